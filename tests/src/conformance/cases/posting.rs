//! Posting: refused requests, and the effect of a refused list.

use anyhow::{Context, Result, ensure};
use doorbell_verbs_sys::*;

use crate::conformance::rig::states::{TRANSPORTS, transport_name};
use crate::conformance::rig::{Bench, End, Errno, Posted, QKEY, Recv, Send, Setup};
use crate::conformance::{Case, case};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case(
            "post/send-queue-full",
            "ibv_post_send(3)",
            "a request beyond the depth is refused, and returned as bad_wr",
            send_queue_full,
        ),
        case(
            "post/receive-queue-full",
            "ibv_post_recv(3)",
            "a receive beyond the depth is refused, and returned as bad_wr",
            receive_queue_full,
        ),
        case(
            "post/slots-come-back",
            "10.8.5.1",
            "the slots of completed requests are reusable, over several wraps",
            slots_come_back,
        ),
        case(
            "post/list-in-order",
            "10.8.3",
            "a list is executed in order",
            list_in_order,
        ),
        case(
            "post/partial-list",
            "ibv_post_send(3)",
            "requests before bad_wr are posted, and none after it",
            partial_list,
        ),
        case(
            "post/partial-receives",
            "ibv_post_recv(3)",
            "receives before bad_wr are posted, and none after it",
            partial_receives,
        ),
        case(
            "post/too-many-elements",
            "11.4.1.1",
            "a send of more SGEs than max_send_sge is refused",
            too_many_elements,
        ),
        case(
            "post/too-many-receive-elements",
            "11.4.1.2",
            "a receive of more SGEs than max_recv_sge is refused",
            too_many_receive_elements,
        ),
        case(
            "post/inline-too-long",
            "ibv_post_send(3)",
            "inline data beyond the capacity are refused",
            inline_too_long,
        ),
        case(
            "post/inline-up-to-capacity",
            "ibv_post_send(3)",
            "inline data of every length up to the capacity arrive",
            inline_lengths,
        ),
        case(
            "post/inline-buffer-is-free",
            "ibv_post_send(3)",
            "inline data may be overwritten as soon as posting has returned",
            inline_is_copied,
        ),
        case(
            "post/inline-of-a-read",
            "ibv_post_send(3)",
            "a READ cannot be inline",
            inline_read,
        ),
        case(
            "post/unknown-opcode",
            "11.4.1.1",
            "an unknown opcode is refused",
            unknown_opcode,
        ),
        case(
            "post/rdma-on-ud",
            "table 34",
            "UD has SEND alone: WRITE, READ and atomics are refused",
            rdma_on_ud,
        ),
        case(
            "post/read-on-uc",
            "table 34",
            "UC has neither READ nor atomics",
            read_on_uc,
        ),
        case(
            "post/reset-refuses-receives",
            "10.3.1.1",
            "no receive can be posted in RESET",
            reset_refuses_receives,
        ),
        case(
            "post/init-refuses-sends",
            "10.3.1.2",
            "no send can be posted before RTS",
            early_sends,
        ),
        case(
            "post/empty-list",
            "ibv_post_send(3)",
            "a receive and a send without SGEs are valid",
            no_elements,
        ),
    ]
}

fn nothing(id: u64) -> Send {
    Send::new(IBV_WR_SEND).id(id)
}

fn send_queue_full(bench: &Bench) -> Result<()> {
    let setup = Setup {
        // The peer never posts a receive: posted sends stay.
        min_rnr_timer: 20,
        ..Setup::default()
    };
    let pair = bench.pair(&setup)?;
    let depth = pair.a.qp.setup.depth as usize;
    let posted = pair.a.qp.post(&vec![nothing(1); depth]);
    ensure!(posted == Posted::All, "as many as were granted: {posted:?}");
    refused_for_want_of_room(depth, || pair.a.qp.post(&[nothing(2), nothing(3)]))
}

/// A device may round its depth up, as to a power of two. `post` posts two.
fn refused_for_want_of_room(granted: usize, post: impl Fn() -> Posted) -> Result<()> {
    for _ in 0..granted {
        match post() {
            Posted::All => {}
            Posted::Refused {
                at: Some(0 | 1),
                errno: Errno(libc::ENOMEM),
            } => return Ok(()),
            other => anyhow::bail!("beyond what was granted: {other:?}"),
        }
    }
    anyhow::bail!("three times what was granted was taken")
}

fn receive_queue_full(bench: &Bench) -> Result<()> {
    for transport in TRANSPORTS {
        let pair = bench.pair(&Setup::of(transport))?;
        let depth = pair.b.qp.query()?.0.cap.max_recv_wr as usize;
        let posted = pair.b.qp.receive(&vec![Recv::new(1); depth]);
        ensure!(posted == Posted::All, "as many as were granted: {posted:?}");
        refused_for_want_of_room(depth, || pair.b.qp.receive(&[Recv::new(2), Recv::new(3)]))
            .with_context(|| transport_name(transport))?;
    }
    Ok(())
}

fn slots_come_back(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup {
        depth: 4,
        ..Setup::default()
    })?;
    for round in 0..40 {
        for index in 0..4 {
            pair.b.expect(round * 4 + index, 0, 8)?;
        }
        let sends: Vec<Send> = (0..4).map(|index| nothing(round * 4 + index)).collect();
        let posted = pair.a.qp.post(&sends);
        ensure!(posted == Posted::All, "round {round}: {posted:?}");
        for index in 0..4 {
            pair.a.sent.done(round * 4 + index)?;
            pair.b.received.done(round * 4 + index)?;
        }
    }
    Ok(())
}

fn list_in_order(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let mut sends = Vec::new();
    for index in 0..8_u8 {
        pair.b.expect(u64::from(index), usize::from(index) * 8, 8)?;
        pair.a.fill(usize::from(index), &[index + 1]);
        sends.push(nothing(u64::from(index)).sge(pair.a.mr.sge(index.into(), 1)));
    }
    ensure!(pair.a.qp.post(&sends) == Posted::All, "refused");
    for index in 0..8_u8 {
        pair.a.sent.done(index.into())?;
        pair.b.received.done(index.into())?;
        ensure!(
            pair.b.bytes(usize::from(index) * 8, 1) == [index + 1],
            "receive {index} got another message"
        );
    }
    Ok(())
}

fn partial_list(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    for id in 0..4 {
        pair.b.expect(id, 0, 8)?;
    }
    let most = pair.a.qp.query()?.0.cap.max_inline_data as usize;
    let bad = nothing(12).inline(&vec![1; most + 1]);
    let posted = pair.a.qp.post(&[nothing(10), nothing(11), bad, nothing(13)]);
    ensure!(posted.is_refused_at(2), "{posted:?}");
    pair.a.sent.done(10)?;
    pair.a.sent.done(11)?;
    pair.a.sent.expect_nothing(bench.quiet)?;
    pair.a.post(nothing(14))?;
    pair.a.sent.done(14)?;
    Ok(())
}

fn partial_receives(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let mut bad = Recv::new(3);
    let most = pair.b.qp.query()?.0.cap.max_recv_sge as usize;
    for _ in 0..=most {
        bad = bad.sge(pair.b.mr.sge(0, 1));
    }
    let posted = pair.b.qp.receive(&[Recv::new(1), Recv::new(2), bad, Recv::new(4)]);
    ensure!(posted.is_refused_at(2), "{posted:?}");
    pair.b.expect(5, 0, 8)?;
    for (id, taken) in [(10, 1), (11, 2), (12, 5)] {
        pair.a.post(nothing(id))?;
        pair.a.sent.done(id)?;
        pair.b.received.done(taken)?;
    }
    Ok(())
}

fn too_many_elements(bench: &Bench) -> Result<()> {
    for transport in [IBV_QPT_RC, IBV_QPT_UC] {
        let pair = bench.pair(&Setup::of(transport))?;
        let most = pair.a.qp.query()?.0.cap.max_send_sge as usize;
        let mut send = nothing(1);
        for _ in 0..=most {
            send = send.sge(pair.a.mr.sge(0, 1));
        }
        let posted = pair.a.qp.post(&[send]);
        ensure!(posted.is_refused_at(0), "{}: {posted:?}", transport_name(transport));
    }
    Ok(())
}

fn too_many_receive_elements(bench: &Bench) -> Result<()> {
    for transport in TRANSPORTS {
        let pair = bench.pair(&Setup::of(transport))?;
        let most = pair.b.qp.query()?.0.cap.max_recv_sge as usize;
        let mut receive = Recv::new(1);
        for _ in 0..=most {
            receive = receive.sge(pair.b.mr.sge(0, 1));
        }
        let posted = pair.b.qp.receive(&[receive]);
        ensure!(posted.is_refused_at(0), "{}: {posted:?}", transport_name(transport));
    }
    Ok(())
}

fn inline_too_long(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let most = pair.a.qp.query()?.0.cap.max_inline_data as usize;
    let posted = pair.a.qp.post(&[nothing(1).inline(&vec![1; most + 1])]);
    ensure!(posted.is_refused_at(0), "one element of {} bytes: {posted:?}", most + 1);
    let posted = pair.a.qp.post(&[nothing(1).inline(&vec![1; most]).inline(&[1])]);
    ensure!(
        posted.is_refused_at(0),
        "two elements of {} bytes: {posted:?}",
        most + 1
    );
    Ok(())
}

fn inline_lengths(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let most = pair.a.qp.query()?.0.cap.max_inline_data as usize;
    for len in [0, 1, 3, 4, 5, 31, 64, most - 1, most] {
        let bytes = bench.pattern(len, len as u32);
        pair.b.expect(1, 0, 4096)?;
        pair.a.post(nothing(2).inline(&bytes))?;
        pair.a.sent.done(2)?;
        let wc = pair.b.received.done(1)?;
        ensure!(wc.byte_len as usize == len, "{} bytes arrived of {len}", wc.byte_len);
        ensure!(pair.b.bytes(0, len) == bytes, "other bytes arrived than the {len} sent");
    }
    Ok(())
}

fn inline_is_copied(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup {
        min_rnr_timer: 14,
        ..Setup::default()
    })?;
    // Without a receive, the message is gathered again long after the rig freed its vector.
    pair.a.post(nothing(1).inline(b"written once"))?;
    pair.b.expect(2, 0, 64)?;
    pair.a.sent.done(1)?;
    pair.b.received.done(2)?;
    ensure!(pair.b.bytes(0, 12) == b"written once", "other bytes arrived");
    Ok(())
}

fn inline_read(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let read = Send::new(IBV_WR_RDMA_READ)
        .id(1)
        .at(pair.b.mr.at(0), pair.b.mr.rkey())
        .inline(&[0; 4]);
    let posted = pair.a.qp.post(&[read]);
    ensure!(posted.is_refused_at(0), "{posted:?}");
    Ok(())
}

fn unknown_opcode(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    for opcode in [99, u32::MAX] {
        let posted = pair.a.qp.post(&[Send::new(opcode)]);
        ensure!(posted.is_refused_at(0), "opcode {opcode}: {posted:?}");
    }
    Ok(())
}

const ATOMICS_AND_READ: [ibv_wr_opcode; 3] = [IBV_WR_RDMA_READ, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD];

fn rdma_on_ud(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::of(IBV_QPT_UD))?;
    let ah = pair.a.pd.ah(pair.a.device().address_of(pair.a.device().gid()))?;
    for opcode in [IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM]
        .into_iter()
        .chain(ATOMICS_AND_READ)
    {
        let send = Send::new(opcode)
            .to(&ah, pair.b.qp.qpn(), QKEY)
            .sge(pair.a.mr.sge(0, 8));
        let posted = pair.a.qp.post(&[send]);
        ensure!(posted.is_refused_at(0), "opcode {opcode}: {posted:?}");
    }
    Ok(())
}

fn read_on_uc(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::of(IBV_QPT_UC))?;
    for opcode in ATOMICS_AND_READ {
        let send = Send::new(opcode)
            .at(pair.b.mr.at(0), pair.b.mr.rkey())
            .sge(pair.a.mr.sge(0, 8));
        let posted = pair.a.qp.post(&[send]);
        ensure!(posted.is_refused_at(0), "opcode {opcode}: {posted:?}");
    }
    Ok(())
}

fn reset_refuses_receives(bench: &Bench) -> Result<()> {
    for transport in TRANSPORTS {
        let end = End::new(&bench.open()?, &Setup::of(transport), 0)?;
        let result = end.qp.receive_one(Recv::new(1));
        ensure!(result != Errno(0), "{} took one", transport_name(transport));
    }
    Ok(())
}

fn early_sends(bench: &Bench) -> Result<()> {
    for transport in TRANSPORTS {
        let device = bench.open()?;
        let ah = device.pd()?.ah(device.address_of(device.gid()))?;
        for state in [IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR] {
            let end = End::new(&device, &Setup::of(transport), 0)?;
            end.qp.bring_to(state)?;
            let mut send = nothing(1);
            if transport == IBV_QPT_UD {
                send = send.to(&ah, end.qp.qpn(), QKEY);
            }
            let result = end.qp.post_one(send);
            ensure!(
                result != Errno(0),
                "{} took one in state {state}",
                transport_name(transport)
            );
        }
    }
    Ok(())
}

fn no_elements(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    ensure!(
        pair.b.qp.receive_one(Recv::new(1)) == Errno(0),
        "the receive was refused"
    );
    pair.a.post(nothing(2))?;
    pair.a.sent.done(2)?;
    ensure!(pair.b.received.done(1)?.byte_len == 0, "it had a length");
    Ok(())
}
