//! `cargo xtask kernels`: compiles gpudirect/cuda/kernels to the committed archives of PTX and of
//! machine code and their manifest, and writes docs/KERNELS.md. The compiler ([`tools`]) is pinned,
//! so that they are reproducible. Needs neither a GPU nor CUDA.

mod archive;
mod report;
mod tools;

use crate::{
    ci::{Scope, Verdict},
    target_folder, workspace,
};
use anyhow::{Context, Result, bail};
use archive::Members;
use std::{
    fs,
    path::{Path, PathBuf},
};
use tools::Tools;

const HELP: &str = "\
Build the kernels and their report

Usage: cargo xtask kernels [OPTIONS]

Options:
      --check      write nothing: fail where what is committed differs from what is built
      --unroll N   groups in flight of each source; the PTX goes to the folder target/kernels, not to where it is committed
      --blocks N   blocks of 512 threads that have registers enough to run beside one another; the same
  -h, --help       show this

Exit status: 0 when all is well, 1 when something differs, 2 for a wrong call or a failure.
";

/// Sources, with headers beside them. Variants are built of the first.
const NAMES: [&str; 7] = ["reduce", "collective", "small", "exchange", "moe", "put", "copy"];
const ARCHIVE: &str = "gpudirect/cuda/kernels/ptx.bin";
/// Members are `NAME.ARCHITECTURE`.
const CODE_ARCHIVE: &str = "gpudirect/cuda/kernels/code.bin";
/// What there is machine code for, of which the report is of the first: the driver takes seconds to
/// compile all PTX.
const CODE: [&str; 2] = ["sm_90", "sm_100"];
const MANIFEST: &str = "gpudirect/cuda/kernels/manifest.txt";
const REPORT: &str = "docs/KERNELS.md";
/// The lowest version of PTX that has all that sm_90 converts; drivers from CUDA 11.8 on load it.
const VERSION: &str = ".version 7.8";

/// The command-line form. Returns the exit status.
pub(crate) fn main(mut arguments: lexopt::Parser) -> Result<u8> {
    use lexopt::prelude::*;
    let (mut check, mut definitions, mut name) = (false, Vec::new(), "reduce".to_owned());
    while let Some(argument) = arguments.next()? {
        match argument {
            Short('h') | Long("help") => {
                print!("{HELP}");
                return Ok(0);
            }
            Long("check") => check = true,
            Long("unroll") => variant("UNROLL", "u", arguments.value()?.parse()?, &mut definitions, &mut name),
            Long("blocks") => variant("BLOCKS", "b", arguments.value()?.parse()?, &mut definitions, &mut name),
            other => return Err(other.unexpected().into()),
        }
    }
    let tools = match Tools::provide()? {
        Ok(tools) => tools,
        Err(missing) => bail!("missing: {} (as root: apt-get install {0})", missing.join(" ")),
    };
    if definitions.is_empty() {
        let differing = build(&tools)?.differing()?;
        return if check {
            for path in &differing {
                println!("{}", path.complaint);
            }
            Ok(u8::from(!differing.is_empty()))
        } else {
            for path in &differing {
                fs::write(workspace().join(path.path), &path.built)
                    .with_context(|| format!("cannot write {}", path.path))?;
                println!("wrote {}", path.path);
            }
            Ok(0)
        };
    }
    let path = folder()?.join(format!("{name}.ptx"));
    let ptx = lower(&tools.compile(Path::new(&source(NAMES[0])), "compute_90", &definitions)?)?;
    fs::write(&path, &ptx).with_context(|| format!("cannot write {}", path.display()))?;
    let (_, listing) = tools.assemble(&path, "sm_90")?;
    print!("{}", report::registers(&listing)?);
    println!("wrote {}", path.display());
    Ok(0)
}

fn variant(definition: &str, letter: &str, value: u32, definitions: &mut Vec<String>, name: &mut String) {
    definitions.push(format!("-DDOORBELL_{definition}={value}"));
    name.push_str(&format!("-{letter}{value}"));
}

/// The archive and the sources are the manifest's; with `--full`, the sources build to that.
pub(crate) fn check(scope: Scope) -> Result<Verdict> {
    if scope == Scope::Short {
        let [ptx, code] = committed()?;
        let manifest = String::from_utf8_lossy(&read(MANIFEST)?).into_owned();
        return match difference(MANIFEST, &manifest, &archive::manifest(&ptx, &code)?) {
            None => Ok(Verdict::Passed),
            Some(complaint) => bail!("{complaint}: run `cargo xtask kernels` and commit"),
        };
    }
    let tools = match Tools::provide()? {
        Ok(tools) => tools,
        Err(missing) => return crate::ci::lacking(&missing),
    };
    match build(&tools)?.differing()?.first() {
        None => Ok(Verdict::Passed),
        Some(first) => bail!("{}: run `cargo xtask kernels` and commit", first.complaint),
    }
}

fn source(name: &str) -> String {
    format!("gpudirect/cuda/kernels/{name}.cu")
}

#[derive(Default)]
struct Built {
    ptx: Members,
    code: Members,
    report: String,
}

struct Differing {
    path: &'static str,
    built: Vec<u8>,
    complaint: String,
}

impl Built {
    /// The archives are compared by their contents, whatever the compressor's version.
    fn differing(self) -> Result<Vec<Differing>> {
        let mut found = Vec::new();
        let archives = [(ARCHIVE, &self.ptx), (CODE_ARCHIVE, &self.code)];
        for ((path, built), committed) in archives.into_iter().zip(committed()?) {
            let differs = |(name, bytes): &(&String, &Vec<u8>)| committed.get(*name) != Some(*bytes);
            let name = built.iter().find(differs).map(|(name, _)| name);
            let name = name.or_else(|| committed.keys().find(|name| !built.contains_key(*name)));
            if let Some(name) = name {
                found.push(Differing {
                    path,
                    built: archive::pack(built),
                    complaint: format!("{path} is not what is built: {name} differs"),
                });
            }
        }
        for (path, built) in [
            (MANIFEST, archive::manifest(&self.ptx, &self.code)?),
            (REPORT, self.report),
        ] {
            if let Some(complaint) = difference(path, &String::from_utf8_lossy(&read(path)?), &built) {
                found.push(Differing {
                    path,
                    built: built.into_bytes(),
                    complaint,
                });
            }
        }
        Ok(found)
    }
}

/// The members of both archives.
fn committed() -> Result<[Members; 2]> {
    Ok([archive::unpack(&read(ARCHIVE)?), archive::unpack(&read(CODE_ARCHIVE)?)])
}

/// A committed file, empty where there is none.
fn read(path: &str) -> Result<Vec<u8>> {
    match fs::read(workspace().join(path)) {
        Ok(bytes) => Ok(bytes),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("cannot read {path}")),
    }
}

/// Where the two differ first.
fn difference(path: &str, committed: &str, built: &str) -> Option<String> {
    if committed == built {
        return None;
    }
    let line = committed.lines().zip(built.lines()).take_while(|(a, b)| a == b).count();
    let (a, b) = (committed.lines().nth(line), built.lines().nth(line));
    Some(format!(
        "{path} is not what is built: line {} is {a:?}, built {b:?}",
        line + 1
    ))
}

fn build(tools: &Tools) -> Result<Built> {
    let mut built = Built {
        report: report::HEAD.to_owned(),
        ..Built::default()
    };
    for name in NAMES {
        let source = source(name);
        let source = Path::new(&source);
        let ptx = lower(&tools.compile(source, "compute_90", &[])?)?;
        let path = folder()?.join(format!("{name}.ptx"));
        fs::write(&path, &ptx).with_context(|| format!("cannot write {}", path.display()))?;
        for (at, architecture) in CODE.iter().enumerate() {
            let (cubin, listing) = tools.assemble(&path, architecture)?;
            let code = fs::read(&cubin).with_context(|| format!("cannot read {}", cubin.display()))?;
            built.code.insert(format!("{name}.{architecture}"), code);
            if at == 0 {
                let table = report::table(name, &ptx, &listing, &tools.disassemble(&cubin)?)?;
                built.report.push_str(&table);
            }
        }
        // What an A100 runs is compiled from the source, as it lacks the conversions of 8 bits.
        let older = folder()?.join(format!("{name}-80.ptx"));
        fs::write(&older, tools.compile(source, "compute_80", &[])?)
            .with_context(|| format!("cannot write {}", older.display()))?;
        tools.assemble(&older, "sm_80")?;
        built.ptx.insert(name.to_owned(), ptx.into_bytes());
    }
    Ok(built)
}

fn folder() -> Result<PathBuf> {
    let folder = target_folder()?.join("kernels");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}

/// PTX for older drivers: an older version, without unknown hints and empty comments.
fn lower(ptx: &str) -> Result<String> {
    let mut lowered = String::with_capacity(ptx.len());
    let mut versions = 0;
    for line in ptx.lines() {
        let line = line.trim_end();
        if line.starts_with(".version ") {
            versions += 1;
            lowered.push_str(VERSION);
        } else if matches!(line.trim_start(), "// begin inline asm" | "// end inline asm")
            || line.contains(".pragma \"used_bytes_mask")
        {
            continue;
        } else {
            lowered.push_str(line);
        }
        lowered.push('\n');
    }
    if versions != 1 {
        bail!("the PTX has {versions} lines that say its version");
    }
    if lowered.contains(&*workspace().to_string_lossy()) {
        bail!("the PTX has a path of this machine in it");
    }
    Ok(lowered)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptx_is_lowered() {
        let ptx = "//\n.version 9.0\n.target sm_90\n\t.pragma \"used_bytes_mask 15\";\n\t// begin inline asm\n\tst;\n\t// end inline asm\n";
        assert_eq!(lower(ptx).unwrap(), "//\n.version 7.8\n.target sm_90\n\tst;\n");
        assert!(lower("nothing\n").is_err());
    }

    #[test]
    fn the_first_difference_is_reported() {
        assert!(difference("p", "a\nb\n", "a\nb\n").is_none());
        assert_eq!(
            difference("p", "a\nb\n", "a\nc\n").unwrap(),
            "p is not what is built: line 2 is Some(\"b\"), built Some(\"c\")"
        );
        assert!(difference("p", "", "a\n").unwrap().contains("line 1"));
    }
}
