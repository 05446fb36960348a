//! Causes of errors: a message has its cause, so `source()` does not return it (decision 104).

use super::{
    Finding,
    source::{Source, Token},
};

pub(super) fn check(source: &Source) -> Vec<Finding> {
    let code: Vec<_> = source.code().collect();
    let text = |at: usize| code.get(at).map_or("", |token| source.text(*token));
    let attributes = (0..code.len()).filter(|at| (0..4).map(|ahead| text(at + ahead)).eq(["#", "[", "error", "("]));
    attributes
        .filter(|at| text(at + 4) != "transparent")
        .flat_map(|at| fields(source, &code, at))
        .filter(|&at| match text(at) {
            "source" => text(at + 1) == ":" || text(at + 1) == "]",
            "from" => text(at + 1) == "]",
            _ => false,
        })
        .map(|at| Finding {
            rule: "causes",
            path: source.path.clone(),
            line: code[at].line,
            what: "a message has its cause, which then is no source: `error`, or `#[error(transparent)]`".to_owned(),
        })
        .collect()
}

/// The tokens of the variant's or struct's fields, behind its attribute at `at`.
fn fields(source: &Source, code: &[Token], mut at: usize) -> std::ops::Range<usize> {
    let text = |at: usize| code.get(at).map_or("", |token| source.text(*token));
    loop {
        match text(at) {
            "#" => at = end_of_group(source, code, at + 1),
            "pub" if text(at + 1) == "(" => at = end_of_group(source, code, at + 1),
            "{" | "(" => return at..end_of_group(source, code, at),
            "" | "," | ";" | "}" => return at..at,
            _ => at += 1,
        }
    }
}

/// The token behind the group that opens at `at`.
fn end_of_group(source: &Source, code: &[Token], at: usize) -> usize {
    let mut depth = 0;
    for (index, token) in code.iter().enumerate().skip(at) {
        match source.text(*token) {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return index + 1;
        }
    }
    code.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_in_the_message_alone() {
        let text = r#"
#[derive(thiserror::Error)]
enum Bad {
    #[error(transparent)]
    Whole(#[from] io::Error),
    #[error("{0} (once)")]
    Converted(#[from] io::Error),
    #[error("{error}")]
    #[cfg(unix)]
    Marked {
        name: String,
        #[source]
        error: io::Error,
    },
    #[error("{source}")]
    Named { source: io::Error },
    #[error("none: {}", source(1))]
    None,
    #[error("good {error}")]
    Good { error: io::Error },
}
#[error("x")]
pub(crate) struct Failure(u32, #[source] io::Error);
struct Other { source: u32 }
"#;
        let findings = check(&Source::of("verbs/src/a.rs", text.to_owned()));
        assert!(
            findings.iter().map(|finding| finding.line).eq([7, 12, 16, 23]),
            "{findings:?}"
        );
    }
}
