//! Two ends over a real loopback connection, and peers of other protocols.

use std::net::Ipv4Addr;
use std::thread::JoinHandle;

use clap::Parser;

use super::*;
use crate::cli::{Cli, Command, LimitArgs};
use crate::exchange::{Hello, introduce};
use crate::plan::Kind;

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn plan() -> Plan {
    let Command::Bw(args) = Cli::parse_from(["doorbell", "bw", "write"]).command else {
        panic!("a bandwidth test");
    };
    Plan::bw(&args).unwrap()
}

fn client(address: SocketAddr) -> JoinHandle<Control> {
    thread::spawn(move || {
        let client = connect("127.0.0.1", address.port(), &Interrupt::default()).unwrap();
        introduce(&client, &plan(), None).unwrap();
        client
    })
}

fn try_accept(listener: &mut Listener, within: Duration, limits: Option<&LimitArgs>) -> Result<Control, Failure> {
    let expected = ExpectedTest {
        kind: Kind::Bw,
        verb: "write",
        gpu: false,
        token: None,
        limits,
    };
    let accepted = listener.accept(Some(within), &expected, &Interrupt::default());
    accepted.map(|(control, _)| control)
}

fn accept(listener: &mut Listener, limits: Option<&LimitArgs>) -> Control {
    try_accept(listener, REPLY_TIMEOUT, limits).unwrap()
}

fn pair_with(limits: Option<&LimitArgs>) -> (Control, Control) {
    let mut listener = Listener::bind(LOOPBACK, 0).unwrap();
    let client = client(listener.address());
    let server = accept(&mut listener, limits);
    (client.join().unwrap(), server)
}

fn pair() -> (Control, Control) {
    pair_with(None)
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

fn wait_for_attention(server: &Control) {
    let deadline = Instant::now() + REPLY_TIMEOUT;
    while !server.attention() {
        assert!(Instant::now() < deadline, "the flag never came up");
        thread::yield_now();
    }
}

#[test]
fn a_peer_that_goes_raises_the_flag_and_is_named() {
    let (client, server) = pair();
    assert!(!server.attention());
    let peer = server.peer();
    drop(client);
    wait_for_attention(&server);
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
    let mut listener = Listener::bind(LOOPBACK, 0).unwrap();
    let mut other_protocol = TcpStream::connect(listener.address()).unwrap();
    other_protocol.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let client = client(listener.address());
    let server = accept(&mut listener, None);
    assert_eq!(server.peer(), local_address(&client.join().unwrap().stream));
}

fn local_address(stream: &TcpStream) -> SocketAddr {
    stream.local_addr().unwrap()
}

#[test]
fn silent_connections_delay_no_client() {
    let mut listener = Listener::bind(LOOPBACK, 0).unwrap();
    listener.0.inner.limits.handshake = Duration::MAX;
    let address = listener.address();
    let mut handshake = PREAMBLE.to_vec();
    Message::Hello(Hello::ours(None)).write(&mut handshake).unwrap();
    let hello = handshake.len();
    Message::Plan(plan()).write(&mut handshake).unwrap();
    // Between the messages and inside each.
    let silent_after = [0, 4, 8, 10, hello - 1, hello, hello + 2, handshake.len() - 1];
    let silent = silent_after.map(|sent| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&handshake[..sent]).unwrap();
        stream
    });
    let client = client(address);
    let server = accept(&mut listener, None);
    assert_eq!(server.peer(), local_address(&client.join().unwrap().stream));
    // They came before it and still wait: each is served once it has sent the rest.
    for (mut stream, sent) in silent.into_iter().zip(silent_after) {
        stream.write_all(&handshake[sent..]).unwrap();
        assert_eq!(accept(&mut listener, None).peer(), local_address(&stream));
    }
}

/// Sends a frame of spaces byte by byte, and fails unless the peer closes the connection first.
fn drip(mut stream: &TcpStream) {
    stream.write_all(&1000_u32.to_be_bytes()).unwrap();
    let all_sent = (0..1000).all(|_| {
        thread::sleep(Duration::from_millis(10));
        stream.write_all(b" ").is_ok()
    });
    assert!(!all_sent);
}

#[test]
fn bytes_do_not_extend_the_time_of_a_handshake() {
    let mut listener = Listener::bind(LOOPBACK, 0).unwrap();
    listener.0.inner.limits.handshake = Duration::from_millis(200);
    let address = listener.address();
    let dripping = thread::spawn(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(PREAMBLE).unwrap();
        drip(&stream);
    });
    while !dripping.is_finished() {
        try_accept(&mut listener, Duration::from_millis(20), None).unwrap_err();
    }
    dripping.join().unwrap();
}

#[test]
fn a_time_limit_is_a_failure_with_its_reason() {
    let limits = LimitArgs {
        client_memory: 1 << 30,
        client_time: 0.3,
        client_qps: 1,
    };
    let is_late = |server: &Control| {
        wait_for_attention(server);
        let said = server.poll().unwrap_err().to_string();
        assert!(said.ends_with("the server's --client-time of 0.3 s"), "{said}");
    };
    let (_silent, server) = pair_with(Some(&limits));
    is_late(&server);
    let (client, server) = pair_with(Some(&limits));
    let dripping = thread::spawn(move || drip(&client.stream));
    is_late(&server);
    drop(server);
    dripping.join().unwrap();
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
