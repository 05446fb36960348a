//! Two ends over a real connection, and peers that misbehave.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::thread;

use doorbell_verbs::{Gid, Lid, Mtu, Psn, Qpn};

use super::super::{Listener, connect};
use super::*;

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn greeting() -> Greeting {
    Greeting {
        page: 4096,
        cache_line: 64,
        mtu: Mtu::B4096,
    }
}

fn key(qpn: u32) -> Key {
    Key {
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
fn with_raw_peer() -> (Conversation, TcpStream) {
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
fn two_ends_go_through_a_whole_conversation() {
    let interrupt = Interrupt::default();
    let listener = Listener::bind(Some(HERE), 0, false).unwrap();
    let port = listener.address().port();
    let server = thread::spawn(move || {
        let mut server = listener.accept(&Interrupt::default()).unwrap();
        let agreed = server
            .greet(Greeting {
                mtu: Mtu::B1024,
                ..greeting()
            })
            .unwrap();
        let keys = server.keys(&[key(3), key(4)]).unwrap();
        server.barrier(&key(3)).unwrap();
        server.barrier_after_test(&key(3)).unwrap();
        let theirs = server.figures(&Figures::default()).unwrap();
        server.goodbye();
        (agreed, keys, theirs)
    });
    let mut client = connect("127.0.0.1", port, Some(HERE), &interrupt).unwrap();
    let agreed = client
        .greet(Greeting {
            page: 65536,
            ..greeting()
        })
        .unwrap();
    let keys = client.keys(&[key(1), key(2)]).unwrap();
    client.barrier(&key(1)).unwrap();
    assert!(!client.watch().ask().unwrap());
    client.barrier_after_test(&key(1)).unwrap();
    let figures = Figures {
        size: 2,
        iterations: 1000,
        peak: 2.5,
        average: 1.25,
        rate: 0.5,
    };
    assert_eq!(client.figures(&figures).unwrap(), Figures::default());
    client.goodbye();
    let both = Greeting {
        page: 65536,
        cache_line: 64,
        mtu: Mtu::B1024,
    };
    assert_eq!((agreed, keys), (both, vec![key(3), key(4)]));
    assert_eq!(server.join().unwrap(), (both, vec![key(1), key(2)], figures));
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
    client.greet(greeting()).unwrap();
    let wrote = served.join().unwrap();
    assert_eq!(wrote, b"6.06\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x10\0\0\0\0\x405\0");
}

#[test]
fn a_peer_of_another_version_is_named() {
    let (mut client, raw) = with_raw_peer();
    let served = answer(raw, &[b"7.12\0\0\0\0\0\0\0\0\0\0\0\0"]);
    let said = client.greet(greeting()).unwrap_err();
    assert!(matches!(said, Failure::Test(_)), "{said}");
    assert!(said.to_string().contains("version 7.12"), "{said}");
    drop(served.join());
}

#[test]
fn garbage_is_no_perftest() {
    let (mut client, raw) = with_raw_peer();
    let served = answer(raw, &[b"HTTP/1.1 400 Bad"]);
    let said = client.greet(greeting()).unwrap_err().to_string();
    assert!(said.contains("no perftest") && !said.contains('\n'), "{said}");
    drop(served.join());
}

#[test]
fn nonsense_after_the_version_is_told_from_a_lost_peer() {
    for (messages, word) in [
        (&[VERSION_6_06, b"\0\0\0\0"] as &[&[u8]], "page"),
        (&[VERSION_6_06, b"\0\0\x10\0", b"\xff\xff\xff\xff"], "cache line"),
        (&[VERSION_6_06, b"\0\0\x10\0", b"\0\0\0\x40", b"9\0"], "MTU"),
    ] {
        let (mut client, raw) = with_raw_peer();
        let served = answer(raw, messages);
        let said = client.greet(greeting()).unwrap_err();
        assert!(
            matches!(said, Failure::Test(_)) && said.to_string().contains(word),
            "{said}"
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
        let said = client.greet(greeting()).unwrap_err();
        gone.join().unwrap();
        assert!(matches!(said, Failure::Lost { .. }), "{said}");
        assert_eq!(said.status(), 1);
    }
}

#[test]
fn half_a_key_is_a_lost_peer() {
    let (mut client, mut raw) = with_raw_peer();
    raw.write_all(&key(5).format()[..50]).unwrap();
    raw.shutdown(Shutdown::Write).unwrap();
    let said = client.keys(&[key(1)]).unwrap_err();
    assert!(matches!(said, Failure::Lost { .. }), "{said}");
}

#[test]
fn a_silent_peer_has_a_deadline() {
    let (mut client, _raw) = with_raw_peer();
    let mut theirs = [0; 4];
    let said = client
        .read(&mut theirs, Some(Duration::from_millis(60)), "its word")
        .unwrap_err();
    assert!(said.to_string().contains("did not send its word in time"), "{said}");
}

#[test]
fn a_wait_without_a_deadline_ends_with_the_peer_or_with_ctrl_c() {
    let interrupt = Interrupt::default();
    let listener = TcpListener::bind((HERE, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut client = connect("127.0.0.1", port, None, &interrupt).unwrap();
    let raw = listener.accept().unwrap().0;
    interrupt.request();
    assert!(matches!(client.barrier_after_test(&key(1)), Err(Failure::Interrupted)));
    let (mut client, gone) = with_raw_peer();
    drop(gone);
    assert!(matches!(client.barrier_after_test(&key(1)), Err(Failure::Lost { .. })));
    drop(raw);
}

#[test]
fn a_watch_sees_words_and_the_end() {
    let (client, mut raw) = with_raw_peer();
    assert!(!client.watch().ask().unwrap());
    raw.write_all(b"x").unwrap();
    let deadline = Instant::now() + ANSWER;
    while !client.watch().ask().unwrap() {
        assert!(Instant::now() < deadline);
    }
    let (client, raw) = with_raw_peer();
    drop(raw);
    let mut watch = client.watch();
    let said = loop {
        match watch.turn() {
            Ok(said) => assert!(!said),
            Err(failure) => break failure,
        }
    };
    assert!(matches!(said, Failure::Lost { .. }), "{said}");
}

#[test]
fn a_second_client_is_refused() {
    let listener = Listener::bind(Some(HERE), 0, false).unwrap();
    let port = listener.address().port();
    let first = TcpStream::connect((HERE, port)).unwrap();
    let server = listener.accept(&Interrupt::default()).unwrap();
    assert!(TcpStream::connect((HERE, port)).is_err());
    drop((first, server));
}

#[test]
fn nobody_there_and_an_unknown_name_are_one_line() {
    let listener = TcpListener::bind((HERE, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    for (host, port) in [("127.0.0.1", port), ("no such host.invalid", 1)] {
        let said = connect(host, port, None, &Interrupt::default()).unwrap_err();
        assert_eq!(said.status(), 1);
        assert!(!said.to_string().contains('\n'), "{said}");
    }
}
