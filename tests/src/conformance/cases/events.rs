//! Asynchronous events, and the draining of a send queue.

use anyhow::{Context, Result, ensure};
use doorbell_verbs_sys::*;

use crate::conformance::rig::{Bench, Errno, Pair, Send, Setup};
use crate::conformance::{Case, case};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case(
            "event/none-without-cause",
            "11.6.3",
            "traffic in RTS raises no asynchronous event",
            none,
        ),
        case(
            "event/communication-established",
            "11.6.3.1",
            "the first message in RTR raises an event",
            established,
        ),
        case(
            "event/access-error",
            "11.6.3.2",
            "a remote access violation raises an event at the responder",
            access_error,
        ),
        case(
            "event/invalid-request",
            "11.6.3.2",
            "an invalid request raises an event at the responder",
            invalid_request,
        ),
        case(
            "event/names-its-queue-pair",
            "ibv_get_async_event(3)",
            "an event carries its queue pair",
            names,
        ),
        case(
            "event/acknowledged-late",
            "ibv_get_async_event(3)",
            "destroying a queue pair waits until its events are acknowledged",
            acknowledged_late,
        ),
        case(
            "event/destroyed-with-event-unread",
            "ibv_get_async_event(3)",
            "unread events are dropped with their queue pair",
            unread,
        ),
        case(
            "drain/idle",
            "10.3.1.5",
            "an empty queue drains at once, with an event if requested",
            drain_idle,
        ),
        case(
            "drain/no-event-unless-requested",
            "11.2.5.2",
            "without EN_SQD_ASYNC_NOTIFY there is no event",
            drain_silent,
        ),
        case(
            "drain/finishes-what-has-begun",
            "10.3.1.5",
            "requests in flight complete before the queue is drained",
            drain_busy,
        ),
        case(
            "drain/holds-what-comes",
            "10.3.1.5",
            "requests posted in SQD wait until RTS",
            drain_holds,
        ),
        case(
            "drain/receives-go-on",
            "10.3.1.5",
            "a queue pair in SQD receives and responds",
            drain_receives,
        ),
        case(
            "drain/change-and-resume",
            "11.2.5.2",
            "attributes modified in SQD are in force after RTS",
            drain_change,
        ),
    ]
}

fn nothing(id: u64) -> Send {
    Send::new(IBV_WR_SEND).id(id)
}

fn none(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    for id in 0..4 {
        pair.b.expect(id, 0, 8)?;
        pair.a.post(nothing(id))?;
        pair.a.sent.done(id)?;
    }
    match pair.a.device().event(bench.quiet) {
        None => Ok(()),
        Some(event) => anyhow::bail!("{event:?}"),
    }
}

fn established(bench: &Bench) -> Result<()> {
    let pair = bench.unconnected_pair(&Setup::default(), &Setup::default())?;
    pair.a.qp.bring_to(IBV_QPS_RTS)?;
    pair.b.qp.bring_to(IBV_QPS_RTR)?;
    pair.b.expect(1, 0, 8)?;
    pair.a.post(nothing(2))?;
    pair.a.sent.done(2)?;
    let event = pair.b.device().next_event()?;
    ensure!(
        event.kind() == IBV_EVENT_COMM_EST && event.is_of_qp(&pair.b.qp),
        "another event: {event:?}"
    );
    Ok(())
}

fn refused_write(pair: &Pair, rkey: u32) -> Result<()> {
    pair.a.post(
        Send::new(IBV_WR_RDMA_WRITE)
            .id(1)
            .sge(pair.a.mr.sge(0, 8))
            .at(pair.b.mr.at(0), rkey),
    )?;
    ensure!(pair.a.sent.wait()?.status != IBV_WC_SUCCESS, "the WRITE was taken");
    Ok(())
}

fn access_error(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    refused_write(&pair, pair.b.mr.rkey() ^ 0x0055_0000)?;
    let event = pair.b.device().next_event()?;
    ensure!(
        event.kind() == IBV_EVENT_QP_ACCESS_ERR && event.is_of_qp(&pair.b.qp),
        "another event: {event:?}"
    );
    Ok(())
}

fn invalid_request(bench: &Bench) -> Result<()> {
    let closed = Setup {
        access: 0,
        ..Setup::default()
    };
    let pair = bench.pair_of(&Setup::default(), &closed)?;
    refused_write(&pair, pair.b.mr.rkey())?;
    let event = pair.b.device().next_event()?;
    ensure!(
        event.kind() == IBV_EVENT_QP_REQ_ERR && event.is_of_qp(&pair.b.qp),
        "another event: {event:?}"
    );
    Ok(())
}

fn names(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    for (end, other) in [(&pair.a, &pair.b), (&pair.b, &pair.a)] {
        let mut attr = end.qp.attr();
        attr.qp_state = IBV_QPS_SQD;
        attr.en_sqd_async_notify = 1;
        let result = end.qp.modify(&attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY);
        ensure!(result == Errno(0), "RTS → SQD: {result}");
        let event = end.device().next_event()?;
        ensure!(
            event.is_of_qp(&end.qp) && !event.is_of_qp(&other.qp),
            "of the other queue pair"
        );
    }
    Ok(())
}

fn unread(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    drain(&pair, true)?;
    // The event is pending and unread.
    pair.a.sent.expect_nothing(bench.quiet)?;
    ensure!(pair.a.qp.destroy() == Errno(0), "destroying the queue pair");
    match pair.a.device().event(bench.quiet) {
        None => Ok(()),
        Some(event) => anyhow::bail!("{event:?} of a queue pair that is gone"),
    }
}

/// RTS → SQD.
fn drain(pair: &Pair, notify: bool) -> Result<()> {
    let mut attr = pair.a.qp.attr();
    attr.qp_state = IBV_QPS_SQD;
    attr.en_sqd_async_notify = u8::from(notify);
    let mask = if notify { IBV_QP_EN_SQD_ASYNC_NOTIFY } else { 0 };
    let result = pair.a.qp.modify(&attr, IBV_QP_STATE | mask);
    ensure!(result == Errno(0), "RTS → SQD: {result}");
    Ok(())
}

fn drained(pair: &Pair) -> Result<()> {
    let event = pair.a.device().next_event()?;
    ensure!(
        event.kind() == IBV_EVENT_SQ_DRAINED && event.is_of_qp(&pair.a.qp),
        "another event: {event:?}"
    );
    Ok(())
}

fn drain_idle(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    drain(&pair, true)?;
    drained(&pair)?;
    let (attr, _) = pair.a.qp.query()?;
    ensure!(
        (attr.qp_state, attr.sq_draining) == (IBV_QPS_SQD, 0),
        "state {}, draining {}",
        attr.qp_state,
        attr.sq_draining
    );
    Ok(())
}

fn drain_silent(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    drain(&pair, false)?;
    match pair.a.device().event(bench.quiet) {
        None => Ok(()),
        Some(event) => anyhow::bail!("{event:?}"),
    }
}

fn drain_busy(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    // Refused with RNR NAKs, and retried.
    pair.a.post(nothing(1))?;
    pair.a.sent.expect_nothing(bench.quiet)?;
    drain(&pair, true)?;
    ensure!(
        pair.a.device().event(bench.quiet).is_none(),
        "drained with a request in flight"
    );
    let (attr, _) = pair.a.qp.query()?;
    ensure!(attr.sq_draining == 1, "sq_draining is {}", attr.sq_draining);
    pair.b.expect(2, 0, 8)?;
    pair.a.sent.done(1).context("in SQD")?;
    drained(&pair)
}

fn drain_holds(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    pair.b.expect(2, 0, 8)?;
    drain(&pair, true)?;
    drained(&pair)?;
    pair.a.post(nothing(1)).context("in SQD")?;
    pair.a.sent.expect_nothing(bench.quiet)?;
    pair.b.received.empty()?;
    ensure!(pair.a.qp.step(IBV_QPS_SQD, IBV_QPS_RTS) == Errno(0), "SQD → RTS");
    pair.a.sent.done(1)?;
    pair.b.received.done(2)?;
    Ok(())
}

fn drain_receives(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    drain(&pair, true)?;
    drained(&pair)?;
    pair.a.expect(1, 0, 8)?;
    pair.b.post(nothing(2).inline(b"in SQD"))?;
    pair.b.sent.done(2)?;
    pair.a.received.done(1)?;
    let read = Send::new(IBV_WR_RDMA_READ)
        .id(3)
        .sge(pair.b.mr.sge(0, 6))
        .at(pair.a.mr.at(0), pair.a.mr.rkey());
    pair.b.post(read)?;
    pair.b.sent.done(3)?;
    ensure!(pair.b.bytes(0, 6) == b"in SQD", "other bytes were read");
    Ok(())
}

fn drain_change(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    drain(&pair, true)?;
    drained(&pair)?;
    let mut attr = pair.a.qp.attr();
    attr.qp_state = IBV_QPS_SQD;
    attr.rnr_retry = 0;
    attr.retry_cnt = 2;
    let result = pair
        .a
        .qp
        .modify(&attr, IBV_QP_STATE | IBV_QP_RNR_RETRY | IBV_QP_RETRY_CNT);
    ensure!(result == Errno(0), "the change: {result}");
    let (found, _) = pair.a.qp.query()?;
    ensure!(
        (found.rnr_retry, found.retry_cnt) == (0, 2),
        "a query returns {} and {}",
        found.rnr_retry,
        found.retry_cnt
    );
    ensure!(pair.a.qp.step(IBV_QPS_SQD, IBV_QPS_RTS) == Errno(0), "SQD → RTS");
    pair.a.post(nothing(1))?;
    pair.a.sent.wait_for(1, IBV_WC_RNR_RETRY_EXC_ERR)?;
    Ok(())
}

fn acknowledged_late(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    drain(&pair, true)?;
    let event = pair.a.device().next_event()?;
    let (waited, result) = pair.a.qp.destroy_in_parallel(event, bench.quiet);
    ensure!(waited, "it was destroyed though an event was not acknowledged");
    ensure!(result == Errno(0), "once it was acknowledged: {result}");
    Ok(())
}
