//! The threat model: every surface has a guarantee or limit for every party, and the tests that it
//! names exist.

use super::Finding;

const DOCUMENT: &str = "docs/THREATS.md";
const PARTIES: [&str; 6] = [
    "remote host",
    "another user",
    "same user",
    "peer rank",
    "wrong program",
    "environment",
];

pub(super) fn check(files: &[(&str, String)]) -> Vec<Finding> {
    let Some((_, document)) = files.iter().find(|(path, _)| *path == DOCUMENT) else {
        return Vec::new();
    };
    let sources: Vec<&str> = files
        .iter()
        .filter(|(path, _)| path.ends_with(".rs"))
        .map(|(_, text)| text.as_str())
        .collect();
    let exists = |test: &str| sources.iter().any(|text| text.contains(&format!("fn {test}(")));
    findings(document, exists)
}

fn findings(document: &str, exists: impl Fn(&str) -> bool) -> Vec<Finding> {
    let finding = |line: usize, what: String| Finding {
        rule: "threats",
        path: DOCUMENT.to_owned(),
        line,
        what,
    };
    let mut found = Vec::new();
    let mut parties = PARTIES.iter();
    for (line, text) in (1..).zip(document.lines()) {
        let mut cells = text.split('|').map(str::trim);
        let (Some(""), Some(party), Some(guarantee)) = (cells.next(), cells.next(), cells.next()) else {
            continue;
        };
        if party == "party" || party.starts_with('-') {
            continue;
        }
        let expected = parties.next().or_else(|| {
            parties = PARTIES.iter();
            parties.next()
        });
        if expected != Some(&party) {
            found.push(finding(line, format!("'{party}' is not the next party")));
        }
        if guarantee.is_empty() {
            found.push(finding(line, format!("the cell of '{party}' is empty")));
        }
        let missing = tests(guarantee).filter(|test| !exists(test));
        found.extend(missing.map(|test| finding(line, format!("there is no test {test}"))));
    }
    if parties.next().is_some() {
        found.push(finding(
            document.lines().count(),
            "the last surface lacks parties".to_owned(),
        ));
    }
    found
}

/// Names in code of three words or more: those of tests.
fn tests(cell: &str) -> impl Iterator<Item = &str> {
    let code = cell.split('`').skip(1).step_by(2);
    let names = code.map(|code| code.rsplit("::").next().unwrap_or(code));
    names.filter(|name| {
        let of_test = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        name.chars().all(of_test) && name.matches('_').count() >= 2
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(document: &str) -> Vec<String> {
        let found = findings(document, |test| test == "a_test_of_it");
        found.into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn cells_are_filled_and_their_tests_exist() {
        let row = |party| format!("| {party} | `module::a_test_of_it`, target `shm_ring` |\n");
        let complete: String = PARTIES.into_iter().map(row).collect();
        assert_eq!(rows(&complete), [""; 0]);
        assert_eq!(
            rows(&complete.replace("a_test_of_it", "a_test_of_more")).len(),
            PARTIES.len()
        );
        let empty = complete.replacen("`module::a_test_of_it`, target `shm_ring`", "", 1);
        assert_eq!(rows(&empty), ["the cell of 'remote host' is empty"]);
        let short: String = PARTIES[..5].iter().copied().map(row).collect();
        assert_eq!(rows(&short), ["the last surface lacks parties"]);
    }
}
