//! Configuration of an endpoint.

use crate::congestion::CongestionConfig;
use crate::{Mtu, NumberKey};

/// Configuration of an endpoint.
#[derive(Clone, Copy, Debug)]
pub struct EndpointConfig {
    /// Determines the queue pair numbers: a [random](NumberKey::random) one, so that peers cannot
    /// predict them and a restarted device does not reuse the old ones.
    pub key: NumberKey,
    /// Send window: unacknowledged PSNs per queue pair, 1 to 2^22 (clamped). A larger one is faster
    /// over long paths, and is retransmitted as a whole after a loss (go-back-N).
    pub window: u32,
    /// The port's MTU: the maximum payload of a UD datagram.
    pub mtu: Mtu,
    /// What lossless links permit.
    pub link: LinkCapabilities,
    /// Congestion control over UDP.
    pub congestion: CongestionConfig,
    /// Reliable queue pairs send probes over UDP when no response comes for a few round trips,
    /// before the local ACK timeout. Any responder answers them.
    pub tail_loss_probes: bool,
    /// RC queue pairs over UDP use selective repeat, if the peer's end is a Doorbell one with this
    /// setting (decision 111).
    pub selective_repeat: bool,
}

/// What a lossless link to a process of the same host permits: packets arrive once and in order, so
/// that they need neither pad nor ICRC, and no ACK that nothing waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinkCapabilities {
    /// Send window, as [`EndpointConfig::window`]: bounded by the packets that the link holds, as
    /// one that references memory occupies its place until it is copied.
    pub window: u32,
    /// Maximum payload of a packet in bytes, the same at both ends.
    pub mtu: usize,
    /// Longer payloads, in bytes, are passed by reference.
    pub inline_limit: usize,
}

impl LinkCapabilities {
    /// Maximum payload of a packet in bytes. The ends do not negotiate it.
    pub const MTU: usize = 256 << 10;
}

impl Default for LinkCapabilities {
    fn default() -> Self {
        Self {
            // Seven eighths of the 512 packets of a ring; the rest is for other queue pairs.
            window: 448,
            mtu: Self::MTU,
            // Up to this size two copies through the ring cost less than a reference.
            inline_limit: 1024,
        }
    }
}

impl EndpointConfig {
    /// The window of the Linux kernel's rxe.
    pub const DEFAULT_WINDOW: u32 = 128;
    pub(super) const MAX_WINDOW: u32 = 1 << 22;
}

impl Default for EndpointConfig {
    fn default() -> Self {
        Self {
            key: 0.into(),
            window: Self::DEFAULT_WINDOW,
            mtu: Mtu::Mtu4096,
            link: LinkCapabilities::default(),
            congestion: CongestionConfig::default(),
            tail_loss_probes: true,
            selective_repeat: false,
        }
    }
}
