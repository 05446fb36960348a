//! The configuration of fault injection, and its textual form.

use std::fmt::{self, Display};
use std::str::FromStr;
use std::time::Duration;

const MAX_DELAY: Duration = Duration::from_secs(10);

/// The faults of a link, such as `drop=0.05,reorder=0.02,delay=100us,seed=7`. Faults that are not
/// named are off.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct FaultConfig {
    /// The fraction of packets that are lost, 0 to 1.
    pub drop: f64,
    /// The fraction of packets that are duplicated, 0 to 1.
    pub duplicate: f64,
    /// The fraction of packets that may be overtaken, 0 to 1.
    pub reorder: f64,
    /// The fraction of packets with one byte changed, 0 to 1.
    pub corrupt: f64,
    /// Additional delay of each packet, at most 10 s.
    pub delay: Duration,
    /// Equal seeds give equal faults to equal sequences of packets.
    pub seed: u64,
}

impl FaultConfig {
    /// Whether any fault is on.
    pub fn is_active(&self) -> bool {
        [self.drop, self.duplicate, self.reorder, self.corrupt]
            .iter()
            .any(|&fraction| fraction > 0.0)
            || !self.delay.is_zero()
    }
}

/// Why a text is no valid [`FaultConfig`].
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FaultConfigError {
    /// A part is not `name=value`.
    #[error("'{part}' is not NAME=VALUE, such as drop=0.05")]
    Syntax {
        /// The part.
        part: String,
    },
    /// An unknown name.
    #[error("no fault is called '{name}': there are drop, duplicate, reorder, corrupt, delay and seed")]
    Name {
        /// The name.
        name: String,
    },
    /// A name given twice.
    #[error("'{name}' is given twice")]
    Twice {
        /// The name.
        name: String,
    },
    /// An invalid value.
    #[error("{name}={value}: {expected}")]
    Value {
        /// The name.
        name: String,
        /// The value.
        value: String,
        /// The valid values.
        expected: &'static str,
    },
}

impl FromStr for FaultConfig {
    type Err = FaultConfigError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut config = Self::default();
        let mut given: Vec<&str> = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (name, value) = part
                .split_once('=')
                .ok_or_else(|| FaultConfigError::Syntax { part: part.into() })?;
            let (name, value) = (name.trim(), value.trim());
            if given.contains(&name) {
                return Err(FaultConfigError::Twice { name: name.into() });
            }
            given.push(name);
            let expected = match name {
                "drop" => set(&mut config.drop, fraction(value)),
                "duplicate" => set(&mut config.duplicate, fraction(value)),
                "reorder" => set(&mut config.reorder, fraction(value)),
                "corrupt" => set(&mut config.corrupt, fraction(value)),
                "delay" => set(&mut config.delay, delay(value)),
                "seed" => set(&mut config.seed, value.parse().map_err(|_| "expected a whole number")),
                _ => return Err(FaultConfigError::Name { name: name.into() }),
            };
            expected.map_err(|expected| FaultConfigError::Value {
                name: name.into(),
                value: value.into(),
                expected,
            })?;
        }
        Ok(config)
    }
}

fn set<T>(field: &mut T, value: Result<T, &'static str>) -> Result<(), &'static str> {
    *field = value?;
    Ok(())
}

fn fraction(text: &str) -> Result<f64, &'static str> {
    let fraction = text.parse().ok().filter(|fraction| (0.0..=1.0).contains(fraction));
    fraction.ok_or("expected a fraction from 0 to 1")
}

fn delay(text: &str) -> Result<Duration, &'static str> {
    const EXPECTED: &str = "expected a time of at most 10 s with its unit, such as 100us, 5ms or 1s";
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| EXPECTED)?;
    let nanoseconds = match unit.trim_start() {
        "ns" => 1,
        "us" | "µs" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        // Zero needs no unit.
        "" if number == 0 => 0,
        _ => return Err(EXPECTED),
    };
    let delay = number.checked_mul(nanoseconds).map(Duration::from_nanos);
    delay.filter(|&delay| delay <= MAX_DELAY).ok_or(EXPECTED)
}

impl Display for FaultConfig {
    /// The form that `from_str` parses: the active faults, and the seed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fractions = [
            ("drop", self.drop),
            ("duplicate", self.duplicate),
            ("reorder", self.reorder),
            ("corrupt", self.corrupt),
        ];
        for (name, fraction) in fractions.into_iter().filter(|&(_, fraction)| fraction > 0.0) {
            write!(f, "{name}={fraction},")?;
        }
        if !self.delay.is_zero() {
            let nanoseconds = self.delay.as_nanos();
            let units = [("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000), ("ns", 1)];
            let (unit, size) = units
                .into_iter()
                .find(|&(_, size)| nanoseconds.is_multiple_of(size))
                .unwrap_or(("ns", 1));
            write!(f, "delay={}{unit},", nanoseconds / size)?;
        }
        write!(f, "seed={}", self.seed)
    }
}
