//! Work requests by ibv_wr_post(3).

use anyhow::{Result, ensure};
use doorbell_verbs_sys::*;

use crate::conformance::rig::{Bench, Binding, Calls, End, Errno, Pair, QKEY, Send, Setup, immediate, next_key};
use crate::conformance::{Case, case};

/// Signaled.
const S: u32 = IBV_SEND_SIGNALED;

const OPERATIONS: u32 = IBV_QP_EX_WITH_SEND
    | IBV_QP_EX_WITH_SEND_WITH_IMM
    | IBV_QP_EX_WITH_RDMA_WRITE
    | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    | IBV_QP_EX_WITH_RDMA_READ
    | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
    | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("calls/send", "ibv_wr_post(3)", "a SEND by ibv_wr_*", send),
        case(
            "calls/elements",
            "ibv_wr_post(3)",
            "a SEND by ibv_wr_* from several elements, also an empty one",
            elements,
        ),
        case(
            "calls/immediate",
            "ibv_wr_post(3)",
            "SEND and WRITE with immediate data by ibv_wr_*",
            with_immediate,
        ),
        case(
            "calls/write-and-read",
            "ibv_wr_post(3)",
            "WRITE and READ by ibv_wr_*",
            write_and_read,
        ),
        case("calls/atomics", "ibv_wr_post(3)", "both atomics by ibv_wr_*", atomics),
        case(
            "calls/inline",
            "ibv_wr_post(3)",
            "inline data by ibv_wr_*, of one buffer and of several, reusable once the call has returned",
            inline,
        ),
        case(
            "calls/batch-in-order",
            "ibv_wr_post(3)",
            "a batch is executed in order, and only signaled requests complete",
            batch,
        ),
        case("calls/abort", "ibv_wr_post(3)", "an aborted batch is not posted", abort),
        case(
            "calls/nothing-before-complete",
            "ibv_wr_post(3)",
            "nothing is executed before ibv_wr_complete",
            nothing_before,
        ),
        case(
            "calls/too-many",
            "ibv_wr_post(3)",
            "a batch that does not fit is refused as a whole",
            too_many,
        ),
        case("calls/in-init", "10.3.1.2", "a batch before RTS is refused", in_init),
        case("calls/in-err", "10.3.1.7", "a batch in ERR completes flushed", in_err),
        case(
            "calls/only-requested-operations",
            "ibv_create_qp_ex(3)",
            "only the requested operations have calls",
            only_requested_operations,
        ),
        case(
            "calls/list-as-well",
            "ibv_create_qp_ex(3)",
            "an extended queue pair accepts post lists, too",
            list_too,
        ),
        case("calls/datagrams", "ibv_wr_post(3)", "datagrams by ibv_wr_*", datagrams),
        case(
            "calls/unreliable",
            "ibv_wr_post(3)",
            "SEND and WRITE of UC by ibv_wr_*",
            unreliable,
        ),
        case(
            "calls/windows",
            "ibv_wr_post(3)",
            "binding and both invalidations by ibv_wr_*",
            windows,
        ),
    ]
}

/// A pair whose `a` posts by `ibv_wr_*`.
fn pair_of(bench: &Bench, transport: ibv_qp_type, operations: u32) -> Result<Pair> {
    let device = bench.open()?;
    let setup = Setup::of(transport);
    let (pd, sent, received) = (device.pd()?, device.cq(64)?, device.cq(64)?);
    let mr = pd.register(setup.bytes, setup.rights)?;
    let qp = pd.qp_ex(&sent, &received, &setup, bench.psn(1), operations)?;
    let a = End {
        qp,
        sent,
        received,
        mr,
        pd,
    };
    let b = End::new(&device, &setup, bench.psn(2))?;
    a.qp.set_peer(b.qp.as_peer());
    b.qp.set_peer(a.qp.as_peer());
    a.qp.bring_to(IBV_QPS_RTS)?;
    b.qp.bring_to(IBV_QPS_RTS)?;
    Ok(Pair { a, b })
}

fn pair(bench: &Bench) -> Result<Pair> {
    pair_of(bench, IBV_QPT_RC, OPERATIONS)
}

fn posted(result: Errno) -> Result<()> {
    ensure!(result == Errno(0), "ibv_wr_complete: {result}");
    Ok(())
}

fn send(bench: &Bench) -> Result<()> {
    let pair = pair(bench)?;
    let bytes = bench.pattern(3000, 1);
    pair.a.fill(0, &bytes);
    pair.b.expect(1, 0, 4000)?;
    let calls = pair.a.qp.calls()?;
    calls.send(3, S)?;
    calls.set_sge(pair.a.mr.sge(0, 3000))?;
    posted(calls.complete()?)?;
    ensure!(
        pair.a.sent.done(3)?.opcode == IBV_WC_SEND,
        "it completed as something else"
    );
    ensure!(
        pair.b.received.done(1)?.byte_len == 3000 && pair.b.bytes(0, 3000) == bytes,
        "other bytes arrived"
    );
    Ok(())
}

fn elements(bench: &Bench) -> Result<()> {
    let pair = pair(bench)?;
    let bytes = bench.pattern(3000, 1);
    pair.a.fill(0, &bytes);
    pair.b.expect(1, 4000, 4000)?;
    let calls = pair.a.qp.calls()?;
    calls.send(2, S)?;
    calls.set_sge_list(&[pair.a.mr.sge(0, 7), pair.a.mr.sge(7, 0), pair.a.mr.sge(7, 1500)])?;
    posted(calls.complete()?)?;
    pair.a.sent.done(2)?;
    let wc = pair.b.received.done(1)?;
    ensure!(wc.byte_len == 1507, "{} bytes of 1507", wc.byte_len);
    ensure!(pair.b.bytes(4000, 1507) == bytes[..1507], "other bytes arrived");
    Ok(())
}

fn gather(calls: &Calls<'_>, end: &End, at: usize, bytes: &[u8]) -> Result<()> {
    end.fill(at, bytes);
    calls.set_sge(end.mr.sge(at, bytes.len()))
}

fn with_immediate(bench: &Bench) -> Result<()> {
    let pair = pair(bench)?;
    pair.b.expect(1, 0, 64)?;
    pair.b.expect(2, 0, 64)?;
    pair.a.fill(0, b"immediate");
    let calls = pair.a.qp.calls()?;
    calls.send_imm(3, S, [1, 2, 3, 4])?;
    calls.write_imm(4, S, pair.b.mr.rkey(), pair.b.mr.at(100), [5, 6, 7, 8])?;
    calls.set_sge(pair.a.mr.sge(0, 9))?;
    posted(calls.complete()?)?;
    pair.a.sent.done(3)?;
    pair.a.sent.done(4)?;
    ensure!(
        immediate(&pair.b.received.done(1)?) == [1, 2, 3, 4],
        "other data with the SEND"
    );
    let wc = pair.b.received.done(2)?;
    ensure!(
        wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && immediate(&wc) == [5, 6, 7, 8],
        "other data with the WRITE"
    );
    ensure!(pair.b.bytes(100, 9) == b"immediate", "other bytes were written");
    Ok(())
}

fn write_and_read(bench: &Bench) -> Result<()> {
    let pair = pair(bench)?;
    let bytes = bench.pattern(2500, 1);
    pair.a.fill(0, &bytes);
    let calls = pair.a.qp.calls()?;
    calls.write(1, S, pair.b.mr.rkey(), pair.b.mr.at(11))?;
    calls.set_sge(pair.a.mr.sge(0, 2500))?;
    calls.read(2, S | IBV_SEND_FENCE, pair.b.mr.rkey(), pair.b.mr.at(11))?;
    calls.set_sge(pair.a.mr.sge(4000, 2500))?;
    posted(calls.complete()?)?;
    pair.a.sent.done(1)?;
    let wc = pair.a.sent.done(2)?;
    ensure!(
        wc.opcode == IBV_WC_RDMA_READ && wc.byte_len == 2500,
        "the READ: opcode {}, {} bytes",
        wc.opcode,
        wc.byte_len
    );
    ensure!(pair.b.bytes(11, 2500) == bytes, "other bytes were written");
    ensure!(pair.a.bytes(4000, 2500) == bytes, "other bytes were read");
    Ok(())
}

fn atomics(bench: &Bench) -> Result<()> {
    let pair = pair(bench)?;
    pair.b.mr.memory.set_word(8, 40);
    let target = (pair.b.mr.rkey(), pair.b.mr.at(8));
    let calls = pair.a.qp.calls()?;
    calls.fetch_add(1, S, target.0, target.1, 2)?;
    calls.set_sge(pair.a.mr.sge(0, 8))?;
    calls.compare_swap(2, S, target, 42, 7)?;
    calls.set_sge(pair.a.mr.sge(8, 8))?;
    posted(calls.complete()?)?;
    ensure!(
        pair.a.sent.done(1)?.opcode == IBV_WC_FETCH_ADD,
        "the first completed as something else"
    );
    ensure!(
        pair.a.sent.done(2)?.opcode == IBV_WC_COMP_SWAP,
        "the second completed as something else"
    );
    let found = (
        pair.a.mr.memory.word(0),
        pair.a.mr.memory.word(8),
        pair.b.mr.memory.word(8),
    );
    ensure!(found == (40, 42, 7), "{found:?} instead of 40, 42 and 7");
    Ok(())
}

fn inline(bench: &Bench) -> Result<()> {
    let pair = pair(bench)?;
    pair.b.expect(1, 0, 64)?;
    pair.b.expect(2, 100, 64)?;
    let calls = pair.a.qp.calls()?;
    calls.send(3, S)?;
    {
        let gone = b"one part".to_vec();
        calls.set_inline(&gone)?;
    }
    calls.send(4, S)?;
    calls.set_inline_list(&[b"three ", b"", b"parts"])?;
    posted(calls.complete()?)?;
    pair.a.sent.done(3)?;
    pair.a.sent.done(4)?;
    pair.b.received.done(1)?;
    ensure!(pair.b.received.done(2)?.byte_len == 11, "another length");
    ensure!(
        pair.b.bytes(0, 8) == b"one part" && pair.b.bytes(100, 11) == b"three parts",
        "other bytes arrived"
    );
    Ok(())
}

fn batch(bench: &Bench) -> Result<()> {
    let pair = pair(bench)?;
    for id in 0..8_u64 {
        pair.b.expect(id, id as usize * 8, 8)?;
    }
    let calls = pair.a.qp.calls()?;
    for id in 0..8_u64 {
        calls.send(id, if id % 4 == 3 { S } else { 0 })?;
        gather(&calls, &pair.a, id as usize * 8, &id.to_be_bytes())?;
    }
    posted(calls.complete()?)?;
    pair.a.sent.done(3)?;
    pair.a.sent.done(7)?;
    pair.a.sent.empty()?;
    for id in 0..8_u64 {
        pair.b.received.done(id)?;
        ensure!(
            pair.b.bytes(id as usize * 8, 8) == id.to_be_bytes(),
            "receive {id} got another message"
        );
    }
    Ok(())
}

fn abort(bench: &Bench) -> Result<()> {
    let pair = pair(bench)?;
    pair.b.expect(1, 0, 64)?;
    let calls = pair.a.qp.calls()?;
    calls.send(2, S)?;
    gather(&calls, &pair.a, 0, b"never")?;
    calls.abort()?;
    pair.a.sent.expect_nothing(bench.quiet)?;
    let calls = pair.a.qp.calls()?;
    calls.send(3, S)?;
    gather(&calls, &pair.a, 8, b"sent")?;
    posted(calls.complete()?)?;
    pair.a.sent.done(3)?;
    pair.b.received.done(1)?;
    ensure!(pair.b.bytes(0, 5) == b"sent\0", "other bytes arrived");
    Ok(())
}

fn nothing_before(bench: &Bench) -> Result<()> {
    let pair = pair(bench)?;
    pair.b.expect(1, 0, 64)?;
    let calls = pair.a.qp.calls()?;
    calls.send(2, S)?;
    gather(&calls, &pair.a, 0, b"later")?;
    pair.b.received.expect_nothing(bench.quiet)?;
    posted(calls.complete()?)?;
    pair.a.sent.done(2)?;
    pair.b.received.done(1)?;
    Ok(())
}

fn too_many(bench: &Bench) -> Result<()> {
    let pair = pair(bench)?;
    // A device may round up.
    let count = u64::from(pair.a.qp.setup.depth) * 3;
    pair.b.expect(1, 0, 64)?;
    let calls = pair.a.qp.calls()?;
    for id in 0..count {
        calls.send(id, S)?;
        gather(&calls, &pair.a, 0, b"x")?;
    }
    let result = calls.complete()?;
    ensure!(result != Errno(0), "{count} requests were taken");
    pair.a.sent.expect_nothing(bench.quiet)?;
    let calls = pair.a.qp.calls()?;
    calls.send(7, S)?;
    posted(calls.complete()?)?;
    pair.a.sent.done(7)?;
    ensure!(pair.b.received.done(1)?.byte_len == 0, "one of the batch arrived");
    Ok(())
}

fn in_init(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let (pd, cq) = (device.pd()?, device.cq(16)?);
    let qp = pd.qp_ex(&cq, &cq, &Setup::default(), 0, OPERATIONS)?;
    qp.bring_to(IBV_QPS_INIT)?;
    let calls = qp.calls()?;
    calls.send(1, S)?;
    ensure!(calls.complete()? != Errno(0), "it was accepted");
    Ok(())
}

fn in_err(bench: &Bench) -> Result<()> {
    let pair = pair(bench)?;
    ensure!(pair.a.qp.step(IBV_QPS_RTS, IBV_QPS_ERR) == Errno(0), "RTS → ERR");
    let calls = pair.a.qp.calls()?;
    calls.send(1, 0)?;
    calls.send(2, S)?;
    posted(calls.complete()?)?;
    pair.a.sent.wait_for(1, IBV_WC_WR_FLUSH_ERR)?;
    pair.a.sent.wait_for(2, IBV_WC_WR_FLUSH_ERR)?;
    Ok(())
}

fn only_requested_operations(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let (pd, cq) = (device.pd()?, device.cq(16)?);
    let qp = pd.qp_ex(&cq, &cq, &Setup::default(), 0, IBV_QP_EX_WITH_RDMA_WRITE)?;
    let found = qp.has_write_and_read()?;
    ensure!(found == (true, false), "WRITE: {}, READ: {}", found.0, found.1);
    Ok(())
}

fn list_too(bench: &Bench) -> Result<()> {
    let pair = pair(bench)?;
    pair.b.expect(1, 0, 64)?;
    pair.b.expect(2, 0, 64)?;
    pair.a.post(Send::new(IBV_WR_SEND).id(3).inline(b"by list"))?;
    let calls = pair.a.qp.calls()?;
    calls.send(4, S)?;
    posted(calls.complete()?)?;
    pair.a.sent.done(3)?;
    pair.a.sent.done(4)?;
    Ok(())
}

fn datagrams(bench: &Bench) -> Result<()> {
    let pair = pair_of(bench, IBV_QPT_UD, IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM)?;
    let device = pair.a.device();
    let ah = pair.a.pd.ah(device.address_of(device.gid()))?;
    pair.b.expect(1, 0, 64)?;
    pair.b.expect(2, 100, 64)?;
    let calls = pair.a.qp.calls()?;
    calls.send(3, S)?;
    calls.set_destination(&ah, pair.b.qp.qpn(), QKEY)?;
    gather(&calls, &pair.a, 0, b"one")?;
    calls.send_imm(4, S, [9, 9, 9, 1])?;
    calls.set_destination(&ah, pair.b.qp.qpn(), QKEY)?;
    gather(&calls, &pair.a, 8, b"two")?;
    posted(calls.complete()?)?;
    pair.a.sent.done(3)?;
    pair.a.sent.done(4)?;
    ensure!(
        pair.b.received.done(1)?.src_qp == pair.a.qp.qpn(),
        "from another sender"
    );
    ensure!(
        immediate(&pair.b.received.done(2)?) == [9, 9, 9, 1],
        "other immediate data"
    );
    ensure!(
        pair.b.bytes(40, 3) == b"one" && pair.b.bytes(140, 3) == b"two",
        "other bytes arrived"
    );
    Ok(())
}

fn unreliable(bench: &Bench) -> Result<()> {
    let pair = pair_of(bench, IBV_QPT_UC, IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE)?;
    pair.b.expect(1, 0, 64)?;
    let calls = pair.a.qp.calls()?;
    calls.write(2, S, pair.b.mr.rkey(), pair.b.mr.at(100))?;
    gather(&calls, &pair.a, 0, b"written")?;
    calls.send(3, S)?;
    gather(&calls, &pair.a, 8, b"sent")?;
    posted(calls.complete()?)?;
    pair.a.sent.done(2)?;
    pair.a.sent.done(3)?;
    pair.b.received.done(1)?;
    ensure!(
        pair.b.bytes(0, 4) == b"sent" && pair.b.bytes(100, 7) == b"written",
        "other bytes arrived"
    );
    Ok(())
}

fn windows(bench: &Bench) -> Result<()> {
    let needed = OPERATIONS | IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_SEND_WITH_INV;
    let pair = pair_of(bench, IBV_QPT_RC, needed)?;
    let mw = pair.a.pd.window(IBV_MW_TYPE_2)?;
    let region = pair.a.pd.register(1024, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND)?;
    let binding = Binding {
        mr: &region,
        offset: 0,
        len: 64,
        rights: IBV_ACCESS_REMOTE_READ,
    };
    let key = next_key(mw.rkey());
    let calls = pair.a.qp.calls()?;
    calls.bind(1, S, &mw, key, binding)?;
    posted(calls.complete()?)?;
    ensure!(
        pair.a.sent.done(1)?.opcode == IBV_WC_BIND_MW,
        "the binding completed as something else"
    );
    mw.bound_as(key);
    pair.b.post(
        Send::new(IBV_WR_RDMA_READ)
            .id(2)
            .sge(pair.b.mr.sge(0, 8))
            .at(region.at(0), key),
    )?;
    pair.b.sent.done(2)?;
    pair.b.expect(5, 0, 64)?;
    let calls = pair.a.qp.calls()?;
    calls.local_invalidate(3, S, key)?;
    posted(calls.complete()?)?;
    ensure!(
        pair.a.sent.done(3)?.opcode == IBV_WC_LOCAL_INV,
        "the invalidation completed as something else"
    );
    // A window of the peer, for the other direction.
    let theirs = pair.b.pd.window(IBV_MW_TYPE_2)?;
    let their_region = pair.b.pd.register(1024, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND)?;
    let their_key = next_key(theirs.rkey());
    let binding = Binding {
        mr: &their_region,
        ..binding
    };
    pair.b
        .post(Send::new(IBV_WR_BIND_MW).id(6).binding(&theirs, their_key, binding))?;
    pair.b.sent.done(6)?;
    theirs.bound_as(their_key);
    let calls = pair.a.qp.calls()?;
    calls.send_invalidate(7, S, their_key)?;
    posted(calls.complete()?)?;
    pair.a.sent.done(7)?;
    pair.b.received.done(5)?;
    let read = Send::new(IBV_WR_RDMA_READ)
        .id(8)
        .sge(pair.a.mr.sge(0, 8))
        .at(their_region.at(0), their_key);
    pair.a.post(read)?;
    pair.a.sent.wait_for(8, IBV_WC_REM_ACCESS_ERR)?;
    Ok(())
}
