//! What a collective costs: the α-β-γ model.
//!
//! A message of *b* bytes takes α + bβ from the beginning of its `Send` to the end of its `Recv`, and reducing it bγ more. Of α, the processors of the sender and of the receiver are busy for a part, which is what bounds a
//! rank that has many messages; the rest is latency, and overlaps with anything (LogGP's L, o and G). [`Link`] has these numbers for each protocol, [`Compute`] those of a rank alone. Where they come from: a calibration
//! ([`tune`](crate::tune)), a tuning file, or one of the presets here.
//!
//! Where processors move the bytes, α and β are not all. A message of Simple that is long waits until its receiver has said where it may go, and an operation that sent one until it is confirmed. A byte costs by how many there are
//! ([`Scale`]), by what was done with it before and what is done with it as it comes, and by how many ranks move some at the same time ([`Moves`]).
//!
//! [`predict_ns`] is each algorithm in these terms, in closed form; [`simulate`](crate::simulate) runs the plan itself, on fabrics that are not uniform, too.

mod closed;
mod scale;

use serde::{Deserialize, Serialize};

use crate::protocol::EAGER_BYTES;
use crate::types::Protocol;

pub(crate) use closed::blocks;
pub use closed::predict_ns;
pub use scale::{MARKS, NEAR, Scale};

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
    /// ns that a hop takes more where the receiver's own message left at the same time: it is not there yet when the other's comes.
    #[serde(default)]
    pub both_ns: f64,
    /// ns from when a receiver begins an operation until its peer knows where a message may go; 0 where nobody has to wait for that, as with slots that are there. Short messages of Simple have such slots.
    #[serde(default)]
    pub grant_ns: f64,
    /// ns more that taking a message costs a rank that sends none: each waits for a line that another processor has just written, and there is nothing to do meanwhile.
    #[serde(default)]
    pub lone_ns: f64,
    /// Of Simple: whether what is short is stored by its sender, as lines are: then nobody has to hear that it came.
    #[serde(default)]
    pub stored: bool,
    /// ns from when a message was taken until its sender's operation may end; 0 where it need not know.
    #[serde(default)]
    pub confirm_ns: f64,
    /// ns more, where the sender itself receives nothing: then nothing that comes anyway brings the confirmation.
    #[serde(default)]
    pub quiet_ns: f64,
    /// β by bytes, where processors move them and it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Moves>,
}

/// What moving a byte costs a processor.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Moves {
    /// Of what has lain there since before the operation.
    pub settled: Scale,
    /// Of what the sender has just received or computed: its lines are changed ones in that processor's cache.
    pub fresh: Scale,
    /// Of what the receiver reduces as it comes: γ is in it, and what it takes that it is laid down elsewhere before.
    pub reduced: Scale,
    /// Of what has lain there, while no other rank of the host moves anything: all share one memory.
    pub alone: Scale,
}

/// Bytes of a message that are more than a processor keeps by it of what it has just made.
const LONG_AGO: f64 = 2.0 * NEAR as f64;

impl MessageCost {
    /// A message of α (so much of it the sender's processor's, and so much the receiver's) and β, for which nothing has to be granted or confirmed.
    #[must_use]
    pub const fn simple(alpha_ns: f64, send_ns: f64, receive_ns: f64, beta_ns_per_byte: f64) -> Self {
        Self {
            alpha_ns,
            send_ns,
            receive_ns,
            beta_ns_per_byte,
            both_ns: 0.0,
            grant_ns: 0.0,
            lone_ns: 0.0,
            stored: false,
            confirm_ns: 0.0,
            quiet_ns: 0.0,
            bytes: None,
        }
    }

    /// What a message of so many bytes waits for until its sender knows where it may go, ns, if its receiver begins when the sender does.
    #[must_use]
    pub fn grant_ns(&self, bytes: f64) -> f64 {
        if bytes > EAGER_BYTES as f64 { self.grant_ns } else { 0.0 }
    }

    /// Whether a message of so many bytes is stored by its sender.
    #[must_use]
    pub fn is_stored(&self, bytes: f64) -> bool {
        self.stored && bytes <= EAGER_BYTES as f64
    }

    /// What the sender of a message of so many bytes waits for after it was taken, until its operation may end, ns.
    #[must_use]
    pub fn confirm_ns(&self, bytes: f64) -> f64 {
        if self.is_stored(bytes) { 0.0 } else { self.confirm_ns }
    }

    /// What reducing adds to β as a message comes, ns per byte; none where γ is all that is known.
    #[must_use]
    pub fn reducing(&self, bytes: f64, whole: f64) -> Option<f64> {
        let moves = self.bytes?;
        Some((moves.reduced.ns_per_byte(bytes, whole) - moves.settled.ns_per_byte(bytes, whole)).max(0.0))
    }

    /// β of messages of so many bytes, in an operation of which a rank has so many, ns per byte; `others` says which part of the other ranks moves something at the same time.
    #[must_use]
    pub fn beta(&self, bytes: f64, whole: f64, fresh: bool, others: f64) -> f64 {
        let Some(moves) = &self.bytes else {
            return self.beta_ns_per_byte;
        };
        let settled = moves.settled.ns_per_byte(bytes, whole);
        let all = match fresh {
            false => settled,
            // Of what is longer the first part has left the sender's cache when the last is made.
            true if bytes > LONG_AGO => settled.max(moves.fresh.ns_per_byte(bytes, whole)),
            true => moves.fresh.ns_per_byte(bytes, whole),
        };
        let shared = (settled - moves.alone.ns_per_byte(bytes, whole)).clamp(0.0, all);
        all - shared * (1.0 - others)
    }

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
        let simple = MessageCost::simple(1000.0, 250.0, 350.0, 0.04);
        Self::derived(Mover::Receiver, simple, 600.0)
    }

    /// An adapter of 400 Gbit/s behind two switches.
    #[must_use]
    pub fn ndr400() -> Self {
        let simple = MessageCost::simple(3000.0, 200.0, 200.0, 0.02);
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
    /// γ by bytes, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gamma: Option<Scale>,
    /// The cost of copying by bytes, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<Scale>,
}

impl Compute {
    /// γ of so many bytes, in an operation of which a rank has so many, ns per byte.
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
    /// A processor of today, data in its caches.
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
