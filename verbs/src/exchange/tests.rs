//! The format, and peers that keep to none. Pairing of real queue pairs is tested over the stub provider in `tests/`, and over devices by the example.

use std::net::Shutdown;

use super::*;
use crate::types::{Gid, Lid, Mtu, Psn, Qpn};

const LONG: Duration = Duration::from_secs(60);

fn endpoint(n: u8) -> Endpoint {
    Endpoint {
        gid: Gid([n; 16]),
        lid: Lid(n.into()),
        qpn: Qpn::truncated(n.into()),
        psn: Psn::truncated(7),
        mtu: Mtu::B1024,
        rd_atomic: 1,
    }
}

/// An exchange with a stream whose other end the test speaks for.
fn with_peer(timeout: Duration) -> (Exchange, TcpStream) {
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let peer = TcpStream::connect(listener.local_addr()).unwrap();
    let exchange = Exchange {
        timeout,
        ..listener.accept(LONG).unwrap()
    };
    (exchange, peer)
}

fn answer_to(bytes: &[u8]) -> Result<(Endpoint, Vec<u8>), ExchangeError> {
    let (mut exchange, mut peer) = with_peer(LONG);
    peer.write_all(bytes).unwrap();
    // Only this way: what was written could be lost if the socket were closed with something in it to be read.
    peer.shutdown(Shutdown::Write).unwrap();
    exchange.swap(&endpoint(1), b"", Deadline::after(LONG))
}

#[test]
fn what_is_said_arrives_byte_by_byte_too() {
    let (mut exchange, mut peer) = with_peer(LONG);
    let speaker = thread::spawn(move || {
        for byte in frame::write(&endpoint(2), b"a key").unwrap() {
            peer.write_all(&[byte]).unwrap();
        }
        let mut ours = vec![0; frame::HEAD];
        peer.read_exact(&mut ours).unwrap();
        ours
    });
    let said = exchange.swap(&endpoint(1), b"", Deadline::after(LONG)).unwrap();
    assert_eq!(said, (endpoint(2), b"a key".to_vec()));
    assert_eq!(speaker.join().unwrap(), frame::write(&endpoint(1), b"").unwrap());
}

#[test]
fn the_layout_is_the_documented_one() {
    let bytes = frame::write(&endpoint(3), &[9; 300]).unwrap();
    assert_eq!(bytes[..12], *b"DBELLXCH\x00\x01\x01\x2c");
    assert_eq!(bytes[12..44], endpoint(3).to_bytes());
    assert_eq!(bytes[44..], [9; 300]);
}

#[test]
fn hostile_bytes_are_errors() {
    let good = frame::write(&endpoint(2), b"").unwrap();
    let with = |at: usize, value: u8| {
        let mut bad = good.clone();
        bad[at] = value;
        answer_to(&bad)
    };
    assert!(matches!(
        answer_to(b"GET / HTTP/1.1\r\n\r\n"),
        Err(ExchangeError::NotOurs { .. })
    ));
    assert!(matches!(with(0, b'd'), Err(ExchangeError::NotOurs { .. })));
    assert!(matches!(
        with(9, 2),
        Err(ExchangeError::Version { theirs: 2, ours: 1, .. })
    ));
    assert!(matches!(
        with(10, 0xff),
        Err(ExchangeError::TooMuch { len: 0xff00, .. })
    ));
    assert!(matches!(with(12, 9), Err(ExchangeError::Endpoint { .. })));
    assert!(matches!(with(16, 1), Err(ExchangeError::Endpoint { .. })));
    // Data announced and never sent, and ends in every part of the head.
    assert!(matches!(with(11, 5), Err(ExchangeError::Closed { .. })));
    for len in 0..good.len() {
        assert!(
            matches!(answer_to(&good[..len]), Err(ExchangeError::Closed { .. })),
            "{len}"
        );
    }
}

#[test]
fn another_version_is_told_before_its_head_is_whole() {
    let (mut exchange, mut peer) = with_peer(LONG);
    peer.write_all(b"DBELLXCH\x00\x02\x00\x00").unwrap();
    let result = exchange.swap(&endpoint(1), b"", Deadline::after(LONG));
    assert!(matches!(result, Err(ExchangeError::Version { theirs: 2, .. })));
}

#[test]
fn a_silent_peer_costs_no_more_than_the_time_given() {
    let (mut exchange, _peer) = with_peer(LONG);
    let result = exchange.swap(&endpoint(1), b"", Deadline::after(Duration::from_millis(30)));
    assert!(matches!(result, Err(ExchangeError::TimedOut { .. })));
}

#[test]
fn nobody_comes() {
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let result = listener.accept(Duration::from_millis(20));
    assert!(matches!(result, Err(ExchangeError::TimedOut { .. })));
}

#[test]
fn nobody_listens() {
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr();
    drop(listener);
    let error = Exchange::connect(address, Duration::from_millis(50)).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains(&address.to_string()) && text.contains("refused"),
        "{text}"
    );
}

#[test]
fn a_listener_that_comes_later_is_found() {
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr();
    drop(listener);
    let late = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        Listener::bind(address).unwrap().accept(LONG).map(drop)
    });
    Exchange::connect(address, LONG).unwrap();
    late.join().unwrap().unwrap();
}

#[test]
fn too_much_is_refused_before_anything_is_sent() {
    let (mut exchange, mut peer) = with_peer(LONG);
    let result = exchange.swap(&endpoint(1), &[0; MAX_DATA + 1], Deadline::after(LONG));
    assert!(matches!(result, Err(ExchangeError::DataTooLong { len: 4097 })));
    drop(exchange);
    let mut sent = Vec::new();
    peer.read_to_end(&mut sent).unwrap();
    assert!(sent.is_empty());
}

#[test]
fn both_ends_finish_together() {
    let (exchange, mut peer) = with_peer(LONG);
    let finishing = thread::spawn(move || exchange.finish());
    let mut said = [0];
    peer.read_exact(&mut said).unwrap();
    assert_eq!(said, [2]);
    assert!(!finishing.is_finished());
    peer.write_all(&[2]).unwrap();
    finishing.join().unwrap().unwrap();
}

#[test]
fn a_peer_that_failed_or_talks_nonsense_does_not_finish() {
    for byte in [0, 1, 0xff] {
        let (exchange, mut peer) = with_peer(LONG);
        peer.write_all(&[byte]).unwrap();
        let error = exchange.finish().unwrap_err();
        assert_eq!(matches!(error, ExchangeError::Closed { .. }), byte == 0, "{error}");
    }
}
