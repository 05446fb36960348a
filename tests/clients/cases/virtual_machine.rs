//! A guest that migrates from one QEMU to another.

use super::{Case, Ready, Run, pair};
use crate::read::{self, Report};
use anyhow::{Context, Result, ensure};

pub(super) fn cases() -> Vec<Case> {
    let run = |what: &str, protocol: &str, command: &str| -> Run {
        let line = |what: &str| format!("exec sh FILES/migrate.sh {what} FILES {protocol}:HOST:PORT");
        let source = format!("{} '{command}'", line(what));
        pair(&line("to"), Ready::Shows("paused (inmigrate)"), &source, migrated)
    };
    let case = |mode, command| {
        Case::new("QEMU", "qemu-system-x86", mode, run("from", "rdma", command))
            .beside(run("from", "tcp", ""))
            .full()
    };
    vec![
        case("a guest migrates", "").lasting(run("slowly", "rdma", "")),
        case(
            "a guest migrates, rdma-pin-all",
            "migrate_set_capability rdma-pin-all on",
        ),
    ]
}

/// The monitor's `Migration status: completed`, and the guest's rounds: of each it prints the
/// number once, at the one host or the other.
fn migrated(_: &str, output: &str) -> Result<Report> {
    ensure!(output.contains("Migration status: completed"), "not migrated");
    ensure!(!output.contains("differs"), "the guest's memory differs");
    let rounds = output.lines().filter_map(|line| line.strip_prefix("round "));
    let rounds: Vec<u32> = rounds
        .map(|round| u32::from_str_radix(round, 16))
        .collect::<Result<_, _>>()?;
    ensure!(rounds.len() >= 10, "{} rounds", rounds.len());
    ensure!(
        rounds.iter().copied().eq(1..=rounds[rounds.len() - 1]),
        "rounds {rounds:?}"
    );
    let value = |name| {
        read::between(output, name, " ")
            .context("no statistics")
            .and_then(read::number)
    };
    let (rate, pause) = (value("throughput: ")? / 8e3, value("downtime: ")?);
    read::report(
        "each word of 32 MiB, in each of the guest's rounds at either end",
        format!("{} GB/s, {pause} ms stopped", read::rounded(rate)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_round_may_be_lost_or_differ() {
        let rounds =
            |numbers: &[u32]| -> String { numbers.iter().map(|round| format!("round {round:08x}\n")).collect() };
        let monitor = "Migration status: completed\ndowntime: 72 ms\nthroughput: 1100.00 mbps\n";
        let all: Vec<u32> = (1..=12).collect();
        let Report { figure, .. } = migrated("", &(monitor.to_owned() + &rounds(&all))).unwrap();
        assert_eq!(figure, "0.14 GB/s, 72 ms stopped");
        assert!(migrated("", &(monitor.to_owned() + &rounds(&all[..9]))).is_err());
        let lost = [&all[..5], &all[6..]].concat();
        assert!(migrated("", &(monitor.to_owned() + &rounds(&lost))).is_err());
        assert!(migrated("", &(monitor.to_owned() + &rounds(&all) + "differs at 00400000\n")).is_err());
        assert!(migrated("", &rounds(&all)).is_err());
    }
}
