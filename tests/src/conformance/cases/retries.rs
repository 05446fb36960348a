//! RC with peers that are not ready or not there: RNR retries and transport retries.

use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use doorbell_verbs_sys::*;

use crate::conformance::rig::{Bench, Errno, Pair, Send, Setup, gid_bytes};
use crate::conformance::{Case, case};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case(
            "rnr/no-retries",
            "9.7.5.2.8",
            "rnr_retry 0: the first RNR NAK ends the request",
            rnr_no_retries,
        ),
        case(
            "rnr/some-retries",
            "9.7.5.2.8",
            "rnr_retry 2: two retries, then an error",
            rnr_some_retries,
        ),
        case(
            "rnr/for-ever",
            "9.7.5.2.8",
            "rnr_retry 7: the request waits until there is a receive",
            rnr_for_ever,
        ),
        case(
            "rnr/retries-begin-anew",
            "9.7.5.2.8",
            "the retry counter is reset by every successful request",
            rnr_anew,
        ),
        case(
            "rnr/write-with-immediate",
            "9.7.5.2.8",
            "a WRITE with immediate data waits for its receive too, and is executed once",
            rnr_write_imm,
        ),
        case(
            "rnr/write-needs-no-receive",
            "9.4.3",
            "a WRITE without immediate data takes no receive",
            write_needs_none,
        ),
        case(
            "rnr/receiver-stays",
            "9.9.3.1",
            "a receiver without a receive stays in RTS",
            rnr_receiver_stays,
        ),
        case(
            "retry/peer-destroyed",
            "9.7.6.1.3",
            "a destroyed peer: the retries are exhausted, then an error",
            peer_destroyed,
        ),
        case(
            "retry/peer-in-init",
            "9.7.6.1.3",
            "a peer in INIT: the same",
            peer_in_init,
        ),
        case(
            "retry/peer-in-err",
            "10.3.1.7",
            "a peer in ERR sends no answer",
            peer_in_err,
        ),
        case(
            "retry/peer-in-reset",
            "10.3.1.1",
            "a peer in RESET sends no answer",
            peer_in_reset,
        ),
        case(
            "retry/other-peer",
            "9.6.1.1.1",
            "a peer that is connected to another queue pair sends no answer",
            peer_of_another,
        ),
        case(
            "retry/no-retries",
            "9.7.6.1.3",
            "retry_cnt 0: the first timeout ends the request",
            no_retries,
        ),
        case(
            "retry/no-timeout",
            "9.7.6.1.3",
            "timeout 0: an unanswered request waits forever",
            no_timeout,
        ),
        case(
            "retry/other-sequence",
            "9.7.1",
            "a peer that expects distant PSNs receives nothing",
            other_sequence,
        ),
        case(
            "retry/peer-comes-back",
            "9.7.6.1.1",
            "a request is retransmitted until the peer is ready",
            peer_comes_back,
        ),
    ]
}

/// A setup with short timeouts: unanswered requests fail after some 100 ms.
fn short_timeouts() -> Setup {
    Setup {
        timeout: 12,
        retry_cnt: 3,
        ..Setup::default()
    }
}

fn nothing(id: u64) -> Send {
    Send::new(IBV_WR_SEND).id(id)
}

fn rnr(bench: &Bench, rnr_retry: u8) -> Result<Pair> {
    bench.pair(&Setup {
        rnr_retry,
        ..Setup::default()
    })
}

fn rnr_no_retries(bench: &Bench) -> Result<()> {
    let pair = rnr(bench, 0)?;
    pair.a.post(nothing(1))?;
    pair.a.sent.wait_for(1, IBV_WC_RNR_RETRY_EXC_ERR)?;
    ensure!(pair.a.qp.state()? == IBV_QPS_ERR, "the requester is not in ERR");
    Ok(())
}

fn rnr_some_retries(bench: &Bench) -> Result<()> {
    let pair = rnr(bench, 2)?;
    pair.a.post(nothing(1))?;
    pair.a.sent.wait_for(1, IBV_WC_RNR_RETRY_EXC_ERR)?;
    Ok(())
}

fn rnr_for_ever(bench: &Bench) -> Result<()> {
    let pair = rnr(bench, 7)?;
    pair.a.post(nothing(1))?;
    // Many times 0.64 ms, the responder's RNR timer.
    pair.a.sent.expect_nothing(bench.quiet)?;
    pair.b.expect(2, 0, 8)?;
    pair.a.sent.done(1)?;
    pair.b.received.done(2)?;
    Ok(())
}

fn rnr_anew(bench: &Bench) -> Result<()> {
    let setup = Setup {
        rnr_retry: 6,
        // 40.96 ms: a receive is posted before the first or a later retry.
        min_rnr_timer: 24,
        ..Setup::default()
    };
    let pair = bench.pair(&setup)?;
    for id in 0..9 {
        pair.a.post(nothing(id))?;
        thread::sleep(Duration::from_millis(5));
        pair.b.expect(10 + id, 0, 8)?;
        pair.a.sent.done(id)?;
        pair.b.received.done(10 + id)?;
    }
    Ok(())
}

fn rnr_write_imm(bench: &Bench) -> Result<()> {
    let pair = rnr(bench, 7)?;
    pair.a.fill(0, &[6; 3000]);
    let write = Send::new(IBV_WR_RDMA_WRITE_WITH_IMM)
        .id(1)
        .sge(pair.a.mr.sge(0, 3000))
        .at(pair.b.mr.at(0), pair.b.mr.rkey());
    pair.a.post(write)?;
    pair.a.sent.expect_nothing(bench.quiet)?;
    pair.b.expect(2, 8000, 8)?;
    pair.b.expect(3, 8000, 8)?;
    pair.a.sent.done(1)?;
    pair.b.received.done(2)?;
    pair.b.received.empty()?;
    ensure!(pair.b.bytes(0, 3000) == [6; 3000], "not all was written");
    Ok(())
}

fn write_needs_none(bench: &Bench) -> Result<()> {
    let pair = rnr(bench, 0)?;
    pair.b.expect(2, 64, 8)?;
    for id in 0..4 {
        pair.a.post(
            Send::new(IBV_WR_RDMA_WRITE)
                .id(id)
                .sge(pair.a.mr.sge(0, 8))
                .at(pair.b.mr.at(0), pair.b.mr.rkey()),
        )?;
        pair.a.sent.done(id)?;
    }
    pair.b.received.empty()
}

fn rnr_receiver_stays(bench: &Bench) -> Result<()> {
    let pair = rnr(bench, 0)?;
    pair.a.post(nothing(1))?;
    pair.a.sent.wait_for(1, IBV_WC_RNR_RETRY_EXC_ERR)?;
    ensure!(pair.b.qp.state()? == IBV_QPS_RTS, "it is not in RTS");
    pair.b.received.empty()
}

/// Checks that a send of `a` gets no answer.
fn unanswered(pair: &Pair) -> Result<()> {
    pair.a.post(nothing(1))?;
    pair.a.sent.wait_for(1, IBV_WC_RETRY_EXC_ERR)?;
    ensure!(pair.a.qp.state()? == IBV_QPS_ERR, "the requester is not in ERR");
    Ok(())
}

fn peer_destroyed(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&short_timeouts())?;
    ensure!(pair.b.qp.destroy() == Errno(0), "destroying the peer");
    unanswered(&pair)
}

fn peer_in_init(bench: &Bench) -> Result<()> {
    let pair = bench.unconnected_pair(&short_timeouts(), &short_timeouts())?;
    pair.a.qp.bring_to(IBV_QPS_RTS)?;
    pair.b.qp.bring_to(IBV_QPS_INIT)?;
    pair.b.expect(2, 0, 8)?;
    unanswered(&pair)?;
    pair.b.received.empty()
}

fn peer_in_err(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&short_timeouts())?;
    ensure!(pair.b.qp.step(IBV_QPS_RTS, IBV_QPS_ERR) == Errno(0), "RTS → ERR");
    unanswered(&pair)
}

fn peer_in_reset(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&short_timeouts())?;
    ensure!(pair.b.qp.step(IBV_QPS_RTS, IBV_QPS_RESET) == Errno(0), "RTS → RESET");
    unanswered(&pair)
}

fn peer_of_another(bench: &Bench) -> Result<()> {
    let pair = bench.unconnected_pair(&short_timeouts(), &short_timeouts())?;
    let mut elsewhere = pair.a.qp.as_peer();
    // An adjacent address: on the guest's wire the other end's, and on loopback any.
    let mut gid = gid_bytes(&elsewhere.gid);
    gid[15] ^= 3;
    elsewhere.gid.raw = gid;
    pair.b.qp.set_peer(elsewhere);
    pair.a.qp.bring_to(IBV_QPS_RTS)?;
    pair.b.qp.bring_to(IBV_QPS_RTR)?;
    pair.b.expect(2, 0, 8)?;
    unanswered(&pair)?;
    pair.b.received.empty()
}

fn peer_comes_back(bench: &Bench) -> Result<()> {
    let pair = bench.unconnected_pair(&Setup::default(), &Setup::default())?;
    pair.a.qp.bring_to(IBV_QPS_RTS)?;
    pair.b.qp.bring_to(IBV_QPS_INIT)?;
    pair.b.expect(2, 0, 8)?;
    pair.a.post(nothing(1))?;
    thread::sleep(Duration::from_millis(20));
    ensure!(pair.b.qp.step(IBV_QPS_INIT, IBV_QPS_RTR) == Errno(0), "INIT → RTR");
    pair.a.sent.done(1)?;
    pair.b.received.done(2)?;
    Ok(())
}

fn no_retries(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup {
        retry_cnt: 0,
        ..short_timeouts()
    })?;
    ensure!(pair.b.qp.destroy() == Errno(0), "destroying the peer");
    unanswered(&pair)
}

fn no_timeout(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup {
        timeout: 0,
        ..short_timeouts()
    })?;
    ensure!(pair.b.qp.destroy() == Errno(0), "destroying the peer");
    pair.a.post(nothing(1))?;
    pair.a.sent.expect_nothing(bench.quiet)?;
    ensure!(pair.a.qp.step(IBV_QPS_RTS, IBV_QPS_ERR) == Errno(0), "RTS → ERR");
    pair.a.sent.wait_for(1, IBV_WC_WR_FLUSH_ERR)?;
    Ok(())
}

fn other_sequence(bench: &Bench) -> Result<()> {
    let pair = bench.unconnected_pair(&short_timeouts(), &short_timeouts())?;
    let mut other = pair.a.qp.as_peer();
    // As far behind as possible: requests appear to be duplicates.
    other.psn = (other.psn + (1 << 20)) & 0x00ff_ffff;
    pair.b.qp.set_peer(other);
    pair.a.qp.bring_to(IBV_QPS_RTS)?;
    pair.b.qp.bring_to(IBV_QPS_RTS)?;
    pair.b.expect(2, 0, 8)?;
    pair.a.post(nothing(1))?;
    // Whatever the peer answers, nothing was received.
    pair.b.received.expect_nothing(bench.quiet)
}
