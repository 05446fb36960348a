//! Two ends over a real loopback connection, and peers of other protocols.

use std::net::Ipv4Addr;

use super::*;

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn pair() -> (Control, Control) {
    let interrupt = Interrupt::default();
    let listener = Listener::bind(LOOPBACK, 0).unwrap();
    let port = listener.address().port();
    let client = thread::spawn(move || {
        let client = connect("127.0.0.1", port, &Interrupt::default()).unwrap();
        client.send(&Message::Ready).unwrap();
        client
    });
    let server = listener.accept(Some(REPLY_TIMEOUT), &interrupt).unwrap();
    assert_eq!(server.receive(Some(REPLY_TIMEOUT), "ready").unwrap(), Message::Ready);
    (client.join().unwrap(), server)
}

#[test]
fn silent_connections_delay_no_client() {
    let listener = Listener::bind(LOOPBACK, 0).unwrap();
    let address = listener.address();
    // More than may wait, the last ones after the client.
    let silent: Vec<_> = (0..70).map(|_| TcpStream::connect(address).unwrap()).collect();
    let client = thread::spawn(move || {
        let client = connect("127.0.0.1", address.port(), &Interrupt::default()).unwrap();
        client.send(&Message::Ready).unwrap();
        client
    });
    let since = Instant::now();
    let server = listener.accept(Some(REPLY_TIMEOUT), &Interrupt::default()).unwrap();
    assert_eq!(server.receive(Some(REPLY_TIMEOUT), "ready").unwrap(), Message::Ready);
    // One silent connection alone kept the server for the time limit of a handshake.
    assert!(since.elapsed() < Duration::from_secs(4));
    drop((client.join().unwrap(), silent));
}

#[test]
fn a_time_limit_is_a_failure_with_its_reason() {
    let (client, mut server) = pair();
    server
        .limit(Duration::from_millis(1), "it took too long".into())
        .unwrap();
    let said = server.receive(Some(REPLY_TIMEOUT), "bye").unwrap_err().to_string();
    assert!(said.ends_with("it took too long"), "{said}");
    drop(client);
}

#[test]
fn messages_arrive_in_order() {
    let (client, server) = pair();
    client.send(&Message::Ready).unwrap();
    client.send(&Message::Bye).unwrap();
    assert_eq!(server.receive(Some(REPLY_TIMEOUT), "ready").unwrap(), Message::Ready);
    assert_eq!(server.receive(Some(REPLY_TIMEOUT), "bye").unwrap(), Message::Bye);
    assert_eq!(server.poll().unwrap(), None);
}

#[test]
fn a_peer_that_goes_raises_the_flag_and_is_named() {
    let (client, server) = pair();
    assert!(!server.attention());
    let peer = server.peer();
    drop(client);
    let deadline = Instant::now() + REPLY_TIMEOUT;
    while !server.attention() {
        assert!(Instant::now() < deadline, "the flag never came up");
        thread::yield_now();
    }
    let said = server.poll().unwrap_err();
    assert_eq!(said.status(), 1);
    assert!(said.to_string().contains(&peer.to_string()), "{said}");
}

#[test]
fn a_peers_reason_is_one_line() {
    let (client, server) = pair();
    server.send_failure(&Failure::test("the disk\nis full"));
    let said = client.receive(Some(REPLY_TIMEOUT), "ready").unwrap_err().to_string();
    assert!(
        said.ends_with("the disk is full") && said.contains("127.0.0.1"),
        "{said}"
    );
}

#[test]
fn a_wait_ends_at_the_deadline() {
    let (client, _server) = pair();
    let said = client
        .receive(Some(Duration::from_millis(1)), "ready")
        .unwrap_err()
        .to_string();
    assert!(said.contains("did not send ready in time"), "{said}");
}

#[test]
fn connections_of_other_protocols_are_refused_and_the_next_is_served() {
    let listener = Listener::bind(LOOPBACK, 0).unwrap();
    let address = listener.address();
    let other_protocol = thread::spawn(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let client = connect("127.0.0.1", address.port(), &Interrupt::default()).unwrap();
        client.send(&Message::Ready).unwrap();
        client
    });
    let server = listener.accept(Some(REPLY_TIMEOUT), &Interrupt::default()).unwrap();
    let _client = other_protocol.join().unwrap();
    assert_eq!(server.receive(Some(REPLY_TIMEOUT), "ready").unwrap(), Message::Ready);
}

#[test]
fn an_address_in_use_is_one_clear_line() {
    let first = Listener::bind(LOOPBACK, 0).unwrap();
    let said = Listener::bind(LOOPBACK, first.address().port()).unwrap_err();
    assert!(said.status() == 1 && said.to_string().contains("--port"), "{said}");
}

#[test]
fn an_unknown_host_is_bad_usage() {
    assert_eq!(
        connect("no such host", 1, &Interrupt::default()).unwrap_err().status(),
        2
    );
}
