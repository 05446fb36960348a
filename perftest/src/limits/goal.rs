//! The goal of a measurement.

use std::fmt;

use serde::Serialize;

/// A goal for the value in its unit, or for its ratio to a limit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Goal {
    RatioAtLeast(f64),
    RatioAtMost(f64),
    AtLeast(f64),
    AtMost(f64),
}

impl Goal {
    pub(super) fn is_met(self, value: f64, ratio: f64) -> bool {
        match self {
            Goal::RatioAtLeast(least) => ratio >= least,
            Goal::RatioAtMost(most) => ratio <= most,
            Goal::AtLeast(least) => value >= least,
            Goal::AtMost(most) => value <= most,
        }
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Goal::RatioAtLeast(least) => write!(f, ">= {least}"),
            Goal::RatioAtMost(most) => write!(f, "<= {most}"),
            Goal::AtLeast(least) => write!(f, ">= {} M", least / 1e6),
            Goal::AtMost(most) => write!(f, "<= {most} ns"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_goal_checks_value_or_ratio() {
        for (goal, met, missed) in [
            (Goal::RatioAtLeast(0.9), (0.0, 0.9), (9.0, 0.89)),
            (Goal::RatioAtMost(0.1), (9.0, 0.1), (0.0, 0.2)),
            (Goal::AtLeast(2e6), (2e6, 0.0), (1e6, 9.0)),
            (Goal::AtMost(500.0), (500.0, 9.0), (501.0, 0.0)),
        ] {
            assert!(goal.is_met(met.0, met.1) && !goal.is_met(missed.0, missed.1), "{goal}");
        }
    }
}
