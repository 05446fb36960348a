//! Storage over the network: tgt's target of iSER, and initiators of libiscsi.

use super::{Case, Ready, Run, pair};
use crate::read::{self, Report};
use anyhow::{Context, Result, ensure};

pub(super) fn cases() -> Vec<Case> {
    let run = |what: &str, transport: &str| -> Run {
        let line = |what: &str| format!("exec sh FILES/iser.sh {what} {transport} HOST PORT");
        pair(
            &line("target"),
            Ready::Shows("the target is ready"),
            &line(what),
            copied,
        )
    };
    vec![
        Case::new(
            "tgt, libiscsi",
            "tgt",
            "iSER, an initiator killed before",
            run("copy", "iser"),
        )
        .beside(run("copy", "tcp"))
        .lasting(run("bench", "iser"))
        .full(),
    ]
}

/// `verified BYTES bytes` of `iser.sh`, and the last `iops average N (N MB/s)` of iscsi-perf.
fn copied(_: &str, client: &str) -> Result<Report> {
    let bytes = read::between(client, "verified ", " bytes").context("no line of verified bytes")?;
    let rate = client
        .rsplit_once("iops average")
        .and_then(|(_, rest)| read::between(rest, "(", " MB/s)"));
    let rate = read::number(rate.context("no line of iscsi-perf")?)?;
    ensure!(rate > 0.0, "nothing was read");
    read::report(
        format!("{bytes} bytes, written and read, every byte"),
        format!("{} GB/s", read::rounded(rate / 1e3)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_rate_counts_and_bytes_must_have_been_compared() {
        let lines = "verified 64 bytes\n00:01 iops average 8 (2 MB/s), busy 0   iops average 9 (1250 MB/s)  \n";
        let Report { verified, figure, .. } = copied("", lines).unwrap();
        assert_eq!(
            [&*verified, &*figure],
            ["64 bytes, written and read, every byte", "1.25 GB/s"]
        );
        assert!(copied("", "iops average 9 (1250 MB/s)").is_err());
        assert!(copied("", "verified 64 bytes\niops average 0 (0 MB/s)").is_err());
    }
}
