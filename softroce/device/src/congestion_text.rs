//! The textual form of a device's congestion control.

use std::time::Duration;

use doorbell_roce_proto::congestion::{Algorithm, CongestionConfig, DcqcnConfig, DelayConfig};

use crate::links::udp::fault::{rate, time};

/// The longest of the intervals.
const MAX_INTERVAL: Duration = Duration::from_secs(1);

/// Parses `dcqcn`, `delay` or `none`, with options as in `dcqcn,line=25Gb,min=100Mb,cnp=50us`.
///
/// # Errors
/// What is wrong with it, in one line.
pub(crate) fn parse(text: &str) -> Result<CongestionConfig, String> {
    let mut parts = text.split(',').map(str::trim);
    let mut config = CongestionConfig {
        algorithm: match parts.next().unwrap_or_default() {
            "none" => Algorithm::None,
            "dcqcn" => Algorithm::Dcqcn(DcqcnConfig::default()),
            "delay" => Algorithm::Delay(DelayConfig::default()),
            other => return Err(format!("has no algorithm '{other}'; valid values: none, dcqcn, delay")),
        },
        ..CongestionConfig::default()
    };
    for part in parts {
        let (name, value) = part
            .split_once('=')
            .ok_or_else(|| format!("has '{part}', which is not NAME=VALUE, such as line=25Gb"))?;
        let invalid = |expected| format!("has {name}={value}: {expected}");
        match name {
            "line" => config.line_rate = rate(value).map_err(invalid)? / 8,
            "min" => config.min_rate = rate(value).map_err(invalid)? / 8,
            "cnp" => config.cnp_interval = interval(value).map_err(invalid)?,
            _ => return Err(format!("has no option '{name}'; there are line, min and cnp")),
        }
    }
    if config.min_rate > config.line_rate {
        return Err("has a minimum rate above the line rate".to_owned());
    }
    Ok(config)
}

fn interval(text: &str) -> Result<Duration, &'static str> {
    let interval = time(text).filter(|interval| *interval <= MAX_INTERVAL);
    interval.ok_or("expected a time of at most 1 s with its unit, such as 50us")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_in_bits_per_second_and_times() {
        let config = parse("dcqcn, line=25Gb, min=40Mb, cnp=4us").unwrap();
        assert!(matches!(config.algorithm, Algorithm::Dcqcn(_)));
        assert_eq!((config.line_rate, config.min_rate), (3_125_000_000, 5_000_000));
        assert_eq!(config.cnp_interval, Duration::from_micros(4));
        assert!(matches!(parse("delay").unwrap().algorithm, Algorithm::Delay(_)));
        assert!(!parse("none").unwrap().reacts());
    }
}
