//! Environment variables: those that the sources name, those that docs/ENVIRONMENT.md lists, and
//! how libraries read them.

use super::{
    Finding, LIBRARIES,
    source::{Kind, Source, Token},
};
use std::collections::BTreeMap;

const DOCUMENT: &str = "docs/ENVIRONMENT.md";
/// Declares values of the C library, which are no variables.
const HEADER: &str = "bindings/c/doorbell.h";
const PREFIX: &str = "DOORBELL_";
/// Programs beside Rust's. Comments and documents may name a family (`DOORBELL_GPU_…`).
const PROGRAMS: [&str; 3] = [".sh", ".py", ".c"];

const EXCEPTIONS: [&str; 2] = ["gpudirect/standin/", "verbs/trust/"];
const READ: [&str; 4] = ["var", "var_os", "vars", "vars_os"];

pub(super) fn check(sources: &[Source], files: &[(&str, String)]) -> Vec<Finding> {
    let documented: BTreeMap<_, _> = files
        .iter()
        .filter(|(path, _)| *path == DOCUMENT)
        .flat_map(|(path, text)| named(path, text))
        .collect();
    let scripts = files
        .iter()
        .filter(|(path, _)| PROGRAMS.iter().any(|ending| path.ends_with(ending)))
        .flat_map(|(path, text)| named(path, text));
    let programs = sources
        .iter()
        .filter(|source| !source.path.starts_with("xtask/src/tidy"))
        .flat_map(named_in_literals);
    let values = declared(files);
    let used: BTreeMap<_, _> = scripts
        .chain(programs)
        .filter(|(name, _)| !values.contains(name))
        .collect();
    let finding = |(name, (path, line)): (&String, &(String, usize)), what: &str| Finding {
        rule: "environment",
        path: path.clone(),
        line: *line,
        what: format!("{name} {what}"),
    };
    let missing = used.iter().filter(|(name, _)| !documented.contains_key(*name));
    let stale = documented.iter().filter(|(name, _)| !used.contains_key(*name));
    missing
        .map(|place| finding(place, "is not in docs/ENVIRONMENT.md"))
        .chain(stale.map(|place| finding(place, "is in no source")))
        .chain(sources.iter().flat_map(reads))
        .collect()
}

/// The values of enums and the macros of the header: they begin a line.
fn declared(files: &[(&str, String)]) -> Vec<String> {
    let header = files.iter().filter(|(path, _)| *path == HEADER);
    let lines = header.flat_map(|(_, text)| text.lines().map(str::trim_start));
    lines
        .map(|line| line.trim_start_matches("#define "))
        .filter(|line| line.starts_with(PREFIX))
        .filter_map(|line| named(HEADER, line).into_iter().next())
        .map(|(name, _)| name)
        .collect()
}

/// What a library reads with `std::env`, and not by `doorbell_trust::variable`.
fn reads(source: &Source) -> Vec<Finding> {
    let path = &source.path;
    let is_library = LIBRARIES.iter().any(|folder| path.starts_with(folder)) && path.contains("/src/");
    if !is_library || EXCEPTIONS.iter().any(|folder| path.starts_with(folder)) {
        return Vec::new();
    }
    let code: Vec<_> = source.code().collect();
    let finding = |words: &[Token]| {
        let [module, colon, _, function] = words else {
            return None;
        };
        let is_read = source.text(*module) == "env" && source.text(*colon) == ":";
        (is_read && READ.contains(&source.text(*function))).then(|| Finding {
            rule: "environment",
            path: path.clone(),
            line: function.line,
            what: "a library reads variables by doorbell_trust::variable".to_owned(),
        })
    };
    code.windows(4).filter_map(finding).collect()
}

fn named_in_literals(source: &Source) -> Vec<(String, (String, usize))> {
    let literals = source.code().filter(|token| token.kind == Kind::Literal);
    literals
        .flat_map(|token| {
            let names = named(&source.path, source.text(token)).into_iter();
            names.map(move |(name, (path, line))| (name, (path, token.line + line - 1)))
        })
        .collect()
}

/// The variables that a file names, each with the file and its first line.
fn named(path: &str, text: &str) -> Vec<(String, (String, usize))> {
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        for (at, _) in line.match_indices(PREFIX) {
            let inside = line[..at].ends_with(|before: char| before.is_ascii_alphanumeric() || before == '_');
            let rest = line[at + PREFIX.len()..].chars();
            let name: String = rest
                .take_while(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || *c == '_')
                .collect();
            if !inside && !name.is_empty() && !name.ends_with('_') {
                found.push((format!("{PREFIX}{name}"), (path.to_owned(), number + 1)));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_documented_if_and_only_if_they_are_used() {
        let files = [
            (DOCUMENT, "`DOORBELL_A` does\n`DOORBELL_OLD` did".to_owned()),
            ("a.sh", "$DOORBELL_SCRIPT".to_owned()),
            ("a.md", "DOORBELL_TEXT".to_owned()),
            (
                HEADER,
                "/* of DOORBELL_NEW */\n  DOORBELL_OK = 0,\n#define DOORBELL_MAX 1".to_owned(),
            ),
            ("a.c", "DOORBELL_OK + DOORBELL_MAX".to_owned()),
        ];
        let source = "\"DOORBELL_A\" \"MY_DOORBELL_X\" // DOORBELL_GPU_…\nDOORBELL_CONST; env(\"DOORBELL_NEW\")";
        let sources = [Source::of("a.rs", source.to_owned())];
        let found: Vec<_> = check(&sources, &files).iter().map(ToString::to_string).collect();
        assert_eq!(
            found,
            [
                "a.rs:2: environment: DOORBELL_NEW is not in docs/ENVIRONMENT.md",
                "a.sh:1: environment: DOORBELL_SCRIPT is not in docs/ENVIRONMENT.md",
                "docs/ENVIRONMENT.md:2: environment: DOORBELL_OLD is in no source"
            ]
        );
    }

    #[test]
    fn libraries_read_variables_by_one_function() {
        let source = "std::env::var(A); env::temp_dir(); env!(\"B\");\nenv::vars_os() // env::var";
        let lines = |path: &str| {
            let findings = check(&[Source::of(path, source.to_owned())], &[]);
            findings.iter().map(|finding| finding.line).collect::<Vec<_>>()
        };
        assert_eq!(lines("softroce/device/src/a.rs"), [1, 2]);
        assert!(lines("softroce/device/tests/a.rs").is_empty());
        assert!(lines("perftest/src/a.rs").is_empty());
    }
}
