//! How the ends of a test are connected, and which of them send.

use std::ops::Not;

use serde::{Deserialize, Serialize};

use super::{Kind, Verb};
use crate::cli::Transport;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Mode {
    #[serde(default)]
    pub(crate) transport: Transport,
    /// Whether both ends send, read or do atomics.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub(crate) bidirectional: bool,
    /// Whether the connection manager connects the queue pairs.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub(crate) rdma_cm: bool,
}

impl Mode {
    /// Whether the transport delivers every message, or fails.
    pub(crate) fn is_reliable(self) -> bool {
        self.transport == Transport::Rc
    }

    /// What differs from a one-way test over RC, as `bidirectional, uc`.
    pub(crate) fn name(self) -> String {
        let transport = match self.transport {
            Transport::Rc => None,
            Transport::Uc => Some("uc"),
            Transport::Ud => Some("ud"),
        };
        let words = [
            self.bidirectional.then_some("bidirectional"),
            transport,
            self.rdma_cm.then_some("rdma_cm"),
        ];
        words.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }

    /// # Errors
    /// One line with what InfiniBand has no such operation for, or what has no such direction.
    pub(super) fn check(self, kind: Kind, verb: Verb) -> Result<(), &'static str> {
        match (self.transport, verb) {
            (Transport::Uc, Verb::Read) => Err("UC has no RDMA READ: --transport uc is for write and send"),
            (Transport::Uc, Verb::Atomic(_)) => Err("UC has no atomics: --transport uc is for write and send"),
            (Transport::Ud, Verb::Write) => Err("UD has no RDMA WRITE: --transport ud is for send"),
            (Transport::Ud, Verb::Read) => Err("UD has no RDMA READ: --transport ud is for send"),
            (Transport::Ud, Verb::Atomic(_)) => Err("UD has no atomics: --transport ud is for send"),
            (Transport::Uc, _) if self.rdma_cm => {
                Err("--rdma-cm connects rc and ud: the connection manager connects no UC")
            }
            _ if self.bidirectional && kind == Kind::Lat => Err("a latency test has one message in flight, one way"),
            _ => Ok(()),
        }
    }
}
