//! Queue pairs on one shared receive queue.

use std::time::Instant;

use doorbell_verbs::{
    AsyncEvent, Buffer, GRH_BYTES, Local, PreparedQueuePair, QKey, QueueKind, QueuePair, QueuePairEvent,
    ReliableConnection, SharedReceiveQueue, SharedReceiveQueueEvent, Success, UnreliableDatagram, WithSrq,
};

use crate::{Side, TIMEOUT, is_soft};

const CLIENTS: usize = 3;

/// A side whose queue pairs share receives, and their peers on the other device.
struct Server {
    srq: SharedReceiveQueue,
    qps: Vec<QueuePair<WithSrq<ReliableConnection>>>,
    clients: Vec<QueuePair>,
    side: Side,
    peer: Side,
}

impl Server {
    fn new() -> Self {
        let (side, peer) = (Side::new(0), Side::new(1));
        let srq = side.pd.shared_receive_queue(8).create().unwrap();
        let connect = |tag: usize| {
            let own = side
                .builder()
                .max_send_wr(4)
                .tag(tag as u64)
                .shared_receive_queue(&srq)
                .rc()
                .unwrap();
            let client: PreparedQueuePair = peer.builder().max_send_wr(4).max_recv_wr(1).rc().unwrap();
            let (of_own, of_client) = (own.endpoint(), client.endpoint());
            (own.connect(&of_client).unwrap(), client.connect(&of_own).unwrap())
        };
        let (qps, clients) = (0..CLIENTS).map(connect).unzip();
        Self {
            srq,
            qps,
            clients,
            side,
            peer,
        }
    }

    fn post(&mut self, count: usize) {
        let buffers: Vec<Buffer> = (0..count).map(|_| self.side.buffer(2000)).collect();
        self.srq
            .post_receives(|batch| buffers.into_iter().for_each(|buffer| batch.receive(buffer)))
            .unwrap();
    }

    /// Sends a message of several packets with the client's index and its number.
    fn send(&mut self, client: usize, number: u8) {
        let mut buffer = self.peer.buffer(1500);
        buffer.fill(number);
        buffer[0] = client as u8;
        self.clients[client].send(buffer).unwrap();
    }

    /// The next message: its client, which must be that of the queue pair, and its number.
    fn receive(&mut self) -> (usize, u64) {
        self.side.next(QueueKind::Receive, |done| {
            assert_eq!(done.result(), Ok(Success::Receive { len: 1500, imm: None }));
            let (tag, sequence) = (done.tag(), done.sequence());
            let buffer = done.take::<Local>().unwrap();
            assert_eq!(u64::from(buffer[0]), tag);
            assert!(buffer[1..1500].iter().all(|&byte| u64::from(byte) == sequence));
            (tag as usize, sequence)
        })
    }
}

#[test]
fn messages_wait_for_receives_and_the_limit_event_reports_few_left() {
    let mut server = Server::new();
    let mut events = server.side.context.events().unwrap();
    server.post(4);
    server.srq.arm_limit(2).unwrap();
    for number in 0..2 {
        (0..CLIENTS).for_each(|client| server.send(client, number));
    }
    let mut next = [0; CLIENTS];
    let mut receive = |server: &mut Server| {
        let (client, number) = server.receive();
        assert_eq!(number, next[client], "each queue pair keeps its order");
        next[client] += 1;
    };
    (0..4).for_each(|_| receive(&mut server));
    let event = SharedReceiveQueueEvent::LimitReached;
    let id = server.srq.id();
    let expected = AsyncEvent::SharedReceiveQueue { id, event };
    assert_eq!(events.wait(TIMEOUT).unwrap(), Some(expected));
    assert_eq!(server.srq.query().unwrap().limit, 0);
    assert_eq!(server.srq.free_slots(), 8);
    server.post(2);
    (0..2).for_each(|_| receive(&mut server));
    assert_eq!(next, [2; CLIENTS]);
}

#[test]
fn a_queue_pair_that_fails_leaves_the_receives_to_the_others() {
    let mut server = Server::new();
    let mut events = server.side.context.events().unwrap();
    server.post(2);
    let failed = server.qps[0].qpn();
    server.qps[0].flush().unwrap();
    // The kernel's rxe has no such event (docs/waivers/rxe.txt).
    if is_soft() {
        let event = QueuePairEvent::LastRequestReached;
        let expected = AsyncEvent::Qp { qpn: failed, event };
        assert_eq!(events.wait(TIMEOUT).unwrap(), Some(expected));
    }
    drop(server.qps.remove(0));
    server.send(1, 0);
    server.send(2, 0);
    let mut received = [server.receive(), server.receive()];
    received.sort_unstable();
    assert_eq!(received, [(1, 0), (2, 0)]);
    assert_eq!(server.srq.free_slots(), 8);
}

#[test]
fn datagrams_to_either_of_two() {
    let (mut side, mut peer) = (Side::new(0), Side::new(1));
    let mut srq = side.pd.shared_receive_queue(8).create().unwrap();
    let make = |tag| -> QueuePair<WithSrq<UnreliableDatagram>> {
        let builder = side.builder().tag(tag).shared_receive_queue(&srq);
        builder.ud().unwrap()
    };
    let mut qps = [make(0), make(1)];
    let mut sender = peer.builder().ud().unwrap();
    let ah = |side: &Side, to: &doorbell_verbs::UdEndpoint| side.pd.address_handle().to(to).unwrap();
    for (round, which) in [0, 1, 1, 0].into_iter().enumerate() {
        srq.receive(side.buffer(GRH_BYTES + 100)).unwrap();
        let to = qps[which].endpoint();
        let text = [round as u8; 50];
        sender.send_to_inline(&text, &ah(&peer, &to), to.qpn, to.qkey).unwrap();
        let from = side.next(QueueKind::Receive, |done| {
            assert_eq!(done.tag(), which as u64);
            let datagram = done.datagram().expect("a datagram");
            let buffer = done.take::<Local>().unwrap();
            assert_eq!(buffer[GRH_BYTES..GRH_BYTES + 50], text);
            datagram.source()
        });
        // And back, by the queue pair that has received it.
        sender.receive(peer.buffer(GRH_BYTES + 100)).unwrap();
        let own = sender.endpoint();
        assert_eq!(from, own.qpn);
        qps[which]
            .send_to_inline(&text, &ah(&side, &own), own.qpn, QKey::DEFAULT)
            .unwrap();
        peer.next(QueueKind::Receive, |done| assert!(done.is_ok()));
    }
}

/// The `ibv_wr_*` backend works with shared receives too.
#[test]
fn by_either_backend() {
    let mut side = Side::new(0);
    let mut srq = side.pd.shared_receive_queue(8).create().unwrap();
    let make = || side.builder().wr_post().shared_receive_queue(&srq).uc().unwrap();
    let (one, other) = (make(), make());
    let (of_one, of_other) = (one.endpoint(), other.endpoint());
    let (mut one, other) = (one.connect(&of_other).unwrap(), other.connect(&of_one).unwrap());
    srq.receive(side.buffer(10)).unwrap();
    one.send_inline(b"hello").unwrap();
    let (qpn, len) = side.next(QueueKind::Receive, |done| (done.qpn(), done.result()));
    assert_eq!((qpn, len), (other.qpn(), Ok(Success::Receive { len: 5, imm: None })));
}

/// The QPN is also in the copy of a completion that a poll has left.
#[test]
fn completions_of_an_extended_queue() {
    let side = Side::new(0);
    let mut cq = side.context.extended_completion_queue(64).create().unwrap();
    let mut srq = side.pd.shared_receive_queue(8).create().unwrap();
    let make = |tag| {
        let builder = side.builder().recv_cq(&cq).max_send_wr(4).tag(tag);
        builder.shared_receive_queue(&srq).rc().unwrap()
    };
    let (one, other) = (make(1), make(2));
    let (of_one, of_other) = (one.endpoint(), other.endpoint());
    let mut qps = [one.connect(&of_other).unwrap(), other.connect(&of_one).unwrap()];
    for _ in 0..8 {
        srq.receive(side.buffer(10)).unwrap();
    }
    for number in 0..4 {
        qps.iter_mut().for_each(|qp| qp.send_inline(&[number; 7]).unwrap());
    }
    let deadline = Instant::now() + TIMEOUT;
    let mut next = [0; 2];
    while next != [4; 2] {
        // One completion of a poll, and the rest by the next.
        if let Some(mut done) = cq.poll().unwrap().next_completion() {
            let (tag, sequence) = (done.tag() as usize, done.sequence());
            assert_eq!(done.qpn(), qps[tag - 1].qpn());
            assert_eq!(done.result(), Ok(Success::Receive { len: 7, imm: None }));
            assert_eq!(u64::from(done.take::<Local>().unwrap()[0]), sequence);
            assert_eq!(sequence, next[tag - 1]);
            next[tag - 1] += 1;
        }
        assert!(Instant::now() < deadline, "{next:?}");
    }
    assert_eq!(srq.free_slots(), 8);
}
