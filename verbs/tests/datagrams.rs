//! Datagrams over the stub, and how long address handles live.

use doorbell_verbs::{
    AddressHandle, AddressHandleError, Buffer, CompletionQueue, GRH_BYTES, Gid, Lid, Local, Mtu, PostList,
    ProtectionDomain, QKey, Qpn, QueuePair, RejectReason, UdEndpoint, UnreliableDatagram,
};
use doorbell_verbs_sys::*;

use crate::rig::{TestBackend, over_both_backends};
use crate::stub::{Origin, Stub, Verb};

over_both_backends! {
    a_datagram_names_its_destination,
    the_shorter_mtu_bounds_a_datagram,
    a_completion_identifies_the_sender_of_a_datagram,
    only_a_receive_that_succeeded_is_a_datagram,
    a_handle_dropped_with_sends_in_flight_stays_until_they_are_polled,
    a_queue_pair_that_goes_needs_no_handle,
    a_connection_needs_no_handle,
    a_queue_pair_that_cannot_be_destroyed_keeps_its_handles,
    a_refused_send_needs_no_handle,
    handles_come_and_go_while_datagrams_stream,
}

const THERE: UdEndpoint = UdEndpoint {
    gid: Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 2]),
    lid: Lid(0),
    qpn: Qpn::truncated(0x77),
    qkey: QKey(0x1234_5678),
    mtu: Mtu::B512,
};

struct Rig<B: TestBackend> {
    qp: QueuePair<UnreliableDatagram, B>,
    cq: CompletionQueue,
    pd: ProtectionDomain,
}

fn rig<B: TestBackend>(stub: &'static Stub) -> Rig<B> {
    stub.extend();
    let context = stub.open();
    let pd = context.protection_domain().unwrap();
    let cq = context.completion_queue(64).unwrap();
    let builder = pd
        .queue_pair(&cq)
        .max_send_wr(8)
        .max_recv_wr(8)
        .max_inline_data(32)
        .max_send_sge(2);
    let qp = B::ud(builder).unwrap();
    Rig { qp, cq, pd }
}

impl<B: TestBackend> Rig<B> {
    fn handle(&self) -> AddressHandle {
        self.pd.address_handle().to(&THERE).unwrap()
    }

    fn buffer(&self, len: usize) -> Buffer {
        self.pd.register(vec![0; len], Local).unwrap()
    }

    fn send(&mut self, ah: &AddressHandle) {
        let buffer = self.buffer(8);
        self.qp
            .post(|batch| {
                batch.send_to(buffer, ah, THERE.qpn, THERE.qkey).signaled();
            })
            .unwrap();
    }

    fn drain(&mut self) -> usize {
        self.cq
            .poll()
            .unwrap()
            .inspect(|completion| assert!(completion.is_ok()))
            .count()
    }
}

fn a_datagram_names_its_destination<B: TestBackend>() {
    let stub = Stub::new();
    let mut rig = rig::<B>(stub);
    let ah = rig.handle();
    let (a, b, c) = (rig.buffer(8), rig.buffer(16), rig.buffer(4));
    let bytes = [1, 2, 3];
    rig.qp
        .post(|batch| {
            batch.send_to(a, &ah, Qpn::truncated(5), QKey(6)).imm(7).solicited();
            batch.send_to_gather([b, c], &ah, Qpn::truncated(8), QKey(9));
            batch
                .send_to_inline(&bytes, &ah, Qpn::truncated(10), QKey(11))
                .signaled();
        })
        .unwrap();
    rig.qp
        .send_to_inline(&bytes, &ah, Qpn::truncated(12), QKey(13))
        .unwrap();
    let sent = stub.pending_sends(rig.qp.qpn().get());
    let to: Vec<_> = sent.iter().map(|request| request.to.unwrap()).collect();
    assert_eq!(
        to.iter().map(|to| (to.1, to.2)).collect::<Vec<_>>(),
        [(5, 6), (8, 9), (10, 11), (12, 13)]
    );
    assert!(to.iter().all(|one| one.0 == to[0].0 && one.0 != 0));
    assert_eq!(
        sent.iter().map(|request| request.opcode).collect::<Vec<_>>(),
        [IBV_WR_SEND_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND, IBV_WR_SEND]
    );
    assert_eq!(
        (sent[0].imm, sent[0].flags & IBV_SEND_SOLICITED),
        (7, IBV_SEND_SOLICITED)
    );
    assert_eq!(sent[1].sges.len(), 2);
    assert_eq!(sent[2].inline, bytes);
    assert_eq!(stub.doorbells(rig.qp.qpn().get()).0, 2);
}

fn the_shorter_mtu_bounds_a_datagram<B: TestBackend>() {
    let stub = Stub::new();
    let mut rig = rig::<B>(stub);
    assert_eq!(rig.qp.max_datagram(), 1024);
    let known = rig.handle();
    let (fits, not) = (rig.buffer(512), rig.buffer(513));
    rig.qp.send_to(fits, &known, THERE.qpn, THERE.qkey).unwrap();
    let refused = rig.qp.send_to(not, &known, THERE.qpn, THERE.qkey).unwrap_err();
    assert!(matches!(
        refused.reason,
        RejectReason::DatagramTooLong { len: 513, max: 512 }
    ));
    let unknown = rig.pd.address_handle().to_gid(THERE.gid).unwrap();
    let (fits, head, tail) = (rig.buffer(1024), rig.buffer(1024), rig.buffer(1));
    rig.qp.send_to(fits, &unknown, THERE.qpn, THERE.qkey).unwrap();
    let refused = rig
        .qp
        .post(|batch| {
            batch.send_to_gather([head, tail], &unknown, THERE.qpn, THERE.qkey);
        })
        .unwrap_err();
    assert!(matches!(
        refused.reason,
        RejectReason::DatagramTooLong { len: 1025, max: 1024 }
    ));
}

#[test]
fn a_handle_is_made_of_what_the_builder_says() {
    let stub = Stub::new();
    let rig = rig::<PostList>(stub);
    let builder = rig
        .pd
        .address_handle()
        .traffic_class(0x60)
        .hop_limit(3)
        .flow_label(0xabcde)
        .service_level(5);
    drop(builder.gid_index(2).to(&THERE).unwrap());
    drop(builder.to_gid(THERE.gid).unwrap());
    let handles = stub.handles();
    let [Origin::Vector(chosen), Origin::Vector(default)] = handles[..] else {
        panic!("two handles, both of a vector");
    };
    assert_eq!((chosen.grh.sgid_index, default.grh.sgid_index), (2, 1));
    assert_eq!((chosen.is_global, chosen.port_num, chosen.sl), (1, 1, 5));
    assert_eq!((chosen.grh.hop_limit, chosen.grh.traffic_class), (3, 0x60));
    assert_eq!((chosen.grh.flow_label, default.grh.flow_label), (0xabcde, 0xabcde));
    // SAFETY: 16 bytes, whichever member was written.
    assert_eq!(unsafe { chosen.grh.dgid.raw }, THERE.gid.0);
    assert_eq!(stub.live("ah"), 0);
    let error = builder.flow_label(1 << 20).to(&THERE).unwrap_err().to_string();
    assert_eq!(error, "flow label 0x100000: the highest is 0xfffff");

    stub.fail(Verb::CreateAh, libc::ETIMEDOUT);
    let error = rig.pd.address_handle().to(&THERE).unwrap_err().to_string();
    let expected = format!(
        "ibv_create_ah({} port 1, ::ffff:10.0.0.2 from ::ffff:10.0.0.1): Connection timed out (os error 110); \
         the address cannot be resolved: check routing to the peer",
        stub.name
    );
    assert_eq!(error, expected);
}

fn a_completion_identifies_the_sender_of_a_datagram<B: TestBackend>() {
    let stub = Stub::new();
    let mut rig = rig::<B>(stub);
    let qpn = rig.qp.qpn().get();
    let mut buffer = rig.buffer(GRH_BYTES + 16);
    for (at, byte) in buffer.iter_mut().enumerate() {
        *byte = at as u8;
    }
    rig.qp.receive(buffer).unwrap();
    stub.complete_datagram(qpn, 16, 0xff00_0042, IBV_WC_GRH);
    let mut completion = rig.cq.poll().unwrap().next().unwrap();
    let datagram = completion.datagram().unwrap();
    let buffer = completion.take::<Local>().unwrap();
    assert_eq!((datagram.len(), datagram.payload()), (16, 40..56));
    assert_eq!((datagram.source().get(), datagram.imm()), (0x42, None));
    assert_eq!((datagram.has_grh(), datagram.pkey_index()), (true, 1));
    assert_eq!((datagram.source_lid(), datagram.service_level()), (Lid(0x21), 3));
    assert_eq!(buffer[datagram.payload()][0], 40);

    drop(rig.pd.address_handle().reply_to(&datagram, &buffer).unwrap());
    let Some(Origin::Completion(wc, header)) = stub.handles().pop() else {
        panic!("a handle made of a completion");
    };
    assert_eq!(
        (wc.wc_flags, wc.slid, wc.sl, wc.dlid_path_bits),
        (IBV_WC_GRH, 0x21, 3, 2)
    );
    assert_eq!((wc.src_qp, wc.byte_len), (0x42, 56));
    assert_eq!(header, core::array::from_fn(|at| at as u8));

    stub.fail(Verb::CreateAh, libc::EINVAL);
    let refused = rig.pd.address_handle().reply_to(&datagram, &buffer);
    assert!(matches!(
        refused,
        Err(AddressHandleError::Create {
            verb: "ibv_create_ah_from_wc",
            ..
        })
    ));
}

fn only_a_receive_that_succeeded_is_a_datagram<B: TestBackend>() {
    let stub = Stub::new();
    let mut rig = rig::<B>(stub);
    let (ah, qpn) = (rig.handle(), rig.qp.qpn().get());
    rig.send(&ah);
    stub.complete_sends(qpn, 1);
    assert!(rig.cq.poll().unwrap().next().unwrap().datagram().is_none());
    // A length that no device reports.
    rig.qp
        .receive(rig.buffer(64))
        .unwrap_or_else(|refused| panic!("{refused}"));
    stub.complete_receive(qpn, IBV_WC_RECV, 7, Some(9));
    let datagram = rig.cq.poll().unwrap().next().unwrap().datagram().unwrap();
    assert_eq!((datagram.len(), datagram.imm()), (0, Some(9)));
    let buffer = rig.buffer(64);
    rig.qp.receive(buffer).unwrap();
    rig.qp.flush().unwrap();
    let completion = rig.cq.poll().unwrap().next().unwrap();
    assert!(!completion.is_ok() && completion.datagram().is_none());
}

fn a_handle_dropped_with_sends_in_flight_stays_until_they_are_polled<B: TestBackend>() {
    let stub = Stub::new();
    let mut rig = rig::<B>(stub);
    let qpn = rig.qp.qpn().get();
    let ah = rig.handle();
    rig.send(&ah);
    rig.send(&ah.clone());
    drop(ah);
    assert_eq!(stub.live("ah"), 1);
    // Another one, and a send that was posted after the first was dropped.
    let other = rig.handle();
    rig.send(&other);
    stub.complete_sends(qpn, 2);
    let third = rig.handle();
    assert_eq!(stub.live("ah"), 3, "completed, but not polled");
    assert_eq!(rig.drain(), 2);
    let fourth = rig.handle();
    assert_eq!(
        stub.live("ah"),
        3,
        "one more, and the first is gone, whatever is in flight of later sends"
    );
    stub.complete_sends(qpn, 1);
    assert_eq!(rig.drain(), 1);
    drop((other, third, fourth));
    assert_eq!(stub.live("ah"), 0);
}

fn a_queue_pair_that_goes_needs_no_handle<B: TestBackend>() {
    let stub = Stub::new();
    let mut rig = rig::<B>(stub);
    let idle = rig.pd.queue_pair(&rig.cq).max_send_wr(8).max_recv_wr(8).ud().unwrap();
    let ah = rig.handle();
    rig.send(&ah);
    drop(ah);
    drop(idle);
    assert_eq!(stub.live("ah"), 1);
    let Rig { qp, cq, pd } = rig;
    drop(qp);
    assert_eq!(stub.live("ah"), 0);
    drop((cq, pd));
    assert_eq!(stub.live("context"), 0);
}

fn a_connection_needs_no_handle<B: TestBackend>() {
    let stub = Stub::new();
    let mut rig = rig::<B>(stub);
    let mut rc = rig
        .pd
        .queue_pair(&rig.cq)
        .max_send_wr(4)
        .max_recv_wr(4)
        .rc()
        .unwrap()
        .connect(&crate::rig::PEER)
        .unwrap();
    rc.send(rig.buffer(8)).unwrap();
    drop(rig.handle());
    assert_eq!(stub.live("ah"), 0);
    assert_eq!(rig.drain(), 0);
}

#[test]
fn a_handle_outlives_what_it_was_made_with() {
    let stub = Stub::new();
    let rig = rig::<PostList>(stub);
    let ah = rig.handle();
    drop(rig);
    assert_eq!((stub.live("qp"), stub.live("pd"), stub.live("ah")), (0, 1, 1));
    drop(ah);
    assert_eq!((stub.live("pd"), stub.live("ah"), stub.live("context")), (0, 0, 0));
}

fn a_queue_pair_that_cannot_be_destroyed_keeps_its_handles<B: TestBackend>() {
    let stub = Stub::new();
    let mut rig = rig::<B>(stub);
    let ah = rig.handle();
    rig.send(&ah);
    drop(ah);
    stub.fail(Verb::DestroyQp, libc::EBUSY);
    drop(rig);
    assert_eq!((stub.live("qp"), stub.live("ah"), stub.live("pd")), (1, 1, 1));
}

fn a_refused_send_needs_no_handle<B: TestBackend>() {
    let stub = Stub::new();
    let mut rig = rig::<B>(stub);
    let ah = rig.handle();
    stub.refuse_send(rig.qp.qpn().get(), 0, libc::ENOMEM);
    let buffer = rig.buffer(8);
    rig.qp.send_to(buffer, &ah, THERE.qpn, THERE.qkey).unwrap_err();
    drop(ah);
    assert_eq!(stub.live("ah"), 0);
}

fn handles_come_and_go_while_datagrams_stream<B: TestBackend>() {
    let stub = Stub::new();
    stub.complete_at_once();
    let mut rig = rig::<B>(stub);
    for round in 0..200 {
        let ah = rig.handle();
        for _ in 0..=round % 5 {
            rig.send(&ah);
        }
        drop(ah);
        if round % 3 == 0 || rig.qp.free_send_slots() < 5 {
            rig.drain();
        }
        assert!(
            stub.live("ah") <= 9,
            "each queue entry holds one at most, and there is the newest"
        );
    }
    rig.drain();
    drop(rig.handle());
    assert_eq!(stub.live("ah"), 0);
}
