//! UC: a message that cannot be received is dropped whole, and the next is received.

use anyhow::{Result, ensure};
use doorbell_verbs_sys::*;

use crate::conformance::rig::{Bench, Errno, Pair, Send, Setup};
use crate::conformance::{Case, case};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case(
            "uc/no-receive",
            "9.8.2.2",
            "a message without a receive is dropped whole, and the next one arrives",
            no_receive,
        ),
        case(
            "uc/long-message-without-receive",
            "9.8.2.2",
            "a multi-packet message without a receive is dropped whole, too",
            long_without_receive,
        ),
        case(
            "uc/unknown-qpn",
            "9.8.2",
            "requests to a destroyed peer complete",
            unknown_qpn,
        ),
        case(
            "uc/wrong-key",
            "9.8.2.2.5",
            "a WRITE with a wrong key is dropped, and the next message arrives",
            wrong_key,
        ),
        case(
            "uc/write-without-right",
            "9.8.2.2.5",
            "a WRITE that the queue pair does not allow is dropped",
            without_right,
        ),
        case(
            "uc/write-with-immediate-without-receive",
            "9.8.2.2",
            "a WRITE with immediate data and no receive writes nothing but its target",
            imm_without_receive,
        ),
        case(
            "uc/longer-than-receive",
            "9.8.2.2",
            "a message longer than its receive writes nothing beyond it, and does not succeed",
            longer,
        ),
        case(
            "uc/sender-stays",
            "9.8.2",
            "a sender whose messages are dropped stays in RTS",
            sender_stays,
        ),
        case(
            "uc/local-error",
            "10.3.1.6",
            "a local error stops the send queue alone: SQE, which still receives, and RTS again",
            local_error,
        ),
        case(
            "uc/flushed-behind-local-error",
            "10.3.1.6",
            "requests behind a local error are flushed",
            flushed,
        ),
    ]
}

fn pair(bench: &Bench) -> Result<Pair> {
    bench.pair(&Setup::of(IBV_QPT_UC))
}

fn send(pair: &Pair, id: u64, len: usize) -> Result<()> {
    pair.a.post(Send::new(IBV_WR_SEND).id(id).sge(pair.a.mr.sge(0, len)))?;
    pair.a.sent.done(id)?;
    Ok(())
}

/// Checks that `b` still receives.
fn next_arrives(pair: &Pair, receive: u64) -> Result<()> {
    pair.a.fill(0, b"the next");
    send(pair, 99, 8)?;
    let wc = pair.b.received.done(receive)?;
    ensure!(wc.byte_len == 8, "another message arrived, of {} bytes", wc.byte_len);
    ensure!(pair.b.qp.state()? == IBV_QPS_RTS, "the receiver is not in RTS");
    Ok(())
}

fn no_receive(bench: &Bench) -> Result<()> {
    let pair = pair(bench)?;
    send(&pair, 1, 100)?;
    pair.b.received.expect_nothing(bench.quiet)?;
    pair.b.expect(2, 0, 1000)?;
    pair.b.received.expect_nothing(bench.quiet)?;
    next_arrives(&pair, 2)
}

fn long_without_receive(bench: &Bench) -> Result<()> {
    let pair = pair(bench)?;
    pair.a.fill(0, &[5; 9000]);
    send(&pair, 1, 9000)?;
    pair.b.received.expect_nothing(bench.quiet)?;
    pair.b.expect(2, 0, 1000)?;
    next_arrives(&pair, 2)
}

fn unknown_qpn(bench: &Bench) -> Result<()> {
    let pair = pair(bench)?;
    ensure!(pair.b.qp.destroy() == Errno(0), "destroying the peer");
    for id in 0..3 {
        send(&pair, id, 5000)?;
    }
    ensure!(pair.a.qp.state()? == IBV_QPS_RTS, "the sender is not in RTS");
    Ok(())
}

fn wrong_key(bench: &Bench) -> Result<()> {
    let pair = pair(bench)?;
    pair.a.fill(0, &[5; 3000]);
    let write = Send::new(IBV_WR_RDMA_WRITE)
        .id(1)
        .sge(pair.a.mr.sge(0, 3000))
        .at(pair.b.mr.at(0), pair.b.mr.rkey() ^ 0x0055_0000);
    pair.a.post(write)?;
    pair.a.sent.done(1)?;
    pair.b.expect(2, 8000, 1000)?;
    next_arrives(&pair, 2)?;
    ensure!(pair.b.bytes(0, 3000) == [0; 3000], "the memory changed");
    Ok(())
}

fn without_right(bench: &Bench) -> Result<()> {
    let target = Setup {
        access: IBV_ACCESS_REMOTE_READ,
        ..Setup::of(IBV_QPT_UC)
    };
    let pair = bench.pair_of(&Setup::of(IBV_QPT_UC), &target)?;
    pair.a.fill(0, &[5; 64]);
    pair.a.post(
        Send::new(IBV_WR_RDMA_WRITE)
            .id(1)
            .sge(pair.a.mr.sge(0, 64))
            .at(pair.b.mr.at(0), pair.b.mr.rkey()),
    )?;
    pair.a.sent.done(1)?;
    pair.b.expect(2, 8000, 1000)?;
    next_arrives(&pair, 2)?;
    ensure!(pair.b.bytes(0, 64) == [0; 64], "the memory changed");
    Ok(())
}

fn imm_without_receive(bench: &Bench) -> Result<()> {
    let pair = pair(bench)?;
    pair.a.fill(0, &[5; 64]);
    let write = Send::new(IBV_WR_RDMA_WRITE_WITH_IMM)
        .id(1)
        .sge(pair.a.mr.sge(0, 64))
        .at(pair.b.mr.at(0), pair.b.mr.rkey());
    pair.a.post(write)?;
    pair.a.sent.done(1)?;
    pair.b.received.expect_nothing(bench.quiet)?;
    pair.b.expect(2, 8000, 1000)?;
    pair.b.received.expect_nothing(bench.quiet)?;
    next_arrives(&pair, 2)?;
    ensure!(pair.b.bytes(64, 64) == [0; 64], "memory beside the target changed");
    Ok(())
}

fn longer(bench: &Bench) -> Result<()> {
    let pair = pair(bench)?;
    pair.a.fill(0, &[5; 3000]);
    pair.b.expect(1, 0, 100)?;
    send(&pair, 2, 3000)?;
    if let Some(wc) = pair.b.received.next_within(bench.quiet)? {
        ensure!(
            wc.status != IBV_WC_SUCCESS,
            "the receive is a success of {} bytes",
            wc.byte_len
        );
    }
    ensure!(pair.b.bytes(100, 3000) == [0; 3000], "bytes behind the receive changed");
    Ok(())
}

fn sender_stays(bench: &Bench) -> Result<()> {
    let pair = pair(bench)?;
    for id in 0..20 {
        send(&pair, id, 1500)?;
    }
    ensure!(pair.a.qp.state()? == IBV_QPS_RTS, "it is not in RTS");
    Ok(())
}

/// A send that fails locally, with one behind it.
fn fail_locally(pair: &Pair) -> Result<()> {
    let mut bad = pair.a.mr.sge(0, 8);
    bad.lkey ^= 0x0055_0000;
    let posted = pair
        .a
        .qp
        .post(&[Send::new(IBV_WR_SEND).id(1).sge(bad), Send::new(IBV_WR_SEND).id(2)]);
    ensure!(posted == crate::conformance::rig::Posted::All, "{posted:?}");
    ensure!(pair.a.sent.wait()?.status != IBV_WC_SUCCESS, "it was sent");
    pair.a.sent.wait_for(2, IBV_WC_WR_FLUSH_ERR)?;
    Ok(())
}

fn local_error(bench: &Bench) -> Result<()> {
    let pair = pair(bench)?;
    fail_locally(&pair)?;
    ensure!(pair.a.qp.state()? == IBV_QPS_SQE, "the state is {}", pair.a.qp.state()?);
    pair.a.expect(3, 0, 64)?;
    pair.b.post(Send::new(IBV_WR_SEND).id(4))?;
    pair.b.sent.done(4)?;
    pair.a.received.done(3)?;
    ensure!(pair.a.qp.step(IBV_QPS_SQE, IBV_QPS_RTS) == Errno(0), "SQE → RTS");
    pair.b.expect(5, 0, 64)?;
    next_arrives(&pair, 5)
}

fn flushed(bench: &Bench) -> Result<()> {
    let pair = pair(bench)?;
    pair.b.expect(5, 0, 64)?;
    fail_locally(&pair)?;
    pair.b.received.expect_nothing(bench.quiet)
}
