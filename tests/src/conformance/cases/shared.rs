//! Shared receive queues.

use anyhow::{Context, Result, ensure};
use doorbell_verbs_sys::*;

use crate::conformance::rig::states::transport_name;
use crate::conformance::rig::{Ah, Bench, Cq, End, Errno, Mr, Pd, Posted, QKEY, Qp, Recv, Send, Setup, Srq};
use crate::conformance::{Case, case};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = vec![
        case(
            "srq/capacity",
            "11.2.3.5",
            "an SRQ has at least the requested capacities, and a query reports them",
            capacity,
        ),
        case(
            "srq/too-deep",
            "11.2.3.5",
            "more receives than the device's maximum are refused",
            too_deep,
        ),
        case(
            "srq/busy",
            "11.2.3.8",
            "an SRQ in use cannot be destroyed, nor its protection domain deallocated",
            busy,
        ),
        case(
            "srq/full",
            "ibv_post_srq_recv(3)",
            "a receive beyond the depth is refused, and returned as bad_wr",
            full,
        ),
        case(
            "srq/too-many-elements",
            "ibv_post_srq_recv(3)",
            "a receive of too many SGEs is refused, and those before it are posted",
            too_many_elements,
        ),
        case(
            "srq/no-receives-of-its-own",
            "10.2.9.2",
            "a queue pair with an SRQ accepts no receives of its own",
            no_own_receives,
        ),
        case(
            "srq/not-ready",
            "9.7.5.2.8",
            "a peer waits while the SRQ is empty",
            not_ready,
        ),
        case(
            "srq/limit",
            "10.2.9.5",
            "falling below the limit raises one event, and disarms it",
            limit,
        ),
        case(
            "srq/limit-too-high",
            "11.2.3.7",
            "a limit above the queue's capacity is refused",
            limit_too_high,
        ),
        case(
            "srq/last-receive",
            "11.6.3.1",
            "a queue pair in ERR raises an event when it has consumed its last receive",
            last_receive,
        ),
        case(
            "srq/error-of-one",
            "10.2.9.4",
            "an error of one queue pair leaves the receives to the others",
            error_of_one,
        ),
        case(
            "srq/destroyed-with-receives",
            "11.2.3.8",
            "an SRQ with posted receives can be destroyed",
            destroyed_with_receives,
        ),
        case(
            "srq/around",
            "10.2.9",
            "the slots of used receives are reusable, over several wraps",
            around,
        ),
    ];
    for transport in [IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD] {
        let name = format!("srq/shared-by-{}", transport_name(transport));
        cases.push(case(
            &name,
            "10.2.9",
            "several queue pairs consume its receives in order, and complete them on their own CQs",
            move |bench| shared(bench, transport),
        ));
    }
    cases
}

/// Queue pairs on one shared receive queue, and a sender for each.
struct Scene {
    senders: Vec<End>,
    receivers: Vec<Qp>,
    received: Cq,
    srq: Srq,
    mr: Mr,
    pd: Pd,
    handles: Vec<Ah>,
}

fn scene(bench: &Bench, transport: ibv_qp_type, count: u32) -> Result<Scene> {
    let device = bench.open()?;
    let (pd, received) = (device.pd()?, device.cq(64)?);
    let srq = pd.srq(16, 2)?;
    let mr = pd.register(4096, IBV_ACCESS_LOCAL_WRITE)?;
    let setup = Setup::of(transport);
    let (mut senders, mut receivers, mut handles) = (Vec::new(), Vec::new(), Vec::new());
    for index in 0..count {
        let sender = End::new(&device, &setup, bench.psn(2 * index))?;
        let receiver = pd.qp_on(Some(&srq), &received, &received, &setup, bench.psn(2 * index + 1))?;
        sender.qp.set_peer(receiver.as_peer());
        receiver.set_peer(sender.qp.as_peer());
        sender.qp.bring_to(IBV_QPS_RTS)?;
        receiver.bring_to(IBV_QPS_RTS)?;
        handles.push(sender.pd.ah(device.address_of(device.gid()))?);
        senders.push(sender);
        receivers.push(receiver);
    }
    Ok(Scene {
        senders,
        receivers,
        received,
        srq,
        mr,
        pd,
        handles,
    })
}

impl Scene {
    fn receive(&self, ids: std::ops::Range<u64>) -> Result<()> {
        let list: Vec<Recv> = ids
            .map(|id| Recv::new(id).sge(self.mr.sge(id as usize % 32 * 128, 128)))
            .collect();
        let posted = self.srq.receive(&list);
        ensure!(posted == Posted::All, "ibv_post_srq_recv: {posted:?}");
        Ok(())
    }

    fn message(&self, sender: usize, bytes: &[u8]) -> Result<()> {
        let end = &self.senders[sender];
        let mut send = Send::new(IBV_WR_SEND).id(1).inline(bytes);
        if end.qp.setup.transport == IBV_QPT_UD {
            send = send.to(&self.handles[sender], self.receivers[sender].qpn(), QKEY);
        }
        end.post(send)?;
        end.sent.done(1)?;
        Ok(())
    }

    fn arrived(&self, id: u64, receiver: usize, bytes: &[u8]) -> Result<()> {
        let wc = self.received.done(id)?;
        ensure!(
            wc.qp_num == self.receivers[receiver].qpn(),
            "of queue pair {:#x}",
            wc.qp_num
        );
        let at = id as usize % 32 * 128 + wc.byte_len as usize - bytes.len();
        ensure!(
            self.mr.memory.bytes(at..at + bytes.len()) == bytes,
            "other bytes arrived"
        );
        Ok(())
    }
}

fn capacity(bench: &Bench) -> Result<()> {
    let pd = bench.open()?.pd()?;
    for (wr, sge) in [(1, 1), (17, 3), (200, 2)] {
        let attr = pd.srq(wr, sge)?.query()?;
        ensure!(
            attr.max_wr >= wr && attr.max_sge >= sge,
            "{attr:?} of {wr} receives of {sge} elements"
        );
        ensure!(attr.srq_limit == 0, "the limit is {}", attr.srq_limit);
    }
    Ok(())
}

fn too_deep(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let pd = device.pd()?;
    pd.srq(1, 1)?;
    let attr = device.query()?;
    ensure!(
        pd.srq(attr.max_srq_wr as u32 + 1, 1).is_err(),
        "{} and one more receives",
        attr.max_srq_wr
    );
    ensure!(
        pd.srq(1, attr.max_srq_sge as u32 + 1).is_err(),
        "{} and one more elements",
        attr.max_srq_sge
    );
    Ok(())
}

fn busy(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let (pd, cq) = (device.pd()?, device.cq(8)?);
    let srq = pd.srq(4, 1)?;
    let result = pd.dealloc();
    ensure!(result == Errno(libc::EBUSY), "the protection domain: {result}");
    let qp = pd.qp_on(Some(&srq), &cq, &cq, &Setup::default(), 0)?;
    let result = srq.destroy();
    ensure!(result == Errno(libc::EBUSY), "the shared queue: {result}");
    ensure!(qp.destroy() == Errno(0), "destroying the queue pair");
    ensure!(srq.destroy() == Errno(0), "destroying the shared queue");
    Ok(())
}

fn full(bench: &Bench) -> Result<()> {
    let srq = bench.open()?.pd()?.srq(8, 1)?;
    let depth = srq.query()?.max_wr as usize;
    let posted = srq.receive(&vec![Recv::new(1); depth]);
    ensure!(posted == Posted::All, "as many as were granted: {posted:?}");
    for _ in 0..depth {
        if let Posted::Refused { at, errno } = srq.receive(&[Recv::new(2), Recv::new(3)]) {
            ensure!(
                matches!(at, Some(0 | 1)) && errno == Errno(libc::ENOMEM),
                "{errno} at {at:?}"
            );
            return Ok(());
        }
    }
    anyhow::bail!("three times what was granted was taken")
}

fn too_many_elements(bench: &Bench) -> Result<()> {
    let scene = scene(bench, IBV_QPT_RC, 1)?;
    let most = scene.srq.query()?.max_sge;
    let bad = (0..=most).fold(Recv::new(1), |receive, _| receive.sge(scene.mr.sge(0, 1)));
    let posted = scene
        .srq
        .receive(&[Recv::new(0).sge(scene.mr.sge(0, 128)), bad, Recv::new(2)]);
    ensure!(posted.is_refused_at(1), "{posted:?}");
    scene.message(0, b"first")?;
    scene.arrived(0, 0, b"first")
}

fn no_own_receives(bench: &Bench) -> Result<()> {
    let scene = scene(bench, IBV_QPT_RC, 1)?;
    let result = scene.receivers[0].receive_one(Recv::new(1));
    ensure!(result != Errno(0), "it accepted one");
    Ok(())
}

fn not_ready(bench: &Bench) -> Result<()> {
    let scene = scene(bench, IBV_QPT_RC, 1)?;
    scene.senders[0].post(Send::new(IBV_WR_SEND).id(1).inline(b"patience"))?;
    scene.senders[0].sent.expect_nothing(bench.quiet)?;
    scene.receive(0..1)?;
    scene.senders[0].sent.done(1)?;
    scene.arrived(0, 0, b"patience")
}

fn limit(bench: &Bench) -> Result<()> {
    let scene = scene(bench, IBV_QPT_RC, 1)?;
    scene.receive(0..6)?;
    let result = scene.srq.modify(0, 4, IBV_SRQ_LIMIT)?;
    ensure!(result == Errno(0), "arming: {result}");
    ensure!(
        scene.srq.query()?.srq_limit == 4,
        "the limit is {}",
        scene.srq.query()?.srq_limit
    );
    let device = scene.pd.device();
    for id in 0..2 {
        scene.message(0, b"m")?;
        scene.arrived(id, 0, b"m")?;
    }
    ensure!(device.event(bench.quiet).is_none(), "an event with 4 receives left");
    scene.message(0, b"m")?;
    scene.arrived(2, 0, b"m")?;
    {
        let event = device.next_event().context("3 receives are left")?;
        ensure!(
            event.kind() == IBV_EVENT_SRQ_LIMIT_REACHED && event.is_of_srq(&scene.srq),
            "another event: {event:?}"
        );
    }
    ensure!(scene.srq.query()?.srq_limit == 0, "it is still armed");
    scene.message(0, b"m")?;
    scene.arrived(3, 0, b"m")?;
    ensure!(device.event(bench.quiet).is_none(), "a second event");
    Ok(())
}

fn limit_too_high(bench: &Bench) -> Result<()> {
    let srq = bench.open()?.pd()?.srq(8, 1)?;
    let most = srq.query()?.max_wr;
    let result = srq.modify(0, most + 1, IBV_SRQ_LIMIT)?;
    ensure!(result != Errno(0), "a limit of {} in a queue of {most}", most + 1);
    ensure!(srq.query()?.srq_limit == 0, "it was set");
    Ok(())
}

fn last_receive(bench: &Bench) -> Result<()> {
    let scene = scene(bench, IBV_QPT_RC, 1)?;
    scene.receive(0..4)?;
    let qp = &scene.receivers[0];
    ensure!(qp.step(IBV_QPS_RTS, IBV_QPS_ERR) == Errno(0), "RTS → ERR");
    let event = scene.pd.device().next_event()?;
    ensure!(
        event.kind() == IBV_EVENT_QP_LAST_WQE_REACHED && event.is_of_qp(qp),
        "another event: {event:?}"
    );
    Ok(())
}

fn error_of_one(bench: &Bench) -> Result<()> {
    let scene = scene(bench, IBV_QPT_RC, 2)?;
    scene.receive(0..4)?;
    ensure!(
        scene.receivers[0].step(IBV_QPS_RTS, IBV_QPS_ERR) == Errno(0),
        "RTS → ERR"
    );
    scene.received.expect_nothing(bench.quiet)?;
    for id in 0..4 {
        scene.message(1, b"m")?;
        scene.arrived(id, 1, b"m")?;
    }
    Ok(())
}

fn destroyed_with_receives(bench: &Bench) -> Result<()> {
    let scene = scene(bench, IBV_QPT_RC, 1)?;
    scene.receive(0..8)?;
    ensure!(scene.receivers[0].destroy() == Errno(0), "destroying the queue pair");
    ensure!(scene.srq.destroy() == Errno(0), "destroying the shared queue");
    scene.received.expect_nothing(bench.quiet)
}

fn around(bench: &Bench) -> Result<()> {
    let scene = scene(bench, IBV_QPT_RC, 1)?;
    for round in 0..20_u64 {
        scene.receive(round * 4..round * 4 + 4)?;
        for id in round * 4..round * 4 + 4 {
            scene.message(0, &id.to_be_bytes())?;
            scene.arrived(id, 0, &id.to_be_bytes())?;
        }
    }
    Ok(())
}

fn shared(bench: &Bench, transport: ibv_qp_type) -> Result<()> {
    let scene = scene(bench, transport, 3)?;
    scene.receive(0..12)?;
    for id in 0..12_u64 {
        let sender = (id as usize * 7 + 1) % 3;
        scene.message(sender, &id.to_be_bytes())?;
        scene.arrived(id, sender, &id.to_be_bytes())?;
    }
    scene.received.empty()
}
