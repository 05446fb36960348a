//! C objects taken over and lent, and the raw pointers to ours.

use core::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use doorbell_verbs::raw::Ownership;
use doorbell_verbs::{
    AddressHandle, Buffer, ClassicCq, CompletionChannel, CompletionQueue, Context, DeviceMemory, ExtendedCq, Local,
    MemoryWindow, Opaque, PeerWrite, ProtectionDomain, QueuePairBuilder, QueuePairError, ReliableConnection,
    SharedReceiveQueue, WindowType2, Windowed, WriteAccess,
};
use doorbell_verbs_sys::*;

use crate::rig::{PEER, opened};
use crate::stub::{Stub, Verb, library};

/// A lender that counts when it is dropped.
struct Lender(Arc<AtomicU32>);

impl Drop for Lender {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// How many of the lenders from `lend` are dropped.
#[derive(Default)]
struct Lending(Arc<AtomicU32>);

impl Lending {
    fn lend(&self) -> Ownership {
        Ownership::Lent(Arc::new(Lender(Arc::clone(&self.0))))
    }

    fn returned(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Objects that a C program creates: one of each that queue pairs need.
struct CObjects {
    api: &'static Api,
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    cq: *mut ibv_cq,
}

impl CObjects {
    fn new(stub: &'static Stub) -> Self {
        let api = library().api();
        let mut len = 0;
        // SAFETY: `len` may be written, the list is as long; all are of one device and context.
        unsafe {
            let list = (api.get_device_list)(&mut len);
            let device = (0..len as usize)
                .map(|at| *list.add(at))
                .find(|&device| {
                    core::ffi::CStr::from_ptr((api.get_device_name)(device))
                        .to_str()
                        .is_ok_and(|name| name == stub.name)
                })
                .unwrap();
            let context = (api.open_device)(device);
            (api.free_device_list)(list);
            Self {
                api,
                context,
                pd: (api.alloc_pd)(context),
                cq: (api.create_cq)(context, 64, null_mut(), null_mut(), 0),
            }
        }
    }

    /// A queue pair of 8 requests each way.
    fn queue_pair(&self, qp_type: u32) -> *mut ibv_qp {
        // SAFETY: all-zero is a valid ibv_qp_init_attr; domain and queue are live.
        unsafe {
            let mut init: ibv_qp_init_attr = core::mem::zeroed();
            (init.send_cq, init.recv_cq, init.qp_type) = (self.cq, self.cq, qp_type);
            (init.cap.max_send_wr, init.cap.max_recv_wr) = (8, 8);
            (init.cap.max_send_sge, init.cap.max_recv_sge) = (1, 1);
            (self.api.create_qp)(self.pd, &mut init)
        }
    }

    fn state(&self, qp: *mut ibv_qp) -> u32 {
        // SAFETY: all-zero is a valid ibv_qp_attr and ibv_qp_init_attr; the queue pair is live.
        unsafe {
            let (mut attr, mut init): (ibv_qp_attr, ibv_qp_init_attr) = core::mem::zeroed();
            assert_eq!(
                (self.api.query_qp)(qp, &mut attr, IBV_QP_STATE.cast_signed(), &mut init),
                0
            );
            attr.qp_state
        }
    }

    fn register(&self, memory: &mut [u8], access: u32) -> *mut ibv_mr {
        let start = memory.as_mut_ptr();
        // SAFETY: the domain is live; the stub moves no data.
        unsafe { (self.api.reg_mr)(self.pd, start.cast(), memory.len(), access.cast_signed()) }
    }
}

fn builder_of_depth_8<'a>(pd: &'a ProtectionDomain, cq: &'a CompletionQueue) -> QueuePairBuilder<'a> {
    pd.queue_pair(cq).max_send_wr(8).max_recv_wr(8)
}

const KINDS: [&str; 9] = ["context", "pd", "mr", "cq", "qp", "srq", "channel", "ah", "mw"];

fn live(stub: &Stub) -> Vec<(&'static str, i32)> {
    let counts = KINDS.map(|kind| (kind, stub.live(kind)));
    counts.into_iter().filter(|&(_, count)| count != 0).collect()
}

#[test]
fn taken_over_objects_are_used_and_destroyed_like_own_ones() {
    let stub = Stub::new();
    let made = CObjects::new(stub);
    let (rc, ud) = (made.queue_pair(IBV_QPT_RC), made.queue_pair(IBV_QPT_UD));
    let mut memory = vec![7_u8; 64];
    let mr = made.register(&mut memory, IBV_ACCESS_LOCAL_WRITE);
    // SAFETY: all were just created, as the types taken over as; the memory stays until the end.
    unsafe {
        let context = Context::from_raw(library(), made.context, Ownership::Taken).unwrap();
        assert_eq!(context.name(), stub.name);
        let pd = ProtectionDomain::from_raw(&context, made.pd, Ownership::Taken);
        let mut cq = CompletionQueue::<ClassicCq>::from_raw(&context, made.cq, Ownership::Taken);
        assert_eq!(cq.capacity(), 64);
        let buffer = Buffer::<Local>::from_raw(&pd, mr, Local, Ownership::Taken).unwrap();
        assert_eq!(*buffer, [7; 64]);

        let mut qp = builder_of_depth_8(&pd, &cq)
            .prepared_from_raw::<ReliableConnection>(rc, Ownership::Taken)
            .unwrap()
            .connect(&PEER)
            .unwrap();
        assert_eq!(made.state(rc), IBV_QPS_RTS);
        qp.receive(buffer).unwrap();
        stub.complete_receive(qp.qpn().get(), IBV_WC_RECV, 10, None);
        let buffer: Buffer = cq.poll().unwrap().next().unwrap().take().unwrap();
        // The memory is the caller's: it cannot be taken from here.
        let buffer = buffer.into_memory().unwrap_err();
        drop(buffer);
        assert_eq!(stub.live("mr"), 0);

        let mut qps = (
            qp,
            builder_of_depth_8(&pd, &cq)
                .datagrams_from_raw(ud, Ownership::Taken)
                .unwrap(),
        );
        let mut vector: ibv_ah_attr = core::mem::zeroed();
        let ah = made.api.create_ah.unwrap()(made.pd, &mut vector);
        let ah = AddressHandle::from_raw(&pd, ah, 1, Ownership::Taken);
        let long = pd.register(vec![0_u8; 1024], Local).unwrap();
        let (qpn, qkey) = (qps.1.qpn(), qps.1.endpoint().qkey);
        qps.1.send_to(long, &ah, qpn, qkey).unwrap();
    }
    assert_eq!(live(stub), [], "nothing is left");
    assert_eq!(memory, [7; 64]);
}

#[test]
fn lent_objects_are_returned_unchanged() {
    let stub = Stub::new();
    let made = CObjects::new(stub);
    let (rc, lending) = (made.queue_pair(IBV_QPT_RC), Lending::default());
    let mut memory = vec![7_u8; 64];
    let mr = made.register(&mut memory, IBV_ACCESS_LOCAL_WRITE);
    // SAFETY: all were just created, as the types taken over as; they stay until the end.
    unsafe {
        let channel = (made.api.create_comp_channel)(made.context);
        let mut vector: ibv_ah_attr = core::mem::zeroed();
        let ah = made.api.create_ah.unwrap()(made.pd, &mut vector);
        let before = live(stub);
        {
            let context = Context::from_raw(library(), made.context, lending.lend()).unwrap();
            let pd = ProtectionDomain::from_raw(&context, made.pd, lending.lend());
            let cq = CompletionQueue::<ClassicCq>::from_raw(&context, made.cq, lending.lend());
            let _channel = CompletionChannel::from_raw(&context, channel, lending.lend()).unwrap();
            let _ah = AddressHandle::from_raw(&pd, ah, 1, lending.lend());
            let buffer = Buffer::<Local>::from_raw(&pd, mr, Local, lending.lend()).unwrap();
            let builder = builder_of_depth_8(&pd, &cq);
            let mut qp = builder
                .connected_from_raw::<ReliableConnection>(rc, &PEER, lending.lend())
                .unwrap();
            assert_eq!(
                qp.mtu(),
                doorbell_verbs::Mtu::B1024,
                "the smaller of the port's and the peer's"
            );
            qp.send(buffer).unwrap();
            drop(qp);
            assert_eq!(made.state(rc), IBV_QPS_RESET);
            assert_eq!(
                lending.returned(),
                1,
                "the buffer lies in the ring until its queue is polled"
            );
        }
        assert_eq!(lending.returned(), 7);
        assert_eq!(live(stub), before);
        (made.api.destroy_qp)(rc);
        (made.api.dereg_mr)(mr);
        made.api.destroy_ah.unwrap()(ah);
        (made.api.destroy_comp_channel)(channel);
        (made.api.destroy_cq)(made.cq);
        (made.api.dealloc_pd)(made.pd);
        (made.api.close_device)(made.context);
    }
    assert_eq!(live(stub), []);
}

#[test]
fn a_lent_queue_pair_that_cannot_be_reset_keeps_its_buffers_and_its_lender() {
    let stub = Stub::new();
    let made = CObjects::new(stub);
    let (rc, lending) = (made.queue_pair(IBV_QPT_RC), Lending::default());
    // SAFETY: all were just created, in these, as the types that they are taken over as.
    unsafe {
        let context = Context::from_raw(library(), made.context, lending.lend()).unwrap();
        let pd = ProtectionDomain::from_raw(&context, made.pd, lending.lend());
        let cq = CompletionQueue::<ClassicCq>::from_raw(&context, made.cq, lending.lend());
        let buffer = pd.register(vec![0_u8; 64], Local).unwrap();
        let builder = builder_of_depth_8(&pd, &cq);
        let mut qp = builder
            .connected_from_raw::<ReliableConnection>(rc, &PEER, lending.lend())
            .unwrap();
        qp.send(buffer).unwrap();
        stub.fail(Verb::ModifyQp, libc::EIO);
        drop(qp);
        drop((cq, pd, context));
    }
    assert_eq!(
        (lending.returned(), stub.live("mr")),
        (0, 1),
        "the device may still read it"
    );
}

#[test]
fn a_queue_pair_whose_adoption_fails_is_destroyed_or_returned() {
    let stub = Stub::new();
    let made = CObjects::new(stub);
    let (first, second, third) = (
        made.queue_pair(IBV_QPT_RC),
        made.queue_pair(IBV_QPT_RC),
        made.queue_pair(IBV_QPT_RC),
    );
    let lending = Lending::default();
    // SAFETY: all were just created, in these, as the types that they are taken over as.
    unsafe {
        let context = Context::from_raw(library(), made.context, Ownership::Taken).unwrap();
        let pd = ProtectionDomain::from_raw(&context, made.pd, Ownership::Taken);
        let cq = CompletionQueue::<ClassicCq>::from_raw(&context, made.cq, Ownership::Taken);
        let deep = || pd.queue_pair(&cq).max_send_wr(100);
        let error = deep()
            .prepared_from_raw::<ReliableConnection>(first, Ownership::Taken)
            .unwrap_err();
        assert!(
            matches!(error, QueuePairError::CompletionQueueTooSmall { .. }),
            "{error}"
        );
        assert_eq!(stub.live("qp"), 2);
        deep()
            .connected_from_raw::<ReliableConnection>(second, &PEER, lending.lend())
            .unwrap_err();
        assert_eq!((stub.live("qp"), lending.returned()), (2, 1));

        // A failure after it was taken over.
        stub.fail(Verb::ModifyQp, libc::EINVAL);
        let builder = builder_of_depth_8(&pd, &cq);
        builder
            .prepared_from_raw::<ReliableConnection>(third, Ownership::Taken)
            .unwrap_err();
        assert_eq!(stub.live("qp"), 1);
        (made.api.destroy_qp)(second);
    }
    assert_eq!(live(stub), []);
}

#[test]
fn an_external_connection_manager_connects_by_the_pointer() {
    let (stub, context, pd) = opened();
    let cq = context.completion_queue(256).unwrap();
    let prepared = pd.queue_pair(&cq).rc().unwrap();
    let raw = prepared.as_raw();
    for state in [IBV_QPS_RTR, IBV_QPS_RTS] {
        // SAFETY: all-zero is valid; the stub needs a state; `prepared` is assumed connected.
        unsafe {
            let mut attr: ibv_qp_attr = core::mem::zeroed();
            attr.qp_state = state;
            assert_eq!((context.api().modify_qp)(raw, &mut attr, IBV_QP_STATE.cast_signed()), 0);
        }
    }
    // SAFETY: it is in RTS.
    let mut qp = unsafe { prepared.assume_connected(&PEER) };
    assert_eq!((qp.as_raw(), *qp.peer()), (raw, PEER));
    qp.send(pd.register(vec![0_u8; 8], Local).unwrap()).unwrap();
    assert_eq!(stub.pending_sends(qp.qpn().get()).len(), 1);
}

#[test]
fn the_other_objects_are_taken_over_too() {
    let stub = Stub::new();
    stub.extend();
    let made = CObjects::new(stub);
    // SAFETY: all are created here, in these, as the types that they are taken over as.
    unsafe {
        let context = Context::from_raw(library(), made.context, Ownership::Taken).unwrap();
        let pd = ProtectionDomain::from_raw(&context, made.pd, Ownership::Taken);
        let cq = CompletionQueue::<ClassicCq>::from_raw(&context, made.cq, Ownership::Taken);

        let mut init: ibv_srq_init_attr = core::mem::zeroed();
        (init.attr.max_wr, init.attr.max_sge) = (16, 1);
        let raw = made.api.create_srq.unwrap()(made.pd, &mut init);
        let mut srq = SharedReceiveQueue::from_raw(&pd, raw, 16, 1).unwrap();
        assert_eq!((srq.as_raw(), srq.free_slots()), (raw, 16));
        srq.receive(pd.register(vec![0_u8; 64], Local).unwrap()).unwrap();
        let _on_it = pd
            .queue_pair(&cq)
            .max_send_wr(8)
            .shared_receive_queue(&srq)
            .rc()
            .unwrap();

        let raw = inline::alloc_mw(made.pd, IBV_MW_TYPE_2);
        let window = MemoryWindow::<WindowType2>::from_raw(&pd, raw);
        assert_eq!(window.as_raw(), raw);
        let memory = pd.register(vec![0_u8; 64], Windowed).unwrap();
        let mut qp = pd
            .queue_pair(&cq)
            .max_send_wr(8)
            .max_recv_wr(8)
            .rc()
            .unwrap()
            .connect(&PEER)
            .unwrap();
        qp.bind(window, &memory, 0..8, WriteAccess).unwrap();
        drop(qp);

        let mut attr = ibv_alloc_dm_attr {
            length: 64,
            log_align_req: 0,
            comp_mask: 0,
        };
        let raw = inline::alloc_dm(made.context, &mut attr);
        let dm = DeviceMemory::from_raw(&context, raw, 64, Ownership::Taken);
        assert_eq!(dm.as_raw(), raw);
        let registered = pd.register_device_memory(&dm, 0, 64, Local).unwrap();
        assert_ne!(registered.as_raw(), null_mut());

        let mut gpu = vec![0_u8; 64];
        let mr = made.register(&mut gpu, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
        let at = (0x7000_0000, 64);
        let opaque = Buffer::<Opaque<PeerWrite>>::from_raw(&pd, mr, at, PeerWrite, Ownership::Taken).unwrap();
        assert_eq!(
            (opaque.addr(), opaque.as_raw(), opaque.remote().len()),
            (0x7000_0000, mr, 64)
        );

        let mut init: ibv_cq_init_attr_ex = core::mem::zeroed();
        (init.cqe, init.wc_flags) = (16, IBV_WC_STANDARD_FLAGS.into());
        let raw = inline::create_cq_ex(made.context, &mut init);
        let mut extended = CompletionQueue::<ExtendedCq>::from_raw(&context, raw, Ownership::Taken).unwrap();
        assert_eq!(extended.as_raw(), raw.cast());
        assert!(extended.poll().unwrap().next_completion().is_none());
        drop(opaque);
    }
    assert_eq!(live(stub), []);
    assert_eq!(stub.live("dm"), 0);
}
