//! Two ends over a real connection, and peers that misbehave.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::thread;

use doorbell_verbs::{Gid, Lid, Mtu, Psn, Qpn};

use super::super::{accept, connect, listen};
use super::*;

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn parameters() -> SharedParameters {
    SharedParameters {
        page: 4096,
        cache_line: 64,
        mtu: Mtu::B4096,
    }
}

fn qp_info(qpn: u32) -> QpInfo {
    QpInfo {
        lid: Lid(0),
        out_reads: 1,
        qpn: Qpn::truncated(qpn),
        psn: Psn::truncated(7),
        rkey: 0x55,
        vaddr: 0x7f00_0000_1000,
        gid: Some(Gid([9; 16])),
        srqn: 0,
    }
}

/// A client, and the raw socket of its peer.
fn with_raw_peer() -> (ControlConnection, TcpStream) {
    let listener = TcpListener::bind((HERE, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let client = connect("127.0.0.1", port, None, &Interrupt::default()).unwrap();
    (client, listener.accept().unwrap().0)
}

fn answer(mut raw: TcpStream, messages: &'static [&'static [u8]]) -> thread::JoinHandle<TcpStream> {
    thread::spawn(move || {
        for message in messages {
            let mut theirs = vec![0; message.len()];
            raw.read_exact(&mut theirs).unwrap();
            raw.write_all(message).unwrap();
        }
        raw
    })
}

const VERSION_6_06: &[u8] = b"6.06\0\0\0\0\0\0\0\0\0\0\0\0";

#[test]
fn two_ends_run_the_whole_protocol() {
    let interrupt = Interrupt::default();
    let listener = listen(Some(HERE), 0, false).unwrap();
    let port = listener.address().port();
    let server = thread::spawn(move || {
        let mut server = accept(listener, &Interrupt::default()).unwrap();
        let agreed = server
            .exchange_parameters(SharedParameters {
                mtu: Mtu::B1024,
                ..parameters()
            })
            .unwrap();
        let qp_infos = server.exchange_qp_infos(&[qp_info(3), qp_info(4)]).unwrap();
        server.barrier(&qp_info(3)).unwrap();
        server.barrier_after_test(&qp_info(3)).unwrap();
        let theirs = server.exchange_report(&BwReport::default()).unwrap();
        server.close();
        (agreed, qp_infos, theirs)
    });
    let mut client = connect("127.0.0.1", port, Some(HERE), &interrupt).unwrap();
    let agreed = client
        .exchange_parameters(SharedParameters {
            page: 65536,
            ..parameters()
        })
        .unwrap();
    let qp_infos = client.exchange_qp_infos(&[qp_info(1), qp_info(2)]).unwrap();
    client.barrier(&qp_info(1)).unwrap();
    assert!(!client.monitor().poll_now().unwrap());
    client.barrier_after_test(&qp_info(1)).unwrap();
    let report = BwReport {
        size: 2,
        iterations: 1000,
        peak: 2.5,
        average: 1.25,
        rate: 0.5,
    };
    assert_eq!(client.exchange_report(&report).unwrap(), BwReport::default());
    client.close();
    let both = SharedParameters {
        page: 65536,
        cache_line: 64,
        mtu: Mtu::B1024,
    };
    assert_eq!((agreed, qp_infos), (both, vec![qp_info(3), qp_info(4)]));
    assert_eq!(server.join().unwrap(), (both, vec![qp_info(1), qp_info(2)], report));
}

#[test]
fn what_a_client_writes_is_what_the_c_tools_write() {
    let (mut client, mut raw) = with_raw_peer();
    let served = thread::spawn(move || {
        let mut read = Vec::new();
        for answer in [VERSION_6_06, &[0, 0, 16, 0], &[0, 0, 0, 64], b"3\0"] {
            let mut message = vec![0; answer.len()];
            raw.read_exact(&mut message).unwrap();
            read.extend(message);
            raw.write_all(answer).unwrap();
        }
        read
    });
    client.exchange_parameters(parameters()).unwrap();
    let wrote = served.join().unwrap();
    assert_eq!(wrote, b"6.06\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x10\0\0\0\0\x405\0");
}

#[test]
fn a_peer_of_another_version_is_named() {
    let (mut client, raw) = with_raw_peer();
    let served = answer(raw, &[b"7.12\0\0\0\0\0\0\0\0\0\0\0\0"]);
    let failure = client.exchange_parameters(parameters()).unwrap_err();
    assert!(matches!(failure, Failure::Test(_)), "{failure}");
    assert!(failure.to_string().contains("version 7.12"), "{failure}");
    drop(served.join());
}

#[test]
fn garbage_is_no_perftest() {
    let (mut client, raw) = with_raw_peer();
    let served = answer(raw, &[b"HTTP/1.1 400 Bad"]);
    let failure = client.exchange_parameters(parameters()).unwrap_err().to_string();
    assert!(failure.contains("no perftest") && !failure.contains('\n'), "{failure}");
    drop(served.join());
}

#[test]
fn nonsense_after_the_version_is_no_lost_peer() {
    for (messages, word) in [
        (&[VERSION_6_06, b"\0\0\0\0"] as &[&[u8]], "page"),
        (&[VERSION_6_06, b"\0\0\x10\0", b"\xff\xff\xff\xff"], "cache line"),
        (&[VERSION_6_06, b"\0\0\x10\0", b"\0\0\0\x40", b"9\0"], "MTU"),
    ] {
        let (mut client, raw) = with_raw_peer();
        let served = answer(raw, messages);
        let failure = client.exchange_parameters(parameters()).unwrap_err();
        assert!(
            matches!(failure, Failure::Test(_)) && failure.to_string().contains(word),
            "{failure}"
        );
        drop(served.join());
    }
}

#[test]
fn a_peer_that_stops_after_any_message_is_lost_at_once() {
    const MESSAGES: &[&[u8]] = &[VERSION_6_06, b"\0\0\x10\0", b"\0\0\0\x40"];
    for known in 0..=MESSAGES.len() {
        let (mut client, raw) = with_raw_peer();
        let served = answer(raw, &MESSAGES[..known]);
        let gone = thread::spawn(move || drop(served.join().unwrap()));
        let failure = client.exchange_parameters(parameters()).unwrap_err();
        gone.join().unwrap();
        assert!(matches!(failure, Failure::Lost { .. }), "{failure}");
        assert_eq!(failure.status(), 1);
    }
}

#[test]
fn half_a_qp_info_is_a_lost_peer() {
    let (mut client, mut raw) = with_raw_peer();
    raw.write_all(&qp_info(5).format()[..50]).unwrap();
    raw.shutdown(Shutdown::Write).unwrap();
    let failure = client.exchange_qp_infos(&[qp_info(1)]).unwrap_err();
    assert!(matches!(failure, Failure::Lost { .. }), "{failure}");
}

#[test]
fn a_silent_peer_has_a_deadline() {
    let (mut client, _raw) = with_raw_peer();
    let mut theirs = [0; 4];
    let failure = client
        .read(&mut theirs, Some(Duration::from_millis(60)), "its word")
        .unwrap_err();
    assert!(
        failure.to_string().contains("did not send its word in time"),
        "{failure}"
    );
}

#[test]
fn a_wait_without_a_deadline_ends_with_the_peer_or_with_ctrl_c() {
    let interrupt = Interrupt::default();
    let listener = TcpListener::bind((HERE, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut client = connect("127.0.0.1", port, None, &interrupt).unwrap();
    let raw = listener.accept().unwrap().0;
    interrupt.request();
    assert!(matches!(
        client.barrier_after_test(&qp_info(1)),
        Err(Failure::Interrupted)
    ));
    let (mut client, gone) = with_raw_peer();
    drop(gone);
    assert!(matches!(
        client.barrier_after_test(&qp_info(1)),
        Err(Failure::Lost { .. })
    ));
    drop(raw);
}

#[test]
fn a_monitor_sees_messages_and_the_close() {
    let (client, mut raw) = with_raw_peer();
    assert!(!client.monitor().poll_now().unwrap());
    raw.write_all(b"x").unwrap();
    let deadline = Instant::now() + REPLY_TIMEOUT;
    while !client.monitor().poll_now().unwrap() {
        assert!(Instant::now() < deadline);
    }
    let (client, raw) = with_raw_peer();
    drop(raw);
    let mut monitor = client.monitor();
    let failure = loop {
        match monitor.poll() {
            Ok(failure) => assert!(!failure),
            Err(failure) => break failure,
        }
    };
    assert!(matches!(failure, Failure::Lost { .. }), "{failure}");
}

#[test]
fn a_second_client_is_refused() {
    let listener = listen(Some(HERE), 0, false).unwrap();
    let port = listener.address().port();
    let mut first = TcpStream::connect((HERE, port)).unwrap();
    first.write_all(b"6").unwrap();
    let server = accept(listener, &Interrupt::default()).unwrap();
    assert!(TcpStream::connect((HERE, port)).is_err());
    drop((first, server));
}

#[test]
fn a_refused_connection_and_an_unknown_name_are_one_line() {
    let listener = TcpListener::bind((HERE, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    for (host, port) in [("127.0.0.1", port), ("no such host.invalid", 1)] {
        let failure = connect(host, port, None, &Interrupt::default()).unwrap_err();
        assert_eq!(failure.status(), 1);
        assert!(!failure.to_string().contains('\n'), "{failure}");
    }
}
