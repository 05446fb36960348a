//! Overrides from the environment.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::algorithm::Algorithm;
use crate::types::Protocol;

/// Forced choices.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Overrides {
    /// `DOORBELL_ALGORITHM`: for every collective that it supports.
    pub algorithm: Option<Algorithm>,
    /// `DOORBELL_PROTOCOL`.
    pub protocol: Option<Protocol>,
    /// `DOORBELL_CHANNELS`, at most the configured number.
    pub channels: Option<u32>,
    /// `DOORBELL_SLICE`, bytes of a block.
    pub slice_bytes: Option<u64>,
}

/// A variable with an invalid value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{variable}={value:?}: {problem}")]
pub struct EnvironmentError {
    /// The variable.
    pub variable: &'static str,
    /// Its value.
    pub value: String,
    /// The error, and the valid values.
    pub problem: String,
}

impl Overrides {
    /// Overrides from this process' environment, and the tuning file's path (`DOORBELL_TUNING`).
    ///
    /// # Errors
    /// An invalid value. A variable that is empty or `auto` counts as unset.
    pub fn from_environment() -> Result<(Self, Option<PathBuf>), EnvironmentError> {
        Self::from_variables(doorbell_trust::variable)
    }

    /// The same from any source of variables.
    ///
    /// # Errors
    /// As [`from_environment`](Self::from_environment).
    pub fn from_variables(
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<(Self, Option<PathBuf>), EnvironmentError> {
        let set = |name: &'static str| variable(name).filter(|value| !value.is_empty());
        let text = |name| {
            let value = set(name).map(|value| value.to_string_lossy().into_owned());
            value.filter(|value| value != "auto").map(|value| (name, value))
        };
        let parsed = Self {
            algorithm: parse(text("DOORBELL_ALGORITHM"), |value| {
                value.parse::<Algorithm>().map_err(|e| e.to_string())
            })?,
            protocol: parse(text("DOORBELL_PROTOCOL"), |value| {
                value.parse::<Protocol>().map_err(|e| e.to_string())
            })?,
            channels: parse(text("DOORBELL_CHANNELS"), |value| {
                let number = value.parse().ok().filter(|&channels: &u32| channels > 0);
                number.ok_or_else(|| "a number of channels, 1 or more, or auto".to_owned())
            })?,
            slice_bytes: parse(text("DOORBELL_SLICE"), |value| {
                bytes(value).ok_or_else(|| "bytes of a slice, 1 or more, as 65536, 64K or 1M, or auto".to_owned())
            })?,
        };
        Ok((parsed, set("DOORBELL_TUNING").map(PathBuf::from)))
    }

    /// These, with `others` where they are unset.
    #[must_use]
    pub fn over(self, others: Self) -> Self {
        Self {
            algorithm: self.algorithm.or(others.algorithm),
            protocol: self.protocol.or(others.protocol),
            channels: self.channels.or(others.channels),
            slice_bytes: self.slice_bytes.or(others.slice_bytes),
        }
    }
}

/// Whether costs are measured at creation: `DOORBELL_CALIBRATE`, `yes` (default) or `no`.
///
/// # Errors
/// An invalid value.
pub fn calibrate(variable: impl Fn(&str) -> Option<OsString>) -> Result<bool, EnvironmentError> {
    Ok(yes_or_no("DOORBELL_CALIBRATE", variable)?.unwrap_or(true))
}

fn yes_or_no(
    name: &'static str,
    variable: impl Fn(&str) -> Option<OsString>,
) -> Result<Option<bool>, EnvironmentError> {
    let value = variable(name).map(|value| value.to_string_lossy().into_owned());
    let set = value.filter(|value| !value.is_empty() && value != "auto");
    parse(set.map(|value| (name, value)), |value| match value {
        "yes" | "1" => Ok(true),
        "no" | "0" => Ok(false),
        _ => Err("yes, no or auto".to_owned()),
    })
}

fn parse<T>(
    set: Option<(&'static str, String)>,
    read: impl Fn(&str) -> Result<T, String>,
) -> Result<Option<T>, EnvironmentError> {
    let Some((variable, value)) = set else { return Ok(None) };
    match read(&value) {
        Ok(read) => Ok(Some(read)),
        Err(problem) => Err(EnvironmentError {
            variable,
            value,
            problem,
        }),
    }
}

fn bytes(text: &str) -> Option<u64> {
    let (number, unit) = match text.as_bytes().last()? {
        b'K' | b'k' => (&text[..text.len() - 1], 1 << 10),
        b'M' | b'm' => (&text[..text.len() - 1], 1 << 20),
        b'G' | b'g' => (&text[..text.len() - 1], 1 << 30),
        _ => (text, 1u64),
    };
    number.parse::<u64>().ok()?.checked_mul(unit).filter(|&bytes| bytes > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(variables: &[(&str, &str)]) -> Result<(Overrides, Option<PathBuf>), EnvironmentError> {
        Overrides::from_variables(|name| {
            variables
                .iter()
                .find(|(set, _)| *set == name)
                .map(|(_, value)| value.into())
        })
    }

    #[test]
    fn costs_are_measured_unless_the_environment_says_otherwise() {
        let no = |_: &str| Some("no".into());
        assert_eq!((calibrate(|_| None), calibrate(no)), (Ok(true), Ok(false)));
        assert!(calibrate(|_| Some("perhaps".into())).is_err());
    }

    #[test]
    fn variables_override_choices() {
        assert_eq!(from(&[]).unwrap(), (Overrides::default(), None));
        let all = [
            ("DOORBELL_ALGORITHM", "double-binary-tree"),
            ("DOORBELL_PROTOCOL", "ll128"),
            ("DOORBELL_CHANNELS", "4"),
            ("DOORBELL_SLICE", "256K"),
            ("DOORBELL_TUNING", "/etc/doorbell.json"),
        ];
        let expected = Overrides {
            algorithm: Some(Algorithm::DoubleBinaryTree),
            protocol: Some(Protocol::Ll128),
            channels: Some(4),
            slice_bytes: Some(256 << 10),
        };
        assert_eq!(from(&all).unwrap(), (expected, Some("/etc/doorbell.json".into())));
        assert_eq!(
            from(&[("DOORBELL_ALGORITHM", "auto"), ("DOORBELL_SLICE", "")])
                .unwrap()
                .0,
            Overrides::default()
        );
        assert_eq!(Overrides::default().over(expected), expected);
    }

    #[test]
    fn errors_are_one_line() {
        let wrong = |name, value| from(&[(name, value)]).unwrap_err().to_string();
        assert_eq!(
            wrong("DOORBELL_ALGORITHM", "star"),
            "DOORBELL_ALGORITHM=\"star\": there is no algorithm \"star\": one of ring, tree, double-binary-tree, recursive-doubling, halving-doubling, bruck, \
             full-mesh, one-shot"
        );
        assert!(wrong("DOORBELL_PROTOCOL", "LL").contains("one of simple, ll, ll128"));
        for value in ["0", "-1", "many", "1e3"] {
            assert!(wrong("DOORBELL_CHANNELS", value).ends_with("a number of channels, 1 or more, or auto"));
        }
        for value in ["0", "K", "12T", "99999999999G", "é"] {
            assert!(wrong("DOORBELL_SLICE", value).ends_with("or auto"), "{value}");
        }
    }
}
