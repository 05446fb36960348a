//! Failure as a value: who is to blame when an operation does not get on, and who is left.
//!
//! What an engine does about it:
//!
//! - It tells its [`ProgressMonitor`] which operations it begins and finishes, and looks at one flag of it, [`ProgressMonitor::attention`], while it spins. If it is [`asked`](ProgressMonitor::asked), it [reports](ProgressMonitor::report) what it waits for.
//! - Stuck for half of an operation's deadline, it has the control mesh [query all members](crate::bootstrap::ControlMesh::investigate). That ends nothing.
//! - When the deadline has come, it [gives up](crate::bootstrap::ControlMesh::give_up), and all members do, with what was found. When a queue pair fails, it [ends](crate::bootstrap::ControlMesh::end) the group, which is both in one: a queue pair
//!   fails because its peer is dead or stopped, too.
//! - When the group has [failed](ProgressMonitor::failed), for its own reasons or others', [`ControlMesh::failure`](crate::bootstrap::ControlMesh::failure) says why: on all members the same.
//!
//! A link that has failed shows only at an end that has something to send on it, some seconds after it was cut at the device's default timeouts. So a rank that is cut off from all may be known by one link alone. All members then try
//! theirs, and who is reached by none of the others is cut off. Where that says nothing, as between two, or where the others have nothing under way, so that nobody drives them, the two ends of the link are named, as of any link that
//! fails between two that live; a group made of what is left is without the higher rank of the two, which need not be the one that was cut off. It fails again if so, and leaves out the next.
//!
//! The thread of the control mesh notices deaths by itself. [`diagnose`] finds the cause in what the members reply, `detector` has them agree on it, and `agreement` on who goes on; all three are without clock and sockets.

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
