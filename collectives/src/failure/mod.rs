//! Failure detection and agreement: which member is to blame when an operation stalls, and which
//! members survive.
//!
//! The engine's part:
//!
//! - It reports to its [`ProgressMonitor`] the operations that it begins and finishes, and polls
//!   one flag of it, [`ProgressMonitor::needs_attention`], while it spins. When a report is
//!   [requested](ProgressMonitor::report_requested), it [reports](ProgressMonitor::report) what it
//!   waits for.
//! - Stalled for half of an operation's deadline, it has the control mesh
//!   [investigate](crate::bootstrap::ControlMesh::investigate): all members are queried. That ends
//!   nothing.
//! - At the deadline it [gives up](crate::bootstrap::ControlMesh::give_up), which fails the group
//!   on all members with the finding. When a queue pair fails, it
//!   [ends](crate::bootstrap::ControlMesh::end) the group, which is both in one: a queue pair also
//!   fails because its peer is dead or stopped.
//! - When the group has [failed](ProgressMonitor::failed), locally or on another member,
//!   [`ControlMesh::failure`](crate::bootstrap::ControlMesh::failure) gives the cause: the same on
//!   all members.
//!
//! A failed link shows only at an end that has something to send, some seconds after the cut at the
//! device's default timeouts, so a rank that is cut off from all may show on one link alone. All
//! members then test their links, and a rank that none of the others reaches is cut off. Where that
//! is inconclusive, as between two ranks, or where the other engines are not driven, the two ends
//! of the link are named, as for any link that fails between two live ranks. A group of survivors
//! excludes the higher rank of the two, which need not be the one that was cut off; if so it fails
//! again and excludes the next.
//!
//! The mesh I/O thread detects deaths by itself. [`diagnose`] derives the cause from the members'
//! reports, `detector` has the members agree on it, and `agreement` on the survivors. All three are
//! sans-IO: no clock and no sockets.

mod agreement;
mod detector;
mod diagnosis;
mod message;
mod monitor;
mod verdict;

pub use agreement::ShrinkError;
pub use detector::AGREEMENT_TIMEOUT;
pub use diagnosis::{MemberStatus, diagnose};
pub use monitor::{Awaited, MESSAGES, ProgressMonitor, Report, Wait};
pub use verdict::{Cause, Failure, Stuck, Verdict};

pub(crate) use agreement::{AddressedMessage, Agreement, Outcome, Proposal, ShrinkMessage};
pub(crate) use detector::{FailureDetector, Outgoing};
pub(crate) use message::Message;
pub(crate) use monitor::message_number;
