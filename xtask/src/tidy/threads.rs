//! Threads of libraries: they are started by `doorbell_threads::spawn`, which blocks signals.

use super::{Finding, LIBRARIES, source::Source};

/// The function itself, and a library that only tests load.
const EXCEPTIONS: [&str; 2] = ["gpudirect/standin/", "verbs/threads/"];
/// Of `std::thread`. A scope's threads have their caller's mask, and end before it goes on.
const STARTS: [&str; 2] = ["spawn", "Builder"];

pub(super) fn check(source: &Source) -> Vec<Finding> {
    let path = &source.path;
    let is_library = LIBRARIES.iter().any(|folder| path.starts_with(folder)) && path.contains("/src/");
    let file = path.rsplit('/').next().unwrap_or(path);
    let is_test = file == "model.rs" || file.ends_with("tests.rs");
    if !is_library || is_test || EXCEPTIONS.iter().any(|folder| path.starts_with(folder)) {
        return Vec::new();
    }
    let code: Vec<_> = source.code().collect();
    let text = |at: usize| code.get(at).map_or("", |token| source.text(*token));
    // A file's tests are at its end.
    let tests = (0..code.len()).find(|at| (0..3).map(|ahead| text(at + ahead)).eq(["cfg", "(", "test"]));
    let end = tests.unwrap_or(code.len());
    let starts = |at: &usize| text(*at) == "thread" && text(at + 1) == ":" && STARTS.contains(&text(at + 3));
    let found = (0..end).filter(starts);
    found
        .map(|at| Finding {
            rule: "threads",
            path: path.clone(),
            line: code[at].line,
            what: "a library starts threads by doorbell_threads::spawn".to_owned(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_start_threads_by_one_function() {
        let source = "use std::thread;\nthread::Builder::new(); // thread::spawn\nthread::sleep(d); std::thread::spawn(f);\n\
                      #[cfg(test)]\nmod tests { fn f() { thread::spawn(f); } }";
        let lines = |path: &str| {
            let findings = check(&Source::of(path, source.to_owned()));
            findings.iter().map(|finding| finding.line).collect::<Vec<_>>()
        };
        assert_eq!(lines("softroce/rdmacm/src/a.rs"), [2, 3]);
        for path in [
            "softroce/device/src/cq/model.rs",
            "softroce/device/tests/a.rs",
            "perftest/src/a.rs",
        ] {
            assert!(lines(path).is_empty(), "{path}");
        }
    }
}
