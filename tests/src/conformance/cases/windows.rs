//! Memory windows: access is limited to the binding, while it lasts.

use anyhow::{Context, Result, ensure};
use doorbell_verbs_sys::*;

use crate::conformance::rig::{
    ALL_RIGHTS, Bench, Binding, Errno, Mr, Mw, Pair, Send, Setup, invalidated, named, next_key,
};
use crate::conformance::{Case, case};

/// An operation, and the right that it needs.
const OPERATIONS: [(&str, ibv_wr_opcode, u32); 4] = [
    ("write", IBV_WR_RDMA_WRITE, IBV_ACCESS_REMOTE_WRITE),
    ("read", IBV_WR_RDMA_READ, IBV_ACCESS_REMOTE_READ),
    ("compare-swap", IBV_WR_ATOMIC_CMP_AND_SWP, IBV_ACCESS_REMOTE_ATOMIC),
    ("fetch-add", IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_ACCESS_REMOTE_ATOMIC),
];

const REMOTE: u32 = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (kind, title) in [(IBV_MW_TYPE_1, "type-1"), (IBV_MW_TYPE_2, "type-2")] {
        for (name, opcode, right) in OPERATIONS {
            cases.push(case(
                &format!("window/{name}-through-{title}"),
                "10.6.7.2",
                "with the right in the binding it succeeds, though the region has no remote rights",
                move |bench| through(bench, kind, opcode, right, true),
            ));
            cases.push(case(
                &format!("window/{name}-not-through-{title}"),
                "10.6.7.2",
                "without the right in the binding: remote access error, memory unchanged",
                move |bench| through(bench, kind, opcode, REMOTE & !right, false),
            ));
        }
        let mut add = |name: &str, clause, rule: &str, run: fn(&Bench, ibv_mw_type) -> Result<()>| {
            cases.push(case(&format!("window/{title}-{name}"), clause, rule, move |bench| {
                run(bench, kind)
            }));
        };
        add(
            "unbound",
            "10.6.7.2",
            "the key of a window that was never bound grants nothing",
            unbound,
        );
        add(
            "bounds",
            "10.6.7.2",
            "bytes of the region outside the window are not granted",
            bounds,
        );
        add("completion", "11.4.2.1", "a binding completes as one", completion);
        add(
            "needs-mw-bind",
            "10.6.7.2.1",
            "a region without the right to bind: the binding fails",
            needs_mw_bind,
        );
        add(
            "needs-local-write",
            "10.6.7.2.1",
            "write through a window on a region without local write: the binding fails",
            needs_local_write,
        );
        add(
            "beyond-region",
            "10.6.7.2.1",
            "a range beyond the region: the binding fails",
            beyond_region,
        );
        add(
            "other-domain",
            "10.6.7.2.1",
            "a region of another protection domain: the binding fails",
            other_domain,
        );
        add(
            "keeps-region",
            "ibv_dereg_mr(3)",
            "a region cannot be deregistered under a bound window",
            keeps_region,
        );
        add(
            "deallocated",
            "10.6.7.3",
            "the key of a deallocated window grants nothing",
            deallocated,
        );
        add(
            "order-with-sends",
            "10.8.3",
            "a binding takes effect before the requests behind it",
            in_order,
        );
    }
    cases.extend([
        case(
            "window/type-1-rebound",
            "10.6.7.2.3",
            "a rebound type 1 window has a new key, and the old one is invalid",
            rebound,
        ),
        case(
            "window/type-1-unbound-by-zero-length",
            "10.6.7.2.3",
            "a binding of length 0 revokes access",
            zero_length,
        ),
        case(
            "window/type-1-by-any-queue-pair",
            "10.6.7.2.2",
            "a type 1 window is accessible through every queue pair of its protection domain",
            any_queue_pair,
        ),
        case(
            "window/type-2-by-its-queue-pair",
            "10.6.7.2.2",
            "a type 2B window is accessible only through the queue pair that bound it",
            only_its_queue_pair,
        ),
        case(
            "window/type-2-bound-twice",
            "10.6.7.2.4",
            "a bound type 2 window cannot be bound again",
            bound_twice,
        ),
        case(
            "window/type-2-local-invalidate",
            "10.6.5",
            "after a local invalidate the key is invalid, and the window can be bound again",
            local_invalidate,
        ),
        case(
            "window/type-2-remote-invalidate",
            "9.4.1.1",
            "a SEND with invalidate invalidates before its receive completes, and reports the key",
            remote_invalidate,
        ),
        case(
            "window/type-2-remote-invalidate-unknown",
            "9.4.1.1.3",
            "a SEND with invalidate of an unknown key is refused",
            invalidate_unknown,
        ),
        case(
            "window/type-2-remote-invalidate-region",
            "9.4.1.1.3",
            "a SEND with invalidate of a region's key is refused, and the region stays valid",
            invalidate_region,
        ),
        case(
            "window/type-2-invalidate-unbound",
            "10.6.5",
            "invalidating an unbound window has no effect or is an error, and never hangs",
            invalidate_unbound,
        ),
    ]);
    cases
}

/// `b` has a region without remote rights; the window is on its bytes from 64 to 192.
struct Scene {
    /// Dropped first: a window is deallocated before its region.
    mw: Mw,
    region: Mr,
    pair: Pair,
}

const START: usize = 64;
const LEN: usize = 128;

fn scene(bench: &Bench, kind: ibv_mw_type) -> Result<Scene> {
    let pair = bench.pair(&Setup::default())?;
    let mw = pair.b.pd.window(kind)?;
    let region = pair.b.pd.register(1024, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND)?;
    Ok(Scene { mw, region, pair })
}

/// Binds by the verb of its type; returns the completion.
fn bind(pair: &Pair, kind: ibv_mw_type, mw: &Mw, binding: Binding<'_>) -> Result<ibv_wc> {
    let (qp, key) = (&pair.b.qp, next_key(mw.rkey()));
    let result = if kind == IBV_MW_TYPE_1 {
        qp.bind(mw, 70, binding)
    } else {
        qp.post_one(Send::new(IBV_WR_BIND_MW).id(70).binding(mw, key, binding))
    };
    ensure!(result == Errno(0), "posting the binding: {result}");
    let wc = pair.b.sent.wait().context("of the binding")?;
    ensure!(wc.wr_id == 70, "request {} completed", wc.wr_id);
    if wc.status == IBV_WC_SUCCESS && kind == IBV_MW_TYPE_2 {
        mw.bound_as(key);
    }
    Ok(wc)
}

impl Scene {
    fn binding(&self, rights: u32) -> Binding<'_> {
        Binding {
            mr: &self.region,
            offset: START,
            len: LEN,
            rights,
        }
    }

    fn bind(&self, kind: ibv_mw_type, rights: u32) -> Result<()> {
        let wc = bind(&self.pair, kind, &self.mw, self.binding(rights))?;
        ensure!(wc.status == IBV_WC_SUCCESS, "the binding: {}", named(wc.status));
        Ok(())
    }

    /// A request of `a` on 8 bytes of the region.
    fn request(&self, opcode: ibv_wr_opcode, offset: usize, rkey: u32) -> Result<ibv_wc> {
        request(&self.pair, opcode, self.region.at(offset), rkey)
    }

    fn refused(&self, opcode: ibv_wr_opcode, offset: usize, rkey: u32) -> Result<()> {
        let before = self.region.memory.bytes(0..1024);
        let wc = self.request(opcode, offset, rkey)?;
        ensure!(
            wc.status == IBV_WC_REM_ACCESS_ERR,
            "it completed with {}",
            named(wc.status)
        );
        ensure!(self.region.memory.bytes(0..1024) == before, "the memory changed");
        Ok(())
    }
}

fn request(pair: &Pair, opcode: ibv_wr_opcode, addr: u64, rkey: u32) -> Result<ibv_wc> {
    pair.a.fill(0, &[0x3c; 8]);
    let send = Send::new(opcode).id(1).sge(pair.a.mr.sge(0, 8));
    let send = match opcode {
        IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD => send.atomic(addr, rkey, 0, 5),
        _ => send.at(addr, rkey),
    };
    pair.a.post(send)?;
    pair.a.sent.wait()
}

fn through(bench: &Bench, kind: ibv_mw_type, opcode: ibv_wr_opcode, rights: u32, works: bool) -> Result<()> {
    let scene = scene(bench, kind)?;
    scene.bind(kind, rights)?;
    if !works {
        return scene.refused(opcode, START, scene.mw.rkey());
    }
    for offset in [START, START + LEN - 8] {
        let wc = scene.request(opcode, offset, scene.mw.rkey())?;
        ensure!(
            wc.status == IBV_WC_SUCCESS,
            "at {offset} it completed with {}",
            named(wc.status)
        );
    }
    if opcode == IBV_WR_RDMA_WRITE {
        ensure!(
            scene.region.memory.bytes(START..START + 8) == [0x3c; 8],
            "nothing was written"
        );
    }
    Ok(())
}

fn unbound(bench: &Bench, kind: ibv_mw_type) -> Result<()> {
    let scene = scene(bench, kind)?;
    scene.refused(IBV_WR_RDMA_READ, START, scene.mw.rkey())
}

fn bounds(bench: &Bench, kind: ibv_mw_type) -> Result<()> {
    for offset in [START - 1, START + LEN - 7, 0, 1000] {
        let scene = scene(bench, kind)?;
        scene.bind(kind, REMOTE)?;
        scene
            .refused(IBV_WR_RDMA_WRITE, offset, scene.mw.rkey())
            .with_context(|| format!("at {offset}"))?;
    }
    Ok(())
}

fn completion(bench: &Bench, kind: ibv_mw_type) -> Result<()> {
    let scene = scene(bench, kind)?;
    let before = scene.mw.rkey();
    let wc = bind(&scene.pair, kind, &scene.mw, scene.binding(REMOTE))?;
    ensure!(
        wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_BIND_MW,
        "{}, opcode {}",
        named(wc.status),
        wc.opcode
    );
    ensure!(scene.mw.rkey() != before, "the key is the old one");
    ensure!(scene.mw.rkey() >> 8 == before >> 8, "another index in the key");
    Ok(())
}

/// Checks that this binding is refused, when posted or by its completion.
fn fails(pair: &Pair, kind: ibv_mw_type, mw: &Mw, binding: Binding<'_>) -> Result<()> {
    let key = next_key(mw.rkey());
    let result = if kind == IBV_MW_TYPE_1 {
        pair.b.qp.bind(mw, 70, binding)
    } else {
        pair.b
            .qp
            .post_one(Send::new(IBV_WR_BIND_MW).id(70).binding(mw, key, binding))
    };
    if result != Errno(0) {
        return Ok(());
    }
    let wc = pair.b.sent.wait()?;
    ensure!(wc.status != IBV_WC_SUCCESS, "it was bound");
    Ok(())
}

fn needs_mw_bind(bench: &Bench, kind: ibv_mw_type) -> Result<()> {
    let scene = scene(bench, kind)?;
    let region = scene.pair.b.pd.register(1024, ALL_RIGHTS)?;
    let binding = Binding {
        mr: &region,
        ..scene.binding(REMOTE)
    };
    fails(&scene.pair, kind, &scene.mw, binding)
}

fn needs_local_write(bench: &Bench, kind: ibv_mw_type) -> Result<()> {
    for rights in [IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_ATOMIC] {
        let scene = scene(bench, kind)?;
        let region = scene.pair.b.pd.register(1024, IBV_ACCESS_MW_BIND)?;
        let binding = Binding {
            mr: &region,
            ..scene.binding(rights)
        };
        fails(&scene.pair, kind, &scene.mw, binding)?;
    }
    Ok(())
}

fn beyond_region(bench: &Bench, kind: ibv_mw_type) -> Result<()> {
    for (offset, len) in [(1000, 25), (1024, 1), (2000, 8)] {
        let scene = scene(bench, kind)?;
        let binding = Binding {
            offset,
            len,
            ..scene.binding(IBV_ACCESS_REMOTE_READ)
        };
        fails(&scene.pair, kind, &scene.mw, binding).with_context(|| format!("{len} bytes at {offset} of 1024"))?;
    }
    Ok(())
}

fn other_domain(bench: &Bench, kind: ibv_mw_type) -> Result<()> {
    let scene = scene(bench, kind)?;
    let other = scene.pair.b.device().pd()?;
    let region = other.register(1024, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND)?;
    let binding = Binding {
        mr: &region,
        ..scene.binding(REMOTE)
    };
    fails(&scene.pair, kind, &scene.mw, binding)
}

fn keeps_region(bench: &Bench, kind: ibv_mw_type) -> Result<()> {
    let scene = scene(bench, kind)?;
    scene.bind(kind, REMOTE)?;
    let result = scene.region.deregister();
    ensure!(result != Errno(0), "it was deregistered");
    ensure!(scene.mw.deallocate() == Errno(0), "deallocating the window");
    let result = scene.region.deregister();
    ensure!(result == Errno(0), "without the window: {result}");
    Ok(())
}

fn deallocated(bench: &Bench, kind: ibv_mw_type) -> Result<()> {
    let scene = scene(bench, kind)?;
    scene.bind(kind, REMOTE)?;
    let key = scene.mw.rkey();
    ensure!(scene.mw.deallocate() == Errno(0), "deallocating the window");
    scene.refused(IBV_WR_RDMA_READ, START, key)
}

fn in_order(bench: &Bench, kind: ibv_mw_type) -> Result<()> {
    let scene = scene(bench, kind)?;
    let Scene { mw, pair, .. } = &scene;
    pair.a.expect(9, 0, 8)?;
    let key = next_key(mw.rkey());
    if kind == IBV_MW_TYPE_1 {
        ensure!(pair.b.qp.bind(mw, 70, scene.binding(REMOTE)) == Errno(0), "not posted");
    } else {
        let bind = Send::new(IBV_WR_BIND_MW).id(70).binding(mw, key, scene.binding(REMOTE));
        ensure!(pair.b.qp.post_one(bind) == Errno(0), "not posted");
        mw.bound_as(key);
    }
    pair.b.post(Send::new(IBV_WR_SEND).id(71).inline(b"use it"))?;
    pair.a.received.done(9)?;
    let wc = scene.request(IBV_WR_RDMA_WRITE, START, mw.rkey())?;
    ensure!(
        wc.status == IBV_WC_SUCCESS,
        "the peer knew of it, but: {}",
        named(wc.status)
    );
    pair.b.sent.done(70)?;
    pair.b.sent.done(71)?;
    Ok(())
}

fn rebound(bench: &Bench) -> Result<()> {
    let scene = scene(bench, IBV_MW_TYPE_1)?;
    scene.bind(IBV_MW_TYPE_1, REMOTE)?;
    let old = scene.mw.rkey();
    scene.bind(IBV_MW_TYPE_1, IBV_ACCESS_REMOTE_READ)?;
    let wc = scene.request(IBV_WR_RDMA_READ, START, scene.mw.rkey())?;
    ensure!(wc.status == IBV_WC_SUCCESS, "by the new key: {}", named(wc.status));
    scene.refused(IBV_WR_RDMA_READ, START, old)
}

fn zero_length(bench: &Bench) -> Result<()> {
    let scene = scene(bench, IBV_MW_TYPE_1)?;
    scene.bind(IBV_MW_TYPE_1, REMOTE)?;
    let old = scene.mw.rkey();
    let nothing = Binding {
        len: 0,
        ..scene.binding(0)
    };
    let wc = bind(&scene.pair, IBV_MW_TYPE_1, &scene.mw, nothing)?;
    ensure!(
        wc.status == IBV_WC_SUCCESS,
        "the binding of nothing: {}",
        named(wc.status)
    );
    scene.refused(IBV_WR_RDMA_READ, START, old)
}

/// A second connection between the same protection domains, and its `a` and `b`.
fn second(bench: &Bench, pair: &Pair) -> Result<Pair> {
    let setup = Setup::default();
    let end = |of: &crate::conformance::rig::End, salt| {
        let device = of.device();
        crate::conformance::rig::End::with(&of.pd, device.cq(16)?, device.cq(16)?, &setup, bench.psn(salt))
    };
    let (a, b) = (end(&pair.a, 3)?, end(&pair.b, 4)?);
    a.qp.set_peer(b.qp.as_peer());
    b.qp.set_peer(a.qp.as_peer());
    a.qp.bring_to(IBV_QPS_RTS)?;
    b.qp.bring_to(IBV_QPS_RTS)?;
    Ok(Pair { a, b })
}

fn any_queue_pair(bench: &Bench) -> Result<()> {
    let scene = scene(bench, IBV_MW_TYPE_1)?;
    scene.bind(IBV_MW_TYPE_1, REMOTE)?;
    let other = second(bench, &scene.pair)?;
    let wc = request(&other, IBV_WR_RDMA_WRITE, scene.region.at(START), scene.mw.rkey())?;
    ensure!(
        wc.status == IBV_WC_SUCCESS,
        "by another queue pair: {}",
        named(wc.status)
    );
    Ok(())
}

fn only_its_queue_pair(bench: &Bench) -> Result<()> {
    let scene = scene(bench, IBV_MW_TYPE_2)?;
    scene.bind(IBV_MW_TYPE_2, REMOTE)?;
    let other = second(bench, &scene.pair)?;
    let wc = request(&other, IBV_WR_RDMA_WRITE, scene.region.at(START), scene.mw.rkey())?;
    ensure!(
        wc.status == IBV_WC_REM_ACCESS_ERR,
        "by another queue pair: {}",
        named(wc.status)
    );
    ensure!(
        scene.region.memory.bytes(START..START + 8) == [0; 8],
        "the memory changed"
    );
    Ok(())
}

fn bound_twice(bench: &Bench) -> Result<()> {
    let scene = scene(bench, IBV_MW_TYPE_2)?;
    scene.bind(IBV_MW_TYPE_2, REMOTE)?;
    fails(
        &scene.pair,
        IBV_MW_TYPE_2,
        &scene.mw,
        scene.binding(IBV_ACCESS_REMOTE_READ),
    )
}

fn local_invalidate(bench: &Bench) -> Result<()> {
    let scene = scene(bench, IBV_MW_TYPE_2)?;
    scene.bind(IBV_MW_TYPE_2, REMOTE)?;
    let key = scene.mw.rkey();
    scene
        .pair
        .b
        .post(Send::new(IBV_WR_LOCAL_INV).id(72).invalidating(key))?;
    let wc = scene.pair.b.sent.done(72)?;
    ensure!(wc.opcode == IBV_WC_LOCAL_INV, "it completed as opcode {}", wc.opcode);
    scene.bind(IBV_MW_TYPE_2, REMOTE).context("bound again")?;
    ensure!(scene.mw.rkey() != key, "the key is the old one");
    let wc = scene.request(IBV_WR_RDMA_WRITE, START, scene.mw.rkey())?;
    ensure!(wc.status == IBV_WC_SUCCESS, "by the new key: {}", named(wc.status));
    scene.refused(IBV_WR_RDMA_READ, START, key)
}

fn remote_invalidate(bench: &Bench) -> Result<()> {
    let scene = scene(bench, IBV_MW_TYPE_2)?;
    scene.bind(IBV_MW_TYPE_2, REMOTE)?;
    let (key, pair) = (scene.mw.rkey(), &scene.pair);
    pair.b.expect(3, 0, 64)?;
    pair.a.post(
        Send::new(IBV_WR_SEND_WITH_INV)
            .id(2)
            .invalidating(key)
            .inline(b"done with it"),
    )?;
    let wc = pair.a.sent.done(2)?;
    ensure!(wc.opcode == IBV_WC_SEND, "the SEND completed as opcode {}", wc.opcode);
    let wc = pair.b.received.done(3)?;
    ensure!(
        wc.opcode == IBV_WC_RECV && wc.byte_len == 12,
        "opcode {}, {} bytes",
        wc.opcode,
        wc.byte_len
    );
    ensure!(invalidated(&wc)? == key, "{:#x} instead of {key:#x}", invalidated(&wc)?);
    scene.refused(IBV_WR_RDMA_READ, START, key)
}

/// A SEND with an invalidation that must be refused.
fn invalidation_refused(pair: &Pair, key: u32) -> Result<()> {
    pair.b.expect(3, 0, 64)?;
    pair.a.post(Send::new(IBV_WR_SEND_WITH_INV).id(2).invalidating(key))?;
    let wc = pair.a.sent.wait()?;
    ensure!(wc.status != IBV_WC_SUCCESS, "it was accepted");
    Ok(())
}

fn invalidate_unknown(bench: &Bench) -> Result<()> {
    let scene = scene(bench, IBV_MW_TYPE_2)?;
    invalidation_refused(&scene.pair, scene.region.rkey() ^ 0x0055_0000)
}

fn invalidate_region(bench: &Bench) -> Result<()> {
    let scene = scene(bench, IBV_MW_TYPE_2)?;
    let region = &scene.pair.b.mr;
    invalidation_refused(&scene.pair, region.rkey())?;
    let other = second(bench, &scene.pair)?;
    let wc = request(&other, IBV_WR_RDMA_READ, region.at(0), region.rkey())?;
    ensure!(
        wc.status == IBV_WC_SUCCESS,
        "the region is invalid: {}",
        named(wc.status)
    );
    Ok(())
}

fn invalidate_unbound(bench: &Bench) -> Result<()> {
    let scene = scene(bench, IBV_MW_TYPE_2)?;
    scene
        .pair
        .b
        .post(Send::new(IBV_WR_LOCAL_INV).id(72).invalidating(scene.mw.rkey()))?;
    let wc = scene.pair.b.sent.wait()?;
    ensure!(wc.wr_id == 72, "request {} completed", wc.wr_id);
    Ok(())
}
