//! Sizes and durations in common notation: `64`, `4K`, `1M`; `100us`, `2s`.

use std::time::Duration;

/// Parses a number of bytes: digits, then nothing, `K`, `M` or `G` (powers of 1024, either case, an
/// optional `iB` or `B` after them).
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        _ => return Err(expected_bytes(text)),
    };
    let value: u64 = digits.parse().map_err(|_| expected_bytes(text))?;
    value.checked_mul(1 << shift).ok_or_else(|| expected_bytes(text))
}

fn expected_bytes(text: &str) -> String {
    format!("'{text}' is not a size: give bytes as 64, 4K, 1M or 1G (powers of 1024)")
}

pub(crate) fn parse_bytes_u32(text: &str) -> Result<u32, String> {
    u32::try_from(parse_bytes(text)?).map_err(|_| format!("'{text}' is too much: the limit is below 4G"))
}

/// Parses a duration: a decimal number and `ns`, `us`, `ms` or `s`.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let seconds = match unit {
        "ns" => 1e-9,
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        _ => return Err(expected_duration(text)),
    };
    let value: f64 = number.parse().map_err(|_| expected_duration(text))?;
    Duration::try_from_secs_f64(value * seconds).map_err(|_| expected_duration(text))
}

fn expected_duration(text: &str) -> String {
    format!("'{text}' is not a duration: give a number with ns, us, ms or s, such as 100us")
}

/// Parses a positive number of seconds, whole or decimal.
pub(crate) fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.strip_suffix('s').unwrap_or(text).parse::<f64>() {
        Ok(seconds) if (0.001..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err(format!(
            "'{text}' is not a running time: give seconds between 0.001 and 86400"
        )),
    }
}

/// Parses a rate per second: a decimal number, then nothing, `k`, `M` or `G` (powers of 1000).
pub(crate) fn parse_rate(text: &str) -> Result<f64, String> {
    let (number, unit) = match text.strip_suffix(['k', 'K', 'M', 'G']) {
        Some(number) => (number, text[number.len()..].to_ascii_lowercase()),
        None => (text, String::new()),
    };
    let scale = match unit.as_str() {
        "" => 1.0,
        "k" => 1e3,
        "m" => 1e6,
        _ => 1e9,
    };
    // Only plain decimals: Rust also parses `inf`, `1e3` and signs.
    let plain = number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    match number.parse::<f64>() {
        Ok(value) if plain && value > 0.0 => Ok(value * scale),
        _ => Err(format!(
            "'{text}' is not a rate: give messages per second as 5000, 20k or 1.5M (powers of 1000)"
        )),
    }
}

/// Parses a bandwidth into bytes per second: a decimal number and `kb`, `Mb`, `Gb`, `Tb` (bits,
/// powers of 1000), `kB`, `MB`, `GB`, `TB` (bytes, powers of 1000) or `KiB`, `MiB`, `GiB`, `TiB`
/// (bytes, powers of 1024), with or without `/s`.
pub(crate) fn parse_bandwidth(text: &str) -> Result<f64, String> {
    let bare = text.strip_suffix("/s").unwrap_or(text);
    let split = bare
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(bare.len());
    let (number, unit) = bare.split_at(split);
    let bytes = match unit {
        "kb" => 1e3 / 8.0,
        "Mb" => 1e6 / 8.0,
        "Gb" => 1e9 / 8.0,
        "Tb" => 1e12 / 8.0,
        "kB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        "TB" => 1e12,
        "KiB" => 1024.0,
        "MiB" => 1024.0 * 1024.0,
        "GiB" => 1024.0 * 1024.0 * 1024.0,
        "TiB" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        _ => return Err(expected_bandwidth(text)),
    };
    match number.parse::<f64>() {
        Ok(value) if value > 0.0 => Ok(value * bytes),
        _ => Err(expected_bandwidth(text)),
    }
}

fn expected_bandwidth(text: &str) -> String {
    format!(
        "'{text}' is not a bandwidth that can mean one thing only: give bits as 10Gb, bytes as 1.2GB (powers of 1000) or 1GiB (powers of 1024), per second"
    )
}

/// Parses a fraction between 0 and 1.
pub(crate) fn parse_fraction(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(fraction) if (0.0..=1.0).contains(&fraction) => Ok(fraction),
        _ => Err(format!(
            "'{text}' is not a fraction: give a number from 0 to 1, such as 0.05 for 5 %"
        )),
    }
}

/// Formats a size as [`parse_bytes`] parses it, in the largest unit that divides it.
pub(crate) fn show_bytes(bytes: u64) -> String {
    match bytes {
        0 => "0".into(),
        b if b.is_multiple_of(1 << 30) => format!("{}G", b >> 30),
        b if b.is_multiple_of(1 << 20) => format!("{}M", b >> 20),
        b if b.is_multiple_of(1 << 10) => format!("{}K", b >> 10),
        b => b.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_in_every_unit() {
        for (text, bytes) in [
            ("64", 64),
            ("4K", 4096),
            ("4k", 4096),
            ("4KiB", 4096),
            ("1M", 1 << 20),
            ("2G", 2 << 30),
            ("7B", 7),
            ("0", 0),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in [
            "",
            "K",
            "4X",
            "-1",
            "4 K",
            "1.5M",
            "99999999999999999999",
            "18446744073709551615G",
        ] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
        assert!(parse_bytes_u32("4G").is_err());
        assert_eq!(parse_bytes_u32("64K"), Ok(65536));
    }

    #[test]
    fn sizes_show_as_they_are_read() {
        for bytes in [0, 1, 1000, 1024, 1536, 65536, 1 << 20, 3 << 30] {
            assert_eq!(parse_bytes(&show_bytes(bytes)), Ok(bytes));
        }
    }

    #[test]
    fn durations_and_fractions() {
        assert_eq!(parse_duration("100us"), Ok(Duration::from_micros(100)));
        assert_eq!(parse_duration("1.5ms"), Ok(Duration::from_micros(1500)));
        for text in ["", "5", "us", "-1s", "1m", "nans", "infs"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        assert_eq!(parse_seconds("0.25"), Ok(0.25));
        for text in ["0", "-1", "nan", "inf", "x"] {
            assert!(parse_seconds(text).is_err(), "{text}");
            assert!(text == "0" || parse_fraction(text).is_err(), "{text}");
        }
        assert_eq!(parse_fraction("0.05"), Ok(0.05));
    }

    #[test]
    fn bandwidths_mean_one_thing_only() {
        for (text, bytes) in [
            ("10Gb", 1.25e9),
            ("10Gb/s", 1.25e9),
            ("1.5GB", 1.5e9),
            ("1GiB/s", 1_073_741_824.0),
            ("512MiB", 536_870_912.0),
            ("8kb", 1000.0),
        ] {
            assert_eq!(parse_bandwidth(text), Ok(bytes), "{text}");
        }
        for text in [
            "", "10", "10G", "10gb", "10Gib", "10Gbps", "Gb", "-1Gb", "0Gb", "1.2.3GB", "1e3MB", "10 Gb", "nanGB",
        ] {
            assert!(parse_bandwidth(text).is_err(), "{text}");
        }
    }

    #[test]
    fn rates_are_in_powers_of_a_thousand() {
        for (text, rate) in [
            ("5000", 5e3),
            ("20k", 2e4),
            ("1.5M", 1.5e6),
            ("2G", 2e9),
            (".5k", 500.0),
        ] {
            assert_eq!(parse_rate(text), Ok(rate), "{text}");
        }
        for text in ["", "k", "-1", "0", "1e3", "inf", "nan", "5Ki", "5 k", "1Mpps"] {
            assert!(parse_rate(text).is_err(), "{text}");
        }
    }
}
