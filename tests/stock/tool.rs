//! The command lines of each family of tools, and the options that it refuses by itself.

use anyhow::{Result, bail};
use doorbell_tests::process::Process;
use std::{path::Path, time::Instant};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Suite {
    Pingpong,
    Perftest,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End<'a> {
    Server,
    Client(&'a str),
}

impl Suite {
    pub(crate) fn of(tool: &str) -> Self {
        if tool.starts_with("ib_") {
            Suite::Perftest
        } else {
            Suite::Pingpong
        }
    }

    /// The command line of one end, on a device's GID.
    pub(crate) fn command(self, tool: &str, options: &str, end: End<'_>, port: u16, on: &Gid) -> Vec<String> {
        let mut line = format!("{tool} {options} -p {port}");
        if let Some(device) = on.device {
            line += &format!(" -d {device}");
        }
        line += &match self {
            Suite::Pingpong => format!(" -g {}", on.index),
            Suite::Perftest => format!(" -x {} -F", on.index),
        };
        if let End::Client(host) = end {
            line += &format!(" {host}");
        }
        line.split_whitespace().map(str::to_owned).collect()
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Gid {
    /// The device, where there are several.
    pub(crate) device: Option<&'static str>,
    /// Its index in the device's GID table.
    pub(crate) index: u32,
}

/// Messages of a tool that has searched for a device: then it supports the options.
const SEARCHED: [&str; 5] = [
    "Did not detect devices",
    "Unable to find the Infiniband/RoCE device",
    "Failed to get IB devices list",
    "No IB devices found",
    "not found",
];

/// A tool's message about options that it does not support on any device: run on the system's
/// library with a device that does not exist. `None` when it supports them.
pub(crate) fn refusal(
    tool: &str,
    options: &str,
    prefix: &[String],
    folder: &Path,
    deadline: Instant,
) -> Result<Option<String>> {
    let mut words = prefix.to_vec();
    words.extend(
        format!("{tool} {options} -d no-such-device")
            .split_whitespace()
            .map(str::to_owned),
    );
    let mut process = Process::start(&words, &[], folder, "refusal")?;
    if process.wait(deadline)?.is_none() {
        bail!("{tool} {options} does not end where no device is");
    }
    let output = process.output();
    if SEARCHED.iter().any(|mark| output.contains(mark)) {
        return Ok(None);
    }
    Ok(Some(reason_in(tool, &output)))
}

/// The tool's reason: the first line that is no ornament, without the tool's name.
pub(crate) fn reason_in(tool: &str, output: &str) -> String {
    let line = output
        .lines()
        .map(str::trim)
        .find(|line| line.chars().any(char::is_alphabetic))
        .unwrap_or("it ends without a word");
    let line = line.strip_prefix(&format!("{tool}: ")).unwrap_or(line);
    line.trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_family_is_called_in_its_own_way() {
        let soft = Gid { device: None, index: 0 };
        let rxe = Gid {
            device: Some("rxe0"),
            index: 3,
        };
        let spelt = |tool: &str, end, on| Suite::of(tool).command(tool, "-n 5", end, 7, on).join(" ");
        assert_eq!(
            spelt("ibv_rc_pingpong", End::Server, &soft),
            "ibv_rc_pingpong -n 5 -p 7 -g 0"
        );
        assert_eq!(
            spelt("ib_send_bw", End::Client("10.9.0.1"), &rxe),
            "ib_send_bw -n 5 -p 7 -d rxe0 -x 3 -F 10.9.0.1"
        );
    }

    #[test]
    fn a_reason_is_the_first_line_with_words() {
        assert_eq!(
            reason_in("x", "-----\n\n Bidirectional is only available in BW test\n Parser …"),
            "Bidirectional is only available in BW test"
        );
        assert_eq!(
            reason_in("ibv_uc_pingpong", "ibv_uc_pingpong: invalid option -- 't'\n"),
            "invalid option -- 't'"
        );
    }
}
