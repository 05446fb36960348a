//! Two ends over a real loopback connection, and peers of other protocols.

use std::net::Ipv4Addr;
use std::thread::JoinHandle;

use super::*;
use crate::exchange::{Hello, check_hello};

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

struct Anyone;

impl Admission for Anyone {
    fn check_hello(&self, hello: &Hello) -> Result<(), String> {
        check_hello(hello)
    }

    fn check_plan(&self, plan: &Plan) -> Result<(), String> {
        plan.check()
    }
}

fn plan() -> Message {
    let text = r#"{"plan":{"kind":"bw","verb":"write","sizes":[64],"extent":{"iterations":1},"warmup":0,"qps":1,"tx_depth":1,"rx_depth":2,"post_list":1,"cq_mod":1,"inline":0,"inline_required":false,"mtu":null,"verify":false,"seed":1,"timeout":14,"retry":7}}"#;
    serde_json::from_str(text).unwrap()
}

/// A client that sends its plan.
fn client(address: SocketAddr) -> JoinHandle<Result<Control, Failure>> {
    thread::spawn(move || {
        let control = connect("127.0.0.1", address.port(), &Interrupt::default())?;
        control.send(&Message::Hello(Hello::ours(None)))?;
        control.receive(Some(REPLY_TIMEOUT), "its hello")?;
        control.send(&plan())?;
        Ok(control)
    })
}

fn accept(listener: &mut Listener, most: Option<Duration>) -> Result<Control, Failure> {
    let accepted = listener.accept(Some(REPLY_TIMEOUT), most, &Anyone, &Interrupt::default());
    accepted.map(|(control, _)| control)
}

fn pair_for(most: Option<Duration>) -> (Control, Control) {
    let mut listener = Listener::bind(LOOPBACK, 0).unwrap();
    let client = client(listener.address());
    let server = accept(&mut listener, most).unwrap();
    (client.join().unwrap().unwrap(), server)
}

fn pair() -> (Control, Control) {
    pair_for(None)
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
    let mut listener = Listener::bind(LOOPBACK, 0).unwrap();
    let mut other_protocol = TcpStream::connect(listener.address()).unwrap();
    other_protocol.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let client = client(listener.address());
    let server = accept(&mut listener, None).unwrap();
    let client = client.join().unwrap().unwrap();
    client.send(&Message::Ready).unwrap();
    assert_eq!(server.receive(Some(REPLY_TIMEOUT), "ready").unwrap(), Message::Ready);
}

/// Silent at every step of the handshake, and more than are kept.
#[test]
fn silent_connections_delay_no_client() {
    let mut listener = Listener::bind(LOOPBACK, 0).unwrap();
    let address = listener.address();
    let hello = {
        let mut bytes = frame::PREAMBLE.to_vec();
        frame::write(&mut bytes, &Message::Hello(Hello::ours(None))).unwrap();
        bytes
    };
    let silent: Vec<_> = (0..100)
        .map(|number| {
            let mut stream = TcpStream::connect(address).unwrap();
            let sent = [0, 4, 8, 10, hello.len() - 1, hello.len()][number % 6];
            stream.write_all(&hello[..sent]).unwrap();
            stream
        })
        .collect();
    let client = client(address);
    let server = accept(&mut listener, None).unwrap();
    let client = client.join().unwrap().unwrap();
    client.send(&Message::Ready).unwrap();
    assert_eq!(server.receive(Some(REPLY_TIMEOUT), "ready").unwrap(), Message::Ready);
    drop(silent);
}

#[test]
fn a_time_limit_is_a_failure_with_its_reason() {
    let (client, server) = pair_for(Some(Duration::from_millis(300)));
    let said = server.receive(None, "its finish").unwrap_err().to_string();
    assert!(
        said.contains("longer than 0.3 s") && said.contains("--client-time"),
        "{said}"
    );
    assert!(server.attention(), "a measurement polls it");
    // A frame that arrives byte by byte.
    let (slow, server) = pair_for(Some(Duration::from_millis(300)));
    let dripping = thread::spawn(move || {
        let bytes = [&1000_u32.to_be_bytes()[..], &[b' '; 1000]].concat();
        bytes.chunks(1).all(|byte| {
            thread::sleep(Duration::from_millis(20));
            (&slow.stream).write_all(byte).is_ok()
        })
    });
    let said = server.receive(None, "its finish").unwrap_err().to_string();
    assert!(said.contains("--client-time"), "{said}");
    drop(server);
    assert!(!dripping.join().unwrap(), "the server has closed");
    drop(client);
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
