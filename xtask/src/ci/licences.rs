//! Licences, origins and advisories of our dependencies, as `deny.toml` allows them.
//!
//! Runs `cargo deny` where it is installed, without its advisory database; elsewhere checks by the
//! same file from cargo's output, as building cargo-deny would take longer than all other steps.

use super::{
    Scope, Verdict,
    steps::{command, stdout, succeed},
};
use crate::{setup, workspace};
use anyhow::{Context, Result, bail};
use std::fs;

/// The only place that dependencies come from.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

pub(super) fn check(_: Scope) -> Result<Verdict> {
    if setup::in_path("cargo-deny") {
        return succeed(&mut command(&[
            "deny",
            "--offline",
            "check",
            "bans",
            "licenses",
            "sources",
        ]));
    }
    let deny = fs::read_to_string(workspace().join("deny.toml")).context("cannot read deny.toml")?;
    let mut cargo = command(&["tree", "--workspace", "--prefix", "none", "--all-features", "--locked"]);
    cargo.args(["--edges", "normal,build,dev", "--format", "{p}|{l}"]);
    let tree = String::from_utf8_lossy(&stdout(&mut cargo)?).into_owned();
    let mut faults = refused(&tree, &allowed(&deny)?, &exceptions(&deny));
    faults.extend(foreign(
        &fs::read_to_string(workspace().join("Cargo.lock")).context("cannot read Cargo.lock")?,
    ));
    if !faults.is_empty() {
        bail!("{}", faults.join("; "));
    }
    Ok(Verdict::Passed)
}

/// With cargo-deny and the RustSec database, which has to be fetched: skipped where either is
/// absent.
pub(super) fn advisories(_: Scope) -> Result<Verdict> {
    if !setup::in_path("cargo-deny") {
        return Ok(Verdict::Skipped("cargo-deny is not installed".to_owned()));
    }
    let fetched = command(&["deny", "fetch", "db"]).output().context("cannot run cargo")?;
    if !fetched.status.success() {
        return Ok(Verdict::Skipped("the advisory database cannot be fetched".to_owned()));
    }
    succeed(&mut command(&["deny", "--offline", "check", "advisories"]))
}

fn allowed(deny: &str) -> Result<Vec<String>> {
    let section = deny.split_once("[licenses]").context("deny.toml has no [licenses]")?.1;
    let list = section
        .split_once("allow = [")
        .and_then(|(_, rest)| rest.split_once(']'));
    let (list, _) = list.context("deny.toml allows no licence")?;
    Ok(list.split('"').skip(1).step_by(2).map(str::to_owned).collect())
}

/// Packages that may have a licence which others may not: name and licence, one a line.
fn exceptions(deny: &str) -> Vec<(&str, &str)> {
    let lines = deny.lines().filter_map(|line| line.split_once("crate = "));
    lines
        .filter_map(|(allow, name)| Some((name.split('"').nth(1)?, allow.split('"').nth(1)?)))
        .collect()
}

fn refused(tree: &str, allowed: &[String], exceptions: &[(&str, &str)]) -> Vec<String> {
    let is_exception = |package: &str, licence| {
        let name = package.split(' ').next().unwrap_or_default();
        exceptions.contains(&(name, licence))
    };
    let mut faults: Vec<_> = tree
        .lines()
        .map(|line| line.strip_suffix(" (*)").unwrap_or(line))
        .filter_map(|line| line.split_once('|'))
        .filter(|(package, licence)| !is_allowed(licence, allowed) && !is_exception(package, licence))
        .map(|(package, licence)| format!("{package} has the licence {licence:?}, which deny.toml does not allow"))
        .collect();
    faults.sort();
    faults.dedup();
    faults
}

fn foreign(lock: &str) -> Vec<String> {
    let sources = lock
        .lines()
        .filter_map(|line| line.strip_prefix("source = \"")?.strip_suffix('"'));
    sources
        .filter(|source| *source != REGISTRY)
        .map(|source| format!("a package comes from {source}"))
        .collect()
}

/// Parses SPDX: AND of terms, each an OR, with parentheses; the old spelling `/` means OR.
fn is_allowed(expression: &str, allowed: &[String]) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    let met = any(&mut words, allowed);
    met && words.next().is_none()
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

/// AND binds tighter than OR (SPDX specification, annex "SPDX license expressions").
fn any(words: &mut Words<'_>, allowed: &[String]) -> bool {
    let mut met = all(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        met |= all(words, allowed);
    }
    met
}

fn all(words: &mut Words<'_>, allowed: &[String]) -> bool {
    let mut met = one(words, allowed);
    while words.next_if_eq(&"AND").is_some() {
        met &= one(words, allowed);
    }
    met
}

fn one(words: &mut Words<'_>, allowed: &[String]) -> bool {
    match words.next() {
        Some("(") => {
            let met = any(words, allowed);
            words.next_if_eq(&")").is_some() && met
        }
        Some(licence) => {
            let mut name = licence.to_owned();
            if words.next_if_eq(&"WITH").is_some() {
                name = format!("{licence} WITH {}", words.next().unwrap_or_default());
            }
            allowed.contains(&name)
        }
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn expressions_are_met_or_not() {
        let allowed = list(&["MIT", "Apache-2.0", "Unicode-3.0"]);
        for good in [
            "MIT",
            "MIT/GPL-3.0",
            "GPL-2.0 OR MIT",
            "(MIT OR GPL-2.0) AND Unicode-3.0",
            "GPL-2.0 AND X OR MIT",
        ] {
            assert!(is_allowed(good, &allowed), "{good}");
        }
        for bad in [
            "",
            "GPL-2.0",
            "MIT AND GPL-2.0",
            "(MIT",
            "MIT)",
            "Apache-2.0 WITH LLVM-exception",
            "MIT MIT",
            "MIT AND (X OR Y)",
        ] {
            assert!(!is_allowed(bad, &allowed), "{bad}");
        }
        assert!(is_allowed(
            "Apache-2.0 WITH LLVM-exception",
            &list(&["Apache-2.0 WITH LLVM-exception"])
        ));
    }

    #[test]
    fn what_is_refused_is_named_once() {
        let tree = "a v1.0.0|MIT\nb v2.0.0|GPL-3.0\nb v2.0.0|GPL-3.0 (*)\n\nc v1.0.0|\n";
        let faults = refused(tree, &list(&["MIT"]), &[]);
        assert_eq!(faults.len(), 2, "{faults:?}");
        assert!(
            faults[0].starts_with("b v2.0.0") && faults[1].starts_with("c v1.0.0"),
            "{faults:?}"
        );
    }

    #[test]
    fn an_exception_is_of_one_package_and_licence() {
        let deny = "[licenses]\nallow = [\"MIT\"]\nexceptions = [\n  { allow = [\"MPL-2.0\"], crate = \"b\" },\n]\n";
        assert_eq!(allowed(deny).unwrap(), ["MIT"]);
        let refused = |tree| refused(tree, &list(&["MIT"]), &exceptions(deny)).len();
        assert_eq!(refused("b v2.0.0|MPL-2.0\n"), 0);
        assert_eq!(refused("b v2.0.0|GPL-3.0\nbc v1.0.0|MPL-2.0\n"), 2);
    }

    #[test]
    fn the_list_is_read_from_the_licences_section() {
        let deny = "[bans]\nallow = [\"no\"]\n[licenses]\n# why\nallow = [\n  \"MIT\",\n  \"Apache-2.0\",\n]\n";
        assert_eq!(allowed(deny).unwrap(), ["MIT", "Apache-2.0"]);
        assert!(allowed("[bans]\n").is_err());
    }

    #[test]
    fn a_package_from_elsewhere_is_found() {
        let lock = format!("source = \"{REGISTRY}\"\nsource = \"git+https://example.org/x#1\"\n");
        assert_eq!(foreign(&lock).len(), 1);
    }
}
