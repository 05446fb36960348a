//! Messages of every operation and of every boundary length, and the contents of their completions.

use anyhow::{Result, ensure};
use doorbell_verbs_sys::*;

use crate::conformance::rig::{Bench, Pair, Recv, Send, Setup, states::transport_name};
use crate::conformance::{Case, case};

/// Immediate data in network byte order.
const IMM: [u8; 4] = [0x01, 0x23, 0x45, 0x67];

pub(super) fn cases() -> Vec<Case> {
    let mut cases = vec![
        case(
            "read/lengths",
            "9.4.4",
            "a READ of every packet boundary length returns every byte",
            read_lengths,
        ),
        case(
            "atomic/fetch-add",
            "9.4.5",
            "FETCH & ADD adds modulo 2^64 and returns the old value",
            fetch_add,
        ),
        case(
            "atomic/compare-swap",
            "9.4.5",
            "COMPARE & SWAP stores only where the comparison holds, and returns the old value",
            compare_swap,
        ),
        case(
            "gather/odd-sizes",
            "10.7.3.1",
            "a message is gathered from SGEs of odd sizes, empty ones too",
            gather,
        ),
        case(
            "scatter/odd-sizes",
            "10.7.3.1",
            "a message is scattered over SGEs of odd sizes, empty ones too",
            scatter,
        ),
        case(
            "scatter/read",
            "10.7.3.1",
            "a READ is scattered over SGEs of odd sizes",
            scatter_read,
        ),
        case(
            "scatter/shorter-message",
            "10.7.3.2",
            "bytes of a receive beyond the message are unchanged",
            shorter_message,
        ),
        case(
            "loopback/own-queue-pair",
            "17.2.2",
            "a queue pair can be connected to itself",
            own_queue_pair,
        ),
    ];
    for transport in [IBV_QPT_RC, IBV_QPT_UC] {
        let name = transport_name(transport);
        cases.extend([
            case(
                &format!("send/lengths-{name}"),
                "9.4.1",
                "a SEND of every packet boundary length delivers every byte, and its length",
                move |bench| send_lengths(bench, transport),
            ),
            case(
                &format!("write/lengths-{name}"),
                "9.4.3",
                "a WRITE of every packet boundary length writes these bytes and no others",
                move |bench| write_lengths(bench, transport),
            ),
            case(
                &format!("send/immediate-{name}"),
                "9.2.8",
                "immediate data arrive byte for byte, flagged, with a SEND of any length",
                move |bench| send_immediate(bench, transport),
            ),
            case(
                &format!("write/immediate-{name}"),
                "9.4.3",
                "a WRITE with immediate data consumes a receive, does not write its memory and reports the length",
                move |bench| write_immediate(bench, transport),
            ),
            case(
                &format!("send/every-mtu-{name}"),
                "9.4.1",
                "messages pass under every path MTU up to the port's",
                move |bench| every_mtu(bench, transport),
            ),
            case(
                &format!("psn/wrap-{name}"),
                "9.2.5",
                "PSNs wrap from 2^24 - 1 to 0 within a message",
                move |bench| psn_wrap(bench, transport),
            ),
        ]);
    }
    cases.push(case(
        "psn/wrap-of-read-and-atomic",
        "9.7.2",
        "a READ's responses and an atomic wrap like any packet",
        psn_wrap_of_read,
    ));
    cases
}

/// Lengths around the packet boundaries of this MTU.
fn lengths(mtu: usize) -> [usize; 10] {
    [
        0,
        1,
        3,
        mtu - 1,
        mtu,
        mtu + 1,
        2 * mtu - 1,
        2 * mtu,
        5 * mtu,
        5 * mtu + 2,
    ]
}

fn send_lengths(bench: &Bench, transport: ibv_qp_type) -> Result<()> {
    let pair = bench.pair(&Setup::of(transport))?;
    for len in lengths(1024) {
        send(bench, &pair, len)?;
    }
    Ok(())
}

fn send(bench: &Bench, pair: &Pair, len: usize) -> Result<()> {
    let bytes = bench.pattern(len, len as u32);
    pair.a.fill(0, &bytes);
    pair.b.fill(0, &vec![0; len + 8]);
    pair.b.expect(7, 0, len + 8)?;
    pair.a.post(Send::new(IBV_WR_SEND).id(8).sge(pair.a.mr.sge(0, len)))?;
    let wc = pair.a.sent.done(8)?;
    ensure!(wc.opcode == IBV_WC_SEND, "the send completed as opcode {}", wc.opcode);
    ensure!(
        wc.qp_num == pair.a.qp.qpn(),
        "the send completed for queue pair {:#x}",
        wc.qp_num
    );
    let wc = pair.b.received.done(7)?;
    ensure!(
        wc.opcode == IBV_WC_RECV,
        "the receive completed as opcode {}",
        wc.opcode
    );
    ensure!(wc.byte_len as usize == len, "{} bytes arrived of {len}", wc.byte_len);
    ensure!(
        wc.qp_num == pair.b.qp.qpn(),
        "the receive completed for queue pair {:#x}",
        wc.qp_num
    );
    ensure!(wc.wc_flags & IBV_WC_WITH_IMM == 0, "there was immediate data");
    ensure!(pair.b.bytes(0, len) == bytes, "other bytes arrived than the {len} sent");
    ensure!(pair.b.bytes(len, 8) == [0; 8], "bytes behind the message changed");
    Ok(())
}

fn write_lengths(bench: &Bench, transport: ibv_qp_type) -> Result<()> {
    let pair = bench.pair(&Setup::of(transport))?;
    // An unaligned offset.
    let at = 13;
    for len in lengths(1024) {
        let bytes = bench.pattern(len, len as u32);
        pair.a.fill(0, &bytes);
        pair.b.fill(0, &vec![0; len + 32]);
        let write = Send::new(IBV_WR_RDMA_WRITE)
            .id(1)
            .sge(pair.a.mr.sge(0, len))
            .at(pair.b.mr.at(at), pair.b.mr.rkey());
        pair.a.post(write)?;
        let wc = pair.a.sent.done(1)?;
        ensure!(wc.opcode == IBV_WC_RDMA_WRITE, "it completed as opcode {}", wc.opcode);
        // Over UC the request completes when it was sent. A SEND behind it arrives after it.
        pair.b.expect(2, 0, 0)?;
        pair.a.post(Send::new(IBV_WR_SEND).id(3))?;
        pair.a.sent.done(3)?;
        pair.b.received.done(2)?;
        ensure!(
            pair.b.bytes(at, len) == bytes,
            "other bytes arrived than the {len} written"
        );
        ensure!(pair.b.bytes(0, at) == [0; 13], "bytes before the target changed");
        ensure!(pair.b.bytes(at + len, 8) == [0; 8], "bytes behind the target changed");
    }
    Ok(())
}

fn send_immediate(bench: &Bench, transport: ibv_qp_type) -> Result<()> {
    let pair = bench.pair(&Setup::of(transport))?;
    for len in [0, 1, 1024, 1025] {
        pair.b.expect(1, 0, 2048)?;
        let send = Send::new(IBV_WR_SEND_WITH_IMM)
            .id(2)
            .imm(IMM)
            .sge(pair.a.mr.sge(0, len));
        pair.a.post(send)?;
        ensure!(
            pair.a.sent.done(2)?.opcode == IBV_WC_SEND,
            "the send completed as something else"
        );
        let wc = pair.b.received.done(1)?;
        immediate(&wc)?;
        ensure!(
            wc.opcode == IBV_WC_RECV && wc.byte_len as usize == len,
            "with {len} bytes: {}, {}",
            wc.opcode,
            wc.byte_len
        );
    }
    Ok(())
}

fn immediate(wc: &ibv_wc) -> Result<()> {
    ensure!(wc.wc_flags & IBV_WC_WITH_IMM != 0, "no immediate data are flagged");
    let imm = crate::conformance::rig::immediate(wc);
    ensure!(imm == IMM, "{imm:02x?} arrived instead of {IMM:02x?}");
    Ok(())
}

fn write_immediate(bench: &Bench, transport: ibv_qp_type) -> Result<()> {
    let pair = bench.pair(&Setup::of(transport))?;
    for len in [0, 1, 1024, 3000] {
        let bytes = bench.pattern(len, len as u32);
        pair.a.fill(0, &bytes);
        pair.b.fill(8000, &[0; 64]);
        pair.b.expect(1, 8000, 64)?;
        let write = Send::new(IBV_WR_RDMA_WRITE_WITH_IMM)
            .id(2)
            .imm(IMM)
            .sge(pair.a.mr.sge(0, len))
            .at(pair.b.mr.at(0), pair.b.mr.rkey());
        pair.a.post(write)?;
        ensure!(
            pair.a.sent.done(2)?.opcode == IBV_WC_RDMA_WRITE,
            "the WRITE completed as something else"
        );
        let wc = pair.b.received.done(1)?;
        immediate(&wc)?;
        ensure!(
            wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM,
            "the receive completed as opcode {}",
            wc.opcode
        );
        ensure!(wc.byte_len as usize == len, "length {} of {len}", wc.byte_len);
        ensure!(
            pair.b.bytes(0, len) == bytes,
            "other bytes arrived than the {len} written"
        );
        ensure!(pair.b.bytes(8000, 64) == [0; 64], "the memory of the receive changed");
    }
    Ok(())
}

fn every_mtu(bench: &Bench, transport: ibv_qp_type) -> Result<()> {
    let most = bench.open()?.port().active_mtu;
    for mtu in IBV_MTU_256..=most {
        let pair = bench.pair(&Setup {
            mtu,
            ..Setup::of(transport)
        })?;
        for len in lengths(128 << mtu)
            .into_iter()
            .filter(|&len| len + 8 <= pair.a.mr.length())
        {
            send(bench, &pair, len)?;
        }
    }
    Ok(())
}

/// A pair whose sender's PSNs wrap soon.
fn nearly_wrapped(bench: &Bench, transport: ibv_qp_type) -> Result<Pair> {
    let setup = Setup::of(transport);
    let pair = bench.unconnected_pair_from([&setup, &setup], [0x00ff_fffd, 0x00ff_fffe])?;
    pair.a.qp.bring_to(IBV_QPS_RTS)?;
    pair.b.qp.bring_to(IBV_QPS_RTS)?;
    Ok(pair)
}

fn psn_wrap(bench: &Bench, transport: ibv_qp_type) -> Result<()> {
    let pair = nearly_wrapped(bench, transport)?;
    for len in [1, 5 * 1024, 1, 2048] {
        send(bench, &pair, len)?;
    }
    Ok(())
}

fn psn_wrap_of_read(bench: &Bench) -> Result<()> {
    let pair = nearly_wrapped(bench, IBV_QPT_RC)?;
    read(bench, &pair, 5 * 1024)?;
    let pair = nearly_wrapped(bench, IBV_QPT_RC)?;
    for count in 0..6 {
        let add = Send::new(IBV_WR_ATOMIC_FETCH_AND_ADD)
            .id(count)
            .sge(pair.a.mr.sge(0, 8))
            .atomic(pair.b.mr.at(0), pair.b.mr.rkey(), 1, 0);
        pair.a.post(add)?;
        pair.a.sent.done(count)?;
        ensure!(
            pair.a.mr.memory.word(0) == count,
            "{} instead of {count}",
            pair.a.mr.memory.word(0)
        );
    }
    Ok(())
}

fn read_lengths(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    for len in lengths(1024) {
        read(bench, &pair, len)?;
    }
    Ok(())
}

/// One READ from an unaligned offset, verified.
fn read(bench: &Bench, pair: &Pair, len: usize) -> Result<()> {
    let bytes = bench.pattern(len, len as u32);
    pair.b.fill(5, &bytes);
    pair.a.fill(0, &vec![0; len + 8]);
    let read = Send::new(IBV_WR_RDMA_READ)
        .id(1)
        .sge(pair.a.mr.sge(0, len))
        .at(pair.b.mr.at(5), pair.b.mr.rkey());
    pair.a.post(read)?;
    let wc = pair.a.sent.done(1)?;
    ensure!(wc.opcode == IBV_WC_RDMA_READ, "it completed as opcode {}", wc.opcode);
    ensure!(
        wc.byte_len as usize == len,
        "its completion reports {} bytes of {len}",
        wc.byte_len
    );
    ensure!(
        pair.a.bytes(0, len) == bytes,
        "other bytes came than the {len} that lie there"
    );
    ensure!(pair.a.bytes(len, 8) == [0; 8], "bytes behind the message changed");
    Ok(())
}

fn fetch_add(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let start = u64::MAX - 2;
    pair.b.mr.memory.set_word(16, start);
    for (id, add) in [(1, 2), (2, 5), (3, u64::MAX)] {
        let before = pair.b.mr.memory.word(16);
        let request = Send::new(IBV_WR_ATOMIC_FETCH_AND_ADD)
            .id(id)
            .sge(pair.a.mr.sge(8, 8))
            .atomic(pair.b.mr.at(16), pair.b.mr.rkey(), add, 0);
        pair.a.post(request)?;
        let wc = pair.a.sent.done(id)?;
        ensure!(wc.opcode == IBV_WC_FETCH_ADD, "it completed as opcode {}", wc.opcode);
        ensure!(wc.byte_len == 8, "its completion reports {} bytes", wc.byte_len);
        ensure!(
            pair.a.mr.memory.word(8) == before,
            "it returned {:#x} instead of {before:#x}",
            pair.a.mr.memory.word(8)
        );
        let after = before.wrapping_add(add);
        ensure!(
            pair.b.mr.memory.word(16) == after,
            "{:#x} is there instead of {after:#x}",
            pair.b.mr.memory.word(16)
        );
    }
    ensure!(
        pair.b.mr.memory.word(8) == 0 && pair.b.mr.memory.word(24) == 0,
        "the neighbours changed"
    );
    Ok(())
}

fn compare_swap(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    pair.b.mr.memory.set_word(16, 0x1122_3344_5566_7788);
    let rounds = [
        (0x1122_3344_5566_7788, 0xffee_ddcc_bbaa_9988, 0xffee_ddcc_bbaa_9988),
        (0x1122_3344_5566_7788, 1, 0xffee_ddcc_bbaa_9988),
        (0xffee_ddcc_bbaa_9988, 0, 0),
    ];
    for (id, (compare, swap, after)) in rounds.into_iter().enumerate() {
        let before = pair.b.mr.memory.word(16);
        let request = Send::new(IBV_WR_ATOMIC_CMP_AND_SWP)
            .id(id as u64)
            .sge(pair.a.mr.sge(8, 8))
            .atomic(pair.b.mr.at(16), pair.b.mr.rkey(), compare, swap);
        pair.a.post(request)?;
        let wc = pair.a.sent.done(id as u64)?;
        ensure!(wc.opcode == IBV_WC_COMP_SWAP, "it completed as opcode {}", wc.opcode);
        ensure!(
            pair.a.mr.memory.word(8) == before,
            "it returned {:#x} instead of {before:#x}",
            pair.a.mr.memory.word(8)
        );
        ensure!(
            pair.b.mr.memory.word(16) == after,
            "{:#x} is there instead of {after:#x}",
            pair.b.mr.memory.word(16)
        );
    }
    Ok(())
}

/// Elements of these sizes, one byte apart.
fn elements(mr: &crate::conformance::rig::Mr, sizes: &[usize]) -> Vec<(usize, ibv_sge)> {
    let mut at = 1;
    sizes
        .iter()
        .map(|&size| {
            let element = (at, mr.sge(at, size));
            at += size + 1;
            element
        })
        .collect()
}

const ODD: [usize; 4] = [3, 0, 1021, 2111];

fn gather(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let total = ODD.iter().sum();
    let bytes = bench.pattern(total, 1);
    let mut send = Send::new(IBV_WR_SEND).id(1);
    let mut done = 0;
    for (at, sge) in elements(&pair.a.mr, &ODD) {
        let len = sge.length as usize;
        pair.a.fill(at, &bytes[done..done + len]);
        done += len;
        send = send.sge(sge);
    }
    pair.b.expect(2, 0, total + 8)?;
    pair.a.post(send)?;
    pair.a.sent.done(1)?;
    let wc = pair.b.received.done(2)?;
    ensure!(
        wc.byte_len as usize == total,
        "{} bytes arrived of {total}",
        wc.byte_len
    );
    ensure!(pair.b.bytes(0, total) == bytes, "other bytes arrived");
    Ok(())
}

/// Checks the bytes in the elements, and that the bytes between them are still 0.
fn scattered(end: &crate::conformance::rig::End, bytes: &[u8]) -> Result<()> {
    let mut done = 0;
    for (at, sge) in elements(&end.mr, &ODD) {
        let len = sge.length as usize;
        ensure!(
            end.bytes(at, len) == bytes[done..done + len],
            "other bytes in the element of {len}"
        );
        ensure!(
            end.bytes(at - 1, 1) == [0] && end.bytes(at + len, 1) == [0],
            "bytes around the element of {len} changed"
        );
        done += len;
    }
    Ok(())
}

fn scatter(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let bytes = bench.pattern(ODD.iter().sum(), 1);
    pair.a.fill(0, &bytes);
    let receive = elements(&pair.b.mr, &ODD)
        .into_iter()
        .fold(Recv::new(2), |receive, (_, sge)| receive.sge(sge));
    ensure!(pair.b.qp.receive_one(receive).0 == 0, "the receive was refused");
    pair.a
        .post(Send::new(IBV_WR_SEND).id(1).sge(pair.a.mr.sge(0, bytes.len())))?;
    pair.a.sent.done(1)?;
    pair.b.received.done(2)?;
    scattered(&pair.b, &bytes)
}

fn scatter_read(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let bytes = bench.pattern(ODD.iter().sum(), 1);
    pair.b.fill(0, &bytes);
    let read = Send::new(IBV_WR_RDMA_READ).id(1).at(pair.b.mr.at(0), pair.b.mr.rkey());
    let read = elements(&pair.a.mr, &ODD)
        .into_iter()
        .fold(read, |read, (_, sge)| read.sge(sge));
    pair.a.post(read)?;
    pair.a.sent.done(1)?;
    scattered(&pair.a, &bytes)
}

fn shorter_message(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    pair.b.fill(0, &[0xee; 300]);
    pair.a.fill(0, &[0x11; 100]);
    let receive = Recv::new(2)
        .sge(pair.b.mr.sge(0, 60))
        .sge(pair.b.mr.sge(100, 60))
        .sge(pair.b.mr.sge(200, 60));
    ensure!(pair.b.qp.receive_one(receive).0 == 0, "the receive was refused");
    pair.a.post(Send::new(IBV_WR_SEND).id(1).sge(pair.a.mr.sge(0, 100)))?;
    pair.a.sent.done(1)?;
    let wc = pair.b.received.done(2)?;
    ensure!(wc.byte_len == 100, "{} bytes arrived of 100", wc.byte_len);
    let expected = |index: usize| {
        if index < 60 || (100..140).contains(&index) {
            0x11
        } else {
            0xee
        }
    };
    let wrong = pair
        .b
        .bytes(0, 300)
        .into_iter()
        .enumerate()
        .find(|&(index, byte)| byte != expected(index));
    ensure!(wrong.is_none(), "byte {wrong:?}");
    Ok(())
}

fn own_queue_pair(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let end = crate::conformance::rig::End::new(&device, &Setup::default(), bench.psn(1))?;
    end.qp.bring_to(IBV_QPS_RTS)?;
    let bytes = bench.pattern(3000, 1);
    end.fill(0, &bytes);
    end.expect(1, 4096, 4096)?;
    end.post(Send::new(IBV_WR_SEND).id(2).sge(end.mr.sge(0, 3000)))?;
    end.sent.done(2)?;
    end.received.done(1)?;
    ensure!(end.bytes(4096, 3000) == bytes, "other bytes arrived");
    end.post(
        Send::new(IBV_WR_RDMA_READ)
            .id(3)
            .sge(end.mr.sge(9000, 3000))
            .at(end.mr.at(0), end.mr.rkey()),
    )?;
    end.sent.done(3)?;
    ensure!(end.bytes(9000, 3000) == bytes, "other bytes were read");
    Ok(())
}
