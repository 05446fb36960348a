//! Runs cases one after the other, each in a thread of its own with a limit, and judges them.

use std::panic;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use doorbell_verbs_sys::Api;

use super::rig::{Bench, NotOffered};
use super::waivers::{Kind, Waiver};
use super::{Case, Options};

/// No case may take longer: twice what it waits for a completion, which most need once.
const LIMIT: Duration = Duration::from_secs(45);

/// How a case ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    Passed,
    Failed(String),
    /// Fails, as the waiver file says, or is not run.
    Waived {
        failure: String,
        reason: String,
    },
    /// Passes, which the waiver file denies.
    WaivedInVain(String),
    /// The device does not report the capability.
    NotOffered(String),
}

/// A case that was run.
pub(super) struct CaseResult {
    pub(super) case: Arc<Case>,
    pub(super) outcome: Outcome,
    pub(super) took: Duration,
}

impl CaseResult {
    pub(super) fn is_good(&self) -> bool {
        !matches!(self.outcome, Outcome::Failed(_) | Outcome::WaivedInVain(_))
    }
}

/// Runs them all, and tells of each as it ends.
pub(super) fn run(
    api: &'static Api,
    options: &Options,
    cases: Vec<Case>,
    waivers: &[Waiver],
    mut tell: impl FnMut(&CaseResult),
) -> Vec<CaseResult> {
    // A panic is told with its case.
    panic::set_hook(Box::new(|_| {}));
    let results = cases
        .into_iter()
        .map(|case| {
            let result = one(api, options, Arc::new(case), waivers);
            tell(&result);
            result
        })
        .collect();
    drop(panic::take_hook());
    results
}

fn one(api: &'static Api, options: &Options, case: Arc<Case>, waivers: &[Waiver]) -> CaseResult {
    let since = Instant::now();
    let waiver = waivers.iter().find(|waiver| waiver.covers(&case.name));
    let times = [options.quiet, patience(options.patience, waiver)];
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
        outcome: judge(outcome, waiver, options.waivers.is_some()),
        took: since.elapsed(),
    }
}

/// A case that must fail waits in vain, as a rule. Should it pass after all, what it waits for comes within milliseconds: a quarter is enough to see that.
fn patience(usual: Duration, waiver: Option<&Waiver>) -> Duration {
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

/// Runs the case in a thread. One that hangs in a verb is left behind: nothing can stop it, and the process ends soon.
fn in_time(case: Arc<Case>, run: impl FnOnce(&Case) -> Outcome + Send + 'static) -> Outcome {
    let (say, heard) = mpsc::channel();
    let thread = thread::Builder::new().name(case.name.clone()).spawn(move || {
        // The other end is gone when this was too late.
        let _ = say.send(run(&case));
    });
    let thread = match thread {
        Ok(thread) => thread,
        Err(error) => return Outcome::Failed(format!("no thread for it: {error}")),
    };
    match heard.recv_timeout(LIMIT) {
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
        .unwrap_or_else(|| "without words".to_owned())
}

/// With a waiver file, what is not offered must be in it.
fn judge(outcome: Outcome, waiver: Option<&Waiver>, has_file: bool) -> Outcome {
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
        _ => Outcome::WaivedInVain(waiver.reason.clone()),
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
    fn only_what_must_fail_is_given_up_sooner() {
        let usual = Duration::from_secs(20);
        assert_eq!(patience(usual, Some(&waiver(Kind::Fails))), Duration::from_secs(5));
        for waited_for in [None, Some(&waiver(Kind::Unsteady)), Some(&waiver(Kind::Lacks))] {
            assert_eq!(patience(usual, waited_for), usual);
        }
    }

    #[test]
    fn a_waived_case_must_fail() {
        let failed = Outcome::Failed("x".to_owned());
        assert_eq!(judge(failed.clone(), None, true), failed);
        assert!(matches!(
            judge(failed, Some(&waiver(Kind::Fails)), true),
            Outcome::Waived { .. }
        ));
        assert!(matches!(
            judge(Outcome::Passed, Some(&waiver(Kind::Fails)), true),
            Outcome::WaivedInVain(_)
        ));
        assert_eq!(
            judge(Outcome::Passed, Some(&waiver(Kind::Unsteady)), true),
            Outcome::Passed
        );
    }

    #[test]
    fn what_a_device_lacks_it_must_not_offer() {
        let not_offered = Outcome::NotOffered("x".to_owned());
        assert_eq!(
            judge(not_offered.clone(), Some(&waiver(Kind::Lacks)), true),
            not_offered
        );
        for (outcome, kind) in [(Outcome::Passed, Kind::Lacks), (not_offered, Kind::Fails)] {
            assert!(matches!(
                judge(outcome, Some(&waiver(kind)), true),
                Outcome::WaivedInVain(_)
            ));
        }
        let failed = Outcome::Failed("x".to_owned());
        assert_eq!(judge(failed.clone(), Some(&waiver(Kind::Lacks)), true), failed);
        let not_offered = Outcome::NotOffered("x".to_owned());
        assert!(matches!(judge(not_offered.clone(), None, true), Outcome::Failed(_)));
        assert_eq!(judge(not_offered.clone(), None, false), not_offered);
    }

    #[test]
    fn a_panic_is_a_failure_with_its_words() {
        let case = Arc::new(case("a/b", "", "", |_| Ok(())));
        let outcome = in_time(case, |_| panic!("no {}", "way"));
        assert_eq!(outcome, Outcome::Failed("panicked: no way".to_owned()));
    }
}
