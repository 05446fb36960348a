//! Tuning: the choice of algorithm, protocol, channels and slice length, and its reasons.
//!
//! [`Tuner::choose`] predicts the time of all candidates by the closed forms of
//! [`cost`](crate::cost), and runs the best of them through the [simulator](crate::simulate), on
//! the actual hosts. The user's overrides restrict the choice: by the environment ([`Overrides`]),
//! or by rules of a tuning file ([`TuningFile`]). [`Decision::explain`] lists the candidates and
//! the reason.

mod choose;
mod environment;
mod file;
mod fit;

pub use choose::{Candidate, Choice, Decision, NoChoice, Tuner, TuningRequest};
pub use environment::{EnvironmentError, Overrides, mapped};
pub use file::{FileError, Rule, TuningFile};
pub use fit::{Calibration, Hops, MANY, Messages, median};
