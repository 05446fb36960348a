//! Tuning files: JSON, as `doorbell` prints it. All of it is optional:
//!
//! ```json
//! {
//!   "local":  {"mover": "processors", "simple": {"alpha_ns": 900, "send_ns": 200, "receive_ns": 300, "beta_ns_per_byte": 0.04}, "ll": {…}, "ll128": {…}},
//!   "remote": {…},
//!   "compute": {"gamma_ns_per_byte": 0.05, "copy_ns_per_byte": 0.04, "begin_ns": 100},
//!   "rules": [{"collective": "allreduce", "from_bytes": 65536, "to_bytes": 1048576, "ranks": 8,
//!              "algorithm": "ring", "protocol": "simple", "channels": 2, "slice_bytes": 262144}]
//! }
//! ```
//!
//! The first matching rule applies; the environment overrides it. A protocol may have `both_ns`,
//! `grant_ns`, `confirm_ns` and `quiet_ns`, and `bytes` with a scale (ns per byte at each of the
//! [`MARKS`](crate::cost::MARKS)) for each kind of [`ByteCosts`](crate::cost::ByteCosts); `compute`
//! may have scales as `gamma` and `copy`.

use core::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{Overrides, TuningRequest};
use crate::algorithm::Algorithm;
use crate::cost::{Compute, Link, Scale};
use crate::plan::Collective;
use crate::types::Protocol;

/// The content of a tuning file.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TuningFile {
    /// Costs between ranks of one host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local: Option<Link>,
    /// Costs between hosts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote: Option<Link>,
    /// Costs of a rank's own work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute: Option<Compute>,
    /// Overrides for some operations.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<Rule>,
}

/// An override for some operations.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// For this collective.
    pub collective: Collective,
    /// From so many bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_bytes: Option<u64>,
    /// Up to so many bytes, inclusive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_bytes: Option<u64>,
    /// For so many ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<u32>,
    /// The algorithm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub algorithm: Option<Algorithm>,
    /// The protocol.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<Protocol>,
    /// The channels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<core::num::NonZeroU32>,
    /// Bytes of a block per slice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slice_bytes: Option<core::num::NonZeroU64>,
}

impl Rule {
    pub(super) fn is_for(&self, question: &TuningRequest, ranks: u32) -> bool {
        self.collective == question.collective
            && self.from_bytes.is_none_or(|from| question.bytes >= from)
            && self.to_bytes.is_none_or(|to| question.bytes <= to)
            && self.ranks.is_none_or(|of| of == ranks)
    }

    pub(super) fn forced(&self) -> Overrides {
        Overrides {
            algorithm: self.algorithm,
            protocol: self.protocol,
            channels: self.channels.map(Into::into),
            slice_bytes: self.slice_bytes.map(Into::into),
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.collective)?;
        if let Some(from) = self.from_bytes {
            write!(f, " from {from} bytes")?;
        }
        if let Some(to) = self.to_bytes {
            write!(f, " to {to} bytes")?;
        }
        self.ranks.map_or(Ok(()), |ranks| write!(f, " of {ranks} ranks"))
    }
}

/// An invalid tuning file.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read.
    #[error("tuning file {}: {error}", .path.display())]
    Unreadable {
        /// Its path.
        path: PathBuf,
        /// The error.
        error: std::io::Error,
    },
    /// It is not a tuning file.
    #[error("tuning file {}: {error}", .path.display())]
    Wrong {
        /// Its path.
        path: PathBuf,
        /// The error and its position.
        error: serde_json::Error,
    },
    /// A cost is not a duration.
    #[error("tuning file {}: {what} is {value}, and no time", .path.display())]
    NoTime {
        /// Its path.
        path: PathBuf,
        /// The cost.
        what: String,
        /// Its value.
        value: f64,
    },
}

impl TuningFile {
    /// Reads a file.
    ///
    /// # Errors
    /// [`FileError`], in one line.
    pub fn read(path: &Path) -> Result<Self, FileError> {
        let text = std::fs::read_to_string(path).map_err(|error| FileError::Unreadable {
            path: path.into(),
            error,
        })?;
        Self::parse(path, &text)
    }

    fn parse(path: &Path, text: &str) -> Result<Self, FileError> {
        let file: Self = serde_json::from_str(text).map_err(|error| FileError::Wrong {
            path: path.into(),
            error,
        })?;
        match file.costs().into_iter().find(|(_, value)| *value < 0.0) {
            Some((what, value)) => Err(FileError::NoTime {
                path: path.into(),
                what,
                value,
            }),
            None => Ok(file),
        }
    }

    /// The JSON text.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_else(|_| "{}".to_owned())
    }

    /// Every number, by name. JSON has neither infinities nor NaN.
    fn costs(&self) -> Vec<(String, f64)> {
        let mut costs = Vec::new();
        for (name, link) in [("local", &self.local), ("remote", &self.remote)] {
            let Some(link) = link else { continue };
            for &protocol in Protocol::ALL {
                let cost = link.cost(protocol);
                let each = [
                    ("alpha_ns", cost.alpha_ns),
                    ("send_ns", cost.send_ns),
                    ("receive_ns", cost.receive_ns),
                    ("beta_ns_per_byte", cost.beta_ns_per_byte),
                    ("both_ns", cost.bidirectional_ns),
                    ("grant_ns", cost.grant_ns),
                    ("confirm_ns", cost.confirm_ns),
                    ("quiet_ns", cost.send_only_ns),
                    ("bytes.far.ns", cost.bytes.map_or(0.0, |moves| moves.far.ns)),
                ];
                let moves = cost.bytes.iter();
                let scales = moves.flat_map(|moves| {
                    [
                        ("settled", moves.resident),
                        ("fresh", moves.forwarded),
                        ("reduced", moves.reduced),
                        ("reduced_alone", moves.isolated_reduced),
                        ("gathered", moves.gathered),
                        ("gathered_alone", moves.isolated_gathered),
                        ("alone", moves.isolated),
                    ]
                });
                costs.extend(scales.flat_map(|(field, scale)| {
                    let name = move |mark| format!("{name}.{protocol}.bytes.{field} at {mark} bytes");
                    scale
                        .marks()
                        .map(move |(mark, value)| (name(mark), value))
                        .collect::<Vec<_>>()
                }));
                costs.extend(each.map(|(field, value)| (format!("{name}.{protocol}.{field}"), value)));
            }
        }
        if let Some(compute) = &self.compute {
            let each = [
                ("gamma_ns_per_byte", compute.gamma_ns_per_byte),
                ("copy_ns_per_byte", compute.copy_ns_per_byte),
                ("begin_ns", compute.begin_ns),
            ];
            costs.extend(each.map(|(field, value)| (format!("compute.{field}"), value)));
            for (field, scale) in [("gamma", compute.gamma), ("copy", compute.copy)] {
                let marks = scale.iter().flat_map(Scale::marks);
                costs.extend(marks.map(|(mark, value)| (format!("compute.{field} at {mark} bytes"), value)));
            }
        }
        costs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_round_trip() {
        let file = TuningFile {
            local: Some(Link::soft_local()),
            remote: Some(Link::ndr400()),
            compute: Some(Compute::default()),
            rules: vec![Rule {
                collective: Collective::AllReduce,
                from_bytes: Some(1 << 16),
                to_bytes: None,
                ranks: Some(8),
                algorithm: Some(Algorithm::Ring),
                protocol: None,
                channels: core::num::NonZeroU32::new(2),
                slice_bytes: None,
            }],
        };
        assert_eq!(TuningFile::parse(Path::new("t.json"), &file.to_json()).unwrap(), file);
        assert_eq!(file.rules[0].to_string(), "allreduce from 65536 bytes of 8 ranks");
        assert_eq!(
            TuningFile::parse(Path::new("t.json"), "{}").unwrap(),
            TuningFile::default()
        );
    }

    #[test]
    fn errors_are_one_line() {
        let wrong = |text: &str| TuningFile::parse(Path::new("t.json"), text).unwrap_err().to_string();
        for (text, says) in [
            ("", "EOF"),
            (r#"{"rule": []}"#, "unknown field `rule`"),
            (
                r#"{"rules": [{"collective": "allsum"}]}"#,
                "there is no collective \"allsum\"",
            ),
            (
                r#"{"rules": [{"collective": "barrier", "algorithm": "star"}]}"#,
                "there is no algorithm \"star\"",
            ),
            (r#"{"rules": [{"collective": "barrier", "channels": 0}]}"#, "nonzero"),
            (
                r#"{"compute": {"gamma_ns_per_byte": -1, "copy_ns_per_byte": 0, "begin_ns": 0}}"#,
                "compute.gamma_ns_per_byte is -1, and no time",
            ),
        ] {
            let message = wrong(text);
            assert!(
                message.starts_with("tuning file t.json: ") && message.contains(says) && message.lines().count() == 1,
                "{message}"
            );
        }
        let missing = TuningFile::read(Path::new("/nowhere/t.json")).unwrap_err().to_string();
        assert!(missing.starts_with("tuning file /nowhere/t.json: "), "{missing}");
    }
}
