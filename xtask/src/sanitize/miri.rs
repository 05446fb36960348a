//! Miri: undefined behaviour, in the tests of each crate that need nothing that Miri lacks:
//! sockets, memfds, child processes, foreign libraries.

use super::{folder, nightly};
use crate::ci::{self, Counts, Verdict};
use anyhow::Result;
use std::time::Instant;

/// Files and clocks are the host's. Devices and peers address registered memory by number, so its
/// provenance is exposed. Memory that a device keeps is leaked. Messages are copied by atomic
/// accesses of several sizes, at which the emulation of weak memory panics; loom has that part.
const FLAGS: &str = "-Zmiri-disable-isolation -Zmiri-permissive-provenance -Zmiri-ignore-leaks \
                     -Zmiri-disable-weak-memory-emulation";

enum Part {
    /// The arguments after the package's, and what the tests that are left out need.
    Tests(&'static [&'static str], &'static str),
    /// Why there is nothing to run.
    None(&'static str),
}
use Part::{None as Nothing, Tests};

/// Every package of the workspace.
const PACKAGES: [(&str, Part); 31] = [
    ("doorbell-verbs-sys", Tests(&["--lib"], "foreign libraries")),
    (
        "doorbell-verbs",
        Tests(
            &[
                "--test",
                "verbs",
                "--",
                "--skip",
                "allocation::",
                "--skip",
                "a_queue_never_fills",
                "--skip",
                "a_handle_is_made_of_what",
                "--skip",
                "a_refused_change_says",
                "--skip",
                "a_sleeper_on_an_extended",
                "--skip",
                "lent_objects_are_returned",
                "--skip",
                "the_limit_is_armed",
                "--skip",
                "the_queue_is_never_empty",
                "--skip",
                "stress::",
            ],
            "sockets, event channels, the system's texts of errors, memfds, huge pages, foreign libraries, a compiler; a minute each: the \
             counts of allocations, and queues posted to thousands of times",
        ),
    ),
    ("doorbell-rendezvous", Nothing("no unsafe code, which its root forbids")),
    ("doorbell-threads", Nothing("signals and threads of the system")),
    ("doorbell-tokio", Nothing("no unsafe code, which its root forbids")),
    ("doorbell-trust", Nothing("its tests are processes of several users")),
    ("doorbell-roce-proto", Nothing("no unsafe code, which its root forbids")),
    ("doorbell-fabric", Nothing("no unsafe code, which its root forbids")),
    (
        "doorbell-softroce",
        Tests(
            &[
                "--lib",
                "--",
                "memory::table",
                "--skip",
                "tests::keys_are_random",
                "--skip",
                "tests::a_key_is_valid",
            ],
            "sockets, memfds, poll(2); as many keys as there may be",
        ),
    ),
    ("doorbell-softroce-ibverbs", Nothing("its tests open devices: sockets")),
    (
        "doorbell-softroce-rdmacm",
        Nothing("its tests open devices and bind ports: sockets"),
    ),
    ("doorbell-dropin", Nothing("symbols in assembly, tested in C programs")),
    ("doorbell-sysfs", Tests(&["--lib"], "child processes")),
    (
        "doorbell-gpudirect",
        Tests(
            &[
                "--lib",
                "--",
                "--skip",
                "small::",
                "--skip",
                "bytes_go_in_and_out",
                "--skip",
                "heap::exchange",
                "--skip",
                "the_kernels_header_is_committed",
            ],
            "memfds, sockets and variables of the environment",
        ),
    ),
    (
        "doorbell-cuda",
        Nothing("its tests call a CUDA driver: foreign libraries"),
    ),
    (
        "doorbell-cuda-standin",
        Nothing("a foreign library for the tests of others"),
    ),
    (
        "doorbell-nccl",
        Nothing("its tests call a CUDA driver: foreign libraries"),
    ),
    ("doorbell-nvml", Nothing("its tests call NVML: foreign libraries")),
    (
        "doorbell-collectives",
        Tests(&["--lib", "kernel::"], "devices: sockets"),
    ),
    (
        "doorbell-perftest",
        Nothing("no unsafe code (cargo xtask ci --only safe)"),
    ),
    ("doorbell-perftest-sys", Nothing("system calls that Miri lacks")),
    (
        "doorbell-examples",
        Nothing("no unsafe code (cargo xtask ci --only safe)"),
    ),
    ("doorbell-tests", Nothing("devices and child processes")),
    (
        "doorbell-fuzz",
        Tests(
            &[
                "--test",
                "corpus",
                "--",
                "endpoint",
                "connection_manager",
                "bootstrap",
                "classic",
                "result",
            ],
            "memfds and sockets",
        ),
    ),
    ("doorbell-instructions", Nothing("programs under valgrind")),
    ("doorbell-c", Nothing("tested by programs in C")),
    ("doorbell", Nothing("no unsafe code, which its root forbids")),
    ("doorbell-test", Nothing("no unsafe code, which its root forbids")),
    (
        "doorbell-test-macros",
        Nothing("no unsafe code, which its root forbids"),
    ),
    (
        "doorbell-python",
        Nothing("a foreign interpreter calls it, and provides its arrays"),
    ),
    ("xtask", Nothing("no unsafe code")),
];

pub(super) fn run() -> Result<Verdict> {
    if let Some(missing) = nightly::missing()? {
        return Ok(Verdict::Skipped(missing));
    }
    let mut total = Verdict::Counted(Counts::default(), None);
    let mut lines = Vec::new();
    for (package, part) in &PACKAGES {
        let (arguments, without) = match part {
            Tests(arguments, without) => (*arguments, without),
            Nothing(why) => {
                lines.push(format!("{package}: not run: {why}"));
                continue;
            }
        };
        let mut command = nightly::cargo(&["miri", "test"]);
        command.arg("--target-dir").arg(folder("miri")?);
        command.args(["--package", package]).args(arguments);
        command.env("MIRIFLAGS", FLAGS).env("PROPTEST_CASES", "4");
        let since = Instant::now();
        total = total.and(ci::tests(&mut command)?);
        let seconds = since.elapsed().as_secs_f64();
        lines.push(format!("{package}: {seconds:.0} s; left out: {without}"));
    }
    lines.iter().for_each(|line| println!("-- {line}"));
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace;
    use std::fs;

    #[test]
    fn every_package_is_listed() {
        let members = fs::read_to_string(workspace().join("Cargo.toml")).unwrap();
        let members = members.split_once("members = [").unwrap().1.split_once(']').unwrap().0;
        for member in members.split('"').skip(1).step_by(2) {
            let manifest = fs::read_to_string(workspace().join(member).join("Cargo.toml")).unwrap();
            let name = manifest.split("name = \"").nth(1).unwrap().split('"').next().unwrap();
            assert!(PACKAGES.iter().any(|(listed, _)| *listed == name), "{name}");
        }
    }
}
