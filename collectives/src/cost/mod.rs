//! Cost model of collectives: the α-β-γ model.
//!
//! A message of *b* bytes takes α + bβ from the beginning of its `Send` to the end of its `Recv`,
//! and reducing it bγ more. For a part of α the processors of sender and receiver are busy; the
//! rest is latency and overlaps (LogGP's L, o and G). [`Link`] has these parameters per protocol,
//! [`Compute`] those of local work, from a calibration ([`tune`](crate::tune)), a tuning file, or a
//! preset.
//!
//! Where processors move the bytes, a long message of Simple also waits for its receiver's grant,
//! and its operation for the acknowledgement; a byte's cost depends on length ([`Scale`]), origin
//! and concurrent ranks ([`ByteCosts`]).
//!
//! [`predict_ns`] is in closed form; [`simulate`](crate::simulate) runs the plan itself.

mod closed;
mod scale;

use serde::{Deserialize, Serialize};

use crate::protocol::EAGER_BYTES;
use crate::types::Protocol;

pub(crate) use closed::blocks;
pub use closed::predict_ns;
pub use scale::{MARKS, NEAR, Scale};

/// Cost of a message by one protocol.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MessageCost {
    /// α, ns: a message without payload, from the beginning of the send to the end of the receive.
    /// Half a round trip.
    pub alpha_ns: f64,
    /// The part of α in which the sender's processor is busy, ns.
    pub send_ns: f64,
    /// The part of α in which the receiver's processor is busy, ns.
    pub receive_ns: f64,
    /// β, ns per byte of payload, including the protocol's overhead.
    pub beta_ns_per_byte: f64,
    /// ns added to a hop if the receiver also sends a message at the same time.
    #[serde(default, rename = "both_ns")]
    pub bidirectional_ns: f64,
    /// ns from the beginning of a receiver's operation until its peer has the grant; 0 with slots.
    #[serde(default)]
    pub grant_ns: f64,
    /// ns added to receiving for a rank that sends nothing: it waits for the transfer of each cache
    /// line, with nothing to overlap.
    #[serde(default, rename = "lone_ns")]
    pub receive_only_ns: f64,
    /// Of Simple: whether eager messages are copied by the sender, and so need no acknowledgement.
    #[serde(default, rename = "stored")]
    pub copied: bool,
    /// ns from the receipt of a message until its sender's operation may end; 0 where no
    /// acknowledgement is needed.
    #[serde(default)]
    pub confirm_ns: f64,
    /// ns added if the sender receives nothing: no reverse traffic carries the acknowledgement.
    #[serde(default, rename = "quiet_ns")]
    pub send_only_ns: f64,
    /// β by bytes, where processors move them and it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<ByteCosts>,
}

/// Cost per byte moved by a processor.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ByteCosts {
    /// Of data that was in memory before the operation.
    #[serde(rename = "settled")]
    pub resident: Scale,
    /// Of data that the sender has just received: modified lines of another processor's cache.
    #[serde(rename = "fresh")]
    pub forwarded: Scale,
    /// Of data that the receiver reduces on arrival, including γ and staging.
    pub reduced: Scale,
    /// Of the reduction alone, on arrival at a rank that sends nothing meanwhile.
    #[serde(rename = "reduced_alone")]
    pub isolated_reduced: Scale,
    /// Of data that a later step of the receiver reduces, including γ.
    pub gathered: Scale,
    /// Of the reduction alone, by a later step of a rank that sends nothing meanwhile.
    #[serde(rename = "gathered_alone")]
    pub isolated_gathered: Scale,
    /// Of data in memory, while no other rank of the host uses the memory bandwidth.
    #[serde(rename = "alone")]
    pub isolated: Scale,
    /// Of granted messages that are shorter than the longest.
    #[serde(default)]
    pub far: FarMessages,
}

/// Cost of a granted message, beside its bytes, in an operation that near caches do not hold.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FarMessages {
    /// ns per message.
    pub ns: f64,
    /// The length of messages whose bytes cost includes it.
    pub bytes: u64,
    /// Bytes per rank of the operation from which on it is all of that; from [`NEAR`] on a part.
    pub whole: u64,
}

impl FarMessages {
    fn ns_per_byte(&self, bytes: f64, whole: f64) -> f64 {
        if self.ns <= 0.0 || bytes <= EAGER_BYTES as f64 {
            return 0.0;
        }
        let part = (whole - NEAR as f64) / (self.whole as f64 - NEAR as f64).max(1.0);
        self.ns * part.clamp(0.0, 1.0) * (1.0 / bytes - 1.0 / self.bytes as f64).max(0.0)
    }
}

impl ByteCosts {
    /// ns per byte of reducing beside moving.
    fn added(&self, (both, isolated): (Scale, Scale), (bytes, whole): (f64, f64), sends: bool) -> f64 {
        let at = |scale: Scale| scale.ns_per_byte(bytes, whole);
        match sends {
            true => (at(both) - at(self.resident)).max(0.0),
            false => at(isolated),
        }
    }
}

/// Message length above which its first bytes have left the sender's cache.
const EVICTED_BYTES: f64 = 2.0 * NEAR as f64;

impl MessageCost {
    /// A message with α, of which parts are busy at sender and receiver, and β, without grants.
    #[must_use]
    pub const fn simple(alpha_ns: f64, send_ns: f64, receive_ns: f64, beta_ns_per_byte: f64) -> Self {
        Self {
            alpha_ns,
            send_ns,
            receive_ns,
            beta_ns_per_byte,
            bidirectional_ns: 0.0,
            grant_ns: 0.0,
            receive_only_ns: 0.0,
            copied: false,
            confirm_ns: 0.0,
            send_only_ns: 0.0,
            bytes: None,
        }
    }

    /// The wait of so many bytes for their grant, ns, if the receiver begins when the sender does.
    #[must_use]
    pub fn grant_ns(&self, bytes: f64) -> f64 {
        if bytes > EAGER_BYTES as f64 { self.grant_ns } else { 0.0 }
    }

    /// Whether a message of so many bytes is copied by its sender.
    #[must_use]
    pub fn is_copied(&self, bytes: f64) -> bool {
        self.copied && bytes <= EAGER_BYTES as f64
    }

    /// The wait of the sender of a message of so many bytes for the acknowledgement, ns.
    #[must_use]
    pub fn confirm_ns(&self, bytes: f64) -> f64 {
        if self.is_copied(bytes) { 0.0 } else { self.confirm_ns }
    }

    /// ns per byte that reducing adds to β, at a rank that also sends, or only receives; `None` if
    /// only γ is known.
    #[must_use]
    pub fn reducing(&self, bytes: f64, whole: f64, sends: bool) -> Option<f64> {
        let moves = self.bytes?;
        Some(moves.added((moves.reduced, moves.isolated_reduced), (bytes, whole), sends))
    }

    /// The same where a later step reduces what was received.
    #[must_use]
    pub fn gathering(&self, bytes: f64, whole: f64, sends: bool) -> Option<f64> {
        let moves = self.bytes?;
        Some(moves.added((moves.gathered, moves.isolated_gathered), (bytes, whole), sends))
    }

    /// β of messages of so many bytes, in an operation with so many per rank, ns per byte; `others`
    /// is the fraction of other ranks that move data concurrently.
    #[must_use]
    pub fn beta(&self, bytes: f64, whole: f64, forwarded: bool, others: f64) -> f64 {
        let Some(moves) = &self.bytes else {
            return self.beta_ns_per_byte;
        };
        let resident = moves.resident.ns_per_byte(bytes, whole);
        let all = match forwarded {
            false => resident,
            // The first part has left the sender's cache when the last is written.
            true if bytes > EVICTED_BYTES => resident.max(moves.forwarded.ns_per_byte(bytes, whole)),
            true => moves.forwarded.ns_per_byte(bytes, whole),
        };
        let shared = (resident - moves.isolated.ns_per_byte(bytes, whole)).clamp(0.0, all);
        all - shared * (1.0 - others) + moves.far.ns_per_byte(bytes, whole)
    }

    /// The part of α in which no processor is busy, ns.
    #[must_use]
    pub fn latency_ns(&self) -> f64 {
        (self.alpha_ns - self.send_ns - self.receive_ns).max(0.0)
    }
}

/// The fraction of payload in the bytes on the wire.
#[must_use]
pub const fn payload(protocol: Protocol) -> f64 {
    match protocol {
        Protocol::Simple => 1.0,
        Protocol::Ll => 0.5,
        Protocol::Ll128 => 0.9375,
    }
}

/// The component that moves the bytes, whose time β is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DataMover {
    /// Adapters and link: processors are free meanwhile.
    #[default]
    Device,
    /// Processors copy, as between processes on the soft device: the sender's a granted message,
    /// the sender's and then the receiver's any other.
    #[serde(alias = "receiver")]
    Processors,
}

impl DataMover {
    /// The shares of β that occupy the sender's and the receiver's processor, for a message of so
    /// many bytes.
    #[must_use]
    pub fn shares(self, protocol: Protocol, bytes: f64) -> (f64, f64) {
        match (self, protocol) {
            (Self::Device, _) => (0.0, 0.0),
            (Self::Processors, Protocol::Simple) if bytes > EAGER_BYTES as f64 => (1.0, 0.0),
            (Self::Processors, _) => (0.5, 0.5),
        }
    }
}

/// A kind of connection between two ranks.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// The component that moves the bytes.
    #[serde(default)]
    #[serde(rename = "mover")]
    pub data_mover: DataMover,
    /// By [`Protocol::Simple`].
    pub simple: MessageCost,
    /// By [`Protocol::Ll`].
    pub ll: MessageCost,
    /// By [`Protocol::Ll128`].
    pub ll128: MessageCost,
}

impl Link {
    /// A link of which only Simple's cost is known: the others have their share of the bandwidth,
    /// and `flagged_alpha_ns` for α, as they need no second message for the flag.
    #[must_use]
    pub fn derived(data_mover: DataMover, simple: MessageCost, flagged_alpha_ns: f64) -> Self {
        let scale = flagged_alpha_ns / simple.alpha_ns.max(f64::MIN_POSITIVE);
        let flagged = |protocol: Protocol| {
            let beta = simple.beta_ns_per_byte / payload(protocol);
            MessageCost::simple(
                flagged_alpha_ns,
                simple.send_ns * scale,
                simple.receive_ns * scale,
                beta,
            )
        };
        let mut ll128 = flagged(Protocol::Ll128);
        // A line is sent whole, however short its data.
        ll128.alpha_ns += 120.0 * ll128.beta_ns_per_byte;
        Self {
            data_mover,
            simple,
            ll: flagged(Protocol::Ll),
            ll128,
        }
    }

    /// The soft device between processes of one host, unmeasured: orders of magnitude of the
    /// reference machine (docs/RESULTS.md).
    #[must_use]
    pub fn soft_local() -> Self {
        let simple = MessageCost::simple(1000.0, 250.0, 350.0, 0.04);
        Self::derived(DataMover::Processors, simple, 600.0)
    }

    /// An adapter of 400 Gbit/s behind two switches.
    #[must_use]
    pub fn ndr400() -> Self {
        let simple = MessageCost::simple(3000.0, 200.0, 200.0, 0.02);
        Self::derived(DataMover::Device, simple, 2000.0)
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

/// Cost of a rank's local work.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compute {
    /// γ, ns per byte of an operand that is reduced into another.
    pub gamma_ns_per_byte: f64,
    /// ns per byte copied within the rank.
    pub copy_ns_per_byte: f64,
    /// ns before the first step of an operation, for its submission.
    pub begin_ns: f64,
    /// γ by bytes, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gamma: Option<Scale>,
    /// The cost of copying by bytes, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<Scale>,
}

impl Compute {
    /// γ of so many bytes, in an operation with so many per rank, ns per byte.
    #[must_use]
    pub fn gamma(&self, bytes: f64, whole: f64) -> f64 {
        self.gamma
            .map_or(self.gamma_ns_per_byte, |scale| scale.ns_per_byte(bytes, whole))
    }

    /// The same of copying.
    #[must_use]
    pub fn copy(&self, bytes: f64, whole: f64) -> f64 {
        self.copy
            .map_or(self.copy_ns_per_byte, |scale| scale.ns_per_byte(bytes, whole))
    }
}

impl Default for Compute {
    /// A current processor, with data in its caches.
    fn default() -> Self {
        Self {
            gamma_ns_per_byte: 0.05,
            copy_ns_per_byte: 0.04,
            begin_ns: 100.0,
            gamma: None,
            copy: None,
        }
    }
}
