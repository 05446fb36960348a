//! How an endpoint behaves.

use crate::Mtu;

/// How an endpoint behaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EndpointConfig {
    /// Chooses the queue pair numbers, or in which order those of a [`Block`](crate::Block) are used, so that a restarted device does not reuse the old ones.
    pub seed: u64,
    /// PSNs of one queue pair unacknowledged at most, 1 to 2^22; values beyond count as the nearest. More is faster over long paths, and has to go again after a loss.
    pub window: u32,
    /// The same of a queue pair whose packets go by a lane, which loses nothing: bounded by the slots that the lane has, as what refers to memory keeps its slot until it has been copied.
    pub shm_window: u32,
    /// The port's MTU: the most that a datagram (UD) carries.
    pub mtu: Mtu,
    /// The most payload of a packet on a lane in bytes, at both ends; 256 KiB unless it is a test.
    pub shm_mtu: usize,
    /// A payload of more bytes is referred to by its packet on a lane; a shorter one goes with it.
    pub shm_inline_threshold: usize,
}

impl EndpointConfig {
    /// The window of the Linux kernel's rxe.
    pub const DEFAULT_WINDOW: u32 = 128;
    /// Seven eighths of the 512 slots of a lane: the rest are for what other queue pairs say meanwhile.
    pub const SHM_WINDOW: u32 = 448;
    /// The most payload of a packet on a lane in bytes. Both ends know it; it is no part of what they agree on.
    pub const LANE_MTU: usize = 256 << 10;
    /// Up to here, copying twice costs less than referring.
    pub const SHM_INLINE_THRESHOLD: usize = 1024;
    pub(super) const MAX_WINDOW: u32 = 1 << 22;
}

impl Default for EndpointConfig {
    fn default() -> Self {
        Self {
            seed: 0,
            window: Self::DEFAULT_WINDOW,
            shm_window: Self::SHM_WINDOW,
            mtu: Mtu::Mtu4096,
            shm_mtu: Self::LANE_MTU,
            shm_inline_threshold: Self::SHM_INLINE_THRESHOLD,
        }
    }
}
