//! Matches the rows of two results by their parameters.

use std::collections::BTreeMap;

use crate::document::{Document, PARAMETERS, Row};

pub(super) struct Matched<'a> {
    /// A point's name, and its row in each.
    pub(super) both: Vec<(String, &'a Row, &'a Row)>,
    /// Names of points that only the first has.
    pub(super) only_before: Vec<String>,
    /// Names of points that only the second has.
    pub(super) only_after: Vec<String>,
}

/// Matches rows. A parameter that only one of the results has is ignored, as an older version did
/// not write it. So are names of algorithms: the choice is part of what is compared.
pub(super) fn matched<'a>(before: &'a Document, after: &'a Document) -> Matched<'a> {
    let knows = |document: &Document, name: &str| document.rows.iter().any(|row| row.parameter(name).is_some());
    let shared: Vec<_> = PARAMETERS
        .into_iter()
        .filter(|name| !["algorithm", "protocol", "channels"].contains(name))
        .filter(|name| knows(before, name) && knows(after, name))
        .collect();
    let mut rest: BTreeMap<Key, Vec<&Row>> = BTreeMap::new();
    for row in after.rows.iter().rev() {
        rest.entry(key(row, &shared)).or_default().push(row);
    }
    let (mut both, mut only_before) = (Vec::new(), Vec::new());
    for row in &before.rows {
        let key = key(row, &shared);
        // A point measured several times in each is matched in order.
        match rest.get_mut(&key).and_then(Vec::pop) {
            Some(same) => both.push((parameters(&key, &shared), row, same)),
            None => only_before.push(name(&key, &shared)),
        }
    }
    let only_after = rest
        .iter()
        .flat_map(|(key, rows)| rows.iter().map(|_| name(key, &shared)))
        .collect();
    Matched {
        both,
        only_before,
        only_after,
    }
}

type Key = (u64, Vec<Option<String>>);

fn key(row: &Row, shared: &[&str]) -> Key {
    (row.bytes, shared.iter().map(|name| row.parameter(name)).collect())
}

fn parameters(key: &Key, shared: &[&str]) -> String {
    let words: Vec<_> = shared
        .iter()
        .zip(&key.1)
        .filter_map(|(name, value)| Some(format!("{name} {}", value.as_ref()?)))
        .collect();
    words.join(", ")
}

fn name(key: &Key, shared: &[&str]) -> String {
    let parameters = parameters(key, shared);
    if parameters.is_empty() {
        format!("{} B", key.0)
    } else {
        format!("{} B, {parameters}", key.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::document::tests::document;

    fn row(bytes: u64, qps: &str, bw: u64) -> String {
        format!(r#"{{"bytes":{bytes}{qps},"bw_avg_bytes_per_s":{bw}}}"#)
    }

    #[test]
    fn rows_of_the_same_point_are_matched_and_the_others_are_named() {
        let before = document(
            "a",
            "soft-udp",
            &[
                row(64, ",\"qps\":1", 1),
                row(64, ",\"qps\":8", 2),
                row(128, ",\"qps\":1", 3),
            ]
            .join(","),
        );
        let after = document(
            "b",
            "soft-udp",
            &[
                row(64, ",\"qps\":8", 20),
                row(64, ",\"qps\":1", 10),
                row(4, ",\"qps\":1", 30),
            ]
            .join(","),
        );
        let found = matched(&before, &after);
        let bw = |row: &Row| row.metric("bw_avg_bytes_per_s").unwrap().value;
        let pairs: Vec<_> = found
            .both
            .iter()
            .map(|(name, a, b)| (name.as_str(), bw(a), bw(b)))
            .collect();
        assert_eq!(pairs, [("qps 1", 1.0, 10.0), ("qps 8", 2.0, 20.0)]);
        assert_eq!(
            (found.only_before, found.only_after),
            (vec!["128 B, qps 1".into()], vec!["4 B, qps 1".into()])
        );
    }

    #[test]
    fn a_parameter_missing_in_one_result_is_ignored() {
        let (before, after) = (
            document("a", "soft-udp", &row(64, "", 1)),
            document("b", "soft-udp", &row(64, ",\"qps\":1", 2)),
        );
        assert_eq!(matched(&before, &after).both.len(), 1);
    }
}
