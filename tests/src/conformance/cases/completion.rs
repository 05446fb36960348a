//! Completions, their order and contents; and resized or overrun completion queues.

use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use doorbell_verbs_sys::*;

use crate::conformance::rig::{Bench, End, Errno, Pair, Posted, Recv, Send, Setup};
use crate::conformance::{Case, case};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case(
            "completion/unsignalled",
            "10.8.6",
            "a successful unsignaled request has no completion",
            unsignaled,
        ),
        case(
            "completion/signal-all",
            "10.8.6",
            "a queue pair that signals all completes every request",
            signal_all,
        ),
        case(
            "completion/unsignalled-error",
            "10.8.6",
            "a failed unsignaled request has a completion",
            unsignalled_error,
        ),
        case(
            "completion/order-of-operations",
            "10.8.3",
            "requests of every operation complete in the order posted",
            order_of_operations,
        ),
        case(
            "completion/receives-in-order",
            "10.8.3",
            "receives complete in the order posted",
            receives_in_order,
        ),
        case(
            "completion/poll-nothing",
            "ibv_poll_cq(3)",
            "polling an empty queue, or for no entries, returns none",
            poll_nothing,
        ),
        case(
            "completion/poll-in-parts",
            "ibv_poll_cq(3)",
            "a poll returns no more than requested and loses nothing",
            poll_in_parts,
        ),
        case(
            "completion/shared-queue",
            "10.2.6",
            "one queue serves both queues of several queue pairs",
            shared_queue,
        ),
        case(
            "completion/flush-in-order",
            "10.3.1.7",
            "in ERR queued requests complete flushed, in order, unsignaled ones too",
            flush_in_order,
        ),
        case(
            "completion/flush-behind-an-error",
            "10.8.7",
            "requests behind a failed one are flushed, none is executed",
            flush_behind,
        ),
        case(
            "completion/sends-posted-in-err",
            "10.3.1.7",
            "sends posted in ERR complete flushed",
            sends_in_err,
        ),
        case(
            "completion/receives-posted-in-err",
            "10.3.1.7",
            "receives posted in ERR complete flushed",
            receives_in_err,
        ),
        case(
            "completion/other-queue-pairs-go-on",
            "10.8.7",
            "an error of one queue pair does not affect others on its completion queue",
            others_go_on,
        ),
        case(
            "completion/reset-forgets",
            "10.3.1.1",
            "requests queued on the transition to RESET never complete",
            reset_forgets,
        ),
        case(
            "completion/after-destroy",
            "11.2.4.4",
            "a destroyed queue pair completes nothing more",
            after_destroy,
        ),
        case(
            "fence/read-then-send",
            "10.8.3.3",
            "a fenced SEND carries the data of the READs before it",
            fence,
        ),
        case(
            "cq/resize-keeps-completions",
            "11.2.8.3",
            "resizing keeps the queue's completions, and their order",
            resize_keeps,
        ),
        case(
            "cq/resize-too-small",
            "11.2.8.3",
            "resizing below the number of queued completions is refused and keeps them",
            resize_too_small,
        ),
        case("cq/overrun", "11.6.3.1", "an overrun raises a CQ error event", overrun),
    ]
}

/// Posts `count` receives without elements at b, with wr_id from 0.
fn ready(pair: &Pair, count: u64) -> Result<()> {
    for id in 0..count {
        let result = pair.b.qp.receive_one(Recv::new(id));
        ensure!(result == Errno(0), "receive {id}: {result}");
    }
    Ok(())
}

fn nothing(id: u64) -> Send {
    Send::new(IBV_WR_SEND).id(id)
}

fn unsignaled(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    ready(&pair, 4)?;
    for id in 10..13 {
        pair.a.post(nothing(id).unsignaled())?;
    }
    pair.a.post(nothing(13))?;
    pair.a.sent.done(13)?;
    pair.a.sent.empty()?;
    for id in 0..4 {
        pair.b.received.done(id)?;
    }
    Ok(())
}

fn signal_all(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup {
        signal_all: true,
        ..Setup::default()
    })?;
    ready(&pair, 4)?;
    for id in 10..14 {
        pair.a.post(nothing(id).unsignaled())?;
    }
    for id in 10..14 {
        pair.a.sent.done(id)?;
    }
    Ok(())
}

fn unsignalled_error(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let write = Send::new(IBV_WR_RDMA_WRITE)
        .id(1)
        .unsignaled()
        .sge(pair.a.mr.sge(0, 8))
        .at(16, 0x00ab_cd00);
    pair.a.post(write)?;
    pair.a.sent.wait_for(1, IBV_WC_REM_ACCESS_ERR)?;
    Ok(())
}

fn order_of_operations(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    ready(&pair, 4)?;
    let (at, key) = (pair.b.mr.at(0), pair.b.mr.rkey());
    let long = pair.a.mr.sge(0, 5000);
    let sends = [
        Send::new(IBV_WR_RDMA_READ).id(0).sge(long).at(at, key),
        nothing(1),
        Send::new(IBV_WR_ATOMIC_FETCH_AND_ADD)
            .id(2)
            .sge(pair.a.mr.sge(8000, 8))
            .atomic(at, key, 1, 0),
        Send::new(IBV_WR_RDMA_WRITE).id(3).sge(long).at(at, key),
        Send::new(IBV_WR_RDMA_READ)
            .id(4)
            .sge(pair.a.mr.sge(8000, 1))
            .at(at, key),
        Send::new(IBV_WR_SEND_WITH_IMM).id(5),
        Send::new(IBV_WR_RDMA_WRITE_WITH_IMM).id(6).at(at, key),
        nothing(7),
    ];
    for send in sends {
        pair.a.post(send)?;
    }
    for id in 0..8 {
        pair.a.sent.done(id)?;
    }
    Ok(())
}

fn receives_in_order(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    ready(&pair, 12)?;
    for id in 0..12 {
        let send = match id % 3 {
            0 => nothing(id),
            1 => Send::new(IBV_WR_SEND_WITH_IMM).id(id),
            _ => Send::new(IBV_WR_RDMA_WRITE_WITH_IMM)
                .id(id)
                .at(pair.b.mr.at(0), pair.b.mr.rkey()),
        };
        pair.a.post(send)?;
    }
    for id in 0..12 {
        pair.b.received.done(id)?;
    }
    Ok(())
}

fn poll_nothing(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    pair.a.sent.empty()?;
    ready(&pair, 1)?;
    pair.a.post(nothing(1))?;
    pair.b.received.done(0)?;
    ensure!(pair.a.sent.poll_many(0)?.is_empty(), "more entries than requested");
    pair.a.sent.done(1)?;
    pair.a.sent.empty()
}

fn poll_in_parts(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    ready(&pair, 10)?;
    for id in 0..10 {
        pair.a.post(nothing(id))?;
    }
    for id in 0..10 {
        pair.b.received.done(id)?;
    }
    let mut found = Vec::new();
    let deadline = Instant::now() + bench.time_limit;
    while found.len() < 10 && Instant::now() < deadline {
        found.extend(pair.a.sent.poll_many(3)?.iter().map(|wc| wc.wr_id));
    }
    ensure!(found == (0..10).collect::<Vec<_>>(), "{found:?}");
    pair.a.sent.empty()
}

fn shared_queue(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let (pd, cq) = (device.pd()?, device.cq(64)?);
    let ends = [0, 1, 2, 3].map(|salt| End::with(&pd, cq.clone(), cq.clone(), &Setup::default(), bench.psn(salt)));
    let [a, b, c, d] = ends;
    let ends = [a?, b?, c?, d?];
    for (one, other) in [(0, 1), (2, 3)] {
        ends[one].qp.set_peer(ends[other].qp.as_peer());
        ends[other].qp.set_peer(ends[one].qp.as_peer());
    }
    for end in &ends {
        end.qp.bring_to(IBV_QPS_RTS)?;
        ensure!(end.qp.receive_one(Recv::new(1)) == Errno(0), "a receive was refused");
    }
    for end in &ends {
        end.post(nothing(2))?;
    }
    let mut found = Vec::new();
    for _ in 0..8 {
        let wc = cq.wait()?;
        ensure!(wc.status == IBV_WC_SUCCESS, "a failure");
        found.push((wc.qp_num, wc.wr_id, wc.opcode));
    }
    cq.empty()?;
    found.sort_unstable();
    let mut expected: Vec<_> = ends
        .iter()
        .flat_map(|end| [(end.qp.qpn(), 1, IBV_WC_RECV), (end.qp.qpn(), 2, IBV_WC_SEND)])
        .collect();
    expected.sort_unstable();
    ensure!(found == expected, "{found:?} instead of {expected:?}");
    Ok(())
}

/// Sends that wait for a receive which is never posted, and receives without a message.
fn stuck(bench: &Bench) -> Result<Pair> {
    let pair = bench.pair(&Setup {
        min_rnr_timer: 20,
        ..Setup::default()
    })?;
    for id in 0..6 {
        let send = nothing(id);
        pair.a.post(if id % 2 == 0 { send } else { send.unsignaled() })?;
        pair.a.expect(100 + id, 0, 8)?;
    }
    Ok(pair)
}

fn flush_in_order(bench: &Bench) -> Result<()> {
    let pair = stuck(bench)?;
    ensure!(pair.a.qp.step(IBV_QPS_RTS, IBV_QPS_ERR) == Errno(0), "RTS → ERR");
    for id in 0..6 {
        let wc = pair.a.sent.wait_for(id, IBV_WC_WR_FLUSH_ERR)?;
        ensure!(wc.qp_num == pair.a.qp.qpn(), "of another queue pair");
        pair.a.received.wait_for(100 + id, IBV_WC_WR_FLUSH_ERR)?;
    }
    pair.a.sent.empty()?;
    pair.a.received.empty()
}

fn flush_behind(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let (at, key) = (pair.b.mr.at(0), pair.b.mr.rkey());
    pair.a.fill(0, &[7; 8]);
    let write = |id: u64, addr: u64, key| {
        Send::new(IBV_WR_RDMA_WRITE)
            .id(id)
            .sge(pair.a.mr.sge(0, 8))
            .at(addr, key)
    };
    let posted = pair.a.qp.post(&[
        write(0, at, key),
        write(1, at, key ^ 0x0055_0000),
        write(2, at + 64, key).unsignaled(),
        write(3, at + 64, key),
    ]);
    ensure!(posted == Posted::All, "{posted:?}");
    pair.a.sent.done(0)?;
    pair.a.sent.wait_for(1, IBV_WC_REM_ACCESS_ERR)?;
    pair.a.sent.wait_for(2, IBV_WC_WR_FLUSH_ERR)?;
    pair.a.sent.wait_for(3, IBV_WC_WR_FLUSH_ERR)?;
    ensure!(pair.b.bytes(0, 8) == [7; 8], "the first was not executed");
    ensure!(pair.b.bytes(64, 8) == [0; 8], "one behind the failed one was executed");
    Ok(())
}

fn sends_in_err(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    ensure!(pair.a.qp.step(IBV_QPS_RTS, IBV_QPS_ERR) == Errno(0), "RTS → ERR");
    for id in 0..3 {
        pair.a.post(nothing(id).unsignaled())?;
    }
    for id in 0..3 {
        pair.a.sent.wait_for(id, IBV_WC_WR_FLUSH_ERR)?;
    }
    Ok(())
}

fn receives_in_err(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    ensure!(pair.a.qp.step(IBV_QPS_RTS, IBV_QPS_ERR) == Errno(0), "RTS → ERR");
    for id in 0..3 {
        pair.a.expect(id, 0, 8)?;
    }
    for id in 0..3 {
        pair.a.received.wait_for(id, IBV_WC_WR_FLUSH_ERR)?;
    }
    Ok(())
}

fn others_go_on(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let (pd, cq) = (device.pd()?, device.cq(64)?);
    let one = End::with(&pd, cq.clone(), cq.clone(), &Setup::default(), bench.psn(1))?;
    let other = End::with(&pd, cq.clone(), cq.clone(), &Setup::default(), bench.psn(2))?;
    one.qp.bring_to(IBV_QPS_RTS)?;
    other.qp.bring_to(IBV_QPS_RTS)?;
    one.post(
        Send::new(IBV_WR_RDMA_WRITE)
            .id(1)
            .sge(one.mr.sge(0, 8))
            .at(16, 0x00ab_cd00),
    )?;
    // Its own peer: either the refusal or the flush may come first.
    ensure!(
        cq.wait()?.status != IBV_WC_SUCCESS,
        "a WRITE with a key of no region succeeded"
    );
    other.post(
        Send::new(IBV_WR_RDMA_WRITE)
            .id(2)
            .sge(other.mr.sge(0, 8))
            .at(other.mr.at(64), other.mr.rkey()),
    )?;
    cq.done(2)?;
    ensure!(other.qp.state()? == IBV_QPS_RTS, "the other queue pair is not in RTS");
    Ok(())
}

fn reset_forgets(bench: &Bench) -> Result<()> {
    let pair = stuck(bench)?;
    ensure!(pair.a.qp.step(IBV_QPS_RTS, IBV_QPS_RESET) == Errno(0), "RTS → RESET");
    pair.a.sent.expect_nothing(bench.quiet)?;
    pair.a.received.empty()
}

fn after_destroy(bench: &Bench) -> Result<()> {
    let pair = stuck(bench)?;
    ensure!(pair.a.qp.destroy() == Errno(0), "destroying the queue pair");
    pair.a.sent.poll_many(32)?;
    pair.a.received.poll_many(32)?;
    pair.a.sent.expect_nothing(bench.quiet)?;
    pair.a.received.empty()
}

fn fence(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    for round in 0..8_u32 {
        let bytes = bench.pattern(6000, round);
        pair.b.fill(0, &bytes);
        pair.a.fill(0, &[0; 6000]);
        pair.b.expect(1, 8000, 6000)?;
        let read = Send::new(IBV_WR_RDMA_READ)
            .id(2)
            .unsignaled()
            .sge(pair.a.mr.sge(0, 6000))
            .at(pair.b.mr.at(0), pair.b.mr.rkey());
        let send = nothing(3).with(IBV_SEND_FENCE).sge(pair.a.mr.sge(0, 6000));
        ensure!(pair.a.qp.post(&[read, send]) == Posted::All, "refused");
        pair.a.sent.done(3)?;
        pair.b.received.done(1)?;
        ensure!(
            pair.b.bytes(8000, 6000) == bytes,
            "the SEND of round {round} did not wait for the READ"
        );
    }
    Ok(())
}

/// A pair with `count` completions of sends in its queue.
fn filled(bench: &Bench, count: u64) -> Result<Pair> {
    let pair = bench.pair(&Setup::default())?;
    ready(&pair, count)?;
    for id in 0..count {
        pair.a.post(nothing(id))?;
    }
    for id in 0..count {
        pair.b.received.done(id)?;
    }
    // A receive completes before its send: wait for what is in flight.
    thread::sleep(bench.quiet);
    Ok(pair)
}

fn resize_keeps(bench: &Bench) -> Result<()> {
    let pair = filled(bench, 8)?;
    for entries in [200, 16, 50] {
        let result = pair.a.sent.resize(entries);
        ensure!(result == Errno(0), "to {entries}: {result}");
        ensure!(
            pair.a.sent.capacity() >= entries,
            "{} entries of {entries}",
            pair.a.sent.capacity()
        );
    }
    for id in 0..8 {
        pair.a.sent.done(id)?;
    }
    ready(&pair, 1)?;
    pair.a.post(nothing(20))?;
    pair.a.sent.done(20)?;
    Ok(())
}

fn resize_too_small(bench: &Bench) -> Result<()> {
    let pair = filled(bench, 8)?;
    let result = pair.a.sent.resize(2);
    ensure!(result != Errno(0), "8 completions in 2 entries");
    for id in 0..8 {
        pair.a.sent.done(id)?;
    }
    Ok(())
}

/// More completions than the queue holds.
fn overrun(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let (pd, small, received) = (device.pd()?, device.cq(1)?, device.cq(8)?);
    let setup = Setup {
        depth: 64,
        ..Setup::default()
    };
    let end = End::with(&pd, small.clone(), received, &setup, bench.psn(1))?;
    end.qp.bring_to(IBV_QPS_RTS)?;
    let room = small.capacity();
    ensure!(room < 60, "{room} entries of 1: more than this case can fill");
    for id in 0..=room as u64 + 1 {
        let write = Send::new(IBV_WR_RDMA_WRITE)
            .id(id)
            .sge(end.mr.sge(0, 8))
            .at(end.mr.at(64), end.mr.rkey());
        end.post(write)?;
    }
    let event = device
        .next_event()
        .with_context(|| format!("of {} completions in {room} entries", room + 2))?;
    ensure!(
        event.kind() == IBV_EVENT_CQ_ERR && event.is_of_cq(&small),
        "another event: {event:?}"
    );
    Ok(())
}
