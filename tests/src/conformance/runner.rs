//! Runs cases in sequence, each in a thread with a time limit, and evaluates them.

use std::panic;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use doorbell_verbs_sys::Api;

use super::rig::{Bench, NotOffered};
use super::waivers::{Kind, Waiver};
use super::{Case, Options};

/// Time limit of a case: twice that of a completion, which most wait for once.
const LIMIT: Duration = Duration::from_secs(45);

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    Passed,
    Failed(String),
    /// Fails as waived, or is not run.
    Waived {
        failure: String,
        reason: String,
    },
    /// Passes although waived.
    WaivedButPassed(String),
    /// The device does not report the capability.
    NotOffered(String),
}

pub(super) struct CaseResult {
    pub(super) case: Arc<Case>,
    pub(super) outcome: Outcome,
    pub(super) took: Duration,
}

impl CaseResult {
    pub(super) fn is_good(&self) -> bool {
        !matches!(self.outcome, Outcome::Failed(_) | Outcome::WaivedButPassed(_))
    }
}

/// Runs all cases, and reports each as it ends.
pub(super) fn run(
    api: &'static Api,
    options: &Options,
    cases: Vec<Case>,
    waivers: &[Waiver],
    mut on_result: impl FnMut(&CaseResult),
) -> Vec<CaseResult> {
    // A panic is reported with its case.
    panic::set_hook(Box::new(|_| {}));
    let results = cases
        .into_iter()
        .map(|case| {
            let result = one(api, options, Arc::new(case), waivers);
            on_result(&result);
            result
        })
        .collect();
    drop(panic::take_hook());
    results
}

fn one(api: &'static Api, options: &Options, case: Arc<Case>, waivers: &[Waiver]) -> CaseResult {
    let since = Instant::now();
    let waiver = waivers.iter().find(|waiver| waiver.covers(&case.name));
    let times = [options.quiet, time_limit(options.time_limit, waiver)];
    let (device, seed) = (options.device.clone(), options.seed);
    if let Some(waiver) = waiver.filter(|waiver| waiver.kind == Kind::Never) {
        let outcome = Outcome::Waived {
            failure: "not run".to_owned(),
            reason: waiver.reason.clone(),
        };
        let took = Duration::ZERO;
        return CaseResult { case, outcome, took };
    }
    let outcome = in_time(Arc::clone(&case), move |case| {
        attempt(case, &Bench::new(api, &device, seed, times))
    });
    CaseResult {
        case,
        outcome: apply_waiver(outcome, waiver, options.waivers.is_some()),
        took: since.elapsed(),
    }
}

/// A case that must fail usually runs into its time limit; if it passes, a quarter suffices.
fn time_limit(usual: Duration, waiver: Option<&Waiver>) -> Duration {
    match waiver {
        Some(waiver) if waiver.kind == Kind::Fails => usual / 4,
        _ => usual,
    }
}

fn attempt(case: &Case, bench: &Bench) -> Outcome {
    match (case.run)(bench) {
        Ok(()) => match &bench.complaints()[..] {
            [] => Outcome::Passed,
            complaints => Outcome::Failed(complaints.join("; ")),
        },
        Err(error) => match error.downcast_ref::<NotOffered>() {
            Some(NotOffered(what)) => Outcome::NotOffered(what.clone()),
            None => Outcome::Failed(format!("{error:#}")),
        },
    }
}

/// A case that hangs in a verb is leaked: it cannot be stopped, and the process ends soon.
fn in_time(case: Arc<Case>, run: impl FnOnce(&Case) -> Outcome + Send + 'static) -> Outcome {
    let (sender, receiver) = mpsc::channel();
    let thread = thread::Builder::new().name(case.name.clone()).spawn(move || {
        // The receiver is gone after a timeout.
        let _ = sender.send(run(&case));
    });
    let thread = match thread {
        Ok(thread) => thread,
        Err(error) => return Outcome::Failed(format!("no thread for it: {error}")),
    };
    match receiver.recv_timeout(LIMIT) {
        Ok(outcome) => outcome,
        Err(mpsc::RecvTimeoutError::Timeout) => Outcome::Failed(format!("has not ended after {LIMIT:?}")),
        Err(mpsc::RecvTimeoutError::Disconnected) => Outcome::Failed(match thread.join() {
            Ok(()) => "ended without a word".to_owned(),
            Err(panic) => format!("panicked: {}", words(&*panic)),
        }),
    }
}

fn words(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()))
        .unwrap_or_else(|| "no message".to_owned())
}

/// With a waiver file, it must list every feature that is not offered.
fn apply_waiver(outcome: Outcome, waiver: Option<&Waiver>, has_file: bool) -> Outcome {
    let Some(waiver) = waiver else {
        return match outcome {
            Outcome::NotOffered(what) if has_file => Outcome::Failed(format!("not offered: {what}")),
            other => other,
        };
    };
    match (outcome, waiver.kind) {
        (outcome @ Outcome::NotOffered(_), Kind::Lacks) => outcome,
        (outcome @ Outcome::Passed, Kind::Unsteady) => outcome,
        (Outcome::Failed(failure), Kind::Fails | Kind::Unsteady) => Outcome::Waived {
            failure,
            reason: waiver.reason.clone(),
        },
        (outcome @ Outcome::Failed(_), _) => outcome,
        _ => Outcome::WaivedButPassed(waiver.reason.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::case;
    use super::*;

    fn waiver(kind: Kind) -> Waiver {
        Waiver {
            pattern: "a/b".to_owned(),
            kind,
            reason: "it is so".to_owned(),
        }
    }

    #[test]
    fn only_a_case_that_must_fail_has_a_shorter_limit() {
        let usual = Duration::from_secs(20);
        assert_eq!(time_limit(usual, Some(&waiver(Kind::Fails))), Duration::from_secs(5));
        for waited_for in [None, Some(&waiver(Kind::Unsteady)), Some(&waiver(Kind::Lacks))] {
            assert_eq!(time_limit(usual, waited_for), usual);
        }
    }

    #[test]
    fn a_waived_case_must_fail() {
        let failed = Outcome::Failed("x".to_owned());
        assert_eq!(apply_waiver(failed.clone(), None, true), failed);
        assert!(matches!(
            apply_waiver(failed, Some(&waiver(Kind::Fails)), true),
            Outcome::Waived { .. }
        ));
        assert!(matches!(
            apply_waiver(Outcome::Passed, Some(&waiver(Kind::Fails)), true),
            Outcome::WaivedButPassed(_)
        ));
        assert_eq!(
            apply_waiver(Outcome::Passed, Some(&waiver(Kind::Unsteady)), true),
            Outcome::Passed
        );
    }

    #[test]
    fn a_lacking_feature_must_not_be_offered() {
        let not_offered = Outcome::NotOffered("x".to_owned());
        assert_eq!(
            apply_waiver(not_offered.clone(), Some(&waiver(Kind::Lacks)), true),
            not_offered
        );
        for (outcome, kind) in [(Outcome::Passed, Kind::Lacks), (not_offered, Kind::Fails)] {
            assert!(matches!(
                apply_waiver(outcome, Some(&waiver(kind)), true),
                Outcome::WaivedButPassed(_)
            ));
        }
        let failed = Outcome::Failed("x".to_owned());
        assert_eq!(apply_waiver(failed.clone(), Some(&waiver(Kind::Lacks)), true), failed);
        let not_offered = Outcome::NotOffered("x".to_owned());
        assert!(matches!(
            apply_waiver(not_offered.clone(), None, true),
            Outcome::Failed(_)
        ));
        assert_eq!(apply_waiver(not_offered.clone(), None, false), not_offered);
    }

    #[test]
    fn a_panic_is_a_failure_with_its_message() {
        let case = Arc::new(case("a/b", "", "", |_| Ok(())));
        let outcome = in_time(case, |_| panic!("no {}", "way"));
        assert_eq!(outcome, Outcome::Failed("panicked: no way".to_owned()));
    }
}
