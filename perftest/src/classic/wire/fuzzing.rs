//! What the C tools send, decoded as each message in turn.

use super::message::{self, BwReport, LARGEST_PAGE, Malformed, check_version, format_mtu, parse_mtu, parse_power};
use super::qp_info::QpInfo;

/// What is decoded must survive being encoded.
pub(crate) fn decode(bytes: &[u8]) {
    if let Ok(info) = QpInfo::parse(bytes) {
        assert_eq!(QpInfo::parse(&info.format()), Ok(info));
    }
    if let Some(bytes) = bytes.first_chunk()
        && let Ok(info) = QpInfo::from_struct(bytes)
    {
        assert_eq!(QpInfo::from_struct(&info.to_struct()), Ok(info));
    }
    if let Some(version) = bytes.first_chunk::<{ message::VERSION }>() {
        let _ = check_version(version);
    }
    if let Some(Ok(mtu)) = bytes.first_chunk().map(|bytes| parse_mtu(*bytes)) {
        assert_eq!(parse_mtu(format_mtu(mtu)), Ok(mtu));
    }
    if let Some(Ok(page)) = bytes
        .first_chunk()
        .map(|bytes| parse_power(*bytes, LARGEST_PAGE, Malformed("a page")))
    {
        assert!(page.is_power_of_two() && page <= LARGEST_PAGE);
    }
    if let Some((words, _)) = bytes.as_chunks::<8>().0.split_first_chunk() {
        let report = BwReport::from_words(*words);
        assert_eq!(report.to_words(), *words);
        assert!(!report.are_plausible() || report.peak >= 0.0);
    }
}
