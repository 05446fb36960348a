//! The report on the kernels, from the assembler's listing and the disassembly.

use anyhow::{Context, Result, bail};
use std::{collections::BTreeMap, fmt::Write as _};

pub(super) const HEAD: &str = "\
# The kernels

Written by `cargo xtask kernels` from what the assembler of CUDA 13.0 makes of the PTX in `gpudirect/cuda/kernels` for sm_90; a step of CI builds it again and compares. A kernel's accesses are those in its code, not
those that it makes: the groups of 16 bytes are where a long reduction spends its time, the narrow ones are of heads and tails. None spills, or reads or writes memory of a thread's own: with one that did, nothing would be
written here.
";

#[derive(Debug, Default, PartialEq, Eq)]
struct Kernel {
    registers: u32,
    spills: (u32, u32),
    stack: u32,
    shared: u32,
    instructions: u32,
    wide_loads: u32,
    narrow_loads: u32,
    wide_stores: u32,
    narrow_stores: u32,
    local: u32,
}

pub(super) fn table(name: &str, ptx: &str, listing: &str, disassembly: &str) -> Result<String> {
    let mut kernels = assembled(listing)?;
    for (name, code) in functions(disassembly) {
        let kernel = kernels
            .get_mut(name)
            .with_context(|| format!("the assembler did not list {name}"))?;
        code.for_each(|operation| kernel.count(operation));
    }
    if let Some((name, _)) = kernels.iter().find(|(_, kernel)| kernel.instructions == 0) {
        bail!("{name} was not disassembled");
    }
    if let Some((name, _)) = kernels
        .iter()
        .find(|(_, kernel)| kernel.local > 0 || kernel.spills != (0, 0))
    {
        bail!("{name} keeps what should be in registers in memory of its own");
    }
    let mut page = format!(
        "\n## {name}\n\n{} kernels, {} KiB of PTX.\n\n",
        kernels.len(),
        ptx.len().div_ceil(1024)
    );
    page.push_str("| kernel | registers | stack | shared | instructions | loads of 16 bytes | narrower | stores of 16 bytes | narrower |\n");
    page.push_str("|---|---|---|---|---|---|---|---|---|\n");
    for (name, kernel) in &kernels {
        let Kernel {
            registers,
            stack,
            shared,
            instructions,
            wide_loads,
            narrow_loads,
            wide_stores,
            narrow_stores,
            ..
        } = kernel;
        writeln!(
            page,
            "| {name} | {registers} | {stack} | {shared} | {instructions} | {wide_loads} | {narrow_loads} | {wide_stores} | {narrow_stores} |"
        )?;
    }
    Ok(page)
}

/// Registers and spills alone, for comparing variants.
pub(super) fn registers(listing: &str) -> Result<String> {
    let mut text = String::new();
    for (name, kernel) in assembled(listing)? {
        writeln!(
            text,
            "{name}: {} registers, {} + {} bytes spilled",
            kernel.registers, kernel.spills.0, kernel.spills.1
        )?;
    }
    Ok(text)
}

impl Kernel {
    /// One operation: `LDG.E.128.STRONG.SYS`.
    fn count(&mut self, operation: &str) {
        self.instructions += 1;
        let wide = operation.split('.').any(|part| part == "128");
        match operation.split('.').next() {
            Some("LDG" | "LD") if wide => self.wide_loads += 1,
            Some("LDG" | "LD") => self.narrow_loads += 1,
            Some("STG" | "ST") if wide => self.wide_stores += 1,
            Some("STG" | "ST") => self.narrow_stores += 1,
            Some("LDL" | "STL") => self.local += 1,
            _ => {}
        }
    }
}

fn assembled(listing: &str) -> Result<BTreeMap<String, Kernel>> {
    let mut kernels = BTreeMap::new();
    let mut current: Option<(String, Kernel)> = None;
    for line in listing.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            kernels.extend(current.take());
            current = Some((
                rest.split('\'').next().unwrap_or_default().to_owned(),
                Kernel::default(),
            ));
        } else if let Some((_, kernel)) = &mut current {
            if line.contains("bytes stack frame") {
                kernel.stack = before(line, "bytes stack frame")?;
                kernel.spills = (before(line, "bytes spill stores")?, before(line, "bytes spill loads")?);
            } else if line.contains(" registers") {
                kernel.registers = before(line, "registers")?;
                kernel.shared = if line.contains("bytes smem") {
                    before(line, "bytes smem")?
                } else {
                    0
                };
            }
        }
    }
    kernels.extend(current);
    if kernels.is_empty() || kernels.values().any(|kernel| kernel.registers == 0) {
        bail!("the assembler did not say what registers its kernels use:\n{listing}");
    }
    Ok(kernels)
}

/// The number before some words.
fn before(line: &str, words: &str) -> Result<u32> {
    line.split_once(words)
        .and_then(|(before, _)| before.split_whitespace().last()?.parse().ok())
        .with_context(|| format!("no number before {words:?} in {line:?}"))
}

fn functions(disassembly: &str) -> impl Iterator<Item = (&str, impl Iterator<Item = &str>)> {
    disassembly.split("\n.text.").skip(1).map(|function| {
        let (name, code) = function.split_once(':').unwrap_or((function, ""));
        (name, code.lines().filter_map(operation))
    })
}

/// The operation of `        /*0340*/              @!P0 BRA 0x5c0 ;`. Padding is none.
fn operation(line: &str) -> Option<&str> {
    let (_, code) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    let mut words = code
        .split_whitespace()
        .filter(|word| !word.starts_with('@') && *word != "{");
    words
        .next()
        .map(|word| word.trim_end_matches(';'))
        .filter(|word| !word.is_empty() && *word != "NOP")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTING: &str = "\
ptxas info    : Compiling entry function 'reduce_a' for 'sm_90'
ptxas info    : Function properties for reduce_a
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 49 registers, used 0 barriers, 16 bytes smem, 8 bytes cumulative stack size
";
    const CODE: &str = "
\t.section\t.text.reduce_a,\"ax\"
.text.reduce_a:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128.STRONG.SYS R12, desc[UR10][R12.64] ;
        /*0020*/                   STG.E.128 desc[UR10][R4.64], R8 ;
        /*0030*/                   STG.E.U8 desc[UR10][R4.64], R8 ;
        /*0050*/                   NOP;
";

    #[test]
    fn kernels_are_read_and_counted() {
        let page = table("a", "x", LISTING, CODE).unwrap();
        assert!(
            page.contains("| reduce_a | 49 | 8 | 16 | 4 | 1 | 0 | 1 | 1 |\n"),
            "{page}"
        );
        assert_eq!(
            registers(LISTING).unwrap(),
            "reduce_a: 49 registers, 0 + 0 bytes spilled\n"
        );
    }

    #[test]
    fn what_is_not_understood_is_an_error() {
        assert!(table("a", "x", "nothing", CODE).is_err());
        assert!(table("a", "x", LISTING, "").is_err());
        assert!(table("a", "x", LISTING, &CODE.replace("reduce_a", "reduce_b")).is_err());
    }

    #[test]
    fn what_spills_is_an_error() {
        assert!(table("a", "x", LISTING, &CODE.replace("STG.E.U8", "STL")).is_err());
        assert!(
            table(
                "a",
                "x",
                &LISTING.replace("0 bytes spill loads", "12 bytes spill loads"),
                CODE
            )
            .is_err()
        );
    }
}
