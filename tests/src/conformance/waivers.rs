//! Waivers: a device's known deviations, with reasons.
//!
//! A line is `NAME: reason`, where the name is a case's, or a prefix and `*`. Before the name,
//! `unsteady`: it passes at times; `never`: it crashes the machine and is not run; `lacks`: the
//! device does not offer the feature, and must still report so. `#` begins a comment.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

/// What a case does that is waived.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// It fails.
    Fails,
    /// It fails at times.
    Unsteady,
    /// It crashes the machine and is not run.
    Never,
    /// It reports that the device lacks the feature.
    Lacks,
}

/// A line of a file of waivers.
#[derive(Clone, Debug)]
pub struct Waiver {
    /// A case's name, or the beginning of names and `*`.
    pub pattern: String,
    /// What is waived.
    pub kind: Kind,
    /// Why.
    pub reason: String,
}

impl Waiver {
    /// Whether it is of the case of this name.
    pub fn covers(&self, name: &str) -> bool {
        match self.pattern.strip_suffix('*') {
            Some(beginning) => name.starts_with(beginning),
            None => name == self.pattern,
        }
    }
}

/// The waivers of a file; an error when a line is none.
pub fn read(path: &Path) -> Result<Vec<Waiver>> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    parse(&text).with_context(|| path.display().to_string())
}

fn parse(text: &str) -> Result<Vec<Waiver>> {
    let mut waivers: Vec<Waiver> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let (head, reason) = line
            .split_once(": ")
            .with_context(|| format!("line {}: not `NAME: reason`", number + 1))?;
        let (kind, pattern) = match head.split_once(' ') {
            Some(("unsteady", pattern)) => (Kind::Unsteady, pattern),
            Some(("never", pattern)) => (Kind::Never, pattern),
            Some(("lacks", pattern)) => (Kind::Lacks, pattern),
            _ => (Kind::Fails, head),
        };
        if waivers.iter().any(|waiver| waiver.pattern == pattern) {
            bail!("line {}: {pattern} is waived twice", number + 1);
        }
        ensure!(
            !reason.trim().is_empty(),
            "line {}: a waiver needs a reason",
            number + 1
        );
        waivers.push(Waiver {
            pattern: pattern.to_owned(),
            kind,
            reason: reason.trim().to_owned(),
        });
    }
    Ok(waivers)
}

/// Checks that each waiver matches a case.
pub(super) fn check(waivers: &[Waiver], names: &[String]) -> Result<()> {
    for waiver in waivers {
        ensure!(
            names.iter().any(|name| waiver.covers(name)),
            "the waiver of {} is of no case that there is",
            waiver.pattern
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_a_case_and_a_reason() {
        let waivers =
            parse("# of a device\n\na/b: it has none: none at all\nunsteady c/*: now and then\nnever d/e: it burns\n")
                .unwrap();
        let [first, second, third] = &waivers[..] else {
            panic!("{waivers:?}")
        };
        assert_eq!(
            (&*first.pattern, first.kind, &*first.reason),
            ("a/b", Kind::Fails, "it has none: none at all")
        );
        assert_eq!((&*third.pattern, third.kind), ("d/e", Kind::Never));
        assert!(second.kind == Kind::Unsteady && second.covers("c/d") && !second.covers("a/c/"));
        assert!(first.covers("a/b") && !first.covers("a/bc"));
    }

    #[test]
    fn a_waiver_without_reason_case_or_twice_is_refused() {
        assert!(parse("a/b\n").is_err());
        assert!(parse("a/b:  \n").is_err());
        assert!(parse("a/b: so\na/b: so\n").is_err());
        let waivers = parse("a/b: so\n").unwrap();
        assert!(check(&waivers, &["a/c".to_owned()]).is_err());
        assert!(check(&waivers, &["a/b".to_owned()]).is_ok());
    }
}
