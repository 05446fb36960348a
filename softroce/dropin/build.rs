//! Generates symbol versions from the lists in `exports/`: a version script for the linker, and the
//! lines of `exports.rs`, which `export.rs` turns into assembly.
//!
//! The script is the linker's second, after rustc's own, which makes local what no Rust item
//! exports. zig's linker takes the last script alone, so ours does that, too. Neither makes a
//! symbol local whose version is set by `.symver` and named in its node.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

const LISTS: [&str; 4] = ["libibverbs", "private", "librdmacm", "libmlx5"];

#[derive(Default)]
struct Exports {
    /// Each node with its parent node, in order.
    nodes: Vec<(String, Option<String>)>,
    symbols: BTreeMap<String, Vec<String>>,
    /// The lines of `exports.rs`.
    lines: String,
}

fn main() {
    let mut exports = Exports::default();
    for list in LISTS {
        let path = Path::new("exports").join(list);
        println!("cargo::rerun-if-changed={}", path.display());
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        exports.read(&text);
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let script = out.join("versions");
    fs::write(&script, exports.script()).expect("OUT_DIR is writable");
    fs::write(out.join("exports.rs"), &exports.lines).expect("OUT_DIR is writable");
    let arguments = [
        format!("--version-script={}", script.display()),
        // The name by which glibc identifies a loaded library, whatever file it came from.
        "-soname,libibverbs.so.1".into(),
        // The device has threads in this code: dlclose(3) must not unload it.
        "-z,nodelete".into(),
    ];
    for argument in arguments {
        println!("cargo::rustc-cdylib-link-arg=-Wl,{argument}");
    }
}

impl Exports {
    fn read(&mut self, text: &str) {
        let mut here: Vec<String> = Vec::new();
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let words: Vec<&str> = line.split_whitespace().collect();
            if let ["nodes", nodes @ ..] = &words[..] {
                let mut parent = None;
                for node in nodes {
                    self.nodes
                        .push(((*node).to_owned(), parent.replace((*node).to_owned())));
                    here.push((*node).to_owned());
                }
                continue;
            }
            let [symbol, versions @ .., what] = &words[..] else {
                panic!("not a symbol, its versions and what answers: {line}")
            };
            let versions: Vec<&str> = match versions {
                ["*"] => here.iter().map(String::as_str).collect(),
                versions => versions.to_vec(),
            };
            for (index, version) in versions.iter().enumerate().filter(|(_, version)| **version != "-") {
                self.export(symbol, version, index, what);
            }
        }
    }

    /// The version at index 0 is the default.
    fn export(&mut self, symbol: &str, version: &str, index: usize, what: &str) {
        assert!(
            self.nodes.iter().any(|(node, _)| node == version),
            "{version} is no node"
        );
        self.symbols
            .entry(version.to_owned())
            .or_default()
            .push(symbol.to_owned());
        let (kind, what) = what
            .split_once(':')
            .filter(|(_, rest)| !rest.starts_with(':'))
            .unwrap_or(("function", what));
        let at = if index == 0 { "@@" } else { "@" };
        let _ = writeln!(
            self.lines,
            "{kind}!(\"__doorbell_{index}_{symbol}\", \"{symbol}{at}{version}\", {what});"
        );
    }

    fn script(&self) -> String {
        let mut script = String::new();
        for (index, (node, parent)) in self.nodes.iter().enumerate() {
            let symbols = self.symbols.get(node).map_or(String::new(), |symbols| {
                symbols.iter().map(|symbol| format!(" {symbol};")).collect()
            });
            let global = if symbols.is_empty() { "" } else { " global:" };
            let local = if index == 0 { " local: *;" } else { "" };
            let _ = writeln!(
                script,
                "{node} {{{global}{symbols}{local} }} {};",
                parent.as_deref().unwrap_or("")
            );
        }
        script
    }
}
