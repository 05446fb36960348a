//! Device memory, reregistered regions, regions with an IOVA, and moderated completion queues.

use anyhow::{Context, Result, ensure};
use doorbell_verbs_sys::*;

use crate::conformance::rig::{ALL_RIGHTS, Bench, End, Errno, Memory, Pair, Recv, Send, Setup, named};
use crate::conformance::{Case, case};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case(
            "mr/iova",
            "ibv_reg_mr_iova(3)",
            "a region with an IOVA is accessed by it, locally and remotely",
            iova,
        ),
        case(
            "mr/local-zero-based-key",
            "10.6.3",
            "a region of several pages is accessed across page boundaries",
            pages,
        ),
        case(
            "rereg/access",
            "ibv_rereg_mr(3)",
            "changed rights are in force, with the same memory",
            rereg_access,
        ),
        case(
            "rereg/translation",
            "ibv_rereg_mr(3)",
            "the keys refer to the new memory, and no longer to the old",
            rereg_translation,
        ),
        case(
            "rereg/domain",
            "ibv_rereg_mr(3)",
            "a changed protection domain is in force",
            rereg_domain,
        ),
        case(
            "rereg/unknown-flag",
            "ibv_rereg_mr(3)",
            "an unknown flag is refused, and the region is unchanged",
            rereg_unknown,
        ),
        case(
            "dm/copy",
            "ibv_alloc_dm(3)",
            "data copied to device memory reads back",
            dm_copy,
        ),
        case(
            "dm/bounds",
            "ibv_alloc_dm(3)",
            "copies beyond device memory are refused",
            dm_bounds,
        ),
        case(
            "dm/busy",
            "ibv_alloc_dm(3)",
            "device memory that is registered cannot be freed",
            dm_busy,
        ),
        case(
            "dm/too-large",
            "ibv_alloc_dm(3)",
            "a size above the device's maximum is refused",
            dm_too_large,
        ),
        case(
            "dm/remote",
            "ibv_alloc_dm(3)",
            "a peer writes and reads it at addresses from 0, within its bounds",
            dm_remote,
        ),
        case(
            "dm/local",
            "ibv_alloc_dm(3)",
            "messages are gathered from it and received into it",
            dm_local,
        ),
        case(
            "moderation/count",
            "ibv_modify_cq(3)",
            "an event is raised after the configured number of completions",
            moderation_count,
        ),
        case(
            "moderation/period",
            "ibv_modify_cq(3)",
            "an event is raised after the period even with fewer completions",
            moderation_period,
        ),
    ]
}

fn iova(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    // With the memory's offset in its page, which some devices require.
    let base = 0x7000_0000_0000 | pair.b.mr.memory.addr() & 0xfff;
    let region = pair.b.pd.register_at(&pair.b.mr.memory, base, ALL_RIGHTS)?;
    ensure!(region.at(5) == base + 5, "the rig's own arithmetic");
    pair.a.fill(0, b"by its own address");
    pair.a.post(
        Send::new(IBV_WR_RDMA_WRITE)
            .id(1)
            .sge(pair.a.mr.sge(0, 18))
            .at(region.at(5), region.rkey()),
    )?;
    pair.a.sent.done(1)?;
    ensure!(pair.b.bytes(5, 18) == b"by its own address", "other bytes were written");
    // As the local address, too.
    pair.a.expect(2, 100, 64)?;
    pair.b.post(Send::new(IBV_WR_SEND).id(3).sge(region.sge(5, 18)))?;
    pair.b.sent.done(3)?;
    pair.a.received.done(2)?;
    ensure!(pair.a.bytes(100, 18) == b"by its own address", "other bytes were sent");
    // The memory's virtual address is invalid for it.
    let real = pair.b.mr.at(5);
    pair.a.post(
        Send::new(IBV_WR_RDMA_WRITE)
            .id(4)
            .sge(pair.a.mr.sge(0, 8))
            .at(real, region.rkey()),
    )?;
    pair.a.sent.wait_for(4, IBV_WC_REM_ACCESS_ERR)?;
    Ok(())
}

fn pages(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup {
        bytes: 1 << 16,
        ..Setup::default()
    })?;
    let bytes = bench.pattern(50_000, 1);
    pair.a.fill(3001, &bytes);
    let write = Send::new(IBV_WR_RDMA_WRITE)
        .id(1)
        .sge(pair.a.mr.sge(3001, 50_000))
        .at(pair.b.mr.at(4093), pair.b.mr.rkey());
    pair.a.post(write)?;
    pair.a.sent.done(1)?;
    ensure!(pair.b.bytes(4093, 50_000) == bytes, "other bytes were written");
    let read = Send::new(IBV_WR_RDMA_READ)
        .id(2)
        .sge(pair.a.mr.sge(1, 50_000))
        .at(pair.b.mr.at(4093), pair.b.mr.rkey());
    pair.a.post(read)?;
    pair.a.sent.done(2)?;
    ensure!(pair.a.bytes(1, 50_000) == bytes, "other bytes were read");
    Ok(())
}

fn changed(result: Errno) -> Result<()> {
    ensure!(result == Errno(0), "ibv_rereg_mr: {result}");
    Ok(())
}

fn write(pair: &Pair, id: u64, at: u64, key: u32) -> Result<ibv_wc> {
    pair.a.fill(0, b"rereg'd!");
    pair.a
        .post(Send::new(IBV_WR_RDMA_WRITE).id(id).sge(pair.a.mr.sge(0, 8)).at(at, key))?;
    pair.a.sent.wait()
}

fn rereg_access(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let mut region = pair.b.pd.register(64, IBV_ACCESS_LOCAL_WRITE)?;
    let (pd, memory) = (pair.b.pd.clone(), region.memory.clone());
    memory.fill(0, b"as it was");
    changed(region.change(IBV_REREG_MR_CHANGE_ACCESS, &pd, &memory, ALL_RIGHTS)?)?;
    ensure!(memory.bytes(0..9) == b"as it was", "the memory changed");
    let wc = write(&pair, 1, region.at(8), region.rkey())?;
    ensure!(wc.status == IBV_WC_SUCCESS, "with the new right: {}", named(wc.status));
    changed(region.change(IBV_REREG_MR_CHANGE_ACCESS, &pd, &memory, IBV_ACCESS_LOCAL_WRITE)?)?;
    let wc = write(&pair, 2, region.at(8), region.rkey())?;
    ensure!(
        wc.status == IBV_WC_REM_ACCESS_ERR,
        "without it again: {}",
        named(wc.status)
    );
    Ok(())
}

fn rereg_translation(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let mut region = pair.b.pd.register(64, ALL_RIGHTS)?;
    let (old, new, pd) = (region.memory.clone(), Memory::new(256), pair.b.pd.clone());
    let old_address = region.at(0);
    changed(region.change(IBV_REREG_MR_CHANGE_TRANSLATION, &pd, &new, 0)?)?;
    let wc = write(&pair, 1, region.at(200), region.rkey())?;
    ensure!(wc.status == IBV_WC_SUCCESS, "into the new memory: {}", named(wc.status));
    ensure!(new.bytes(200..208) == b"rereg'd!", "nothing was written");
    let wc = write(&pair, 2, old_address, region.rkey())?;
    ensure!(
        wc.status == IBV_WC_REM_ACCESS_ERR,
        "into the old memory: {}",
        named(wc.status)
    );
    ensure!(old.bytes(0..64) == [0; 64], "the old memory changed");
    Ok(())
}

fn rereg_domain(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let other = pair.b.device().pd()?;
    let mut region = other.register(64, ALL_RIGHTS)?;
    let (pd, memory) = (pair.b.pd.clone(), region.memory.clone());
    changed(region.change(IBV_REREG_MR_CHANGE_PD, &pd, &memory, 0)?)?;
    ensure!(other.dealloc() == Errno(0), "the old domain is in use still");
    let wc = write(&pair, 1, region.at(0), region.rkey())?;
    ensure!(wc.status == IBV_WC_SUCCESS, "in the new domain: {}", named(wc.status));
    Ok(())
}

fn rereg_unknown(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let mut region = pair.b.pd.register(64, ALL_RIGHTS)?;
    let (pd, memory) = (pair.b.pd.clone(), region.memory.clone());
    changed(region.change(IBV_REREG_MR_CHANGE_ACCESS, &pd, &memory, ALL_RIGHTS)?)?;
    let result = region.change(1 << 9, &pd, &memory, 0)?;
    ensure!(result != Errno(0), "it was accepted");
    let wc = write(&pair, 1, region.at(0), region.rkey())?;
    ensure!(wc.status == IBV_WC_SUCCESS, "afterwards: {}", named(wc.status));
    Ok(())
}

fn dm_copy(bench: &Bench) -> Result<()> {
    let dm = bench.open()?.memory(4096)?;
    let bytes = bench.pattern(1000, 1);
    ensure!(dm.put(24, &bytes) == Errno(0), "not copied in");
    ensure!(dm.get(24, 1000)? == bytes, "other bytes came back");
    Ok(())
}

fn dm_bounds(bench: &Bench) -> Result<()> {
    let dm = bench.open()?.memory(4096)?;
    ensure!(dm.put(4090, &[1; 16]) != Errno(0), "copied in beyond the end");
    ensure!(dm.get(4096, 8).is_err(), "copied out beyond the end");
    ensure!(dm.put(u64::MAX - 3, &[1; 8]) != Errno(0), "copied in around zero");
    Ok(())
}

fn dm_busy(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    let (dm, pd) = (device.memory(4096)?, device.pd()?);
    let region = pd.register_dm(&dm, 0, 4096, IBV_ACCESS_LOCAL_WRITE)?;
    let result = dm.free();
    ensure!(result == Errno(libc::EBUSY), "{result}");
    ensure!(region.deregister() == Errno(0), "the region cannot be deregistered");
    ensure!(dm.free() == Errno(0), "not freed without a region");
    Ok(())
}

fn dm_too_large(bench: &Bench) -> Result<()> {
    let device = bench.open()?;
    device.memory(8)?;
    let most = device.query_ex()?.max_dm_size;
    ensure!(device.memory(most as usize + 1).is_err(), "{most} and one more bytes");
    Ok(())
}

fn dm_remote(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let dm = pair.b.device().memory(4096)?;
    let region = pair.b.pd.register_dm(&dm, 1024, 2048, ALL_RIGHTS)?;
    pair.a.fill(0, &bench.pattern(2000, 1));
    pair.a.post(
        Send::new(IBV_WR_RDMA_WRITE)
            .id(1)
            .sge(pair.a.mr.sge(0, 2000))
            .at(16, region.rkey()),
    )?;
    pair.a.sent.done(1)?;
    ensure!(
        dm.get(1024 + 16, 2000)? == bench.pattern(2000, 1),
        "other bytes were written"
    );
    pair.a.post(
        Send::new(IBV_WR_RDMA_READ)
            .id(2)
            .sge(pair.a.mr.sge(4000, 2000))
            .at(16, region.rkey()),
    )?;
    pair.a.sent.done(2)?;
    ensure!(
        pair.a.bytes(4000, 2000) == bench.pattern(2000, 1),
        "other bytes were read"
    );
    pair.a.post(
        Send::new(IBV_WR_RDMA_WRITE)
            .id(3)
            .sge(pair.a.mr.sge(0, 8))
            .at(2044, region.rkey()),
    )?;
    pair.a.sent.wait_for(3, IBV_WC_REM_ACCESS_ERR)?;
    Ok(())
}

fn dm_local(bench: &Bench) -> Result<()> {
    let pair = bench.pair(&Setup::default())?;
    let dm = pair.a.device().memory(4096)?;
    let region = pair.a.pd.register_dm(&dm, 0, 4096, IBV_ACCESS_LOCAL_WRITE)?;
    ensure!(dm.put(8, b"from the device.") == Errno(0), "not copied in");
    pair.b.expect(1, 0, 64)?;
    pair.a.post(Send::new(IBV_WR_SEND).id(2).sge(region.sge(8, 16)))?;
    pair.a.sent.done(2)?;
    pair.b.received.done(1)?;
    ensure!(pair.b.bytes(0, 16) == b"from the device.", "other bytes arrived");
    ensure!(
        pair.a.qp.receive_one(Recv::new(3).sge(region.sge(1000, 64))) == Errno(0),
        "the receive was refused"
    );
    pair.b.post(Send::new(IBV_WR_SEND).id(4).inline(b"to the device..."))?;
    pair.b.sent.done(4)?;
    pair.a.received.done(3)?;
    ensure!(dm.get(1000, 16)? == b"to the device...", "other bytes arrived");
    Ok(())
}

/// A pair, and a channel of the moderated completion queue of `b`'s receives.
fn moderated(bench: &Bench, count: u16, period: u16) -> Result<(Pair, crate::conformance::rig::Channel)> {
    let device = bench.open()?;
    let channel = device.channel()?;
    let setup = Setup::default();
    let a = End::new(&device, &setup, bench.psn(1))?;
    let received = device.cq_with(32, Some(&channel), 0, 0)?;
    let result = received.moderate(count, period)?;
    ensure!(result == Errno(0), "ibv_modify_cq: {result}");
    let b = End::with(&device.pd()?, device.cq(32)?, received, &setup, bench.psn(2))?;
    a.qp.set_peer(b.qp.as_peer());
    b.qp.set_peer(a.qp.as_peer());
    a.qp.bring_to(IBV_QPS_RTS)?;
    b.qp.bring_to(IBV_QPS_RTS)?;
    for id in 0..8 {
        b.expect(id, 0, 8)?;
    }
    ensure!(b.received.arm(false) == Errno(0), "not armed");
    Ok((Pair { a, b }, channel))
}

fn message(pair: &Pair) -> Result<()> {
    pair.a.post(Send::new(IBV_WR_SEND).id(1))?;
    pair.a.sent.done(1)?;
    Ok(())
}

fn moderation_count(bench: &Bench) -> Result<()> {
    // The longest period: over 60 ms.
    let (pair, channel) = moderated(bench, 3, u16::MAX)?;
    for _ in 0..3 {
        message(&pair)?;
    }
    channel
        .event(bench.time_limit)?
        .context("no event was raised after 3 completions")?;
    pair.b.received.acknowledge(1);
    ensure!(channel.event(bench.quiet)?.is_none(), "a second event");
    Ok(())
}

fn moderation_period(bench: &Bench) -> Result<()> {
    let (pair, channel) = moderated(bench, 100, 20_000)?;
    message(&pair)?;
    channel
        .event(bench.time_limit)?
        .context("no event was raised after 20 ms")?;
    pair.b.received.acknowledge(1);
    Ok(())
}
