//! Failure as a value: who is to blame when an operation does not get on, and who is left.
//!
//! What an engine does about it:
//!
//! - It tells its [`Watch`] which operations it begins and finishes, and looks at one flag of it, [`Watch::attention`], while it spins. If it is [`asked`](Watch::asked), it [reports](Watch::report) what it waits for.
//! - Stuck for half of an operation's deadline, it has the control mesh [ask all members](crate::bootstrap::ControlMesh::investigate). That ends nothing.
//! - When the deadline has come, it [gives up](crate::bootstrap::ControlMesh::give_up), and all members do, with what was found. When a queue pair fails, it [ends](crate::bootstrap::ControlMesh::end) the group, which is both in one: a queue pair
//!   fails because its peer is dead or stopped, too.
//! - When the group has [failed](Watch::failed), for its own reasons or others', [`ControlMesh::failure`](crate::bootstrap::ControlMesh::failure) says why: on all members the same.
//!
//! A link that has failed shows only at an end that has something to send on it, some seconds after it was cut at the device's default timeouts. So a rank that is cut off from all may be known by one link alone. All members then try
//! theirs, and who is reached by none of the others is cut off. Where that says nothing, as between two, or where the others have nothing under way, so that nobody drives them, the two ends of the link are named, as of any link that
//! fails between two that live; a group made of what is left is without the higher rank of the two, which need not be the one that was cut off. It fails again if so, and leaves out the next.
//!
//! The thread of the control mesh notices deaths by itself. [`judge`] finds the cause in what the members answer, `trial` has them agree on it, and `agreement` on who goes on; all three are without clock and sockets.

mod agreement;
mod judge;
mod message;
mod trial;
mod verdict;
mod watch;

pub use agreement::ShrinkError;
pub use judge::{Testimony, judge};
pub use trial::SETTLE;
pub use verdict::{Cause, Failure, Stuck, Verdict};
pub use watch::{Awaited, MESSAGES, Report, Wait, Watch};

pub(crate) use agreement::{Agreement, Outcome, Proposal, Said, Word};
pub(crate) use message::Message;
pub(crate) use trial::{Post, Trial};
pub(crate) use watch::message_number;
