//! Failure as a value: who is to blame when an operation does not get on.
//!
//! An engine tells its [`Watch`] what it has begun and finished, and looks at one flag of it. The rest is the control mesh's: its thread notices deaths, asks all members when one of them is stuck, and tells all what came of it.

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
pub use watch::{Awaited, Report, Wait, Watch};

pub(crate) use agreement::{Agreement, Outcome, Proposal, Said, Word};
pub(crate) use message::Message;
pub(crate) use trial::{Post, Trial};
