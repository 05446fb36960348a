//! From library to completions, over the stub.

use std::cell::RefCell;

use doorbell_verbs::{
    AtomicWord, Buffer, CompletionStatus, DeviceError, Gid, Local, Mtu, PeerAll, Psn, QpState, QueueKind,
    QueuePairError, ReadAccess, Remote, Success, WriteAccess,
};
use doorbell_verbs_sys as sys;

use crate::rig::{PEER, TestBackend, TestCq, opened, over_all_kinds, poll_count, poll_each, rig_of};
use crate::stub::{Stub, Verb, library};

over_all_kinds! {
    a_panic_while_completions_are_taken_loses_none_but_its_own,
    every_operation_reaches_the_provider_as_posted,
    receives_give_length_immediate_and_buffer,
    an_error_completion_says_what_to_do_and_the_rest_is_flushed,
    flush_brings_everything_back,
    a_poll_that_stops_early_loses_nothing,
    one_thread_can_poll_and_post_in_one_loop,
    a_queue_never_fills_with_nothing_signalled,
    a_forgotten_request_is_not_posted_and_another_is_signaled_for_it,
}

#[test]
fn devices_are_listed_and_opened_by_name() {
    let stub = Stub::new();
    assert!(
        library()
            .devices()
            .unwrap()
            .iter()
            .any(|device| device.name == stub.name && device.guid == 0x0102_0304_0506_0708)
    );
    let context = stub.open();
    assert_eq!(context.name(), stub.name);
    assert_eq!(context.attr().max_sge, 8);
    let port = context.port(1).unwrap();
    assert_eq!((port.active_mtu, port.bits_per_s), (Mtu::B1024, Some(100_000_000_000)));
    let error = library().open("mlx5_0").unwrap_err();
    assert!(
        matches!(&error, DeviceError::NoDevice { available, .. } if available.contains(&stub.name)),
        "{error}"
    );
    assert!(matches!(
        context.port(2),
        Err(DeviceError::NoPort { port: 2, ports: 1, .. })
    ));
}

#[test]
fn gids_are_found_and_the_furthest_reaching_is_the_default() {
    let context = Stub::new().open();
    let gids: Vec<_> = context
        .gids(1)
        .unwrap()
        .iter()
        .map(|entry| (entry.index, entry.gid.to_string()))
        .collect();
    assert_eq!(gids, [(1, "::ffff:10.0.0.1".to_owned()), (2, "fe80::1".to_owned())]);
    let error = context.gid(1, 3).unwrap_err().to_string();
    assert!(
        error.contains("index 3") && error.contains("1 = ::ffff:10.0.0.1"),
        "{error}"
    );
    let pd = context.protection_domain().unwrap();
    let cq = context.completion_queue(256).unwrap();
    let prepared = pd.queue_pair(&cq).rc().unwrap();
    assert_eq!(prepared.endpoint().gid.to_string(), "::ffff:10.0.0.1");
}

#[test]
fn connecting_gives_each_transition_what_it_requires() {
    let (stub, context, pd) = opened();
    let cq = context.completion_queue(256).unwrap();
    let error = pd.queue_pair(&cq).flow_label(1 << 20).rc().unwrap_err().to_string();
    assert!(error.contains("flow_label"), "{error}");
    let builder = pd.queue_pair(&cq).psn(Psn::truncated(9)).flow_label(0xf_ffff);
    let prepared = builder.rc().unwrap();
    assert_eq!(prepared.endpoint().psn.get(), 9);
    let qp = prepared.connect(&PEER).unwrap();
    assert_eq!(qp.state().unwrap(), QpState::Rts);
    assert_eq!(qp.mtu(), Mtu::B1024, "the smaller of the two");
    let masks = stub.masks(qp.qpn().get());
    let init = sys::IBV_QP_STATE | sys::IBV_QP_PKEY_INDEX | sys::IBV_QP_PORT | sys::IBV_QP_ACCESS_FLAGS;
    assert_eq!(masks.len(), 3);
    assert_eq!(masks[0], init);
    let attr = stub.attr(qp.qpn().get());
    assert_eq!(
        (attr.dest_qp_num, attr.rq_psn, attr.ah_attr.grh.sgid_index),
        (0x77, 0x1234, 1)
    );
    assert_eq!(attr.ah_attr.grh.flow_label, 0xf_ffff);
}

#[test]
fn a_refused_transition_is_explained() {
    let (stub, context, pd) = opened();
    let cq = context.completion_queue(256).unwrap();
    let prepared = pd.queue_pair(&cq).rc().unwrap();
    stub.fail(Verb::ModifyQp, libc::EINVAL);
    let mut peer = PEER;
    peer.gid = Gid([0xfe; 16]);
    let error = prepared.connect(&peer).unwrap_err().to_string();
    assert!(
        error.contains("INIT to RTR") && error.contains("of different kinds"),
        "{error}"
    );
    assert_eq!(stub.live("qp"), 0, "a queue pair that did not connect is gone");
    assert_eq!(cq.unreserved(), 256);
}

#[test]
fn a_port_that_is_down_is_named() {
    let (stub, context, pd) = opened();
    let cq = context.completion_queue(256).unwrap();
    stub.port_state(sys::IBV_PORT_DOWN);
    let error = pd.queue_pair(&cq).rc().unwrap_err();
    assert!(matches!(error, QueuePairError::PortDown { port: 1, .. }), "{error}");
}

#[test]
fn a_completion_queue_cannot_be_overbooked() {
    let (_stub, context, pd) = opened();
    let cq = context.completion_queue(100).unwrap();
    let first = pd.queue_pair(&cq).max_send_wr(40).max_recv_wr(30).rc().unwrap();
    assert_eq!(cq.unreserved(), 30);
    let error = pd.queue_pair(&cq).max_send_wr(10).max_recv_wr(21).rc().unwrap_err();
    assert!(
        matches!(
            error,
            QueuePairError::CompletionQueueTooSmall {
                which: "receive",
                needed: 21,
                free: 20,
                capacity: 100
            }
        ),
        "{error}"
    );
    assert_eq!(cq.unreserved(), 30, "the half that fitted is given back");
    drop(first);
    assert_eq!(cq.unreserved(), 100);
}

fn every_operation_reaches_the_provider_as_posted<B: TestBackend, Q: TestCq>() {
    let stub = Stub::new();
    let (mut qp, mut cq, mut buffers) = rig_of::<B, Q>(stub, 16, 8);
    let qpn = qp.qpn().get();
    let addr: Vec<u64> = buffers.iter().map(Buffer::addr).collect();
    let remote = Remote::<doorbell_verbs::AllAccess>::from_raw(0x1000, 0x55, 4096);
    let word = |buffer: Buffer| -> AtomicWord {
        let (word, _) = buffer.split_at(8);
        word.into_word().unwrap()
    };
    let bytes = [1, 2, 3];
    let mut next = || buffers.remove(0);
    let (a, b, c, d, e, f, g) = (next(), next(), next(), next(), next(), next(), next());
    let [e, f] = [word(e), word(f)];
    qp.post(|batch| {
        batch.send(a).imm(0xabcd).signaled();
        batch.write(b, remote).fence();
        batch.read(c.part(8..24), remote.slice(64, 16).unwrap());
        batch.write_inline(&bytes, remote);
        batch.compare_swap(e, remote.word(8).unwrap(), 5, 6);
        batch.fetch_add(f, remote.word(16).unwrap(), 7);
        batch.write_gather([d, g], remote).imm(9).solicited().signaled();
        batch.send_inline(&[]);
    })
    .unwrap();
    assert_eq!(stub.doorbells(qpn).0, 1);
    let posted = stub.pending_sends(qpn);
    let summary: Vec<_> = posted
        .iter()
        .map(|request| (request.opcode, request.flags, request.sges.len()))
        .collect();
    assert_eq!(
        summary,
        [
            (sys::IBV_WR_SEND_WITH_IMM, sys::IBV_SEND_SIGNALED, 1),
            (sys::IBV_WR_RDMA_WRITE, sys::IBV_SEND_FENCE, 1),
            (sys::IBV_WR_RDMA_READ, 0, 1),
            (sys::IBV_WR_RDMA_WRITE, sys::IBV_SEND_INLINE, 1),
            (sys::IBV_WR_ATOMIC_CMP_AND_SWP, 0, 1),
            (sys::IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 1),
            (
                sys::IBV_WR_RDMA_WRITE_WITH_IMM,
                sys::IBV_SEND_SIGNALED | sys::IBV_SEND_SOLICITED,
                2
            ),
            (sys::IBV_WR_SEND, sys::IBV_SEND_INLINE, 0),
        ]
    );
    assert_eq!((posted[0].imm, posted[6].imm), (0xabcd, 9));
    assert_eq!(posted[1].remote, (0x1000, 0x55));
    assert_eq!(
        (posted[2].remote, &posted[2].sges[0].0, posted[2].sges[0].1),
        ((0x1040, 0x55), &(addr[2] + 8), 16)
    );
    assert_eq!(posted[3].inline, bytes);
    assert_eq!((posted[4].remote, posted[4].atomic), ((0x1008, 0x55), (5, 6)));
    assert_eq!((posted[5].remote, posted[5].atomic), ((0x1010, 0x55), (7, 0)));
    assert_eq!(
        posted[6].sges.iter().map(|sge| sge.0).collect::<Vec<_>>(),
        [addr[3], addr[6]]
    );

    stub.complete_sends(qpn, 8);
    let mut seen = Vec::new();
    cq.poll().unwrap().for_each(|mut done| {
        let result = done.result().unwrap();
        let word = done.take_word().map(|word| word.addr());
        let first = word.or_else(|| done.take::<Local>().map(|buffer| buffer.addr()));
        let second = done.take::<Local>().map(|buffer| buffer.addr());
        seen.push((done.sequence(), result, first, second));
    });
    assert_eq!(
        seen,
        [
            (0, Success::Send, Some(addr[0]), None),
            (1, Success::Confirmed, Some(addr[1]), None),
            (2, Success::Confirmed, Some(addr[2]), None),
            (4, Success::Confirmed, Some(addr[4]), None),
            (5, Success::Confirmed, Some(addr[5]), None),
            (6, Success::Write, Some(addr[3]), Some(addr[6])),
        ]
    );
}

fn receives_give_length_immediate_and_buffer<B: TestBackend, Q: TestCq>() {
    let stub = Stub::new();
    let (mut qp, mut cq, mut buffers) = rig_of::<B, Q>(stub, 4, 4);
    let qpn = qp.qpn().get();
    let (first, second, third) = (buffers.remove(0), buffers.remove(0), buffers.remove(0));
    let addr = [first.addr(), second.addr(), third.addr()];
    qp.post_receives(|batch| {
        batch.receive(first);
        batch.receive_scatter([second, third]);
    })
    .unwrap();
    qp.receive(buffers.remove(0)).unwrap();
    assert_eq!(stub.doorbells(qpn).1, 2);
    assert_eq!(stub.pending_receives(qpn)[1].sges.len(), 2);
    stub.complete_receive(qpn, sys::IBV_WC_RECV, 10, None);
    stub.complete_receive(qpn, sys::IBV_WC_RECV, 100, Some(77));
    stub.complete_receive(qpn, sys::IBV_WC_RECV_RDMA_WITH_IMM, 5, Some(8));
    let mut seen = Vec::new();
    cq.poll().unwrap().for_each(|mut done| {
        assert_eq!(done.queue(), QueueKind::Receive);
        let taken: Vec<u64> = core::iter::from_fn(|| done.take::<Local>())
            .map(|buffer: Buffer| buffer.addr())
            .collect();
        seen.push((done.result().unwrap(), taken));
    });
    assert_eq!(seen[0], (Success::Receive { len: 10, imm: None }, vec![addr[0]]));
    assert_eq!(
        seen[1],
        (
            Success::Receive {
                len: 100,
                imm: Some(77)
            },
            vec![addr[1], addr[2]]
        )
    );
    assert_eq!(seen[2].0, Success::ReceiveWrite { len: 5, imm: 8 });
}

fn an_error_completion_says_what_to_do_and_the_rest_is_flushed<B: TestBackend, Q: TestCq>() {
    let stub = Stub::new();
    let (mut qp, mut cq, mut buffers) = rig_of::<B, Q>(stub, 8, 3);
    let qpn = qp.qpn().get();
    let remote = Remote::<WriteAccess>::from_raw(0, 1, 64);
    for _ in 0..3 {
        qp.write(buffers.remove(0), remote).unwrap();
    }
    stub.complete_sends(qpn, 1);
    stub.fail_send(qpn, sys::IBV_WC_RETRY_EXC_ERR);
    let outcomes: Vec<_> = poll_each(&mut cq, |mut done| {
        (
            done.sequence(),
            done.take::<Local>().is_some(),
            done.result().map_err(|failure| failure.status),
        )
    });
    assert_eq!(
        outcomes,
        [
            (0, true, Ok(Success::Confirmed)),
            (1, true, Err(CompletionStatus::RetryExceeded)),
            (2, true, Err(CompletionStatus::Flushed)),
        ],
        "what was done before the failure succeeded"
    );
    assert_eq!(qp.state().unwrap(), QpState::Err);
    let text = CompletionStatus::RetryExceeded.advice();
    assert!(text.contains("does not answer"), "{text}");
}

fn flush_brings_everything_back<B: TestBackend, Q: TestCq>() {
    let stub = Stub::new();
    let (mut qp, mut cq, mut buffers) = rig_of::<B, Q>(stub, 8, 4);
    qp.receive(buffers.remove(0)).unwrap();
    qp.send(buffers.remove(0)).unwrap();
    qp.flush().unwrap();
    let back = poll_each(&mut cq, |mut done| done.take::<Local>())
        .into_iter()
        .flatten()
        .count();
    assert_eq!(back, 2);
    assert_eq!((qp.free_send_slots(), qp.free_receive_slots()), (8, 8));
}

fn a_poll_that_stops_early_loses_nothing<B: TestBackend, Q: TestCq>() {
    let stub = Stub::new();
    let (mut qp, mut cq, mut buffers) = rig_of::<B, Q>(stub, 8, 6);
    let qpn = qp.qpn().get();
    qp.post(|batch| {
        for buffer in buffers.drain(..5) {
            batch.send(buffer);
        }
        batch.send(buffers.remove(0)).signaled();
    })
    .unwrap();
    stub.complete_sends(qpn, 6);
    let mut sequences = Vec::new();
    for _ in 0..6 {
        let mut completions = cq.poll().unwrap();
        let done = completions.next_completion().unwrap();
        sequences.push(done.sequence());
    }
    assert_eq!(sequences, [0, 1, 2, 3, 4, 5]);
    assert!(cq.poll().unwrap().next_completion().is_none());
}

fn one_thread_can_poll_and_post_in_one_loop<B: TestBackend, Q: TestCq>() {
    let stub = Stub::new();
    let (mut qp, mut cq, buffers) = rig_of::<B, Q>(stub, 4, 4);
    let qpn = qp.qpn().get();
    for buffer in buffers {
        qp.post(|batch| {
            batch.send(buffer).signaled();
        })
        .unwrap();
    }
    for _ in 0..100 {
        stub.complete_sends(qpn, 2);
        cq.poll().unwrap().for_each(|mut done| {
            let buffer: Buffer = done.take().unwrap();
            qp.post(|batch| {
                batch.send(buffer).signaled();
            })
            .unwrap();
        });
    }
    assert_eq!(qp.next_send(), 204);
}

fn a_queue_never_fills_with_nothing_signalled<B: TestBackend, Q: TestCq>() {
    for depth in [1, 2, 3, 4, 7, 64] {
        let stub = Stub::new();
        let (mut qp, mut cq, _) = rig_of::<B, Q>(stub, depth, 0);
        let qpn = qp.qpn().get();
        for _ in 0..20 {
            while qp.send_inline(b"x").is_ok() {}
            assert!(
                stub.pending_sends(qpn).iter().any(|request| request.signaled()),
                "depth {depth}"
            );
            stub.complete_sends(qpn, usize::MAX);
            assert!(poll_count(&mut cq) > 0);
            assert!(qp.free_send_slots() > 0);
        }
    }
}

fn a_forgotten_request_is_not_posted_and_another_is_signaled_for_it<B: TestBackend, Q: TestCq>() {
    let stub = Stub::new();
    let (mut qp, mut cq, _) = rig_of::<B, Q>(stub, 4, 0);
    let qpn = qp.qpn().get();
    let mut posted = 0;
    // The second is the one that the library would signal; it never enters the batch.
    while qp
        .post(|batch| {
            let request = batch.send_inline(b"x");
            if posted == 1 {
                core::mem::forget(request);
            }
        })
        .is_ok()
    {
        posted += 1;
    }
    let signaled: Vec<bool> = stub
        .pending_sends(qpn)
        .iter()
        .map(|request| request.signaled())
        .collect();
    assert_eq!(signaled, [false, true, false, true]);
    stub.complete_sends(qpn, usize::MAX);
    assert!(poll_count(&mut cq) > 0);
    assert!(qp.free_send_slots() > 0);
}

#[test]
fn atomics_and_remote_memory_are_typed_and_checked() {
    let (stub, _context, pd) = opened();
    let buffer = pd.register(doorbell_verbs::Memory::zeroed(64), PeerAll).unwrap();
    let remote = buffer.remote();
    let (addr, len, access) = stub.region(remote.rkey().0 & 0x7fff_ffff).unwrap();
    assert_eq!((addr, len), (buffer.addr(), 64));
    assert_eq!(access, 0b1111);
    let bytes = remote.to_bytes();
    assert_eq!(Remote::<ReadAccess>::from_bytes(&bytes).unwrap().addr(), remote.addr());
    let (first, rest) = remote.split_at(24);
    assert_eq!((first.addr(), first.len()), (remote.addr(), 24));
    assert_eq!((rest.addr(), rest.len()), (remote.addr() + 24, 40));
    assert!(remote.word(1).is_none() && remote.word(64).is_none() && remote.word(56).is_some());
    let read_only = pd
        .register(vec![0_u8; 8], doorbell_verbs::PeerRead)
        .unwrap()
        .remote()
        .to_bytes();
    let error = Remote::<WriteAccess>::from_bytes(&read_only).unwrap_err().to_string();
    assert!(error.contains("Write"), "{error}");
    let error = Remote::<ReadAccess>::from_bytes(&bytes[1..]).unwrap_err().to_string();
    assert!(error.starts_with("23 bytes where"), "{error}");
}

fn a_panic_while_completions_are_taken_loses_none_but_its_own<B: TestBackend, Q: TestCq>() {
    let stub = Stub::new();
    let (mut qp, mut cq, mut buffers) = rig_of::<B, Q>(stub, 8, 6);
    let qpn = qp.qpn().get();
    for _ in 0..2 {
        qp.post(|batch| {
            batch.send(buffers.remove(0));
            batch.send(buffers.remove(0));
            batch.send(buffers.remove(0)).signaled();
        })
        .unwrap();
    }
    stub.complete_sends(qpn, 6);
    let seen = RefCell::new(Vec::new());
    let mut panics = 0;
    while seen.borrow().len() < 6 {
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            cq.poll().unwrap().for_each(|done| {
                seen.borrow_mut().push(done.sequence());
                assert!(![1, 3, 5].contains(&done.sequence()), "on purpose");
            });
        }));
        panics += usize::from(panicked.is_err());
    }
    assert_eq!((seen.into_inner(), panics), (vec![0, 1, 2, 3, 4, 5], 3));
    assert_eq!(qp.free_send_slots(), 8);
}
