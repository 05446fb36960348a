//! Extended completion queues: ibv_create_cq_ex(3).

use anyhow::{Context, Result, ensure};
use doorbell_verbs_sys::*;

use crate::conformance::rig::{Bench, CqEx, End, Errno, Pair, Recv, Send, Setup, named};
use crate::conformance::{Case, case};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case(
            "cq-ex/empty",
            "ibv_create_cq_ex(3)",
            "a poll of an empty queue returns ENOENT",
            empty,
        ),
        case(
            "cq-ex/fields",
            "ibv_create_cq_ex(3)",
            "the read calls return the same values as ibv_poll_cq(3)",
            fields,
        ),
        case(
            "cq-ex/walk",
            "ibv_create_cq_ex(3)",
            "one poll iterates over all completions, in order",
            walk,
        ),
        case(
            "cq-ex/polls-in-parts",
            "ibv_create_cq_ex(3)",
            "completions that a poll has not reached remain for the next",
            parts,
        ),
        case(
            "cq-ex/classic-poll",
            "ibv_create_cq_ex(3)",
            "ibv_poll_cq(3) works on it as well",
            classic,
        ),
        case(
            "cq-ex/error",
            "ibv_create_cq_ex(3)",
            "a completion in error carries wr_id and status",
            error,
        ),
        case(
            "cq-ex/only-requested-fields",
            "ibv_create_cq_ex(3)",
            "only the requested fields have read calls",
            only_requested_fields,
        ),
        case(
            "cq-ex/timestamps",
            "ibv_create_cq_ex(3)",
            "timestamps are monotonic, and lie between the times queried before and after",
            timestamps,
        ),
        case(
            "cq-ex/unknown-field",
            "ibv_create_cq_ex(3)",
            "an unknown field is refused",
            unknown_field,
        ),
    ]
}

fn extended(bench: &Bench, fields: u32) -> Result<(Pair, CqEx)> {
    let device = bench.open()?;
    let cq = device.cq_ex(64, fields.into())?;
    let setup = Setup::default();
    let a = End::new(&device, &setup, bench.psn(1))?;
    let b = End::with(&device.pd()?, device.cq(64)?, cq.cq.clone(), &setup, bench.psn(2))?;
    a.qp.set_peer(b.qp.as_peer());
    b.qp.set_peer(a.qp.as_peer());
    a.qp.bring_to(IBV_QPS_RTS)?;
    b.qp.bring_to(IBV_QPS_RTS)?;
    Ok((Pair { a, b }, cq))
}

/// Sends `count` messages, which are in the receiver's queue when this returns.
fn messages(pair: &Pair, count: u64) -> Result<()> {
    for id in 0..count {
        pair.b.expect(id, 0, 64)?;
        pair.a.post(Send::new(IBV_WR_SEND).id(id).inline(b"message"))?;
        pair.a.sent.done(id)?;
    }
    Ok(())
}

fn empty(bench: &Bench) -> Result<()> {
    let (pair, cq) = extended(bench, IBV_WC_STANDARD_FLAGS)?;
    ensure!(!cq.start()?, "a completion of nothing");
    messages(&pair, 1)?;
    cq.wait()?;
    ensure!(!cq.next()?, "a second completion of one message");
    cq.end()?;
    ensure!(!cq.start()?, "it came twice");
    Ok(())
}

fn fields(bench: &Bench) -> Result<()> {
    let (pair, cq) = extended(bench, IBV_WC_STANDARD_FLAGS)?;
    pair.b.expect(77, 0, 64)?;
    pair.a.post(
        Send::new(IBV_WR_SEND_WITH_IMM)
            .id(1)
            .imm([4, 3, 2, 1])
            .inline(b"fields"),
    )?;
    pair.a.sent.done(1)?;
    cq.wait()?;
    let found = cq.current()?;
    cq.end()?;
    ensure!(
        (found.wr_id, found.status) == (77, IBV_WC_SUCCESS),
        "request {} {}",
        found.wr_id,
        named(found.status)
    );
    ensure!(
        found.opcode == IBV_WC_RECV && found.byte_len == 6,
        "opcode {}, {} bytes",
        found.opcode,
        found.byte_len
    );
    ensure!(
        found.wc_flags & IBV_WC_WITH_IMM != 0 && found.imm == [4, 3, 2, 1],
        "immediate data {:?}",
        found.imm
    );
    ensure!(found.qp_num == pair.b.qp.qpn(), "queue pair {:#x}", found.qp_num);
    Ok(())
}

fn walk(bench: &Bench) -> Result<()> {
    let (pair, cq) = extended(bench, IBV_WC_STANDARD_FLAGS)?;
    messages(&pair, 10)?;
    cq.wait()?;
    let mut found = vec![cq.head().0];
    while cq.next()? {
        found.push(cq.head().0);
    }
    cq.end()?;
    ensure!(found == (0..10).collect::<Vec<_>>(), "{found:?}");
    Ok(())
}

fn parts(bench: &Bench) -> Result<()> {
    let (pair, cq) = extended(bench, IBV_WC_STANDARD_FLAGS)?;
    messages(&pair, 5)?;
    cq.wait()?;
    ensure!(cq.next()?, "one completion of five");
    ensure!(cq.head().0 == 1, "the second is {}", cq.head().0);
    cq.end()?;
    for id in 2..5 {
        cq.wait()?;
        ensure!(cq.head().0 == id, "{} instead of {id}", cq.head().0);
        cq.end()?;
    }
    Ok(())
}

fn classic(bench: &Bench) -> Result<()> {
    let (pair, cq) = extended(bench, IBV_WC_STANDARD_FLAGS)?;
    messages(&pair, 3)?;
    let wc = cq.cq.done(0)?;
    ensure!(
        wc.byte_len == 7 && wc.qp_num == pair.b.qp.qpn(),
        "{} bytes",
        wc.byte_len
    );
    cq.wait()?;
    ensure!(cq.head().0 == 1, "{} instead of 1", cq.head().0);
    cq.end()?;
    cq.cq.done(2)?;
    Ok(())
}

fn error(bench: &Bench) -> Result<()> {
    let (pair, cq) = extended(bench, IBV_WC_STANDARD_FLAGS)?;
    ensure!(
        pair.b.qp.receive_one(Recv::new(88)) == Errno(0),
        "the receive was refused"
    );
    ensure!(pair.b.qp.step(IBV_QPS_RTS, IBV_QPS_ERR) == Errno(0), "RTS → ERR");
    cq.wait()?;
    let found = cq.head();
    cq.end()?;
    ensure!(
        found == (88, IBV_WC_WR_FLUSH_ERR),
        "request {} {}",
        found.0,
        named(found.1)
    );
    Ok(())
}

fn only_requested_fields(bench: &Bench) -> Result<()> {
    let (_pair, cq) = extended(bench, IBV_WC_EX_WITH_BYTE_LEN)?;
    let found = cq.reads_length_and_time();
    ensure!(found == (true, false), "length: {}, time: {}", found.0, found.1);
    Ok(())
}

fn timestamps(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let before = device.clock()?;
    let fields = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
    let (pair, cq) = extended(bench, fields)?;
    messages(&pair, 4)?;
    let after = device.clock()?;
    cq.wait()?;
    let mut found = vec![cq.times()?];
    while cq.next()? {
        found.push(cq.times()?);
    }
    cq.end()?;
    ensure!(found.len() == 4, "{} completions of 4", found.len());
    ensure!(found.is_sorted(), "not in order: {found:?}");
    ensure!(
        before.mask == u64::MAX,
        "a clock of {:#x}, which this case does not know how to compare",
        before.mask
    );
    let ticks = |index: usize| found[index].0;
    ensure!(
        before.now <= ticks(0) && ticks(3) <= after.now,
        "{} to {} for {found:?}",
        before.now,
        after.now
    );
    let wall = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .context("the clock is before 1970")?;
    let wall = wall.as_nanos() as u64;
    ensure!(
        found[3].1 <= wall && wall - found[0].1 < 600_000_000_000,
        "wall clock {} at {wall}",
        found[3].1
    );
    Ok(())
}

fn unknown_field(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    device.cq_ex(8, IBV_WC_STANDARD_FLAGS.into())?;
    ensure!(device.cq_ex(8, 1 << 40).is_err(), "it was accepted");
    Ok(())
}
