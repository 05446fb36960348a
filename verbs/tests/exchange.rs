//! Queue pairs connected over TCP, on two stubs.

use std::thread;
use std::time::{Duration, Instant};

use doorbell_verbs::exchange::{Exchange, ExchangeError, Listener};
use doorbell_verbs::{CompletionQueue, PreparedQueuePair, Psn};

use crate::stub::{Stub, Verb};

const TIMEOUT: Duration = Duration::from_secs(60);

fn prepared(stub: &'static Stub, psn: u32) -> (PreparedQueuePair, CompletionQueue) {
    let context = stub.open();
    let cq = context.completion_queue(8).unwrap();
    let pd = context.protection_domain().unwrap();
    let builder = pd.queue_pair(&cq).max_send_wr(4).max_recv_wr(4);
    (builder.psn(Psn::truncated(psn)).rc().unwrap(), cq)
}

#[test]
fn both_ends_are_connected_and_receive_each_others_data() {
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr();
    let passive = thread::spawn(move || {
        let (qp, _cq) = prepared(Stub::new(), 1);
        let ours = qp.endpoint();
        let mut exchange = listener.accept(TIMEOUT).unwrap();
        let (qp, said) = exchange.pair(qp, b"from the passive side").unwrap();
        assert_eq!(said, b"");
        exchange.finish().unwrap();
        (ours, *qp.peer())
    });
    let (qp, _cq) = prepared(Stub::new(), 2);
    let ours = qp.endpoint();
    let mut exchange = Exchange::connect(address, TIMEOUT).unwrap();
    let (qp, said) = exchange.pair(qp, b"").unwrap();
    exchange.finish().unwrap();
    assert_eq!(said, b"from the passive side");
    assert_eq!((*qp.peer(), ours), passive.join().unwrap());
}

#[test]
fn queue_pairs_of_every_kind_are_paired_in_turn() {
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr();
    let pair_all = |mut exchange: Exchange, stub: &'static Stub| {
        let context = stub.open();
        let cq = context.completion_queue(32).unwrap();
        let pd = context.protection_domain().unwrap();
        let shared = pd.shared_receive_queue(4).create().unwrap();
        let builder = || pd.queue_pair(&cq).max_send_wr(4).max_recv_wr(4);
        let with_shared = builder().shared_receive_queue(&shared).rc().unwrap();
        let (with_shared, _) = exchange.pair(with_shared, b"").unwrap();
        let (unreliable, _) = exchange.pair(builder().uc().unwrap(), b"").unwrap();
        let datagrams = builder().ud().unwrap();
        let (peer, said) = exchange.datagrams(&datagrams.endpoint(), b"a key").unwrap();
        exchange.finish().unwrap();
        assert_eq!(said, b"a key");
        let own = [with_shared.qpn(), unreliable.qpn(), datagrams.qpn()];
        (own, [with_shared.peer().qpn, unreliable.peer().qpn, peer.qpn])
    };
    let passive = thread::spawn(move || pair_all(listener.accept(TIMEOUT).unwrap(), Stub::new()));
    let (own, peers) = pair_all(Exchange::connect(address, TIMEOUT).unwrap(), Stub::new());
    assert_eq!((peers, own), passive.join().unwrap());
}

#[test]
fn a_queue_pair_that_fails_to_connect_is_an_error_at_both_ends() {
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr();
    let passive = thread::spawn(move || {
        let stub = Stub::new();
        let (qp, _cq) = prepared(stub, 1);
        stub.fail(Verb::ModifyQp, libc::EINVAL);
        listener.accept(TIMEOUT).unwrap().pair(qp, b"").unwrap_err()
    });
    let (qp, _cq) = prepared(Stub::new(), 2);
    let theirs = Exchange::connect(address, TIMEOUT).unwrap().pair(qp, b"").unwrap_err();
    assert!(matches!(theirs, ExchangeError::Closed { .. }), "{theirs}");
    let ours = passive.join().unwrap();
    assert!(matches!(ours, ExchangeError::Transition(_)), "{ours}");
}

#[test]
fn a_server_learns_that_a_peer_has_left() {
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr();
    let mut incoming = listener.incoming(TIMEOUT);
    let mut meet = || {
        let peer = Exchange::connect(address, TIMEOUT).unwrap();
        (incoming.next().unwrap().unwrap(), peer)
    };
    let left = |exchange: &Exchange| {
        let deadline = Instant::now() + TIMEOUT;
        while !exchange.peer_has_left() {
            assert!(Instant::now() < deadline, "the peer has left");
        }
    };
    let (exchange, peer) = meet();
    assert!(!exchange.peer_has_left());
    drop(peer);
    left(&exchange);
    let (mut exchange, mut peer) = meet();
    thread::scope(|scope| {
        let pairing = scope.spawn(|| peer.pair(prepared(Stub::new(), 1).0, b"").map(|_| peer));
        // What has arrived is of the next pair, or nothing has.
        assert!(!exchange.peer_has_left());
        exchange.pair(prepared(Stub::new(), 2).0, b"").unwrap();
        let peer = pairing.join().unwrap().unwrap();
        let finishing = scope.spawn(|| peer.finish());
        left(&exchange);
        exchange.finish().unwrap();
        finishing.join().unwrap().unwrap();
    });
}
