//! Failure as a value: who is to blame when an operation does not get on.
//!
//! An engine tells its [`Watch`] what it has begun and finished, and looks at one flag of it. The rest is the control mesh's: its thread notices deaths, asks all members when one of them is stuck, and tells all what came of it.

mod watch;

pub use watch::{Awaited, Report, Wait, Watch};
