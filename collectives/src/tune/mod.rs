//! Tuning: the choice of algorithm, protocol, channels and slice length, and its reasons.
//!
//! [`Tuner::choose`] predicts all candidates by the closed forms of [`cost`](crate::cost), and runs
//! the best through the [simulator](crate::simulate). The environment ([`Overrides`]) or a tuning
//! file ([`TuningFile`]) restricts the choice; [`Decision::explain`] lists candidates and the
//! reason.

mod choose;
mod environment;
mod file;
mod fit;

pub use choose::{Candidate, Choice, Decision, NoChoice, Tuner, TuningRequest};
pub use environment::{EnvironmentError, Overrides, calibrate};
pub use file::{FileError, Rule, TuningFile};
pub use fit::{Calibration, Hops, MANY, Messages, median};
