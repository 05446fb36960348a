//! Text in charts and pages: escaping, width, and numbers with units.

pub(crate) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            // Not allowed in XML, even escaped.
            c if c.is_control() && c != '\n' || matches!(c, '\u{fffe}' | '\u{ffff}') => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}

/// Approximate width of a text, in units of the font size.
pub(super) fn width(text: &str) -> f64 {
    text.chars()
        .map(|c| match c {
            'i' | 'j' | 'l' | '.' | ',' | ':' | '|' | ' ' | '\'' => 0.32,
            'm' | 'w' | 'M' | 'W' | '@' | '%' => 0.92,
            c if c.is_uppercase() => 0.7,
            c if c.is_ascii() => 0.6,
            _ => 1.0,
        })
        .sum()
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unit {
    /// A size, in powers of 1024.
    Bytes,
    Count,
    BytesPerS,
    /// Messages per second.
    PerS,
    Ns,
    Us,
    Fraction,
}

impl Unit {
    /// A value with its unit, to about four digits.
    pub(crate) fn show(self, value: f64) -> String {
        match self {
            Unit::Bytes => match size(value) {
                size if size.ends_with(['K', 'M', 'G']) => {
                    let (number, unit) = size.split_at(size.len() - 1);
                    format!("{number} {unit}iB")
                }
                size => format!("{size} B"),
            },
            Unit::Count => number(value),
            Unit::BytesPerS => scaled(value, &[(1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s")]),
            Unit::PerS => scaled(value, &[(1e6, "M/s"), (1e3, "k/s"), (1.0, "/s")]),
            Unit::Ns => scaled(value, &[(1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns")]),
            Unit::Us => Unit::Ns.show(value * 1e3),
            Unit::Fraction => format!("{} %", fixed(value * 100.0)),
        }
    }

    pub(super) fn tick(self, value: f64) -> String {
        match self {
            Unit::Bytes => size(value),
            Unit::Fraction if value >= 1.0 => "max".into(),
            Unit::Fraction => format!("{}%", fixed(value * 100.0)),
            _ if value == 0.0 => "0".into(),
            Unit::BytesPerS => short(value, &[(1e9, " GB/s"), (1e6, " MB/s"), (1e3, " kB/s"), (1.0, " B/s")]),
            Unit::PerS => short(value, &[(1e6, " M/s"), (1e3, " k/s"), (1.0, " /s")]),
            Unit::Ns => short(value, &[(1e9, " s"), (1e6, " ms"), (1e3, " µs"), (1.0, " ns")]),
            Unit::Us => Unit::Ns.tick(value * 1e3),
            Unit::Count => fixed(value),
        }
    }
}

fn size(value: f64) -> String {
    let units = [(30, "G"), (20, "M"), (10, "K")];
    for (shift, unit) in units {
        let one = f64::from(1u32 << shift);
        if value >= one && (value / one).fract() == 0.0 {
            return format!("{}{unit}", value / one);
        }
    }
    fixed(value)
}

fn scaled(value: f64, units: &[(f64, &str)]) -> String {
    let (one, unit) = of(value, units);
    format!("{} {unit}", number(value / one))
}

fn short(value: f64, units: &[(f64, &str)]) -> String {
    let (one, unit) = of(value, units);
    format!("{}{unit}", fixed(value / one))
}

fn of<'a>(value: f64, units: &[(f64, &'a str)]) -> (f64, &'a str) {
    let fits = units.iter().find(|(one, _)| value >= *one * 0.999_999);
    fits.or(units.last()).copied().unwrap_or((1.0, ""))
}

/// Four significant digits, or all before the decimal point.
fn number(value: f64) -> String {
    match value {
        v if v >= 1000.0 => format!("{v:.0}"),
        v if v >= 100.0 => format!("{v:.1}"),
        v if v >= 10.0 => format!("{v:.2}"),
        v => format!("{v:.3}"),
    }
}

/// As many decimals as needed, up to those of a tick or a percentile.
fn fixed(value: f64) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn values_read_as_people_write_them() {
        for (unit, value, shown, tick) in [
            (Unit::Bytes, 65536.0, "64 KiB", "64K"),
            (Unit::Bytes, 3.0, "3 B", "3"),
            (Unit::Bytes, 1536.0, "1536 B", "1536"),
            (Unit::BytesPerS, 12.5e9, "12.50 GB/s", "12.5 GB/s"),
            (Unit::BytesPerS, 0.0, "0.000 B/s", "0"),
            (Unit::PerS, 2e6, "2.000 M/s", "2 M/s"),
            (Unit::Ns, 1500.0, "1.500 µs", "1.5 µs"),
            (Unit::Us, 1.5, "1.500 µs", "1.5 µs"),
            (Unit::Fraction, 0.9999, "99.99 %", "99.99%"),
            (Unit::Fraction, 1.0, "100 %", "max"),
            (Unit::Count, 128.0, "128.0", "128"),
        ] {
            assert_eq!((unit.show(value).as_str(), unit.tick(value).as_str()), (shown, tick));
        }
    }

    proptest! {
        #[test]
        fn nothing_that_is_escaped_can_end_a_text_or_an_attribute(text in any::<String>()) {
            let safe = escape(&text);
            prop_assert!(!safe.contains(['<', '>', '"', '\'']));
            prop_assert!(safe.chars().all(|c| c == '\n' || !c.is_control()));
            let back = safe.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&#39;", "'").replace("&amp;", "&");
            prop_assert_eq!(back.chars().count(), text.chars().count());
        }
    }
}
