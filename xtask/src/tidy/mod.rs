//! `cargo xtask tidy`: rules for sources that neither rustfmt nor clippy has.
//!
//! Each rule is a module with a function `check` that reads [`Source`]s and returns [`Finding`]s;
//! its tests plant a violation.

mod causes;
mod environment;
mod layout;
mod source;
mod threads;
mod threats;
mod visibility;
mod words;

use crate::{
    ci::{Scope, Verdict, stdout},
    workspace,
};
use anyhow::{Context, Result, bail};
use source::Source;
use std::{fmt, fs, process::Command};

/// Libraries, which are loaded by programs of others, also with more rights than their callers.
const LIBRARIES: [&str; 5] = ["bindings/", "collectives/src/", "gpudirect/", "softroce/", "verbs/"];

const HELP: &str = "\
Check the sources for what rustfmt and clippy do not

Usage: cargo xtask tidy

Rules:
  words        no word that docs/GLOSSARY.md retires, in identifiers, comments or messages
  width        comments end at column 100
  length       files have at most 600 lines
  fields       structs have at most 12 fields, or a comment '// fields: REASON' above them
  environment  docs/ENVIRONMENT.md lists exactly the DOORBELL_ variables that the sources name;
               libraries read them by doorbell_trust
  causes       errors print their cause, and then do not return it as their source
  threads      libraries start them by doorbell_threads::spawn
  visibility   what is `pub` is used outside its crate
  threats      docs/THREATS.md has no empty cell, and the tests that it names exist

Exit status: 0 when all is well, 1 for findings, 2 for a wrong call.
";

#[derive(Debug, PartialEq, Eq)]
struct Finding {
    rule: &'static str,
    path: String,
    line: usize,
    what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}: {}", self.path, self.line, self.rule, self.what)
    }
}

/// The command-line form. Returns the exit status.
pub(crate) fn main(mut arguments: lexopt::Parser) -> Result<u8> {
    use lexopt::prelude::*;
    match arguments.next()? {
        None => {}
        Some(Short('h') | Long("help")) => {
            print!("{HELP}");
            return Ok(0);
        }
        Some(other) => return Err(other.unexpected().into()),
    }
    let findings = findings()?;
    for finding in &findings {
        println!("{finding}");
    }
    println!("tidy: {} findings", findings.len());
    Ok(u8::from(!findings.is_empty()))
}

pub(crate) fn check(_: Scope) -> Result<Verdict> {
    let findings = findings()?;
    for finding in &findings {
        println!("{finding}");
    }
    if findings.is_empty() {
        Ok(Verdict::Passed)
    } else {
        bail!("{} findings, above", findings.len())
    }
}

fn findings() -> Result<Vec<Finding>> {
    let files = tracked()?;
    let sources = files
        .iter()
        .filter(|path| path.ends_with(".rs"))
        .map(|path| Source::read(path))
        .collect::<Result<Vec<_>>>()?;
    let read = |path: &str| fs::read_to_string(workspace().join(path)).with_context(|| format!("cannot read {path}"));
    let glossary = words::Retired::read(&read("docs/GLOSSARY.md")?)?;
    let mut findings = Vec::new();
    // The rules themselves quote what they find.
    let checked = |source: &&Source| !source.is_generated() && !source.path.starts_with("xtask/src/tidy/");
    for source in sources.iter().filter(checked) {
        findings.extend(words::check(source, &glossary));
        findings.extend(layout::check(source));
        findings.extend(causes::check(source));
        findings.extend(threads::check(source));
    }
    let texts = files
        .iter()
        .filter(|path| !path.ends_with(".bin") && !path.starts_with("tests/fuzz/corpus/"))
        .map(|path| Ok((path.as_str(), read(path)?)))
        .collect::<Result<Vec<_>>>()?;
    findings.extend(environment::check(&sources, &texts));
    findings.extend(threats::check(&texts));
    findings.extend(visibility::check(&sources, &texts));
    Ok(findings)
}

/// The files that git tracks or would add, relative to the workspace.
fn tracked() -> Result<Vec<String>> {
    let mut git = Command::new("git");
    git.args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"])
        .current_dir(workspace());
    let mut files: Vec<_> = String::from_utf8(stdout(&mut git)?)?
        .split_terminator('\0')
        .filter(|path| workspace().join(path).is_file())
        .map(str::to_owned)
        .collect();
    files.sort();
    files.dedup();
    Ok(files)
}
