//! What a collective costs: the α-β-γ model.
//!
//! A message of *b* bytes takes α + bβ from the beginning of its `Send` to the end of its `Recv`, and reducing it bγ more. Of α, the processors of the sender and of the receiver are busy for a part, which is what bounds a
//! rank that has many messages; the rest is latency, and overlaps with anything (LogGP's L, o and G). [`Link`] has these numbers for each protocol, [`Compute`] those of a rank alone. Where they come from: a calibration
//! ([`tune`](crate::tune)), a tuning file, or one of the presets here.
//!
//! [`predict_ns`] is each algorithm in these terms, in closed form; [`simulate`](crate::simulate) runs the plan itself, on fabrics that are not uniform, too.

mod closed;

use serde::{Deserialize, Serialize};

use crate::types::Protocol;

pub(crate) use closed::blocks;
pub use closed::predict_ns;

/// What a message costs by one protocol.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MessageCost {
    /// α, ns: a message without payload, from the beginning of the send to the end of the receive. Half a round trip.
    pub alpha_ns: f64,
    /// ns of α in which the sender's processor is busy.
    pub send_ns: f64,
    /// ns of α in which the receiver's processor is busy.
    pub receive_ns: f64,
    /// β, ns per byte of payload: what the protocol adds to the payload is in it.
    pub beta_ns_per_byte: f64,
}

impl MessageCost {
    /// ns of α in which nobody is busy.
    #[must_use]
    pub fn latency_ns(&self) -> f64 {
        (self.alpha_ns - self.send_ns - self.receive_ns).max(0.0)
    }

    /// α + bβ, ns.
    #[must_use]
    pub fn message_ns(&self, bytes: f64) -> f64 {
        self.alpha_ns + bytes * self.beta_ns_per_byte
    }
}

/// Which part of the bytes on the wire is payload.
#[must_use]
pub const fn payload(protocol: Protocol) -> f64 {
    match protocol {
        Protocol::Simple => 1.0,
        Protocol::Ll => 0.5,
        Protocol::Ll128 => 0.9375,
    }
}

/// Whose time β is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mover {
    /// The adapters' and the link's: while they carry one message the processors do something else.
    #[default]
    Device,
    /// The receiver's processor copies, as between processes on the userspace device.
    Receiver,
}

/// A kind of connection between two ranks.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Who moves the bytes.
    #[serde(default)]
    pub mover: Mover,
    /// By [`Protocol::Simple`].
    pub simple: MessageCost,
    /// By [`Protocol::Ll`].
    pub ll: MessageCost,
    /// By [`Protocol::Ll128`].
    pub ll128: MessageCost,
}

impl Link {
    /// A link of which only Simple's cost is known: the others have their part of the bandwidth, and `flagged_alpha_ns` for α, as they need no second message for the flag.
    #[must_use]
    pub fn derived(mover: Mover, simple: MessageCost, flagged_alpha_ns: f64) -> Self {
        let scale = flagged_alpha_ns / simple.alpha_ns.max(f64::MIN_POSITIVE);
        let flagged = |protocol: Protocol| MessageCost {
            alpha_ns: flagged_alpha_ns,
            send_ns: simple.send_ns * scale,
            receive_ns: simple.receive_ns * scale,
            beta_ns_per_byte: simple.beta_ns_per_byte / payload(protocol),
        };
        let mut ll128 = flagged(Protocol::Ll128);
        // A line travels whole, however little is in it.
        ll128.alpha_ns += 120.0 * ll128.beta_ns_per_byte;
        Self {
            mover,
            simple,
            ll: flagged(Protocol::Ll),
            ll128,
        }
    }

    /// The userspace device between processes of one host, where nothing was measured: orders of magnitude of the reference machine (docs/PERFORMANCE.md).
    #[must_use]
    pub fn soft_local() -> Self {
        let simple = MessageCost {
            alpha_ns: 1000.0,
            send_ns: 250.0,
            receive_ns: 350.0,
            beta_ns_per_byte: 0.04,
        };
        Self::derived(Mover::Receiver, simple, 600.0)
    }

    /// An adapter of 400 Gbit/s behind two switches.
    #[must_use]
    pub fn ndr400() -> Self {
        let simple = MessageCost {
            alpha_ns: 3000.0,
            send_ns: 200.0,
            receive_ns: 200.0,
            beta_ns_per_byte: 0.02,
        };
        Self::derived(Mover::Device, simple, 2000.0)
    }

    /// What a message costs by `protocol`.
    #[must_use]
    pub const fn cost(&self, protocol: Protocol) -> &MessageCost {
        match protocol {
            Protocol::Simple => &self.simple,
            Protocol::Ll => &self.ll,
            Protocol::Ll128 => &self.ll128,
        }
    }
}

/// What a rank's own work costs.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compute {
    /// γ, ns per byte of an operand that is reduced into another.
    pub gamma_ns_per_byte: f64,
    /// ns per byte copied within the rank.
    pub copy_ns_per_byte: f64,
    /// ns before the first step of an operation: submitting it.
    pub begin_ns: f64,
}

impl Default for Compute {
    /// A processor of today, data in its caches.
    fn default() -> Self {
        Self {
            gamma_ns_per_byte: 0.05,
            copy_ns_per_byte: 0.04,
            begin_ns: 100.0,
        }
    }
}
