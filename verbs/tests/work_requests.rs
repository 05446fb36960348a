//! Posting by `ibv_wr_*`: creation, and that a batch is posted as a whole or not at all.

use doorbell_verbs::{
    Buffer, EitherBackend, Local, PeerAll, QueuePairError, RejectReason, Remote, WrPost, WriteAccess,
};
use doorbell_verbs_sys as sys;

use crate::rig::{PEER, rig};
use crate::stub::{Stub, Verb};

const REMOTE: Remote<WriteAccess> = Remote::from_raw(0x1000, 0x55, 64);

fn batch_refused_by(refuse: impl FnOnce(&Stub, u32)) {
    let stub = Stub::new();
    let (mut qp, mut cq, buffers) = rig::<WrPost>(stub, 4, 3);
    let qpn = qp.qpn().get();
    let expected: Vec<_> = buffers.iter().map(|buffer| Some(buffer.addr())).collect();
    refuse(stub, qpn);
    let refused = qp
        .post(|batch| {
            for buffer in buffers {
                batch.send(buffer).signaled();
            }
        })
        .unwrap_err();
    assert_eq!((refused.index, refused.posted), (0, 0), "the device does not say which");
    assert!(refused.to_string().contains("ibv_wr_complete"), "{refused}");
    let mut back: Vec<Option<Buffer>> = refused.buffers.into_iter().map(|mut each| each.take()).collect();
    let addresses: Vec<_> = back.iter().map(|buffer| buffer.as_ref().map(Buffer::addr)).collect();
    assert_eq!(addresses, expected);
    assert_eq!((qp.next_send(), qp.free_send_slots()), (0, 4));
    assert_eq!((stub.pending_sends(qpn).len(), stub.aborts(qpn)), (0, 0));

    qp.post(|batch| {
        for buffer in back.drain(..).flatten() {
            batch.send(buffer);
        }
        batch.send_inline(b"x").signaled();
    })
    .unwrap();
    stub.complete_sends(qpn, 4);
    let sequences: Vec<_> = cq.poll().unwrap().map(|done| done.sequence()).collect();
    assert_eq!(sequences, [0, 1, 2, 3]);
}

#[test]
fn a_batch_that_the_device_refuses_comes_back_whole() {
    batch_refused_by(|stub, qpn| stub.refuse_send(qpn, 1, libc::ENOMEM));
    batch_refused_by(|stub, _| stub.fail(Verb::PostSend, libc::EIO));
}

#[test]
fn what_is_refused_here_is_aborted() {
    let stub = Stub::new();
    let (mut qp, _cq, mut buffers) = rig::<WrPost>(stub, 2, 3);
    let qpn = qp.qpn().get();
    // Empty, with an unsupported request, too long for the queue, and with a panicking closure.
    qp.post(|_| {}).unwrap();
    let refused = qp.post(|batch| {
        batch.write(buffers.remove(0), REMOTE);
        batch.write(buffers.remove(0), REMOTE.slice(0, 63).unwrap());
        batch.write_inline(b"not posted to the device", REMOTE);
    });
    assert_eq!(refused.unwrap_err().index, 1);
    let refused = qp.post(|batch| {
        for _ in 0..3 {
            batch.send_inline(b"x");
        }
    });
    assert!(matches!(
        refused.unwrap_err().reason,
        RejectReason::QueueFull { depth: 2 }
    ));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        qp.post(|batch| {
            batch.send(buffers.remove(0));
            panic!("in the closure");
        })
    }));
    assert!(panicked.is_err());
    assert_eq!((stub.aborts(qpn), stub.doorbells(qpn).0), (4, 0));
    assert_eq!(
        (stub.pending_sends(qpn).len(), qp.next_send(), qp.free_send_slots()),
        (0, 0, 2)
    );
    qp.send_inline(b"and it goes on").unwrap();
    assert_eq!(stub.doorbells(qpn).0, 1);
}

#[test]
fn flags_do_not_stick() {
    let stub = Stub::new();
    let (mut qp, _cq, _) = rig::<WrPost>(stub, 16, 0);
    let qpn = qp.qpn().get();
    qp.post(|batch| {
        batch.send_inline(b"a").signaled().fence().solicited();
        batch.send_inline(b"b");
    })
    .unwrap();
    qp.send_inline(b"c").unwrap();
    let flags: Vec<_> = stub
        .pending_sends(qpn)
        .iter()
        .map(|request| request.flags & !sys::IBV_SEND_INLINE)
        .collect();
    let all = sys::IBV_SEND_SIGNALED | sys::IBV_SEND_FENCE | sys::IBV_SEND_SOLICITED;
    assert_eq!(flags, [all, 0, 0]);
}

#[test]
fn a_provider_without_them_is_named_and_lists_are_the_way_out() {
    let stub = Stub::new();
    let make = || {
        let context = stub.open();
        let pd = context.protection_domain().unwrap();
        let cq = context.completion_queue(256).unwrap();
        let builder = pd.queue_pair(&cq);
        let refused = builder.clone().wr_post().rc().err();
        let lists = matches!(builder.best_rc().unwrap(), EitherBackend::PostList(_));
        (refused, lists)
    };
    let expect_refusal = |why: &str| {
        let (refused, lists) = make();
        let refused = refused.unwrap();
        assert!(matches!(refused, QueuePairError::NoWrPost { .. }), "{refused}");
        let text = refused.to_string();
        for part in [&stub.name, "RC", why, "best_rc()"] {
            assert!(text.contains(part), "{text} has no {part}");
        }
        assert!(lists);
    };
    // No such function in the context; then one that refuses; then one whose queue pairs lack some.
    expect_refusal("ibv_create_qp_ex");
    stub.extend();
    stub.without(sys::IBV_QP_EX_WITH_RDMA_READ);
    expect_refusal("leaves some");
    stub.without(0);
    for errno in [libc::EOPNOTSUPP, libc::ENOSYS] {
        stub.fail(Verb::CreateQpEx, errno);
        let (refused, _) = make();
        assert!(matches!(refused, Some(QueuePairError::NoWrPost { .. })), "{errno}");
    }
    stub.fail(Verb::CreateQpEx, libc::ENOMEM);
    assert!(
        matches!(make().0, Some(QueuePairError::Create { .. })),
        "a failure of another kind"
    );
    let (refused, lists) = make();
    assert!(refused.is_none() && !lists, "it has all of them now");
    assert_eq!(stub.live("qp"), 0);
}

#[test]
fn each_transport_requests_only_the_operations_it_supports() {
    let stub = Stub::new();
    stub.extend();
    // A UC queue pair does not request READ, nor one of UD WRITE.
    stub.without(sys::IBV_QP_EX_WITH_RDMA_READ);
    let context = stub.open();
    let pd = context.protection_domain().unwrap();
    let cq = context.completion_queue(1024).unwrap();
    let builder = pd.queue_pair(&cq).max_inline_data(32);
    let uc = builder.clone().best_uc().unwrap();
    let EitherBackend::WrPost(uc) = uc else {
        panic!("UC by calls is there")
    };
    let mut uc = uc.connect(&PEER).unwrap();
    uc.write_inline(b"x", REMOTE).unwrap();
    assert_eq!(stub.pending_sends(uc.qpn().get())[0].remote, (0x1000, 0x55));
    stub.without(sys::IBV_QP_EX_WITH_RDMA_WRITE);
    assert!(matches!(builder.best_ud().unwrap(), EitherBackend::WrPost(_)));
}

#[test]
fn unsupported_atomics_are_refused_before_they_are_posted() {
    let stub = Stub::new();
    stub.without(sys::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD);
    let (mut qp, _cq, mut buffers) = rig::<WrPost>(stub, 4, 2);
    let qpn = qp.qpn().get();
    let word = |buffer: Buffer| buffer.split_at(8).0.into_word().unwrap();
    let at = Remote::<<PeerAll as doorbell_verbs::PeerAccessible>::Key>::from_raw(0x1000, 7, 8)
        .word(0)
        .unwrap();
    let refused = qp.fetch_add(word(buffers.remove(0)), at, 1).unwrap_err();
    assert!(matches!(refused.reason, RejectReason::Unsupported), "{refused}");
    let mut back = refused.buffers;
    let again = back[0].take_word().unwrap();
    let refused = qp
        .post(|batch| {
            batch.compare_swap(word(buffers.remove(0)), at, 1, 2);
            batch.fetch_add(again, at, 1);
        })
        .unwrap_err();
    assert_eq!((refused.index, refused.buffers.len()), (1, 2));
    assert_eq!(stub.doorbells(qpn).0, 0);
    assert!(
        refused
            .buffers
            .into_iter()
            .all(|mut each| each.take::<Local>().is_some())
    );
}
