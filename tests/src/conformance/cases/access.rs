//! Access checks of remote and local memory: rights, bounds, keys and protection domains.

use anyhow::{Context, Result, ensure};
use doorbell_verbs_sys::*;

use crate::conformance::rig::states::transport_name;
use crate::conformance::rig::{ALL_RIGHTS, Bench, End, Memory, Mr, Pair, Recv, Send, Setup};
use crate::conformance::{Case, case};

#[derive(Clone, Copy)]
struct Operation {
    name: &'static str,
    opcode: ibv_wr_opcode,
    right: u32,
}

const OPERATIONS: [Operation; 5] = [
    Operation {
        name: "write",
        opcode: IBV_WR_RDMA_WRITE,
        right: IBV_ACCESS_REMOTE_WRITE,
    },
    Operation {
        name: "write-imm",
        opcode: IBV_WR_RDMA_WRITE_WITH_IMM,
        right: IBV_ACCESS_REMOTE_WRITE,
    },
    Operation {
        name: "read",
        opcode: IBV_WR_RDMA_READ,
        right: IBV_ACCESS_REMOTE_READ,
    },
    Operation {
        name: "compare-swap",
        opcode: IBV_WR_ATOMIC_CMP_AND_SWP,
        right: IBV_ACCESS_REMOTE_ATOMIC,
    },
    Operation {
        name: "fetch-add",
        opcode: IBV_WR_ATOMIC_FETCH_AND_ADD,
        right: IBV_ACCESS_REMOTE_ATOMIC,
    },
];

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for operation in OPERATIONS {
        let name = operation.name;
        cases.extend([
            case(
                &format!("access/{name}-allowed"),
                "10.6.3.1",
                "succeeds with only its own right, of region and queue pair",
                move |bench| allowed(bench, operation),
            ),
            case(
                &format!("access/{name}-not-by-region"),
                "9.7.4.1.5",
                "without the region's right: remote access error, memory unchanged",
                move |bench| denied(bench, operation),
            ),
            case(
                &format!("access/{name}-not-by-queue-pair"),
                "9.7.4.1.4",
                "without the queue pair's right: invalid request, memory unchanged",
                move |bench| unsupported(bench, operation),
            ),
            case(
                &format!("access/{name}-unknown-key"),
                "9.7.4.1.5",
                "an unknown rkey: remote access error",
                move |bench| {
                    bad_target(bench, operation, |pair| {
                        (pair.b.mr.at(0), pair.b.mr.rkey() ^ 0x0055_0000)
                    })
                },
            ),
            case(
                &format!("access/{name}-beyond-the-end"),
                "9.7.4.1.5",
                "some bytes beyond the region: remote access error, memory unchanged",
                move |bench| {
                    bad_target(bench, operation, |pair| {
                        (pair.b.mr.at(pair.b.mr.length() - 4), pair.b.mr.rkey())
                    })
                },
            ),
            case(
                &format!("access/{name}-around-zero"),
                "9.7.4.1.5",
                "an address whose range wraps around zero: remote access error",
                move |bench| bad_target(bench, operation, |pair| (0_u64.wrapping_sub(8), pair.b.mr.rkey())),
            ),
            case(
                &format!("access/{name}-before-the-start"),
                "9.7.4.1.5",
                "before the region's start: remote access error, memory unchanged",
                move |bench| bad_target(bench, operation, |pair| (pair.b.mr.at(0) - 8, pair.b.mr.rkey())),
            ),
            case(
                &format!("access/{name}-other-domain"),
                "10.2.2",
                "a region of another protection domain: remote access error",
                move |bench| other_domain(bench, operation),
            ),
            case(
                &format!("access/{name}-deregistered"),
                "10.6.5",
                "a deregistered region: remote access error",
                move |bench| deregistered(bench, operation),
            ),
        ]);
    }
    for transport in [IBV_QPT_RC, IBV_QPT_UC] {
        for source in SOURCES {
            let name = format!("local/{}-of-{}", source.name, transport_name(transport));
            cases.push(case(
                &name,
                "10.6.3.2",
                "a send from this memory completes with a local protection error, and nothing is sent",
                move |bench| local_source(bench, transport, source),
            ));
        }
    }
    cases.extend([
        case(
            "local/read-into-read-only",
            "10.6.3.1",
            "a READ into memory without local write fails locally, memory unchanged",
            read_into_read_only,
        ),
        case(
            "local/receive-into-read-only",
            "10.6.3.1",
            "a receive into memory without local write fails at both ends, memory unchanged",
            receive_into_read_only,
        ),
        case(
            "local/receive-with-unknown-key",
            "9.9.3.1",
            "a receive with an unknown lkey fails at both ends",
            receive_with_unknown_key,
        ),
        case(
            "local/send-from-read-only",
            "10.6.3.1",
            "memory without any right can be sent from",
            send_from_read_only,
        ),
        case(
            "access/zero-length-needs-no-key",
            "9.4.3",
            "zero-length WRITE and READ succeed with any key and address",
            zero_length,
        ),
        case(
            "access/part-of-a-long-write",
            "9.7.4.1.5",
            "a multi-packet WRITE that ends beyond the region changes nothing",
            long_write,
        ),
        case(
            "access/part-of-a-long-read",
            "9.7.4.1.5",
            "a multi-packet READ that ends beyond the region returns nothing",
            long_read,
        ),
        case(
            "access/change-in-rts",
            "11.2.5.2",
            "rights removed from the queue pair in RTS are no longer granted",
            change_in_rts,
        ),
    ]);
    cases
}

#[derive(Clone, Copy)]
struct Source {
    name: &'static str,
    sge: fn(&End) -> Result<Found>,
}

/// An element, and a region to be kept until the case ends.
type Found = (ibv_sge, Option<Mr>);

const SOURCES: [Source; 4] = [
    Source {
        name: "unknown-key",
        sge: |end| {
            let mut sge = end.mr.sge(0, 8);
            sge.lkey ^= 0x0055_0000;
            Ok((sge, None))
        },
    },
    Source {
        name: "beyond-the-end",
        sge: |end| Ok((end.mr.sge(end.mr.length() - 7, 8), None)),
    },
    Source {
        name: "deregistered",
        sge: |end| {
            let region = end.pd.register(64, ALL_RIGHTS)?;
            let sge = region.sge(0, 8);
            ensure!(region.deregister().0 == 0, "the region cannot be deregistered");
            Ok((sge, None))
        },
    },
    Source {
        name: "other-domain",
        sge: |end| {
            let region = end.device().pd()?.register(64, ALL_RIGHTS)?;
            Ok((region.sge(0, 8), Some(region)))
        },
    },
];

fn request(pair: &Pair, operation: Operation, addr: u64, rkey: u32) -> Send {
    let send = Send::new(operation.opcode).id(1).sge(pair.a.mr.sge(0, 8));
    if operation.right == IBV_ACCESS_REMOTE_ATOMIC {
        send.atomic(addr, rkey, 0, 77)
    } else {
        send.at(addr, rkey)
    }
}

fn allowed(bench: &Bench, operation: Operation) -> Result<()> {
    let target = Setup {
        access: operation.right,
        rights: IBV_ACCESS_LOCAL_WRITE | operation.right,
        ..Setup::default()
    };
    let pair = bench.pair_of(&Setup::default(), &target)?;
    pair.b.expect(2, 64, 8)?;
    pair.a
        .post(request(&pair, operation, pair.b.mr.at(0), pair.b.mr.rkey()))?;
    pair.a.sent.done(1)?;
    Ok(())
}

fn denied(bench: &Bench, operation: Operation) -> Result<()> {
    let target = Setup {
        rights: ALL_RIGHTS & !operation.right,
        ..Setup::default()
    };
    let pair = bench.pair_of(&Setup::default(), &target)?;
    refused(bench, &pair, operation, pair.b.mr.at(0), pair.b.mr.rkey())
}

/// A queue pair without the right does not support it: this is checked before the memory.
fn unsupported(bench: &Bench, operation: Operation) -> Result<()> {
    let target = Setup {
        access: ALL_RIGHTS & !operation.right,
        ..Setup::default()
    };
    let pair = bench.pair_of(&Setup::default(), &target)?;
    fails(
        bench,
        &pair,
        operation,
        (pair.b.mr.at(0), pair.b.mr.rkey()),
        IBV_WC_REM_INV_REQ_ERR,
    )
}

fn bad_target(bench: &Bench, operation: Operation, target: fn(&Pair) -> (u64, u32)) -> Result<()> {
    // No multiple of 8, so that an aligned word can cross its end.
    let odd = Setup {
        bytes: 1020,
        ..Setup::default()
    };
    let pair = bench.pair_of(&Setup::default(), &odd)?;
    let (addr, rkey) = target(&pair);
    refused(bench, &pair, operation, addr, rkey)
}

fn refused(bench: &Bench, pair: &Pair, operation: Operation, addr: u64, rkey: u32) -> Result<()> {
    fails(bench, pair, operation, (addr, rkey), IBV_WC_REM_ACCESS_ERR)
}

/// Nothing changes at either end, and both queue pairs move to ERR.
fn fails(bench: &Bench, pair: &Pair, operation: Operation, target: (u64, u32), status: ibv_wc_status) -> Result<()> {
    let before = bench.pattern(pair.b.mr.length(), 9);
    pair.b.fill(0, &before);
    pair.b.expect(2, 64, 8)?;
    pair.a.fill(0, &[0xaa; 8]);
    pair.a.post(request(pair, operation, target.0, target.1))?;
    pair.a.sent.wait_for(1, status)?;
    ensure!(pair.b.bytes(0, before.len()) == before, "the peer's memory changed");
    ensure!(pair.a.bytes(0, 8) == [0xaa; 8], "our memory changed");
    ensure!(pair.a.qp.state()? == IBV_QPS_ERR, "the requester is not in ERR");
    // The responder's receive is flushed, as it is in ERR.
    let wc = pair.b.received.wait()?;
    ensure!(wc.status != IBV_WC_SUCCESS, "the responder's receive was used");
    ensure!(pair.b.qp.state()? == IBV_QPS_ERR, "the responder is not in ERR");
    Ok(())
}

fn other_domain(bench: &Bench, operation: Operation) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let region = pair.b.device().pd()?.register(64, ALL_RIGHTS)?;
    refused(bench, &pair, operation, region.at(0), region.rkey())?;
    ensure!(region.memory.bytes(0..64) == [0; 64], "the region changed");
    Ok(())
}

fn deregistered(bench: &Bench, operation: Operation) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let memory = Memory::new(64);
    let region = pair.b.pd.register_part(&memory, 0..64, ALL_RIGHTS)?;
    let (addr, rkey) = (region.at(0), region.rkey());
    ensure!(region.deregister().0 == 0, "the region cannot be deregistered");
    refused(bench, &pair, operation, addr, rkey)?;
    ensure!(memory.bytes(0..64) == [0; 64], "the memory changed");
    Ok(())
}

fn local_source(bench: &Bench, transport: ibv_qp_type, source: Source) -> Result<()> {
    let pair = bench.pair(&Setup::of(transport))?;
    pair.b.expect(2, 0, 64)?;
    let (bad, _kept) = (source.sge)(&pair.a)?;
    pair.a.post(Send::new(IBV_WR_SEND).id(1).sge(bad))?;
    pair.a.sent.wait_for(1, IBV_WC_LOC_PROT_ERR)?;
    pair.b.received.expect_nothing(bench.quiet)?;
    let state = pair.a.qp.state()?;
    let expected = if transport == IBV_QPT_RC {
        IBV_QPS_ERR
    } else {
        IBV_QPS_SQE
    };
    ensure!(state == expected, "the state is {state} instead of {expected}");
    Ok(())
}

fn read_into_read_only(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let region = pair.a.pd.register(64, 0)?;
    pair.b.fill(0, &[1; 8]);
    let read = Send::new(IBV_WR_RDMA_READ)
        .id(1)
        .sge(region.sge(0, 8))
        .at(pair.b.mr.at(0), pair.b.mr.rkey());
    pair.a.post(read)?;
    pair.a.sent.wait_for(1, IBV_WC_LOC_PROT_ERR)?;
    ensure!(region.memory.bytes(0..64) == [0; 64], "the memory changed");
    ensure!(pair.a.qp.state()? == IBV_QPS_ERR, "the requester is not in ERR");
    Ok(())
}

/// A SEND into a receive that the responder's own memory does not allow.
fn bad_receive(pair: &Pair, receive: ibv_sge) -> Result<()> {
    ensure!(
        pair.b.qp.receive_one(Recv::new(2).sge(receive)).0 == 0,
        "the receive was refused at once"
    );
    pair.a.post(Send::new(IBV_WR_SEND).id(1).sge(pair.a.mr.sge(0, 8)))?;
    pair.a.sent.wait_for(1, IBV_WC_REM_OP_ERR).context("at the sender")?;
    pair.b
        .received
        .wait_for(2, IBV_WC_LOC_PROT_ERR)
        .context("at the receiver")?;
    ensure!(pair.b.qp.state()? == IBV_QPS_ERR, "the receiver is not in ERR");
    Ok(())
}

fn receive_into_read_only(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let region = pair.b.pd.register(64, 0)?;
    pair.a.fill(0, &[1; 8]);
    bad_receive(&pair, region.sge(0, 8))?;
    ensure!(region.memory.bytes(0..64) == [0; 64], "the memory changed");
    Ok(())
}

fn receive_with_unknown_key(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let mut sge = pair.b.mr.sge(0, 8);
    sge.lkey ^= 0x0055_0000;
    bad_receive(&pair, sge)
}

fn send_from_read_only(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let region = pair.a.pd.register(64, 0)?;
    region.memory.fill(0, b"readable");
    pair.b.expect(2, 0, 64)?;
    pair.a.post(Send::new(IBV_WR_SEND).id(1).sge(region.sge(0, 8)))?;
    pair.a.sent.done(1)?;
    pair.b.received.done(2)?;
    ensure!(pair.b.bytes(0, 8) == b"readable", "other bytes arrived");
    Ok(())
}

fn zero_length(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    for opcode in [IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ] {
        for (addr, rkey) in [(0, 0), (u64::MAX, pair.b.mr.rkey()), (pair.b.mr.at(0), 0x00ab_cd00)] {
            pair.a.post(Send::new(opcode).id(1).at(addr, rkey))?;
            let wc = pair
                .a
                .sent
                .done(1)
                .with_context(|| format!("opcode {opcode} at {addr:#x}, key {rkey:#x}"))?;
            ensure!(
                opcode == IBV_WR_RDMA_WRITE || wc.byte_len == 0,
                "a READ of {} bytes",
                wc.byte_len
            );
        }
    }
    Ok(())
}

const LONG: usize = 8 * 1024;

fn long_write(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    pair.a.fill(0, &bench.pattern(LONG, 1));
    let start = pair.b.mr.length() - LONG + 1;
    let write = Send::new(IBV_WR_RDMA_WRITE)
        .id(1)
        .sge(pair.a.mr.sge(0, LONG))
        .at(pair.b.mr.at(start), pair.b.mr.rkey());
    pair.a.post(write)?;
    pair.a.sent.wait_for(1, IBV_WC_REM_ACCESS_ERR)?;
    ensure!(
        pair.b.bytes(start, LONG - 1).iter().all(|&byte| byte == 0),
        "part of it was written"
    );
    Ok(())
}

fn long_read(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    pair.b.fill(0, &bench.pattern(pair.b.mr.length(), 1));
    let start = pair.b.mr.length() - LONG + 1;
    let read = Send::new(IBV_WR_RDMA_READ)
        .id(1)
        .sge(pair.a.mr.sge(0, LONG))
        .at(pair.b.mr.at(start), pair.b.mr.rkey());
    pair.a.post(read)?;
    pair.a.sent.wait_for(1, IBV_WC_REM_ACCESS_ERR)?;
    ensure!(
        pair.a.bytes(0, LONG).iter().all(|&byte| byte == 0),
        "part of it arrived"
    );
    Ok(())
}

fn change_in_rts(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let write = || {
        Send::new(IBV_WR_RDMA_WRITE)
            .id(1)
            .sge(pair.a.mr.sge(0, 8))
            .at(pair.b.mr.at(0), pair.b.mr.rkey())
    };
    pair.a.post(write())?;
    pair.a.sent.done(1)?;
    let mut attr = pair.b.qp.attr();
    attr.qp_state = IBV_QPS_RTS;
    attr.qp_access_flags = IBV_ACCESS_REMOTE_READ;
    let result = pair.b.qp.modify(&attr, IBV_QP_STATE | IBV_QP_ACCESS_FLAGS);
    ensure!(result.0 == 0, "the change: {result}");
    pair.a.fill(0, &[3; 8]);
    pair.a.post(write())?;
    let wc = pair.a.sent.wait()?;
    ensure!(wc.status != IBV_WC_SUCCESS, "a WRITE was taken");
    ensure!(pair.b.bytes(0, 8) == [0; 8], "the memory changed");
    Ok(())
}
