//! Region coverage of the parsers by the replay of the committed corpora.

use super::folder;
use crate::{
    ci::{command, stdout, succeed},
    sanitize, workspace,
};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The files that decode what others say; a folder stands for its files.
const PARSERS: [&str; 22] = [
    "softroce/proto/src/wire/",
    "softroce/proto/src/gsi.rs",
    "softroce/proto/src/qp/requester/response.rs",
    "softroce/proto/src/qp/responder/mod.rs",
    "softroce/proto/src/qp/responder/request.rs",
    "softroce/proto/src/qp/responder/unreliable.rs",
    "softroce/proto/src/cm/message.rs",
    "softroce/proto/src/cm/handle.rs",
    "softroce/proto/src/cm/mad.rs",
    "softroce/proto/src/cm/path.rs",
    "softroce/device/src/links/shm_ring/receiver.rs",
    "softroce/device/src/links/shm_ring/record.rs",
    "softroce/device/src/direct/grant.rs",
    "softroce/device/src/direct/tables.rs",
    "softroce/device/src/host/registry.rs",
    "collectives/src/bootstrap/wire.rs",
    "collectives/src/bootstrap/mesh/frame.rs",
    "collectives/src/plan/text.rs",
    "perftest/src/classic/wire/qp_info.rs",
    "perftest/src/document.rs",
    "perftest/src/exchange/message.rs",
    "verbs/rendezvous/src/frame.rs",
];

/// Prints a line for each file.
pub(super) fn show() -> Result<()> {
    let tools = tools()?;
    let folder = folder()?.join("coverage");
    let _ = fs::remove_dir_all(folder.join("profiles"));
    let mut cargo = command(&["test", "--locked", "--package", "doorbell-fuzz", "--test", "corpus"]);
    cargo
        .arg("--target-dir")
        .arg(&folder)
        .env("RUSTFLAGS", "-Cinstrument-coverage")
        .env("LLVM_PROFILE_FILE", folder.join("profiles/%p-%m.profraw"));
    succeed(&mut cargo)?;
    let merged = folder.join("merged.profdata");
    let mut merge = Command::new(tools.join("llvm-profdata"));
    merge
        .args(["merge", "--sparse", "--output"])
        .arg(&merged)
        .args(profiles(&folder)?);
    succeed(&mut merge)?;
    let mut export = Command::new(tools.join("llvm-cov"));
    export
        .args(["export", "--summary-only", "--instr-profile"])
        .arg(&merged)
        .arg(program(&folder)?);
    let summary = serde_json::from_slice(&stdout(&mut export)?).context("llvm-cov's summary is no JSON")?;
    print!("{}", table(&regions(&summary, &workspace())));
    Ok(())
}

/// The component llvm-tools: tools of the compiler's own version.
fn tools() -> Result<PathBuf> {
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    let output = rustc
        .args(["--print", "sysroot"])
        .output()
        .context("cannot run rustc")?;
    let root = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    let tools = root.join("lib/rustlib").join(sanitize::host()?).join("bin");
    if !tools.join("llvm-cov").is_file() {
        bail!("this toolchain has no llvm-cov (rustup component add llvm-tools)");
    }
    Ok(tools)
}

fn profiles(folder: &Path) -> Result<Vec<PathBuf>> {
    let files = fs::read_dir(folder.join("profiles")).context("the replay has left no profile")?;
    files.map(|file| Ok(file?.path())).collect()
}

/// The newest program of the test.
fn program(folder: &Path) -> Result<PathBuf> {
    let mut found = Vec::new();
    for file in fs::read_dir(folder.join("debug/deps"))? {
        let file = file?;
        let path = file.path();
        let name = file.file_name();
        if name.to_string_lossy().starts_with("corpus-") && path.extension().is_none() {
            found.push((file.metadata()?.modified()?, path));
        }
    }
    found.sort();
    found.pop().map(|(_, path)| path).context("the test has no program")
}

/// Of each parser's file: its path, the regions that ran, and all.
fn regions(summary: &Value, root: &Path) -> Vec<(String, u64, u64)> {
    let files = summary["data"][0]["files"].as_array().map_or(&[][..], Vec::as_slice);
    let mut found = Vec::new();
    for file in files {
        let path = Path::new(file["filename"].as_str().unwrap_or_default());
        let Some(path) = path.strip_prefix(root).ok().and_then(Path::to_str) else {
            continue;
        };
        let of = |name: &str| file["summary"]["regions"][name].as_u64().unwrap_or(0);
        if PARSERS.iter().any(|parser| path.starts_with(parser)) {
            found.push((path.to_owned(), of("covered"), of("count")));
        }
    }
    found.sort();
    found
}

fn table(files: &[(String, u64, u64)]) -> String {
    let percent = |covered, count: u64| 100.0 * covered as f64 / count.max(1) as f64;
    let mut text = format!("{:<60} {:>8} {:>8} {:>7}\n", "parser", "regions", "covered", "%");
    let mut total = (0, 0);
    for (path, covered, count) in files {
        total = (total.0 + covered, total.1 + count);
        text += &format!(
            "{path:<60} {count:>8} {covered:>8} {:>7.1}\n",
            percent(*covered, *count)
        );
    }
    text + &format!(
        "{:<60} {:>8} {:>8} {:>7.1}\n",
        "all",
        total.1,
        total.0,
        percent(total.0, total.1)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parsers_are_picked_from_the_summary() {
        let file = |name: &str, covered: u64| serde_json::json!({"filename": name, "summary": {"regions": {"count": 10, "covered": covered}}});
        let files = [
            file("/w/softroce/proto/src/wire/bth.rs", 9),
            file("/w/verbs/src/lib.rs", 1),
            file("/x/y.rs", 2),
        ];
        let summary = serde_json::json!({"data": [{"files": files}]});
        let found = regions(&summary, Path::new("/w"));
        assert_eq!(found, [("softroce/proto/src/wire/bth.rs".to_owned(), 9, 10)]);
        assert!(table(&found).ends_with("90.0\n"));
    }
}
