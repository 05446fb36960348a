//! The frame format, and peers that violate it.

use std::net::Shutdown;
use std::thread;

use super::*;
use crate::types::{Gid, Lid, Mtu, Psn, Qpn};

const LONG: Duration = Duration::from_secs(60);

fn endpoint(n: u8) -> EndpointBytes {
    let endpoint = Endpoint {
        gid: Gid([n; 16]),
        lid: Lid(n.into()),
        qpn: Qpn::truncated(n.into()),
        psn: Psn::truncated(7),
        mtu: Mtu::B1024,
        max_dest_rd_atomic: 1,
    };
    endpoint.to_bytes()
}

/// An exchange with a stream whose other end the test controls.
fn with_peer(timeout: Duration) -> (Exchange, TcpStream) {
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let peer = TcpStream::connect(listener.local_addr()).unwrap();
    let exchange = Exchange {
        timeout,
        ..listener.accept(LONG).unwrap()
    };
    (exchange, peer)
}

fn result_for(bytes: &[u8]) -> Result<((), Vec<u8>), ExchangeError> {
    let (mut exchange, mut peer) = with_peer(LONG);
    peer.write_all(bytes).unwrap();
    // Only this direction: closing a socket with unread data could lose what was written.
    peer.shutdown(Shutdown::Write).unwrap();
    let read = |theirs: Endpoint| {
        assert_eq!(theirs.to_bytes(), endpoint(2));
        Ok(())
    };
    exchange.meet(&endpoint(1), b"", Endpoint::from_bytes, read)
}

#[test]
fn a_frame_may_arrive_byte_by_byte() {
    let (mut exchange, mut peer) = with_peer(LONG);
    let peer_thread = thread::spawn(move || {
        for byte in frame::write(&endpoint(2), b"a key").unwrap() {
            peer.write_all(&[byte]).unwrap();
        }
        let mut ours = vec![0; frame::HEADER_LEN];
        peer.read_exact(&mut ours).unwrap();
        ours
    });
    let received = exchange
        .exchange_endpoints(&endpoint(1), b"", Deadline::after(LONG))
        .unwrap();
    assert_eq!(received, (endpoint(2), b"a key".to_vec()));
    assert_eq!(peer_thread.join().unwrap(), frame::write(&endpoint(1), b"").unwrap());
}

#[test]
fn the_layout_is_the_documented_one() {
    let bytes = frame::write(&endpoint(3), &[9; 300]).unwrap();
    assert_eq!(bytes[..12], *b"DBELLXCH\x00\x01\x01\x2c");
    assert_eq!(bytes[12..44], endpoint(3));
    assert_eq!(bytes[44..], [9; 300]);
}

#[test]
fn hostile_bytes_are_errors() {
    let good = frame::write(&endpoint(2), b"").unwrap();
    let with = |at: usize, value: u8| {
        let mut bad = good.clone();
        bad[at] = value;
        result_for(&bad)
    };
    assert!(matches!(
        result_for(b"GET / HTTP/1.1\r\n\r\n"),
        Err(ExchangeError::UnknownProtocol { .. })
    ));
    assert!(matches!(with(0, b'd'), Err(ExchangeError::UnknownProtocol { .. })));
    assert!(matches!(
        with(9, 2),
        Err(ExchangeError::Version { theirs: 2, ours: 1, .. })
    ));
    assert!(matches!(
        with(10, 0xff),
        Err(ExchangeError::PeerDataTooLong { len: 0xff00, .. })
    ));
    assert!(matches!(with(12, 9), Err(ExchangeError::Endpoint { .. })));
    assert!(matches!(with(16, 1), Err(ExchangeError::Endpoint { .. })));
    // Data announced and never sent, and streams that end in every part of the header.
    assert!(matches!(with(11, 5), Err(ExchangeError::Closed { .. })));
    for len in 0..good.len() {
        assert!(
            matches!(result_for(&good[..len]), Err(ExchangeError::Closed { .. })),
            "{len}"
        );
    }
}

#[test]
fn another_version_is_reported_before_its_header_is_complete() {
    let (mut exchange, mut peer) = with_peer(LONG);
    peer.write_all(b"DBELLXCH\x00\x02\x00\x00").unwrap();
    let result = exchange.exchange_endpoints(&endpoint(1), b"", Deadline::after(LONG));
    assert!(matches!(result, Err(ExchangeError::Version { theirs: 2, .. })));
}

#[test]
fn a_silent_peer_times_out() {
    let (mut exchange, _peer) = with_peer(LONG);
    let result = exchange.exchange_endpoints(&endpoint(1), b"", Deadline::after(Duration::from_millis(30)));
    assert!(matches!(result, Err(ExchangeError::TimedOut { .. })));
}

#[test]
fn accept_times_out() {
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let result = listener.accept(Duration::from_millis(20));
    assert!(matches!(result, Err(ExchangeError::TimedOut { .. })));
}

#[test]
fn connect_to_a_closed_port_is_refused() {
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
fn too_much_data_is_refused_before_anything_is_sent() {
    let (mut exchange, mut peer) = with_peer(LONG);
    let result = exchange.exchange_endpoints(&endpoint(1), &[0; MAX_DATA + 1], Deadline::after(LONG));
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
    let mut received = [0];
    peer.read_exact(&mut received).unwrap();
    assert_eq!(received, [2]);
    assert!(!finishing.is_finished());
    peer.write_all(&[2]).unwrap();
    finishing.join().unwrap().unwrap();
}

#[test]
fn finish_fails_if_the_peer_failed_or_sends_garbage() {
    for byte in [0, 1, 0xff] {
        let (exchange, mut peer) = with_peer(LONG);
        peer.write_all(&[byte]).unwrap();
        let error = exchange.finish().unwrap_err();
        assert_eq!(matches!(error, ExchangeError::Closed { .. }), byte == 0, "{error}");
    }
}
