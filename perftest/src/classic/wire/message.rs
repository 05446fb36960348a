//! The short messages of the control connection, as bytes.

use doorbell_verbs::Mtu;

/// A malformed message: the text goes behind the peer's name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Malformed(pub(crate) &'static str);

/// Length of a version.
pub(super) const VERSION: usize = 16;
/// Length of an MTU.
pub(super) const MTU: usize = 2;
pub(super) const DONE: [u8; 5] = *b"done\0";

/// The version of the C tools that is implemented. From 6.28 on there is a further message between
/// peers that both have it, so this end reports an older one.
const OURS: &str = "6.06";
/// The oldest version that the C tools of [`OURS`] accept.
const OLDEST: (u32, u32) = (5, 70);
/// The major version of these messages.
const MAJOR: u32 = 6;

pub(super) fn our_version() -> [u8; VERSION] {
    let mut bytes = [0; VERSION];
    bytes[..OURS.len()].copy_from_slice(OURS.as_bytes());
    bytes
}

/// Whether a version uses this protocol.
pub(super) fn check_version(bytes: &[u8; VERSION]) -> Result<(), String> {
    let text = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
    let version = std::str::from_utf8(text).ok().and_then(|text| {
        let (major, minor) = text.split_once('.')?;
        let number = |digits: &str| {
            let plain = !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
            plain.then(|| digits.parse::<u32>().ok()).flatten()
        };
        Some((number(major)?, number(minor)?, text))
    });
    match version {
        None => Err("it is no perftest: it sends no version".to_owned()),
        Some((major, minor, _)) if (OLDEST..(MAJOR + 1, 0)).contains(&(major, minor)) => Ok(()),
        Some((_, _, text)) => Err(format!(
            "it is perftest of version {}: this end implements {OURS}, compatible with versions from {}.{} to before {}",
            text,
            OLDEST.0,
            OLDEST.1,
            MAJOR + 1
        )),
    }
}

/// The parameters that the two ends agree on first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SharedParameters {
    /// Bytes of the cycle buffer: the larger page of the two.
    pub(crate) page: u32,
    /// Alignment of messages in it: the larger cache line of the two.
    pub(crate) cache_line: u32,
    /// The path MTU: the smaller of the two.
    pub(crate) mtu: Mtu,
}

impl SharedParameters {
    /// What both ends agree on.
    pub(super) fn merge(self, theirs: SharedParameters) -> SharedParameters {
        SharedParameters {
            page: self.page.max(theirs.page),
            cache_line: self.cache_line.max(theirs.cache_line),
            mtu: self.mtu.min(theirs.mtu),
        }
    }
}

/// Bounds the memory of each queue pair, which is at least a peer's page long.
pub(super) const LARGEST_PAGE: u32 = 1 << 20;
pub(super) const LARGEST_CACHE_LINE: u32 = 4096;

/// Decodes a power of two, up to `most`.
pub(super) fn parse_power(bytes: [u8; 4], most: u32, otherwise: Malformed) -> Result<u32, Malformed> {
    let value = u32::from_be_bytes(bytes);
    if value.is_power_of_two() && value <= most {
        Ok(value)
    } else {
        Err(otherwise)
    }
}

pub(super) fn format_mtu(mtu: Mtu) -> [u8; MTU] {
    [b'0' + mtu as u8, 0]
}

pub(super) fn parse_mtu(bytes: [u8; MTU]) -> Result<Mtu, Malformed> {
    match bytes {
        [digit @ b'1'..=b'5', 0 | b' '] => Mtu::from_bytes(128 << (digit - b'0')),
        _ => None,
    }
    .ok_or(Malformed("its MTU is invalid"))
}

/// The report of a bandwidth test at one end; each field is a message of its own.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct BwReport {
    pub(crate) size: u64,
    pub(crate) iterations: u64,
    /// Peak bandwidth, in the unit the sender prints: MiB/s, or Gb/s with `--report_gbits`.
    pub(crate) peak: f64,
    /// Average bandwidth in the same unit.
    pub(crate) average: f64,
    /// Millions of messages per second.
    pub(crate) rate: f64,
}

impl BwReport {
    pub(super) fn to_words(self) -> [[u8; 8]; 5] {
        [
            self.size.to_be_bytes(),
            self.iterations.to_be_bytes(),
            self.peak.to_be_bytes(),
            self.average.to_be_bytes(),
            self.rate.to_be_bytes(),
        ]
    }

    /// Decodes them. An end that has measured nothing sends arbitrary values.
    pub(super) fn from_words(words: [[u8; 8]; 5]) -> BwReport {
        let [size, iterations, peak, average, rate] = words;
        BwReport {
            size: u64::from_be_bytes(size),
            iterations: u64::from_be_bytes(iterations),
            peak: f64::from_be_bytes(peak),
            average: f64::from_be_bytes(average),
            rate: f64::from_be_bytes(rate),
        }
    }

    /// Whether the values can be a measurement: finite, and not negative.
    pub(crate) fn are_plausible(&self) -> bool {
        [self.peak, self.average, self.rate]
            .iter()
            .all(|value| value.is_finite() && *value >= 0.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn version(text: &str) -> [u8; VERSION] {
        let mut bytes = [0; VERSION];
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        bytes
    }

    #[test]
    fn versions_of_this_protocol_are_accepted() {
        assert_eq!(check_version(&our_version()), Ok(()));
        for text in ["5.70", "5.97", "6.00", "6.28", "6.30"] {
            assert_eq!(check_version(&version(text)), Ok(()), "{text}");
        }
        for text in ["5.60", "5.69", "4.6", "7.00", "16.06"] {
            assert!(check_version(&version(text)).unwrap_err().contains(text), "{text}");
        }
        for text in ["", ".", "6", "6.", "-6.1", "+6.06", "GET / HTTP/1.1\r\n", "6.0\u{7f}"] {
            assert!(
                check_version(&version(text)).unwrap_err().contains("no perftest"),
                "{text}"
            );
        }
        assert!(check_version(&[0xff; VERSION]).is_err());
    }

    #[test]
    fn an_mtu_is_a_digit() {
        for (code, bytes) in (1..).zip([256, 512, 1024, 2048, 4096]) {
            let mtu = Mtu::from_bytes(bytes).unwrap();
            assert_eq!(format_mtu(mtu), [b'0' + code, 0]);
            assert_eq!(parse_mtu([b'0' + code, 0]), Ok(mtu));
        }
        for bad in [[0, 0], [b'0', 0], [b'6', 0], [b'5', b'5'], [0xff, 0]] {
            assert!(parse_mtu(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_larger_page_and_the_smaller_mtu_are_agreed_on() {
        let ours = SharedParameters {
            page: 4096,
            cache_line: 128,
            mtu: Mtu::B4096,
        };
        let theirs = SharedParameters {
            page: 65536,
            cache_line: 64,
            mtu: Mtu::B1024,
        };
        let both = SharedParameters {
            page: 65536,
            cache_line: 128,
            mtu: Mtu::B1024,
        };
        assert_eq!((ours.merge(theirs), theirs.merge(ours)), (both, both));
    }

    #[test]
    fn pages_are_powers_of_two() {
        let parse = |value: u32| parse_power(value.to_be_bytes(), LARGEST_PAGE, Malformed("x"));
        assert_eq!(parse(4096), Ok(4096));
        assert_eq!(parse(LARGEST_PAGE), Ok(LARGEST_PAGE));
        for bad in [0, 3, 4097, u32::MAX, 1 << 31, 2 * LARGEST_PAGE] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn reports_survive_encoding_and_decoding(size: u64, iterations: u64, peak: f64, average: f64, rate: f64) {
            let report = BwReport { size, iterations, peak, average, rate };
            let back = BwReport::from_words(report.to_words());
            prop_assert_eq!(back.to_words(), report.to_words());
            prop_assert_eq!(back.are_plausible(), [peak, average, rate].iter().all(|v| v.is_finite() && *v >= 0.0));
        }

        #[test]
        fn hostile_versions_are_judged_in_one_line(bytes: [u8; VERSION]) {
            if let Err(reason) = check_version(&bytes) {
                prop_assert!(!reason.chars().any(char::is_control), "{reason:?}");
            }
        }
    }
}
