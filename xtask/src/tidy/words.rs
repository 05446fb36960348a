//! Words that docs/GLOSSARY.md retires in favour of a standard term.

use super::{
    Finding,
    source::{Kind, Source},
};
use anyhow::{Result, ensure};
use std::collections::BTreeMap;

/// The heading of the glossary's table of retired words, whose rows are `| word, word | use |`.
const HEADING: &str = "## Retired words";

pub(super) struct Retired(BTreeMap<String, String>);

impl Retired {
    pub(super) fn read(glossary: &str) -> Result<Self> {
        let rows = glossary.lines().skip_while(|line| *line != HEADING).skip(1);
        let rows = rows.take_while(|line| !line.starts_with("## "));
        let cells = rows.filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |")?.split_once(" | "));
        let mut retired = BTreeMap::new();
        for (words, instead) in cells.skip(1) {
            let words = words.split(", ").map(|word| word.trim_matches('`').to_owned());
            retired.extend(words.map(|word| (word, instead.to_owned())));
        }
        ensure!(!retired.is_empty(), "docs/GLOSSARY.md has no table under '{HEADING}'");
        Ok(Self(retired))
    }

    fn finding(&self, source: &Source, line: usize, word: &str) -> Option<Finding> {
        let instead = self.0.get(word)?;
        Some(Finding {
            rule: "words",
            path: source.path.clone(),
            line,
            what: format!("'{word}' is retired: {instead}"),
        })
    }
}

pub(super) fn check(source: &Source, retired: &Retired) -> Vec<Finding> {
    let mut findings = Vec::new();
    for token in &source.tokens {
        let text = source.text(*token);
        // A literal of one word is a key or a name of an interface.
        if token.kind == Kind::Literal && !text.contains(' ') {
            continue;
        }
        let words: Vec<_> = match token.kind {
            Kind::Ident => segments(text).map(|word| (0, word)).collect(),
            Kind::Comment | Kind::Literal => {
                let lines = text.lines().enumerate();
                let words = lines.flat_map(|(at, line)| prose(line).map(move |word| (at, word)));
                words.collect()
            }
            Kind::Mark => continue,
        };
        let found = words
            .iter()
            .filter_map(|(at, word)| retired.finding(source, token.line + at, word));
        findings.extend(found);
    }
    findings
}

/// The words of an identifier, in lower case: `is_ToldBy` is `is`, `told`, `by`.
fn segments(identifier: &str) -> impl Iterator<Item = String> {
    let mut words = vec![String::new()];
    let mut previous = '_';
    for character in identifier.chars() {
        let starts = character == '_' || character.is_uppercase() && !previous.is_uppercase();
        if starts {
            words.push(String::new());
        }
        if character != '_'
            && let Some(word) = words.last_mut()
        {
            word.extend(character.to_lowercase());
        }
        previous = character;
    }
    words.into_iter().filter(|word| !word.is_empty())
}

/// The words of a line of text, in lower case, identifiers taken apart.
fn prose(line: &str) -> impl Iterator<Item = String> {
    line.split(|character: char| !character.is_alphanumeric() && character != '_')
        .flat_map(segments)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<String> {
        let glossary = "# G\n## Retired words\n\n| words | use |\n|---|---|\n| `tell`, `told` | report |\n## Next\n| `send` | x |\n";
        let retired = Retired::read(glossary).unwrap();
        let source = Source::of("a.rs", text.to_owned());
        check(&source, &retired)
            .iter()
            .map(|finding| format!("{} {}", finding.line, finding.what))
            .collect()
    }

    #[test]
    fn retired_words_are_found_in_identifiers_comments_and_messages() {
        assert_eq!(found("fn tell_peer() {}"), ["1 'tell' is retired: report"]);
        assert_eq!(found("struct AsTold;\n"), ["1 'told' is retired: report"]);
        assert_eq!(found("/* a\n Tell\n*/"), ["2 'tell' is retired: report"]);
        assert_eq!(found("const A: &str = \"is told\";"), ["1 'told' is retired: report"]);
    }

    #[test]
    fn other_words_and_other_tables_are_not() {
        assert_eq!(found("// teller, retold\nfn send() { satellite() }"), [""; 0]);
        assert!(Retired::read("# no table").is_err());
    }
}
