//! Functions and constants that are `pub` and that nothing outside their crate names: no other
//! crate, test, example, documentation test or page of docs/.

use super::{
    Finding,
    source::{Kind, Source},
};
use std::collections::{HashMap, HashSet};

/// What follows `pub` before the item's keyword.
const QUALIFIERS: [&str; 5] = ["unsafe", "async", "extern", "const", "\"C\""];
/// Types are left to rustc: one that no other crate names may be part of a signature.
const ITEMS: [&str; 3] = ["fn", "const", "static"];
/// Crates that are embedded: what is public there is for users.
const APIS: [&str; 7] = [
    "bindings/doorbell/src/",
    "bindings/test/src/",
    "verbs/src/",
    "verbs/sys/src/",
    "collectives/src/",
    "gpudirect/src/",
    "gpudirect/cuda/src/",
];
/// Above an item of another crate that is public for its users.
const REASON: &str = "// public: ";

pub(super) fn check(sources: &[Source], texts: &[(&str, String)]) -> Vec<Finding> {
    let crates: Vec<_> = texts
        .iter()
        .filter_map(|(path, _)| path.strip_suffix("Cargo.toml"))
        .map(|folder| format!("{folder}src/"))
        .collect();
    // The crate whose library a file is part of, if it is.
    let owner = |path: &str| {
        let library = |folder: &String| {
            path.strip_prefix(folder.as_str())
                .is_some_and(|file| !file.starts_with("bin/"))
        };
        crates.iter().position(library)
    };
    // By word, the crates that name it; `None` stands for everything that is in no crate's `src`.
    let mut users: HashMap<&str, HashSet<Option<usize>>> = HashMap::new();
    for source in sources {
        let owner = owner(&source.path);
        for token in source.code().filter(|token| token.kind == Kind::Ident) {
            users.entry(source.text(token)).or_default().insert(owner);
        }
        for word in source.comments().flat_map(|token| words(source.text(token))) {
            // A documentation test or a link is a use, except in the item's own crate's prose.
            users.entry(word).or_default().insert(owner);
        }
    }
    for (_, text) in texts.iter().filter(|(path, _)| !path.ends_with(".rs")) {
        for word in words(text) {
            users.entry(word).or_default().insert(None);
        }
    }
    let mut findings = Vec::new();
    let is_api = |path: &str| APIS.iter().any(|folder| path.starts_with(folder));
    for source in sources
        .iter()
        .filter(|source| !source.is_generated() && !is_api(&source.path))
    {
        let Some(own) = owner(&source.path) else { continue };
        let tested: HashSet<_> = documentation_tests(source);
        for (line, name) in public_items(source) {
            let used = users[name].iter().any(|user| *user != Some(own)) || tested.contains(name);
            if !used {
                findings.push(Finding {
                    rule: "visibility",
                    path: source.path.clone(),
                    line,
                    what: format!("{name} is used in its own crate alone: pub(crate), or '{REASON}…' above it"),
                });
            }
        }
    }
    findings
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter(|word| !word.is_empty())
}

fn documentation_tests(source: &Source) -> HashSet<&str> {
    let (mut fenced, mut found) = (false, HashSet::new());
    for token in source.comments() {
        let text = source.text(token);
        if text.trim_start_matches(['/', '!']).trim_start().starts_with("```") {
            fenced = !fenced;
        } else if fenced {
            found.extend(words(text));
        }
    }
    found
}

/// Line and name of each item that is `pub` without restriction and states no reason.
fn public_items(source: &Source) -> Vec<(usize, &str)> {
    let code: Vec<_> = source.code().collect();
    let text = |at: usize| code.get(at).map_or("", |token| source.text(*token));
    let mut found = Vec::new();
    for at in (0..code.len()).filter(|at| text(*at) == "pub") {
        let mut next = at + 1;
        while QUALIFIERS.contains(&text(next)) && (text(next) != "const" || !is_name(text(next + 1))) {
            next += 1;
        }
        let excused = source.above(code[at].start).any(|line| line.starts_with(REASON));
        if ITEMS.contains(&text(next)) && is_name(text(next + 1)) && !excused {
            found.push((code[at].line, text(next + 1)));
        }
    }
    found
}

/// Whether a word names an item, and is no keyword that may follow `const`.
fn is_name(word: &str) -> bool {
    word.starts_with(|c: char| c.is_alphabetic()) && !ITEMS.contains(&word) && !QUALIFIERS.contains(&word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn public_items_need_a_user_outside_or_a_reason() {
        let inside = "\
            pub fn used() {}\npub const fn unused() {}\n// public: for users\npub fn excused() {}\n\
            pub(crate) fn own() {}\npub const UNUSED: u8 = 1;\npub const DOCUMENTED: u8 = 1;\n\
            /// ```\n/// tested();\n/// ```\npub unsafe fn tested() {}\nfn f() { unused() }";
        let sources = [
            Source::of("a/src/lib.rs", inside.to_owned()),
            Source::of("a/tests/t.rs", "used();".to_owned()),
        ];
        let texts = [
            ("a/Cargo.toml", String::new()),
            ("README.md", "`DOCUMENTED`".to_owned()),
        ];
        let found: Vec<_> = check(&sources, &texts)
            .into_iter()
            .map(|finding| (finding.line, finding.what))
            .collect();
        let lines: Vec<_> = found.iter().map(|(line, _)| *line).collect();
        assert_eq!(lines, [2, 6], "{found:?}");
    }
}
