//! Both backends of the send queue have the same effect on the peer, for every operation.

use std::time::Instant;

use doorbell_verbs::{
    Backend, Buffer, CompletionStatus, EitherBackend, GRH_BYTES, Local, PeerAll, PeerWrite, QueueKind, QueuePair,
    QueuePairBuilder, RejectReason, ReliableConnection, Success, Transport, UnreliableDatagram,
};

use crate::{Side, TIMEOUT, connect, is_soft};

const ROUNDS: u32 = 40;

/// Length of the second buffer: with `ibv_wr_set_sge_list`, rdma-core's provider for rxe (44) takes
/// all elements to be as long as the first.
fn second(len: usize) -> usize {
    if is_soft() { len / 2 + 1 } else { len }
}

fn filled(side: &Side, len: usize, round: u32) -> Buffer {
    let mut buffer = side.buffer(len);
    for (at, byte) in buffer.iter_mut().enumerate() {
        *byte = (at as u32 * 7 + round) as u8;
    }
    buffer
}

/// Waits until all send requests have completed, and returns their buffers, in order.
fn all_back<T: Transport, B: Backend>(side: &mut Side, qp: &QueuePair<T, B>) -> Vec<Buffer> {
    let deadline = Instant::now() + TIMEOUT;
    let mut back = Vec::new();
    while qp.free_send_slots() < 16 {
        for mut done in side.cq.poll().unwrap() {
            done.result().unwrap();
            assert_eq!(done.queue(), QueueKind::Send);
            back.extend(core::iter::from_fn(|| done.take()));
        }
        assert!(Instant::now() < deadline, "not all that was posted came back");
    }
    back
}

/// Every RC operation, in batches and alone, in one direction.
fn reliable<B: Backend>(
    a: &mut Side,
    b: &mut Side,
    mut to_b: QueuePair<ReliableConnection, B>,
    mut to_a: QueuePair<ReliableConnection, B>,
) {
    let mut inbox = b.pd.register(vec![0; 4096], PeerAll).unwrap();
    inbox.fill(0);
    let remote = inbox.remote();
    let at = |offset: u64, len: u64| remote.slice(offset, len).unwrap();
    let word = |side: &Side| side.buffer(8).into_word().ok().unwrap();
    for round in 0..ROUNDS {
        let (whole, head) = (filled(a, 1500, round), filled(a, 100, round + 1));
        let tail = filled(a, second(100), round + 2);
        let end = 1600 + tail.len();
        let mut expected = vec![0; 2048];
        expected[..1500].copy_from_slice(&whole);
        expected[1500..1600].copy_from_slice(&head);
        expected[1600..end].copy_from_slice(&tail);
        expected[2000..2008].copy_from_slice(&u64::from(round).to_ne_bytes());
        to_a.receive(b.buffer(64)).unwrap();
        to_a.receive(b.buffer(64)).unwrap();
        to_b.post(|batch| {
            batch.write(whole, at(0, 1500));
            batch.write_gather([head, tail], at(1500, end as u64 - 1500));
            batch.write_inline(&expected[2000..2008], at(2000, 8)).fence();
            batch.write_inline(&[], at(0, 0)).imm(round);
            batch.send_inline(b"and so on").imm(!round).signaled();
        })
        .unwrap();
        b.next(QueueKind::Receive, |done| {
            assert_eq!(done.result(), Ok(Success::ReceiveWrite { len: 0, imm: round }));
        });
        b.next(QueueKind::Receive, |done| {
            let (len, imm) = (9, Some(!round));
            assert_eq!(done.result(), Ok(Success::Receive { len, imm }));
            assert_eq!(&done.take::<Local>().unwrap()[..9], b"and so on");
        });
        let mut there = vec![0; 2048];
        inbox.read_at(0, &mut there);
        assert_eq!(there, expected, "round {round}");

        // Reads the written data back, and checks the counter.
        let (one, two) = (a.buffer(1024), a.buffer(1024));
        let (add, swap) = (word(a), word(a));
        let counter = remote.word(2048).unwrap();
        to_b.post(|batch| {
            batch.read_scatter([one, two], at(0, 2048));
            batch.fetch_add(add, counter, 3);
            batch
                .compare_swap(swap, counter, 3 * u64::from(round + 1), u64::from(round))
                .signaled();
        })
        .unwrap();
        let back = all_back(a, &to_b);
        let [.., one, two, added, swapped] = &back[..] else {
            panic!("the requests give their buffers back")
        };
        assert_eq!([&one[..], &two[..]].concat(), expected);
        let found = [added, swapped].map(|word| u64::from_ne_bytes(word[..].try_into().unwrap()));
        assert_eq!(found, [3 * u64::from(round), 3 * u64::from(round + 1)]);
        // The swap stored the round: adjust to what the next round expects.
        let single = word(a);
        to_b.fetch_add(single, counter, 3 * u64::from(round + 1) - u64::from(round))
            .unwrap();
        let (buffer, from) = (a.buffer(16), at(2048, 16));
        to_b.read(buffer, from).unwrap();
        to_a.receive(b.buffer(32)).unwrap();
        to_b.send(filled(a, 32, round)).unwrap();
        b.next(QueueKind::Receive, |done| done.result().unwrap());
        to_b.post(|batch| {
            batch.write_inline(&[], at(0, 0)).signaled();
        })
        .unwrap();
        all_back(a, &to_b);
    }
    // The queue accepts as many as it has free slots, and refuses larger batches whole.
    let depth = to_b.free_send_slots() as usize;
    let refused = to_b
        .post(|batch| {
            for _ in 0..=depth {
                batch.write_inline(b"x", at(0, 1));
            }
        })
        .unwrap_err();
    assert!(matches!(refused.reason, RejectReason::QueueFull { .. }), "{refused}");
    assert_eq!((refused.index, refused.posted), (depth, 0));
    to_b.post(|batch| {
        for _ in 1..depth {
            batch.write_inline(b"y", at(0, 1));
        }
        batch.write_inline(b"z", at(0, 1)).signaled();
    })
    .unwrap();
    all_back(a, &to_b);
    // In ERR, posted requests are flushed.
    to_b.flush().unwrap();
    to_b.send(a.buffer(8)).unwrap();
    assert_eq!(a.failed(), CompletionStatus::Flushed);
}

#[test]
fn rc_is_the_same_on_both_backends() {
    let (mut a, mut b) = (Side::new(0), Side::new(1));
    fn allow(builder: QueuePairBuilder<'_>) -> QueuePairBuilder<'_> {
        let builder = builder.allow_remote_read().allow_remote_write().allow_remote_atomic();
        builder.max_send_sge(2)
    }
    let (to_b, to_a) = connect(&a, &b, |builder| allow(builder).rc());
    reliable(&mut a, &mut b, to_b, to_a);
    let (to_b, to_a) = connect(&a, &b, |builder| match allow(builder).best_rc()? {
        EitherBackend::WrPost(prepared) => Ok(prepared),
        EitherBackend::PostList(_) => panic!("the device has ibv_wr_*"),
    });
    reliable(&mut a, &mut b, to_b, to_a);
}

#[test]
fn uc_streams_by_work_requests() {
    let (mut a, mut b) = (Side::new(0), Side::new(1));
    let (mut to_b, mut to_a) = connect(&a, &b, |builder: QueuePairBuilder<'_>| {
        builder.allow_remote_write().wr_post().uc()
    });
    let inbox = b.pd.register(vec![0; 64], PeerWrite).unwrap();
    for round in 0..ROUNDS {
        to_a.receive(b.buffer(6 << 10)).unwrap();
        to_a.receive(b.buffer(8)).unwrap();
        let message = filled(&a, 5 << 10, round);
        let expected = message.to_vec();
        to_b.post(|batch| {
            batch.send(message).imm(round);
            batch
                .write_inline(&expected[..64], inbox.remote())
                .imm(!round)
                .signaled();
        })
        .unwrap();
        b.next(QueueKind::Receive, |done| {
            let (len, imm) = (5 << 10, Some(round));
            assert_eq!(done.result(), Ok(Success::Receive { len, imm }));
            assert_eq!(done.take::<Local>().unwrap()[..5 << 10], expected);
        });
        b.next(QueueKind::Receive, |done| {
            assert_eq!(done.result(), Ok(Success::ReceiveWrite { len: 64, imm: !round }));
        });
        let mut written = [0; 64];
        inbox.read_at(0, &mut written);
        assert_eq!(written, expected[..64]);
        all_back(&mut a, &to_b);
    }
}

fn datagrams<B: Backend>(
    a: &mut Side,
    b: &mut Side,
    mut from: QueuePair<UnreliableDatagram, B>,
    mut to: QueuePair<UnreliableDatagram, B>,
) {
    let there = to.endpoint();
    let ah = a.pd.address_handle().to(&there).unwrap();
    for round in 0..ROUNDS {
        for _ in 0..3 {
            to.receive(b.buffer(1024 + GRH_BYTES)).unwrap();
        }
        let (whole, head, tail) = (
            filled(a, 512, round),
            filled(a, 30, round),
            filled(a, second(30), round),
        );
        let gathered = [&head[..], &tail[..]].concat();
        let expected = [whole.to_vec(), gathered, b"inline".to_vec()];
        from.post(|batch| {
            batch.send_to(whole, &ah, there.qpn, there.qkey).imm(round);
            batch.send_to_gather([head, tail], &ah, there.qpn, there.qkey);
            batch.send_to_inline(b"inline", &ah, there.qpn, there.qkey).signaled();
        })
        .unwrap();
        for (number, expected) in expected.iter().enumerate() {
            b.next(QueueKind::Receive, |done| {
                let datagram = done.datagram().expect("a datagram");
                assert_eq!(datagram.imm(), (number == 0).then_some(round));
                assert_eq!(datagram.source(), from.qpn());
                assert_eq!(&done.take::<Local>().unwrap()[datagram.payload()], &expected[..]);
            });
        }
        all_back(a, &from);
    }
}

#[test]
fn ud_is_the_same_on_both_backends() {
    let (mut a, mut b) = (Side::new(0), Side::new(1));
    let lists = |side: &Side| side.builder().max_send_sge(2).ud().unwrap();
    let (from, to) = (lists(&a), lists(&b));
    datagrams(&mut a, &mut b, from, to);
    let calls = |side: &Side| side.builder().max_send_sge(2).wr_post().ud().unwrap();
    let (from, to) = (calls(&a), calls(&b));
    datagrams(&mut a, &mut b, from, to);
}
