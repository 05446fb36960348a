//! Tests and examples of crates of crates.io, which `cargo xtask clients` has built.

use super::{Case, Package, Ready, Run, alone, pair};
use crate::read::{self, Report};
use anyhow::{Context, Result, ensure};

pub(super) fn cases() -> Vec<Case> {
    let tests = |name: &str| -> Run {
        let line = format!("for test in FILES/crates/{name}/tests/*; do $test || exit; done");
        alone(&line, passed)
    };
    let pingpong = |example: &str| -> Run {
        let line = format!("exec FILES/crates/sideway/examples/{example} -p PORT -g 3 -n 1000");
        pair(&line, Ready::Listening, &format!("{line} HOST"), exchanged)
    };
    let case = |name, version, mode, run| Case {
        package: Package::Crate(version),
        ..Case::new(name, "", mode, run).full()
    };
    let sideway = |mode, run| case("crate sideway", "0.4.3", mode, run);
    let ibverbs = |mode, run| case("crate ibverbs", "0.9.2", mode, run);
    vec![
        sideway("its tests", tests("sideway")),
        sideway("rc_pingpong", pingpong("rc_pingpong")),
        sideway("rc_pingpong_split", pingpong("rc_pingpong_split")),
        ibverbs("its tests", tests("ibverbs")),
        ibverbs("loopback", alone("exec FILES/crates/ibverbs/examples/loopback", looped)),
    ]
}

/// `test result: ok. 3 passed; 0 failed; …` of each program.
fn passed(_: &str, output: &str) -> Result<Report> {
    let mut tests = 0;
    for result in output.split("test result: ").skip(1) {
        let passed = read::between(result, "ok. ", " passed; 0 failed; 0 ignored;");
        tests += passed.context("a test failed or was left out")?.parse::<usize>()?;
    }
    ensure!(tests > 0, "no test");
    read::report(format!("{tests} tests pass"), read::NO_FIGURE)
}

/// `1000 iters in 0.02 seconds = 21.05µs/iter` of both ends.
fn exchanged(server: &str, client: &str) -> Result<Report> {
    ensure!(
        server.contains("1000 iters in "),
        "the server has not ended its round trips"
    );
    let figure = client
        .split_once("1000 iters in ")
        .and_then(|(_, rest)| read::between(rest, "= ", "/iter"));
    let figure = figure.context("no line of round trips")?;
    read::report(
        "1000 round trips of 1024 bytes",
        figure.replace("µs", " µs").replace("ms", " ms"),
    )
}

/// It asserts what it received.
fn looped(_: &str, output: &str) -> Result<Report> {
    ensure!(output.contains("sent\n") && output.contains("received\n"), "no message");
    read::report("a message by GID 1, every byte", read::NO_FIGURE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_tests_must_pass_and_be_run() {
        let result = |rest: &str| format!("running 3 tests\ntest result: ok. 3 passed; {rest}; 0 measured\n");
        let right = result("0 failed; 0 ignored");
        assert_eq!(passed("", &(right.clone() + &right)).unwrap().verified, "6 tests pass");
        assert!(passed("", &(right.clone() + &result("0 failed; 1 ignored"))).is_err());
        assert!(passed("", &(right + "test result: FAILED. 2 passed; 1 failed; 0 ignored;")).is_err());
        assert!(passed("", "").is_err());
        let line = "1000 iters in 0.02 seconds = 21.05µs/iter\n";
        assert_eq!(exchanged(line, line).unwrap().figure, "21.05 µs");
        assert!(exchanged("", line).is_err());
        assert!(looped("", "sent\n").is_err());
    }
}
