//! No `unsafe` in `examples` and `perftest`: their code is what users of the safe API can write.
//! What the command needs beyond it is in `perftest/sys`. Each crate root forbids it, and as a root
//! could be missed, no other file may contain the word.

use super::{Scope, Verdict};
use crate::workspace;
use anyhow::{Context, Result, bail};
use std::{
    fs,
    path::{Path, PathBuf},
};

const FOLDERS: [&str; 3] = ["examples", "perftest/src", "perftest/tests"];

const FORBIDDEN: &str = "#![forbid(unsafe_code)]";

pub(super) fn check(_: Scope) -> Result<Verdict> {
    let mut complaints = Vec::new();
    let mut roots = 0;
    for folder in FOLDERS {
        for file in sources(&workspace().join(folder))? {
            let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
            roots += u32::from(is_root(&file));
            let complaint = complaint(is_root(&file), &text);
            complaints.extend(complaint.map(|complaint| format!("{}: {complaint}", file.display())));
        }
    }
    if roots == 0 {
        bail!("no crate's root in {}", FOLDERS.join(", "));
    }
    if !complaints.is_empty() {
        bail!(complaints.join("; "));
    }
    Ok(Verdict::Passed)
}

fn sources(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(sources(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    Ok(found)
}

/// Whether cargo takes the file for a crate's root, by its name or folder.
fn is_root(file: &Path) -> bool {
    let name = |path: Option<&Path>| {
        path.and_then(Path::file_name)
            .and_then(|name| name.to_str().map(str::to_owned))
    };
    matches!(name(Some(file)).as_deref(), Some("main.rs" | "lib.rs" | "build.rs"))
        || matches!(
            name(file.parent()).as_deref(),
            Some("tests" | "benches" | "bin" | "examples")
        )
}

fn complaint(is_root: bool, text: &str) -> Option<&'static str> {
    let code = |line: &&str| !line.trim_start().starts_with("//");
    let has_unsafe = |line: &str| {
        let line = line.replace(FORBIDDEN, "");
        line.split(|c: char| !c.is_alphanumeric() && c != '_')
            .any(|word| word == "unsafe")
    };
    if is_root && !text.lines().any(|line| line.trim() == FORBIDDEN) {
        Some("a crate's root without #![forbid(unsafe_code)]")
    } else if text.lines().filter(code).any(has_unsafe) {
        Some("unsafe")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_unsafe_or_may_be_is_found() {
        assert_eq!(
            complaint(true, "//! A program.\n#![forbid(unsafe_code)]\nfn main() {}\n"),
            None
        );
        assert!(complaint(true, "fn main() {}\n").is_some());
        assert!(complaint(true, "// #![forbid(unsafe_code)]\nfn main() {}\n").is_some());
        assert_eq!(
            complaint(false, "// Not unsafe.\nfn f() { let unsafe_prefix = 1; }\n"),
            None
        );
        assert!(complaint(false, "fn f() { unsafe { g() } }\n").is_some());
    }

    #[test]
    fn roots_are_known_by_name_or_folder() {
        let roots = [
            "examples/src/lib.rs",
            "examples/01_x/main.rs",
            "perftest/tests/command.rs",
        ];
        assert!(roots.iter().all(|path| is_root(Path::new(path))));
        assert!(!is_root(Path::new("perftest/src/report/text.rs")));
    }

    #[test]
    fn the_workspace_keeps_to_it() {
        assert_eq!(check(Scope::Short).unwrap(), Verdict::Passed);
    }
}
