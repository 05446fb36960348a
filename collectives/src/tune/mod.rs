//! Choosing how an operation is done: algorithm, protocol, channels and slice, and why.
//!
//! [`Tuner::choose`] predicts the time of all that could be done by the closed forms of [`cost`](crate::cost), and then runs the best of them through the [simulator](crate::simulate), on the hosts as they are. What
//! the user forces is taken out of the choice: by the environment ([`Overrides`]), or by rules of a tuning file ([`TuningFile`]). [`Decision::explain`] shows the candidates and says why.

mod choose;
mod environment;
mod file;
mod fit;

pub use choose::{Candidate, Choice, Decision, NoChoice, Question, Tuner};
pub use environment::{EnvironmentError, Overrides, mapped};
pub use file::{FileError, Rule, TuningFile};
pub use fit::{Calibration, Hops, MANY, Messages, median};
