//! Queue pairs with their objects, alone and in connected pairs on one device.

use std::ffi::c_int;

use anyhow::{Context, Result, ensure};
use doorbell_verbs_sys::*;

use super::{ALL_RIGHTS, Bench, Cq, Device, Errno, Mr, Pd, Qp, Recv};

#[derive(Clone, Copy, Debug)]
// fields: the attributes of a queue pair and its region, one each
pub(in crate::conformance) struct Setup {
    pub(in crate::conformance) transport: ibv_qp_type,
    pub(in crate::conformance) depth: u32,
    pub(in crate::conformance) sges: u32,
    /// Maximum inline data in bytes.
    pub(in crate::conformance) inline: u32,
    pub(in crate::conformance) signal_all: bool,
    pub(in crate::conformance) mtu: ibv_mtu,
    pub(in crate::conformance) access: u32,
    pub(in crate::conformance) rights: u32,
    /// Bytes of the region.
    pub(in crate::conformance) bytes: usize,
    /// 4.096 µs · 2^timeout.
    pub(in crate::conformance) timeout: u8,
    pub(in crate::conformance) retry_cnt: u8,
    pub(in crate::conformance) rnr_retry: u8,
    pub(in crate::conformance) min_rnr_timer: u8,
    pub(in crate::conformance) rd_atomic: u8,
    pub(in crate::conformance) dest_rd_atomic: u8,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            transport: IBV_QPT_RC,
            depth: 16,
            sges: 4,
            inline: 64,
            signal_all: false,
            mtu: IBV_MTU_1024,
            access: ALL_RIGHTS,
            rights: ALL_RIGHTS,
            bytes: 1 << 14,
            timeout: 15,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            rd_atomic: 4,
            dest_rd_atomic: 4,
        }
    }
}

impl Setup {
    pub(in crate::conformance) fn of(transport: ibv_qp_type) -> Self {
        Self {
            transport,
            ..Self::default()
        }
    }
}

/// Dropped in the order of the fields: the queue pair before its completion queues.
pub(in crate::conformance) struct End {
    pub(in crate::conformance) qp: Qp,
    pub(in crate::conformance) sent: Cq,
    pub(in crate::conformance) received: Cq,
    pub(in crate::conformance) mr: Mr,
    pub(in crate::conformance) pd: Pd,
}

impl End {
    pub(in crate::conformance) fn new(device: &Device, setup: &Setup, psn: u32) -> Result<Self> {
        let pd = device.pd().context("ibv_alloc_pd")?;
        let (sent, received) = (
            device.cq(setup.depth as c_int * 2)?,
            device.cq(setup.depth as c_int * 2)?,
        );
        Self::with(&pd, sent, received, setup, psn)
    }

    pub(in crate::conformance) fn with(pd: &Pd, sent: Cq, received: Cq, setup: &Setup, psn: u32) -> Result<Self> {
        let mr = pd.register(setup.bytes, setup.rights).context("ibv_reg_mr")?;
        let qp = pd.qp(&sent, &received, setup, psn).context("ibv_create_qp")?;
        Ok(Self {
            qp,
            sent,
            received,
            mr,
            pd: pd.clone(),
        })
    }

    pub(in crate::conformance) fn device(&self) -> &Device {
        self.pd.device()
    }

    /// Posts a receive into a part of the region.
    pub(in crate::conformance) fn expect(&self, wr_id: u64, offset: usize, len: usize) -> Result<()> {
        let result = self.qp.receive_one(Recv::new(wr_id).sge(self.mr.sge(offset, len)));
        ensure!(result == Errno(0), "ibv_post_recv: {result}");
        Ok(())
    }

    pub(in crate::conformance) fn post(&self, send: super::Send) -> Result<()> {
        let result = self.qp.post_one(send);
        ensure!(result == Errno(0), "ibv_post_send: {result}");
        Ok(())
    }

    pub(in crate::conformance) fn fill(&self, at: usize, bytes: &[u8]) {
        self.mr.memory.fill(at, bytes);
    }

    pub(in crate::conformance) fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        self.mr.memory.bytes(at..at + len)
    }
}

/// Two connected ends on one device: what `a` sends goes to `b`.
pub(in crate::conformance) struct Pair {
    pub(in crate::conformance) a: End,
    pub(in crate::conformance) b: End,
}

impl Bench {
    /// A first PSN, from the case's seed.
    pub(in crate::conformance) fn psn(&self, salt: u32) -> u32 {
        (mix(self.seed ^ u64::from(salt) << 40) >> 20) as u32 & 0x00ff_ffff
    }

    /// Two ends in RESET, each set as the other's peer.
    pub(in crate::conformance) fn unconnected_pair(&self, a: &Setup, b: &Setup) -> Result<Pair> {
        self.unconnected_pair_from([a, b], [self.psn(1), self.psn(2)])
    }

    /// The same with these first PSNs.
    pub(in crate::conformance) fn unconnected_pair_from(&self, [a, b]: [&Setup; 2], psns: [u32; 2]) -> Result<Pair> {
        let device = self.open()?;
        let a = End::new(&device, a, psns[0])?;
        let b = End::new(&device, b, psns[1])?;
        a.qp.set_peer(b.qp.as_peer());
        b.qp.set_peer(a.qp.as_peer());
        Ok(Pair { a, b })
    }

    pub(in crate::conformance) fn pair(&self, setup: &Setup) -> Result<Pair> {
        self.pair_of(setup, setup)
    }

    pub(in crate::conformance) fn pair_of(&self, a: &Setup, b: &Setup) -> Result<Pair> {
        let pair = self.unconnected_pair(a, b)?;
        pair.a.qp.bring_to(IBV_QPS_RTS)?;
        pair.b.qp.bring_to(IBV_QPS_RTS)?;
        Ok(pair)
    }

    pub(in crate::conformance) fn pattern(&self, len: usize, salt: u32) -> Vec<u8> {
        pattern(len, self.seed ^ u64::from(salt) << 32)
    }
}

/// Bytes that differ by offset and seed; none is 0, which memory starts with.
pub(in crate::conformance) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64)
        .map(|index| (mix(seed ^ index) >> 56) as u8 | 1)
        .collect()
}

/// SplitMix64's output function.
fn mix(value: u64) -> u64 {
    let mut mixed = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
