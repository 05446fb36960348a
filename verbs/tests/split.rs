//! Split queue pairs: two posters on two threads, and the end of the queue pair with its last half.

use std::error::Error as _;
use std::sync::mpsc;
use std::thread;

use doorbell_verbs::{Buffer, Local, QueueKind};
use doorbell_verbs_sys::IBV_WC_RECV;

use crate::rig::{TestBackend, TestCq, over_all_kinds, over_both_backends, poll_each, rig, rig_of};
use crate::stub::Stub;

over_all_kinds! {
    two_posters_and_a_poller_lose_and_double_nothing,
}

over_both_backends! {
    the_queue_pair_lives_as_long_as_a_half,
    halves_of_two_queue_pairs_come_back,
}

/// Miri is a thousand times slower.
const ROUNDS: u64 = if cfg!(miri) { 100 } else { 5_000 };

/// Posts each buffer that comes, numbered, until all rounds are posted.
fn post_all(returned: &mpsc::Receiver<Buffer>, mut post: impl FnMut(Buffer) -> Option<Buffer>) {
    for number in 0..ROUNDS {
        let Ok(mut buffer) = returned.recv() else { return };
        buffer[..8].copy_from_slice(&number.to_ne_bytes());
        let mut waiting = Some(buffer);
        while let Some(buffer) = waiting.take() {
            waiting = post(buffer);
            if waiting.is_some() {
                thread::yield_now();
            }
        }
    }
}

fn two_posters_and_a_poller_lose_and_double_nothing<B: TestBackend, Q: TestCq>() {
    let stub = Stub::new();
    let (qp, mut cq, mut buffers) = rig_of::<B, Q>(stub, 16, 32);
    let qpn = qp.qpn();
    let (mut send, mut receive) = qp.split();
    let (give_sent, sent) = mpsc::channel();
    let (give_received, received) = mpsc::channel();
    for buffer in buffers.split_off(16) {
        give_received.send(buffer).unwrap();
    }
    for buffer in buffers {
        give_sent.send(buffer).unwrap();
    }
    let sender = thread::spawn(move || {
        post_all(&sent, |buffer| {
            let posted = send.post(|batch| {
                batch.send(buffer).signaled();
            });
            posted.err().and_then(|mut refused| refused.buffers[0].take())
        });
        send
    });
    let receiver = thread::spawn(move || {
        post_all(&received, |buffer| {
            let posted = receive.receive(buffer);
            posted.err().and_then(|mut refused| refused.buffers[0].take())
        });
        receive
    });
    let (mut of_sends, mut of_receives) = (0, 0);
    while of_sends < ROUNDS || of_receives < ROUNDS {
        stub.complete_sends(qpn.get(), usize::MAX);
        for _ in stub.pending_receives(qpn.get()) {
            stub.complete_receive(qpn.get(), IBV_WC_RECV, 8, None);
        }
        cq.poll().unwrap().for_each(|mut done| {
            let (next, give_back) = match done.queue() {
                QueueKind::Send => (&mut of_sends, &give_sent),
                QueueKind::Receive => (&mut of_receives, &give_received),
            };
            assert_eq!(done.sequence(), *next);
            let buffer = done.take::<Local>().unwrap();
            assert_eq!(buffer[..8], next.to_ne_bytes(), "the buffer of another request");
            *next += 1;
            // The poster may have exited.
            let _ = give_back.send(buffer);
        });
        thread::yield_now();
    }
    let (send, receive) = (sender.join().unwrap(), receiver.join().unwrap());
    let whole = send.rejoin(receive).unwrap();
    assert_eq!((whole.next_send(), whole.next_receive()), (ROUNDS, ROUNDS));
    assert_eq!((whole.free_send_slots(), whole.free_receive_slots()), (16, 16));
}

fn the_queue_pair_lives_as_long_as_a_half<B: TestBackend>() {
    let stub = Stub::new();
    let (qp, mut cq, mut buffers) = rig::<B>(stub, 4, 3);
    let qpn = qp.qpn();
    let (mut send, mut receive) = qp.split();
    assert_eq!((send.qpn(), receive.qpn()), (qpn, qpn));
    let buffer = buffers.pop().unwrap();
    let posted = send.post(|batch| {
        batch.send(buffer).signaled();
    });
    posted.unwrap();
    drop(send);
    assert_eq!(stub.live("qp"), 1);
    receive.receive(buffers.pop().unwrap()).unwrap();
    stub.complete_receive(qpn.get(), IBV_WC_RECV, 8, None);
    stub.complete_sends(qpn.get(), 1);
    let mut done = poll_each(&mut cq, |done| (done.queue(), done.into_buffer::<Local>().is_some()));
    done.sort_by_key(|(queue, _)| *queue == QueueKind::Receive);
    assert_eq!(done, [(QueueKind::Send, true), (QueueKind::Receive, true)]);
    receive.receive(buffers.pop().unwrap()).unwrap();
    drop(receive);
    assert_eq!(stub.live("qp"), 0);
    assert_eq!(poll_each(&mut cq, |_| ()).len(), 0, "buffers in flight went with it");
}

fn halves_of_two_queue_pairs_come_back<B: TestBackend>() {
    let (one, _cq, _buffers) = rig::<B>(Stub::new(), 4, 1);
    let (two, _cq, _buffers) = rig::<B>(Stub::new(), 4, 1);
    let ((send, own), (others_send, receive)) = (one.split(), two.split());
    let error = send.rejoin(receive).unwrap_err();
    assert!(error.source().is_none() && error.to_string().starts_with("the halves of two queue pairs, "));
    let one = error.send.rejoin(own).unwrap();
    let two = others_send.rejoin(*error.receive).unwrap();
    assert_eq!([one.next_send(), two.next_send()], [0; 2]);
}
