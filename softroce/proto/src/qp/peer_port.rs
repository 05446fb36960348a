//! The UDP source port of a connected peer (decision 070).
//!
//! A soft end sends from one socket, whose port no other process of its host can have. Adapters and
//! rxe choose a port of at least 49152 by flow label, for entropy, and may change it.

use crate::Psn;

/// The first of the source ports that adapters and rxe choose for entropy.
pub const FIRST_ENTROPY_PORT: u16 = 0xc000;

/// The ports from which the packets of a peer may come: all while it is unknown, one if it is a
/// socket's, all for entropy if it is one of those.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PeerPort(Option<u16>);

impl PeerPort {
    pub(crate) const fn pinned(port: u16) -> Self {
        Self(Some(port))
    }

    pub(crate) const fn is_unknown(self) -> bool {
        self.0.is_none()
    }

    /// Whether it is a socket's: the peer is a soft end.
    pub(crate) const fn is_socket(self) -> bool {
        matches!(self.0, Some(port) if port < FIRST_ENTROPY_PORT)
    }

    pub(crate) fn admits(self, port: u16) -> bool {
        self.0
            .is_none_or(|pinned| port == pinned || pinned >= FIRST_ENTROPY_PORT && port >= FIRST_ENTROPY_PORT)
    }
}

/// How far the packets of the peer have brought a queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Progress {
    /// The PSN of the next request.
    pub(crate) expected: Psn,
    /// Packets acknowledged.
    pub(crate) acked: u64,
}

impl Progress {
    /// Whether the packet with this PSN has brought it here from `before`, as one that was
    /// expected: its sender knew the PSN. A UC message may begin at any.
    pub(crate) fn is_by_valid_packet(self, psn: Psn, before: Self) -> bool {
        self.acked != before.acked || self.expected != before.expected && psn == before.expected
    }
}
