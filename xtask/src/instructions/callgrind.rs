//! Runs a program under callgrind and parses its output (valgrind manual, "Callgrind Format").

use anyhow::{Context, Result, bail};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The exit status of a program that has no such call; it says why on stdout.
const LACKS: i32 = 3;

pub(super) struct Run<'a> {
    /// Called with the row's name and the number of iterations.
    pub(super) program: &'a Path,
    pub(super) row: &'a str,
    pub(super) iterations: u64,
    /// Prefix of the name of the function to count in.
    pub(super) function: &'a str,
    /// The folder of the provider that replaces the system's libibverbs.
    pub(super) libraries: &'a Path,
    pub(super) output: PathBuf,
}

pub(super) enum Outcome {
    Counted(Profile),
    /// The program has no such call, for this reason.
    Lacking(String),
}

impl Run<'_> {
    /// Runs the program; collects only within the function.
    pub(super) fn measure(&self) -> Result<Outcome> {
        let called = || format!("{} {} {}", self.program.display(), self.row, self.iterations);
        let output = Command::new("valgrind")
            .args(["--tool=callgrind", "--dump-instr=yes"])
            .args(["--compress-strings=no", "--compress-pos=no"])
            .arg(format!("--callgrind-out-file={}", self.output.display()))
            .arg(format!("--toggle-collect=*{}*", self.function))
            .arg(self.program)
            .args([self.row, &self.iterations.to_string()])
            .env("LD_LIBRARY_PATH", self.libraries)
            .output()
            .context("cannot run valgrind")?;
        if output.status.code() == Some(LACKS) {
            return Ok(Outcome::Lacking(
                String::from_utf8_lossy(&output.stdout).trim().to_owned(),
            ));
        }
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("{}: {}\n{}", called(), output.status, said.trim());
        }
        let text =
            fs::read_to_string(&self.output).with_context(|| format!("cannot read {}", self.output.display()))?;
        let profile = Profile::parse(&text).with_context(|| format!("{}", self.output.display()))?;
        if !profile.has(self.function) {
            bail!("{}: callgrind met no {}", called(), self.function);
        }
        Ok(Outcome::Counted(profile))
    }
}

/// Executed instructions by function, while callgrind collected.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Profile(BTreeMap<Function, Executed>);

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Function {
    pub(super) object: String,
    pub(super) name: String,
}

/// Executions of each instruction, by link-time address; callees excluded.
pub(super) type Executed = BTreeMap<u64, u64>;

impl Function {
    /// The provider's part of the data path, which is the same for all columns.
    fn is_stub(&self) -> bool {
        self.name.starts_with("stub_")
    }
}

impl Profile {
    /// Parses the output of `--dump-instr=yes`: each cost line begins with an address.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let mut functions = BTreeMap::<_, Executed>::new();
        let (mut object, mut current, mut after_call, mut by_instruction) = ("", None, false, false);
        for line in text.lines() {
            if let Some(name) = line.strip_prefix("ob=") {
                object = name;
            } else if let Some(name) = line.strip_prefix("fn=") {
                let (object, name) = (object.to_owned(), name.to_owned());
                current = Some(Function { object, name });
            } else if line.starts_with("calls=") {
                after_call = true;
            } else if line == "positions: instr line" {
                by_instruction = true;
            } else if line.starts_with("0x") {
                // The line after a call is the callee's cost, which the callee's own lines repeat.
                if core::mem::take(&mut after_call) {
                    continue;
                }
                let (address, cost) = cost_line(line).with_context(|| format!("not a line of cost: {line:?}"))?;
                let function = current.clone().context("cost before any function")?;
                *functions.entry(function).or_default().entry(address).or_default() += cost;
            }
        }
        if !by_instruction {
            bail!("callgrind wrote no addresses of instructions");
        }
        Ok(Self(functions))
    }

    pub(super) fn own_cost(&self) -> u64 {
        self.own().flat_map(|(_, executed)| executed.values()).sum()
    }

    pub(super) fn own(&self) -> impl Iterator<Item = (&Function, &Executed)> {
        self.0.iter().filter(|(function, _)| !function.is_stub())
    }

    /// Executions beyond those of a shorter run: the cost per call without one-time work.
    pub(super) fn beyond(mut self, shorter: &Self) -> Self {
        for (function, executed) in &mut self.0 {
            let before = shorter.0.get(function);
            for (address, times) in executed.iter_mut() {
                *times = times.saturating_sub(before.and_then(|before| before.get(address)).copied().unwrap_or(0));
            }
            executed.retain(|_, times| *times > 0);
        }
        self.0.retain(|_, executed| !executed.is_empty());
        self
    }

    fn has(&self, function: &str) -> bool {
        self.own()
            .any(|(one, executed)| !executed.is_empty() && one.name.contains(function))
    }
}

/// Address and cost from `0x1720 0 256`: address, source line, instructions.
fn cost_line(line: &str) -> Option<(u64, u64)> {
    let mut fields = line.split(' ');
    let address = u64::from_str_radix(fields.next()?.strip_prefix("0x")?, 16).ok()?;
    Some((address, fields.nth(1)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORDED: &str = "\
positions: instr line
events: Ir
summary: 18

ob=/x/ours
fl=c.c
fn=measure_write
0x10 10 5
cob=/x/libibverbs.so.1
cfi=provider.c
cfn=stub_post_send
calls=1 0x1720 20
0x14 11 10
0x18 12 2

ob=/x/libibverbs.so.1
fl=provider.c
fn=stub_post_send
0x1720 20 4
cob=/x/libc.so.6
cfn=memcpy
calls=1 0x5000 0
0x1724 21 6

ob=/x/libc.so.6
fn=memcpy
0x5000 0 6
totals: 17
";

    #[test]
    fn a_call_is_not_counted_twice_and_the_provider_not_at_all() {
        let profile = Profile::parse(RECORDED).unwrap();
        assert_eq!(profile.own_cost(), 5 + 2 + 6);
        assert!(profile.has("measure_write"));
        assert!(!profile.has("stub_post_send") && !profile.has("measure_read"));
    }

    #[test]
    fn each_instruction_is_known_by_its_object_and_address() {
        let profile = Profile::parse(RECORDED).unwrap();
        let executed: Vec<_> = profile
            .own()
            .map(|(one, executed)| (one.object.as_str(), executed))
            .collect();
        assert_eq!(executed[0], ("/x/libc.so.6", &BTreeMap::from([(0x5000, 6)])));
        assert_eq!(executed[1], ("/x/ours", &BTreeMap::from([(0x10, 5), (0x18, 2)])));
    }

    #[test]
    fn what_happens_once_is_not_in_what_each_call_does() {
        let longer = RECORDED
            .replace("0x10 10 5", "0x10 10 9")
            .replace("0x5000 0 6", "0x5000 0 6\n0x5004 0 1");
        let beyond = Profile::parse(&longer)
            .unwrap()
            .beyond(&Profile::parse(RECORDED).unwrap());
        let executed: Vec<_> = beyond
            .own()
            .map(|(one, executed)| (one.name.as_str(), executed))
            .collect();
        assert_eq!(executed[0], ("memcpy", &BTreeMap::from([(0x5004, 1)])));
        assert_eq!(executed[1], ("measure_write", &BTreeMap::from([(0x10, 4)])));
    }

    #[test]
    fn what_cannot_be_read_is_an_error() {
        assert!(Profile::parse("positions: line\nfn=measure_write\n10 5\n").is_err());
        assert!(Profile::parse("positions: instr line\nfn=measure_write\n0x10 5\n").is_err());
        assert!(Profile::parse("positions: instr line\n0x10 10 5\n").is_err());
    }
}
