use super::*;

const SHORT: Duration = Duration::from_millis(50);

#[test]
fn memcpy_moves_bytes() {
    assert!(memcpy(SHORT).bytes_per_s > 0.0);
    assert!(memcpy_repeated(SHORT, 4096).bytes_per_s > 0.0);
}

#[test]
fn a_word_takes_time_between_cores() {
    match shm_pingpong(SHORT) {
        Ok(latency) => assert!(latency.ns > 0.0),
        Err(error) => assert!(matches!(error, LimitError::OneCpu), "{error}"),
    }
}

#[test]
fn datagrams_arrive_intact_over_the_loopback() {
    assert!(udp_gso(SHORT).unwrap().bytes_per_s > 0.0);
    assert_eq!((PACKET, RUN_PACKETS), (4112, 15));
}

#[test]
fn a_damaged_packet_is_not_counted() {
    let mut packet = [7; PACKET];
    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
    let envelope = Envelope {
        src: addr,
        dst: addr.into(),
        ident: 0,
    };
    seal(&mut packet, &envelope);
    assert!(is_intact(&packet));
    packet[2000] ^= 1;
    assert!(!is_intact(&packet));
    assert!(!is_intact(&packet[..3]));
}

#[test]
fn another_process_is_written_to_or_the_reason_is_reported() {
    match process_vm_writev(SHORT, BLOCK) {
        Ok(bandwidth) => assert!(bandwidth.bytes_per_s > 0.0),
        Err(error) => assert!(matches!(error, LimitError::Forbidden(_)), "{error}"),
    }
}

#[test]
fn causes_are_said_once() {
    let error = LimitError::Bind(BindError::Io {
        addr: SocketAddr::from((Ipv4Addr::LOCALHOST, 1)),
        error: io::Error::other("no more"),
    });
    let said = "no UDP socket on the loopback interface: 127.0.0.1:1 cannot be bound: no more";
    assert_eq!(error.to_string(), said);
    assert!(std::error::Error::source(&error).is_none());
}
