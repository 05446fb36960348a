//! The configuration of fault injection, and its textual form.

use std::fmt::{self, Display};
use std::str::FromStr;
use std::time::Duration;

const MAX_DELAY: Duration = Duration::from_secs(10);

/// The faults of a port, such as `drop=0.05,rate=1Gb,delay=100us,down=3s+1s,seed=7`. Faults that
/// are not named are off.
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
    /// The fraction of ECN-capable packets that get Congestion Experienced, 0 to 1.
    pub mark: f64,
    /// Additional delay of each packet, at most 10 s.
    pub delay: Duration,
    /// The speed at which the port sends, in bits of UDP payload per second; 0 is unlimited.
    pub rate: u64,
    /// When the port is down.
    pub down: Option<Outage>,
    /// Equal seeds give equal faults to equal sequences of packets.
    pub seed: u64,
}

/// A time for which a port is down: it neither sends nor receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outage {
    /// When it begins, after [`DeviceConfig::start`](crate::DeviceConfig::start).
    pub at: Duration,
    /// How long it lasts; `None` for ever.
    pub lasts: Option<Duration>,
}

impl FaultConfig {
    /// Whether any fault is on.
    pub fn is_active(&self) -> bool {
        [self.drop, self.duplicate, self.reorder, self.corrupt, self.mark]
            .iter()
            .any(|&fraction| fraction > 0.0)
            || !self.delay.is_zero()
            || self.rate > 0
            || self.down.is_some()
    }

    /// Adds the faults of a text to these; what both name has the value of the text.
    pub(crate) fn extend(&mut self, text: &str) -> Result<(), FaultConfigError> {
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
                "drop" => set(&mut self.drop, fraction(value)),
                "duplicate" => set(&mut self.duplicate, fraction(value)),
                "reorder" => set(&mut self.reorder, fraction(value)),
                "corrupt" => set(&mut self.corrupt, fraction(value)),
                "mark" => set(&mut self.mark, fraction(value)),
                "delay" => set(&mut self.delay, delay(value)),
                "rate" => set(&mut self.rate, rate(value)),
                "down" => set(&mut self.down, outage(value).map(Some)),
                "seed" => set(&mut self.seed, value.parse().map_err(|_| "expected a whole number")),
                _ => return Err(FaultConfigError::Name { name: name.into() }),
            };
            expected.map_err(|expected| FaultConfigError::Value {
                name: name.into(),
                value: value.into(),
                expected,
            })?;
        }
        Ok(())
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
    #[error(
        "no fault is called '{name}': there are drop, duplicate, reorder, corrupt, mark, delay, rate, down and seed"
    )]
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
        config.extend(text)?;
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
    let delay = time(text).filter(|&delay| delay <= MAX_DELAY);
    delay.ok_or("expected a time of at most 10 s with its unit, such as 100us, 5ms or 1s")
}

fn outage(text: &str) -> Result<Outage, &'static str> {
    let (at, lasts) = text
        .split_once('+')
        .map_or((text, None), |(at, lasts)| (at, Some(lasts)));
    let lasts = lasts.map(|lasts| time(lasts.trim()).filter(|lasts| !lasts.is_zero()));
    time(at.trim())
        .filter(|_| lasts != Some(None))
        .map(|at| Outage {
            at,
            lasts: lasts.flatten(),
        })
        .ok_or("expected when it begins and, after a +, how long it lasts, such as 3s or 3s+500ms")
}

/// In ns, us, ms or s, as a whole number.
pub(crate) fn time(text: &str) -> Option<Duration> {
    let (number, unit) = split_unit(text);
    let number: u64 = number.parse().ok()?;
    let nanoseconds = match unit {
        // Zero needs no unit.
        "" if number == 0 => 0,
        "µs" => 1_000,
        _ => TIME_UNITS.iter().find(|known| known.0 == unit)?.1,
    };
    number.checked_mul(nanoseconds).map(Duration::from_nanos)
}

pub(crate) fn rate(text: &str) -> Result<u64, &'static str> {
    let (number, unit) = split_unit(text);
    let unit = unit.strip_suffix("/s").unwrap_or(unit);
    let known = RATE_UNITS.iter().find(|known| known.0 == unit);
    let bits = known
        .zip(number.parse().ok())
        .map(|(known, number): (_, f64)| number * known.1 as f64);
    // Above 1 Tb/s the limit would not be felt.
    bits.filter(|bits| (1e6..=1e12).contains(bits))
        .map(|bits| bits as u64)
        .ok_or("expected a rate from 1Mb to 1000Gb, such as 500Mb or 2.5Gb")
}

fn split_unit(text: &str) -> (&str, &str) {
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    (number, unit.trim_start())
}

/// The units, the largest first.
const TIME_UNITS: [(&str, u64); 4] = [("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000), ("ns", 1)];
const RATE_UNITS: [(&str, u64); 2] = [("Gb", 1_000_000_000), ("Mb", 1_000_000)];

/// A number with the largest unit of which it is a multiple.
fn with_unit(number: u64, units: &[(&str, u64)]) -> String {
    let exact = units.iter().find(|unit| number.is_multiple_of(unit.1));
    exact.map_or_else(
        // A fraction of the smallest unit.
        || {
            units.last().map_or_else(String::new, |unit| {
                format!("{}{}", number as f64 / unit.1 as f64, unit.0)
            })
        },
        |unit| format!("{}{}", number / unit.1, unit.0),
    )
}

fn time_text(time: Duration) -> String {
    with_unit(time.as_nanos() as u64, &TIME_UNITS)
}

impl Display for FaultConfig {
    /// The form that `from_str` parses: the active faults, and the seed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fractions = [
            ("drop", self.drop),
            ("duplicate", self.duplicate),
            ("reorder", self.reorder),
            ("corrupt", self.corrupt),
            ("mark", self.mark),
        ];
        for (name, fraction) in fractions.into_iter().filter(|&(_, fraction)| fraction > 0.0) {
            write!(f, "{name}={fraction},")?;
        }
        if !self.delay.is_zero() {
            write!(f, "delay={},", time_text(self.delay))?;
        }
        if self.rate > 0 {
            write!(f, "rate={},", with_unit(self.rate, &RATE_UNITS))?;
        }
        if let Some(outage) = self.down {
            let lasts = outage
                .lasts
                .map_or_else(String::new, |lasts| format!("+{}", time_text(lasts)));
            write!(f, "down={}{lasts},", time_text(outage.at))?;
        }
        write!(f, "seed={}", self.seed)
    }
}
