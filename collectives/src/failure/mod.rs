//! Failure detection and agreement: which member is to blame when an operation stalls, and which
//! members survive.
//!
//! An engine publishes its operations to its [`ProgressMonitor`], polls
//! [`ProgressMonitor::needs_attention`] while it spins, and [reports](ProgressMonitor::report) its
//! waits on [request](ProgressMonitor::report_requested). Stalled for half of a deadline, it has
//! the control mesh [investigate](crate::bootstrap::GroupControl::investigate), which ends nothing;
//! at the deadline it [gives up](crate::bootstrap::GroupControl::give_up), which fails the group
//! with the finding. A failed queue pair [ends](crate::bootstrap::GroupControl::end) the group,
//! which is both in one. The cause is the same on all members:
//! [`GroupControl::failure`](crate::bootstrap::GroupControl::failure).
//!
//! A failed link shows only at an end that has something to send, so all members then test their
//! links: a rank that none of the others reaches is cut off. Where that is inconclusive, as between
//! two ranks, the two ends of the link are named, and a group of survivors excludes the higher rank
//! of the two; if that is the wrong one, it fails again and excludes the next.
//!
//! The mesh I/O thread detects deaths. [`diagnose`], `detector` and `agreement` are sans-IO.

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
