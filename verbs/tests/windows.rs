//! Memory windows over the stub: completions, refusals and the order of destruction.

use doorbell_verbs::{
    BoundWindow, Buffer, CompletionQueue, MemoryWindow, ProtectionDomain, QueuePair, RKey, ReadAccess, ReadWriteAccess,
    RejectReason, Success, WindowType1, WindowType2, Windowed, WriteAccess,
};
use doorbell_verbs_sys::*;

use crate::rig::{PEER, opened};
use crate::stub::{Bound, Stub, Verb};

struct Rig {
    stub: &'static Stub,
    qp: QueuePair,
    cq: CompletionQueue,
    pd: ProtectionDomain,
    inbox: Buffer<Windowed>,
}

fn rig() -> Rig {
    let (stub, context, pd) = opened();
    let cq = context.completion_queue(16).unwrap();
    let prepared = pd
        .queue_pair(&cq)
        .max_send_wr(4)
        .max_recv_wr(4)
        .max_inline_data(32)
        .rc()
        .unwrap();
    let qp = prepared.connect(&PEER).unwrap();
    let inbox = pd.register(vec![0_u8; 4096], Windowed).unwrap();
    Rig {
        stub,
        qp,
        cq,
        pd,
        inbox,
    }
}

impl Rig {
    fn qpn(&self) -> u32 {
        self.qp.qpn().get()
    }

    /// Completes the oldest send, and returns the window that it has bound.
    fn bound(&mut self) -> BoundWindow<WriteAccess> {
        self.stub.complete_sends(self.qpn(), 1);
        let mut completion = self.cq.poll().unwrap().next().unwrap();
        assert_eq!(completion.result().unwrap(), Success::Bind);
        completion.take_bound_window().unwrap()
    }

    /// Receives a message that invalidates `rkey`.
    fn invalidated(
        &mut self,
        window: BoundWindow<WriteAccess>,
        rkey: RKey,
    ) -> Result<MemoryWindow, BoundWindow<WriteAccess>> {
        let receive = self.pd.register(vec![0_u8; 8], doorbell_verbs::Local).unwrap();
        self.qp.receive(receive).unwrap();
        self.stub.complete_invalidating(self.qpn(), rkey.0);
        let completion = self.cq.poll().unwrap().next().unwrap();
        assert_eq!(completion.result().unwrap(), Success::Receive { len: 0, imm: None });
        assert_eq!(completion.invalidated(), Some(rkey));
        window.invalidated(completion.into_invalidation().unwrap())
    }

    fn bind(&mut self) -> BoundWindow<WriteAccess> {
        let window = self.pd.memory_window().unwrap();
        self.qp.bind(window, &self.inbox, 16..48, WriteAccess).unwrap();
        self.bound()
    }
}

#[test]
fn a_binding_gives_the_window_back_with_its_key() {
    let mut rig = rig();
    let window = rig.pd.memory_window().unwrap();
    rig.qp.bind(window, &rig.inbox, 16..48, ReadWriteAccess).unwrap();
    let posted = rig.stub.pending_sends(rig.qpn()).remove(0);
    assert!(posted.signaled() && posted.opcode == IBV_WR_BIND_MW);
    let expected = Bound {
        rkey: 0x77_00ff,
        addr: rig.inbox.addr() + 16,
        len: 32,
        access: IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE,
    };
    assert_eq!(posted.bind, Some(expected));
    rig.stub.complete_sends(rig.qpn(), 1);
    let mut completion = rig.cq.poll().unwrap().next().unwrap();
    assert!(
        completion.take_bound_window::<WriteAccess, WindowType2>().is_none(),
        "not what was bound"
    );
    assert!(completion.take_bound_window::<ReadWriteAccess, WindowType1>().is_none());
    assert!(completion.take_window::<WindowType2>().is_none(), "it is bound");
    assert!(completion.take::<Windowed>().is_none(), "it is no buffer");
    assert!(completion.take_word().is_none());
    let window = completion.take_bound_window::<ReadWriteAccess, WindowType2>().unwrap();
    assert!(
        completion.take_bound_window::<ReadWriteAccess, WindowType2>().is_none(),
        "taken"
    );
    let remote = window.remote();
    assert_eq!(
        (remote.addr(), remote.len(), remote.rkey()),
        (expected.addr, 32, RKey(expected.rkey))
    );
}

#[test]
fn an_invalidated_window_is_bound_again_with_the_next_key() {
    let mut rig = rig();
    let first = rig.bind();
    let rkey = first.rkey();
    rig.qp.invalidate(first).unwrap();
    assert_eq!(rig.stub.pending_sends(rig.qpn())[0].invalidate, Some(rkey.0));
    rig.stub.complete_sends(rig.qpn(), 1);
    let mut completion = rig.cq.poll().unwrap().next().unwrap();
    assert_eq!(completion.result().unwrap(), Success::Invalidate);
    assert!(
        completion.take_bound_window::<WriteAccess, WindowType2>().is_none(),
        "it is bound no more"
    );
    let window = completion.take_window::<WindowType2>().unwrap();
    drop(completion);
    // The whole buffer; the lower 8 bits of the key wrap.
    rig.qp.bind(window, &rig.inbox, .., WriteAccess).unwrap();
    let second = rig.bound();
    assert_eq!((second.rkey(), second.remote().len()), (RKey(0x77_0000), 4096));
}

#[test]
fn a_peer_takes_the_key_away() {
    let mut rig = rig();
    let window = rig.bind();
    let rkey = window.rkey();
    let window = rig.invalidated(window, rkey).unwrap();
    rig.qp.bind(window, &rig.inbox, 0..8, WriteAccess).unwrap();
    let again = rig.bound();
    assert_eq!(again.rkey(), RKey(0x77_0000));
    drop(again);
    assert_eq!(rig.stub.live("mw"), 0);
}

#[test]
fn a_completion_proves_nothing_of_other_windows() {
    let (mut rig, mut other) = (rig(), rig());
    let (window, foreign) = (rig.bind(), other.bind());
    let rkey = window.rkey();
    assert_eq!(foreign.rkey(), rkey, "the stub gives all windows one key");
    let foreign = rig.invalidated(foreign, rkey).unwrap_err();
    let window = rig.invalidated(window, RKey(rkey.0 ^ 1)).unwrap_err();
    rig.invalidated(window, rkey).unwrap();
    other.invalidated(foreign, rkey).unwrap();
    let receive = rig.pd.register(vec![0_u8; 8], doorbell_verbs::Local).unwrap();
    rig.qp.receive(receive).unwrap();
    rig.stub.complete_receive(rig.qpn(), IBV_WC_RECV, 0, None);
    let completion = rig.cq.poll().unwrap().next().unwrap();
    assert!(completion.into_invalidation().is_none(), "it invalidates nothing");
}

#[test]
fn a_send_that_invalidates() {
    let mut rig = rig();
    let buffer = rig.pd.register(vec![0_u8; 8], doorbell_verbs::Local).unwrap();
    rig.qp.send_with_invalidate(buffer, RKey(7)).unwrap();
    rig.qp
        .post(|batch| {
            batch
                .send_inline_with_invalidate(b"bye", RKey(8))
                .solicited()
                .signaled();
        })
        .unwrap();
    let posted = rig.stub.pending_sends(rig.qpn());
    assert_eq!([posted[0].invalidate, posted[1].invalidate], [Some(7), Some(8)]);
    assert!(posted.iter().all(|request| request.opcode == IBV_WR_SEND_WITH_INV));
    assert_eq!((posted[0].sges.len(), &posted[1].inline[..]), (1, &b"bye"[..]));
    assert_ne!(posted[1].flags & IBV_SEND_SOLICITED, 0);
}

#[test]
fn a_window_goes_before_its_region_and_its_queue_pair() {
    // The buffer is dropped first: the window keeps the region.
    let mut kept = rig();
    let window = kept.bind();
    drop(kept.inbox);
    assert_eq!(kept.stub.log(), [""; 0]);
    drop(window);
    assert_eq!(kept.stub.log(), ["dealloc_mw", "dereg_mr"]);
    // The queue pair is dropped first: the window is freed with it.
    let mut tied = rig();
    let window = tied.bind();
    drop(tied.qp);
    assert_eq!(tied.stub.log(), ["dealloc_mw", "destroy_qp"]);
    drop(tied.inbox);
    drop(window);
    assert_eq!(tied.stub.log(), ["dealloc_mw", "destroy_qp", "dereg_mr"]);
    assert_eq!(tied.stub.live("mw"), 0);
    // While the bind or invalidate request is in flight.
    for unbind in [false, true] {
        let mut rig = rig_in_flight(unbind);
        drop(rig.inbox);
        drop(rig.qp);
        assert_eq!(rig.stub.log(), ["dealloc_mw", "destroy_qp"]);
        assert_eq!(rig.cq.poll().unwrap().count(), 0);
        assert_eq!(rig.stub.log(), ["dealloc_mw", "destroy_qp", "dereg_mr"]);
    }
    // One that was unbound before stays.
    let mut free = rig();
    let rkey = free.bind();
    let key = rkey.rkey();
    let window = free.invalidated(rkey, key).unwrap();
    drop(free.qp);
    assert_eq!(free.stub.live("mw"), 1);
    drop(window);
    assert_eq!(free.stub.live("mw"), 0);
}

fn rig_in_flight(unbind: bool) -> Rig {
    let mut rig = rig();
    if unbind {
        let window = rig.bind();
        rig.qp.invalidate(window).unwrap();
    } else {
        let window = rig.pd.memory_window().unwrap();
        rig.qp.bind(window, &rig.inbox, .., ReadAccess).unwrap();
    }
    rig
}

#[test]
fn a_window_whose_request_fails_goes_with_the_completion() {
    for unbind in [false, true] {
        let mut rig = rig_in_flight(unbind);
        rig.stub.fail_send(rig.qpn(), IBV_WC_MW_BIND_ERR);
        let mut completion = rig.cq.poll().unwrap().next().unwrap();
        assert!(completion.result().is_err());
        assert!(completion.take_window::<WindowType2>().is_none());
        assert!(completion.take_bound_window::<WriteAccess, WindowType2>().is_none());
        assert!(completion.take_bound_window::<ReadAccess, WindowType2>().is_none());
        assert_eq!(rig.stub.live("mw"), 1);
        drop(completion);
        assert_eq!(rig.stub.live("mw"), 0);
    }
}

#[test]
fn what_is_refused_comes_back() {
    let mut rig = rig();
    let other = self::rig();
    let window = other.pd.memory_window().unwrap();
    let mut refused = rig.qp.bind(window, &rig.inbox, .., WriteAccess).unwrap_err();
    assert!(matches!(refused.reason, RejectReason::ForeignWindow), "{refused}");
    drop(refused.take_window::<WindowType2>().unwrap());
    let window = rig.pd.memory_window().unwrap();
    let mut refused = rig.qp.bind(window, &rig.inbox, 8..8, WriteAccess).unwrap_err();
    assert!(matches!(refused.reason, RejectReason::EmptyWindow), "{refused}");
    assert!(refused.take_window::<WindowType1>().is_none());
    assert!(refused.take_bound_window::<WriteAccess, WindowType2>().is_none());
    let window = refused.take_window::<WindowType2>().unwrap();
    rig.stub.refuse_send(rig.qpn(), 0, libc::EINVAL);
    let mut refused = rig.qp.bind(window, &rig.inbox, .., WriteAccess).unwrap_err();
    assert!(matches!(refused.reason, RejectReason::Device { .. }), "{refused}");
    let window = refused.take_window::<WindowType2>().unwrap();
    rig.qp.bind(window, &rig.inbox, .., WriteAccess).unwrap();
    let window = rig.bound();
    // Unbinding refused: still bound.
    rig.stub.refuse_send(rig.qpn(), 0, libc::EINVAL);
    let mut refused = rig.qp.invalidate(window).unwrap_err();
    assert!(refused.take_window::<WindowType2>().is_none());
    let window = refused.take_bound_window::<WriteAccess, WindowType2>().unwrap();
    assert_eq!(window.remote().len(), 4096);
    // A batch that does not fit: each is returned by its index.
    let mut windows = (0..5).map(|_| rig.pd.memory_window().unwrap()).collect::<Vec<_>>();
    let mut refused = rig
        .qp
        .post(|batch| {
            for window in windows.drain(..) {
                batch.bind(window, &rig.inbox, 0..8, WriteAccess);
            }
        })
        .unwrap_err();
    assert!(
        matches!(refused.reason, RejectReason::QueueFull { depth: 4 }),
        "{refused}"
    );
    assert_eq!((0..5).filter_map(|_| refused.take_window::<WindowType2>()).count(), 5);
    let mut gone = self::rig();
    let lost = gone.bind();
    drop(gone.qp);
    let mut refused = rig.qp.invalidate(lost).unwrap_err();
    assert!(matches!(refused.reason, RejectReason::WindowGone), "{refused}");
    assert!(refused.take_bound_window::<WriteAccess, WindowType2>().is_some());
}

#[test]
fn type_1_has_a_call_of_its_own() {
    let mut rig = rig();
    let window = rig.pd.memory_window_type_1().unwrap();
    rig.stub.fail(Verb::BindMw, libc::ENOMEM);
    let mut refused = rig.qp.bind_type_1(window, &rig.inbox, 8..16, ReadAccess).unwrap_err();
    assert!(refused.to_string().contains("ibv_bind_mw"), "{refused}");
    let window = refused.take_window::<WindowType1>().unwrap();
    rig.qp.bind_type_1(window, &rig.inbox, 8..16, ReadAccess).unwrap();
    let posted = rig.stub.pending_sends(rig.qpn()).remove(0);
    assert_eq!(posted.bind.unwrap().access, IBV_ACCESS_REMOTE_READ);
    rig.stub.complete_sends(rig.qpn(), 1);
    let mut completion = rig.cq.poll().unwrap().next().unwrap();
    assert_eq!(completion.result().unwrap(), Success::Bind);
    let window = completion.take_bound_window::<ReadAccess, WindowType1>().unwrap();
    drop(completion);
    assert_eq!(window.remote().addr(), rig.inbox.addr() + 8);
    rig.qp.unbind_type_1(window).unwrap();
    assert_eq!(rig.stub.pending_sends(rig.qpn())[0].bind.unwrap().len, 0);
    rig.stub.complete_sends(rig.qpn(), 1);
    let mut completion = rig.cq.poll().unwrap().next().unwrap();
    let window = completion.take_window::<WindowType1>().unwrap();
    drop(completion);
    // It is not freed with the queue pair.
    rig.qp.bind_type_1(window, &rig.inbox, .., WriteAccess).unwrap();
    rig.stub.complete_sends(rig.qpn(), 1);
    let window = rig
        .cq
        .poll()
        .unwrap()
        .next()
        .unwrap()
        .take_bound_window::<WriteAccess, WindowType1>();
    drop(rig.qp);
    assert_eq!(rig.stub.live("mw"), 1);
    drop(window);
    assert_eq!(rig.stub.live("mw"), 0);
}

#[test]
fn type_1_keeps_to_the_depth_of_the_queue() {
    let mut rig = rig();
    for _ in 0..4 {
        let window = rig.pd.memory_window_type_1().unwrap();
        rig.qp.bind_type_1(window, &rig.inbox, .., WriteAccess).unwrap();
    }
    let window = rig.pd.memory_window_type_1().unwrap();
    let mut refused = rig.qp.bind_type_1(window, &rig.inbox, .., WriteAccess).unwrap_err();
    assert!(
        matches!(refused.reason, RejectReason::QueueFull { depth: 4 }),
        "{refused}"
    );
    let window = refused.take_window::<WindowType1>().unwrap();
    rig.stub.complete_sends(rig.qpn(), 4);
    assert_eq!(rig.cq.poll().unwrap().count(), 4);
    rig.qp.bind_type_1(window, &rig.inbox, .., WriteAccess).unwrap();
}

#[test]
fn a_device_without_windows() {
    let rig = rig();
    rig.stub.fail(Verb::AllocMw, libc::EOPNOTSUPP);
    let error = rig.pd.memory_window().unwrap_err().to_string();
    assert!(
        error.contains("ibv_alloc_mw") && error.contains("remote rights"),
        "{error}"
    );
}

#[test]
#[should_panic(expected = "beyond a buffer")]
fn a_range_beyond_the_buffer() {
    let mut rig = rig();
    let window = rig.pd.memory_window().unwrap();
    let _ = rig.qp.bind(window, &rig.inbox, 1..4097, WriteAccess);
}
