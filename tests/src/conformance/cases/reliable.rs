//! RC: invalid requests, the limits of READs and atomics, and ordering.

use anyhow::{Result, ensure};
use doorbell_verbs_sys::*;

use crate::conformance::rig::{Bench, End, Errno, Posted, Recv, Send, Setup, named};
use crate::conformance::{Case, case};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case(
            "invalid/longer-than-receive",
            "9.9.3.1",
            "a message longer than its receive: local length error at the responder, invalid request at the requester",
            too_long,
        ),
        case(
            "invalid/atomic-unaligned",
            "9.4.5",
            "an atomic on an unaligned address is an invalid request",
            atomic_unaligned,
        ),
        case(
            "invalid/read-without-resources",
            "9.7.4.1.2",
            "a READ that the responder has no resources for is an invalid request",
            read_without_resources,
        ),
        case(
            "limit/one-read-at-a-time",
            "9.7.7.2.1",
            "max_rd_atomic 1: many READs and atomics posted at once all succeed",
            one_at_a_time,
        ),
        case(
            "limit/many-reads",
            "9.7.7.2.1",
            "as many READs as the responder has resources for, many times over",
            many_reads,
        ),
        case(
            "limit/atomics-are-executed-once",
            "9.4.5",
            "many atomics on one word, each executed once",
            atomics_once,
        ),
        case(
            "rtr/receives-before-rts",
            "10.3.1.3",
            "a queue pair in RTR receives and responds",
            rtr_receives,
        ),
        case(
            "init/receives-are-kept",
            "10.3.1.2",
            "receives posted in INIT are used after RTR",
            init_receives,
        ),
        case(
            "order/write-then-send",
            "9.5",
            "a SEND behind WRITEs arrives after their data",
            write_then_send,
        ),
        case(
            "order/write-then-read",
            "9.5",
            "a READ behind a WRITE of the same bytes returns the written data",
            write_then_read,
        ),
        case(
            "long/every-operation",
            "9.7.2",
            "WRITE, READ and SEND of many more packets than the window",
            long_messages,
        ),
        case(
            "invalid/short-answer-of-atomic",
            "10.8.2.2",
            "an atomic with less than 8 bytes for its result does not succeed, and writes nothing beyond them",
            short_answer,
        ),
        case(
            "order/both-directions",
            "9.5",
            "two queue pairs that send to each other at once lose nothing",
            both_directions,
        ),
    ]
}

fn nothing(id: u64) -> Send {
    Send::new(IBV_WR_SEND).id(id)
}

fn too_long(bench: &Bench) -> Result<()> {
    for len in [65, 5000] {
        let pair = bench.pair(&Setup::default())?;
        pair.a.fill(0, &vec![9; len]);
        pair.b.expect(2, 0, 64)?;
        pair.a.post(nothing(1).sge(pair.a.mr.sge(0, len)))?;
        pair.a.sent.wait_for(1, IBV_WC_REM_INV_REQ_ERR)?;
        pair.b.received.wait_for(2, IBV_WC_LOC_LEN_ERR)?;
        ensure!(pair.b.bytes(64, 64) == [0; 64], "bytes behind the receive changed");
        ensure!(pair.b.qp.state()? == IBV_QPS_ERR, "the receiver is not in ERR");
    }
    Ok(())
}

fn atomic_unaligned(bench: &Bench) -> Result<()> {
    for opcode in [IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP] {
        let pair = bench.pair(&Setup::default())?;
        let atomic = Send::new(opcode)
            .id(1)
            .sge(pair.a.mr.sge(0, 8))
            .atomic(pair.b.mr.at(4), pair.b.mr.rkey(), 0, 1);
        // Either the library or the peer may detect it.
        match pair.a.qp.post_one(atomic) {
            Errno(0) => {
                pair.a.sent.wait_for(1, IBV_WC_REM_INV_REQ_ERR)?;
            }
            refusal => ensure!(refusal == Errno(libc::EINVAL), "{refusal}"),
        }
        ensure!(pair.b.bytes(0, 16) == [0; 16], "the memory changed");
    }
    Ok(())
}

fn read_without_resources(bench: &Bench) -> Result<()> {
    let without = Setup {
        dest_rd_atomic: 0,
        ..Setup::default()
    };
    let pair = bench.pair_of(&Setup::default(), &without)?;
    pair.a.post(
        Send::new(IBV_WR_RDMA_READ)
            .id(1)
            .sge(pair.a.mr.sge(0, 8))
            .at(pair.b.mr.at(0), pair.b.mr.rkey()),
    )?;
    pair.a.sent.wait_for(1, IBV_WC_REM_INV_REQ_ERR)?;
    Ok(())
}

/// Posts as many READs and atomics as fit, several times over.
fn flood(bench: &Bench, rd_atomic: u8) -> Result<()> {
    let pair = bench.pair(&Setup {
        rd_atomic,
        dest_rd_atomic: rd_atomic,
        ..Setup::default()
    })?;
    let bytes = bench.pattern(3000, 1);
    pair.b.fill(64, &bytes);
    for round in 0..4 {
        let sends: Vec<Send> = (0..12)
            .map(|id| {
                if id % 4 == 3 {
                    return Send::new(IBV_WR_ATOMIC_FETCH_AND_ADD)
                        .id(id)
                        .sge(pair.a.mr.sge(0, 8))
                        .atomic(pair.b.mr.at(0), pair.b.mr.rkey(), 1, 0);
                }
                Send::new(IBV_WR_RDMA_READ)
                    .id(id)
                    .sge(pair.a.mr.sge(64, 3000))
                    .at(pair.b.mr.at(64), pair.b.mr.rkey())
            })
            .collect();
        ensure!(pair.a.qp.post(&sends) == Posted::All, "refused");
        for id in 0..12 {
            pair.a.sent.done(id)?;
        }
        ensure!(pair.a.bytes(64, 3000) == bytes, "other bytes came");
        let sum = pair.b.mr.memory.word(0);
        ensure!(
            sum == 3 * (round + 1),
            "{sum} atomics were executed of {}",
            3 * (round + 1)
        );
    }
    Ok(())
}

fn one_at_a_time(bench: &Bench) -> Result<()> {
    flood(bench, 1)
}

fn many_reads(bench: &Bench) -> Result<()> {
    let most = bench.open()?.query()?.max_qp_rd_atom;
    flood(bench, most.min(16) as u8)
}

fn atomics_once(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    for round in 0..8 {
        let sends: Vec<Send> = (0..16)
            .map(|id| {
                Send::new(IBV_WR_ATOMIC_FETCH_AND_ADD)
                    .id(id)
                    .sge(pair.a.mr.sge(8 * id as usize, 8))
                    .atomic(pair.b.mr.at(0), pair.b.mr.rkey(), 1, 0)
            })
            .collect();
        ensure!(pair.a.qp.post(&sends) == Posted::All, "refused");
        for id in 0..16 {
            pair.a.sent.done(id)?;
            let found = pair.a.mr.memory.word(8 * id as usize);
            ensure!(found == round * 16 + id, "atomic {id} of round {round} found {found}");
        }
    }
    Ok(())
}

fn rtr_receives(bench: &Bench) -> Result<()> {
    let pair = bench.unconnected_pair(&Setup::default(), &Setup::default())?;
    pair.a.qp.bring_to(IBV_QPS_RTS)?;
    pair.b.qp.bring_to(IBV_QPS_RTR)?;
    pair.b.expect(2, 0, 8)?;
    pair.a.post(nothing(1).inline(b"early"))?;
    pair.a.sent.done(1)?;
    pair.b.received.done(2)?;
    ensure!(pair.b.bytes(0, 5) == b"early", "other bytes arrived");
    ensure!(pair.b.qp.state()? == IBV_QPS_RTR, "the state changed by itself");
    Ok(())
}

fn init_receives(bench: &Bench) -> Result<()> {
    let pair = bench.unconnected_pair(&Setup::default(), &Setup::default())?;
    pair.a.qp.bring_to(IBV_QPS_RTS)?;
    pair.b.qp.bring_to(IBV_QPS_INIT)?;
    for id in 0..3 {
        pair.b.expect(id, 0, 8)?;
    }
    pair.b.qp.modify_through(IBV_QPS_INIT, &[IBV_QPS_RTR, IBV_QPS_RTS])?;
    for id in 0..3 {
        pair.a.post(nothing(id))?;
        pair.a.sent.done(id)?;
        pair.b.received.done(id)?;
    }
    Ok(())
}

fn write_then_send(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    for round in 0..8_u32 {
        let bytes = bench.pattern(6000, round);
        pair.a.fill(0, &bytes);
        pair.b.expect(1, 8000, 0)?;
        let target = |at: usize| (pair.b.mr.at(at), pair.b.mr.rkey());
        let write = |id: u64, from: usize| {
            let (addr, key) = target(from);
            Send::new(IBV_WR_RDMA_WRITE)
                .id(id)
                .unsignaled()
                .sge(pair.a.mr.sge(from, 3000))
                .at(addr, key)
        };
        ensure!(
            pair.a.qp.post(&[write(1, 0), write(2, 3000), nothing(3)]) == Posted::All,
            "refused"
        );
        pair.b.received.done(1)?;
        ensure!(pair.b.bytes(0, 6000) == bytes, "not all was there in round {round}");
        pair.a.sent.done(3)?;
    }
    Ok(())
}

fn both_directions(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let ends: [&End; 2] = [&pair.a, &pair.b];
    for round in 0..5 {
        for end in ends {
            for id in 0..8 {
                ensure!(
                    end.qp.receive_one(Recv::new(id).sge(end.mr.sge(8000, 3000))) == Errno(0),
                    "a receive was refused"
                );
            }
        }
        for end in ends {
            let sends: Vec<Send> = (0..8).map(|id| nothing(100 + id).sge(end.mr.sge(0, 2500))).collect();
            ensure!(end.qp.post(&sends) == Posted::All, "refused");
        }
        for end in ends {
            for id in 0..8 {
                let wc = end.sent.wait()?;
                ensure!(
                    (wc.wr_id, wc.status) == (100 + id, 0),
                    "round {round}: {}",
                    named(wc.status)
                );
                end.received.done(id)?;
            }
        }
    }
    Ok(())
}

fn write_then_read(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    for round in 0..8_u32 {
        let bytes = bench.pattern(3000, round);
        pair.a.fill(0, &bytes);
        let (at, key) = (pair.b.mr.at(0), pair.b.mr.rkey());
        let posted = pair.a.qp.post(&[
            Send::new(IBV_WR_RDMA_WRITE)
                .id(1)
                .unsignaled()
                .sge(pair.a.mr.sge(0, 3000))
                .at(at, key),
            Send::new(IBV_WR_RDMA_READ)
                .id(2)
                .sge(pair.a.mr.sge(8000, 3000))
                .at(at, key),
        ]);
        ensure!(posted == Posted::All, "{posted:?}");
        pair.a.sent.done(2)?;
        ensure!(
            pair.a.bytes(8000, 3000) == bytes,
            "round {round} read what was there before"
        );
    }
    Ok(())
}

fn long_messages(bench: &Bench) -> Result<()> {
    const LEN: usize = 300_000;
    let pair = bench.pair(&Setup {
        bytes: 2 * LEN,
        ..Setup::default()
    })?;
    let bytes = bench.pattern(LEN, 1);
    pair.a.fill(0, &bytes);
    let (at, key) = (pair.b.mr.at(0), pair.b.mr.rkey());
    pair.a.post(
        Send::new(IBV_WR_RDMA_WRITE)
            .id(1)
            .sge(pair.a.mr.sge(0, LEN))
            .at(at, key),
    )?;
    pair.a.sent.done(1)?;
    ensure!(pair.b.bytes(0, LEN) == bytes, "other bytes were written");
    pair.a.post(
        Send::new(IBV_WR_RDMA_READ)
            .id(2)
            .sge(pair.a.mr.sge(LEN, LEN))
            .at(at, key),
    )?;
    pair.a.sent.done(2)?;
    ensure!(pair.a.bytes(LEN, LEN) == bytes, "other bytes were read");
    pair.b.expect(3, LEN, LEN)?;
    pair.a.post(nothing(4).sge(pair.a.mr.sge(0, LEN)))?;
    pair.a.sent.done(4)?;
    pair.b.received.done(3)?;
    ensure!(pair.b.bytes(LEN, LEN) == bytes, "other bytes arrived");
    Ok(())
}

fn short_answer(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    pair.b.fill(0, &[0x55; 8]);
    let atomic = Send::new(IBV_WR_ATOMIC_FETCH_AND_ADD)
        .id(1)
        .sge(pair.a.mr.sge(0, 4))
        .atomic(pair.b.mr.at(0), pair.b.mr.rkey(), 1, 0);
    if pair.a.qp.post_one(atomic) == Errno(0) {
        let wc = pair.a.sent.wait()?;
        ensure!(wc.status != IBV_WC_SUCCESS, "it succeeded");
    }
    ensure!(pair.a.bytes(4, 8) == [0; 8], "bytes behind the element changed");
    Ok(())
}
