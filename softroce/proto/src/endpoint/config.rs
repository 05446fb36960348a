//! Configuration of an endpoint.

use crate::Mtu;

/// Configuration of an endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EndpointConfig {
    /// Selects the queue pair numbers, so that a restarted device does not reuse the old ones.
    pub seed: u64,
    /// Send window: unacknowledged PSNs per queue pair, 1 to 2^22 (clamped). A larger one is faster
    /// over long paths, and is retransmitted as a whole after a loss (go-back-N).
    pub window: u32,
    /// Send window on a shm link, which is lossless: bounded by the ring's slots, as a packet that
    /// references memory occupies its slot until it is copied.
    pub shm_window: u32,
    /// The port's MTU: the maximum payload of a UD datagram.
    pub mtu: Mtu,
    /// Maximum payload of a shm packet in bytes, the same at both ends; 256 KiB except in tests.
    pub shm_mtu: usize,
    /// On a shm link, longer payloads (in bytes) are passed by reference, not through the ring.
    pub shm_inline_threshold: usize,
}

impl EndpointConfig {
    /// The window of the Linux kernel's rxe.
    pub const DEFAULT_WINDOW: u32 = 128;
    /// Seven eighths of the 512 slots of a shm ring; the rest is for other queue pairs.
    pub(crate) const SHM_WINDOW: u32 = 448;
    /// Maximum payload of a shm packet in bytes. The ends do not negotiate it.
    pub const SHM_MTU: usize = 256 << 10;
    /// Up to this size two copies through the ring cost less than a reference.
    pub(crate) const SHM_INLINE_THRESHOLD: usize = 1024;
    pub(super) const MAX_WINDOW: u32 = 1 << 22;
}

impl Default for EndpointConfig {
    fn default() -> Self {
        Self {
            seed: 0,
            window: Self::DEFAULT_WINDOW,
            shm_window: Self::SHM_WINDOW,
            mtu: Mtu::Mtu4096,
            shm_mtu: Self::SHM_MTU,
            shm_inline_threshold: Self::SHM_INLINE_THRESHOLD,
        }
    }
}
