//! A queue pair with all that it needs, connected by one call.

#![cfg(feature = "softroce")]

use std::thread;
use std::time::Duration;

use doorbell::exchange::ExchangeError;
use doorbell::prelude::*;

const TIMEOUT: Duration = Duration::from_secs(30);
const SHORT_TIMEOUT: Duration = Duration::from_millis(20);

/// Two ends, on devices of their own of this kind, each with one receive posted.
fn pair(device: &str) -> [Connection; 2] {
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr();
    let connect = |exchange: Exchange| {
        let pd = doorbell::open(device).unwrap().protection_domain().unwrap();
        let receive = pd.register(vec![0; 8], Local).unwrap();
        let connection = exchange.connection(&pd, |qp| qp.max_inline_data(8), [receive], b"data");
        connection.unwrap()
    };
    thread::scope(|scope| {
        let passive = scope.spawn(|| connect(listener.accept(TIMEOUT).unwrap()));
        let active = connect(Exchange::connect(address, TIMEOUT).unwrap());
        [passive.join().unwrap(), active]
    })
}

#[test]
fn a_server_receives_what_there_is_until_its_client_leaves() {
    let [mut server, mut client] = pair("soft");
    assert_eq!(server.peer_data(), b"data");
    let served = thread::spawn(move || {
        let mut served = 0;
        while let Some((success, request)) = server.next_completion().unwrap() {
            assert!(matches!(success, Success::Receive { len: 8, .. }), "{success:?}");
            let answer = request.to_vec();
            server.receive(request).unwrap();
            server.send_inline(&answer).unwrap();
            served += 1;
        }
        served
    });
    // More than a queue has entries: completions without a buffer are taken, too.
    for number in 0..300_u64 {
        if number % 100 == 50 {
            // Until the server sleeps.
            thread::sleep(SHORT_TIMEOUT);
        }
        client.send_inline(&number.to_be_bytes()).unwrap();
        let (_, answer) = client.wait(TIMEOUT).unwrap();
        assert_eq!(answer[..], number.to_be_bytes());
        client.receive(answer).unwrap();
    }
    drop(client);
    assert_eq!(served.join().unwrap(), 300);
}

#[test]
fn what_must_come_is_waited_for_for_a_time() {
    let [mut one, mut other] = pair("soft?delay=20ms");
    let silent = one.wait(SHORT_TIMEOUT).unwrap_err();
    assert!(matches!(silent, ExchangeError::TimedOut { .. }), "{silent}");
    // What was sent before the peer left is received, though the packets take longer than the end.
    one.send_inline(b"the last").unwrap();
    let leaving = thread::spawn(move || one.finish());
    assert_eq!(other.wait(TIMEOUT).unwrap().1[..], *b"the last");
    let left = other.wait(TIMEOUT).unwrap_err();
    assert!(matches!(left, ExchangeError::Left { .. }), "{left}");
    other.finish().unwrap();
    leaving.join().unwrap().unwrap();
}
