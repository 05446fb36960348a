//! Operations that the data path must not execute: locks, atomic read-modify-writes, the heap.
//!
//! Only what ran more often in the longer run counts: a branch's slow path and one-time work (a
//! CQ's first poll takes in new QPs under a lock) are free.

use super::callgrind::{Function, Profile};
use crate::ci::stdout;
use anyhow::{Context, Result};
use std::{
    collections::{BTreeSet, HashMap, hash_map::Entry},
    path::Path,
    process::Command,
};

/// Machine code by address, and the symbols that begin there.
#[derive(Debug, Default)]
pub(super) struct Disassembly {
    instructions: HashMap<u64, String>,
    symbols: Vec<String>,
}

impl Disassembly {
    pub(super) fn of(object: &Path) -> Result<Self> {
        let mut objdump = Command::new("objdump");
        objdump
            .args(["--disassemble", "--demangle", "--no-show-raw-insn"])
            .arg(object);
        Ok(Self::parse(&String::from_utf8_lossy(&stdout(&mut objdump)?)))
    }

    fn parse(text: &str) -> Self {
        let mut parsed = Self::default();
        for line in text.lines() {
            if let Some((address, instruction)) = line.split_once(":\t") {
                // A comment with the resolved operand follows the hash.
                let instruction = instruction.split('#').next().unwrap_or(instruction);
                if let Ok(address) = u64::from_str_radix(address.trim(), 16) {
                    parsed.instructions.insert(address, instruction.trim().to_owned());
                }
            } else if let Some((_, symbol)) = line.strip_suffix(">:").and_then(|line| line.split_once(" <")) {
                parsed.symbols.push(symbol.to_owned());
            }
        }
        parsed
    }

    /// A symbol inside a measured function where callgrind would stop counting: code that the
    /// compiler split off or did not inline. Cold parts run only in failures.
    pub(super) fn part_of_a_measure(&self) -> Option<&str> {
        let is_part = |symbol: &&String| {
            let Some((_, rest)) = symbol.split_once("measure_") else {
                return false;
            };
            let rest = rest.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || c == '_');
            !(rest.is_empty() || rest.starts_with('<') || rest.starts_with("::<") || rest == ".cold")
                || rest.contains("{closure")
                || rest.contains("{{closure")
        };
        self.symbols.iter().find(is_part).map(String::as_str)
    }
}

/// Disassemblies by object, each made once.
#[derive(Debug, Default)]
pub(super) struct Objects(HashMap<String, Disassembly>);

impl Objects {
    /// The forbidden operations of a profile, one line each.
    pub(super) fn faults(&mut self, profile: &Profile) -> Result<BTreeSet<String>> {
        let mut faults = BTreeSet::new();
        for (function, executed) in profile.own() {
            if is_heap_or_lock(&function.name) {
                faults.insert(format!("calls {}", function.name));
            }
            let code = match self.0.entry(function.object.clone()) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(Disassembly::of(Path::new(&function.object))?),
            };
            for address in executed.keys() {
                let instruction = code.instructions.get(address).with_context(|| {
                    let Function { object, name } = function;
                    format!("objdump shows nothing at {address:#x} of {object}, which ran in {name}")
                })?;
                if is_atomic(instruction) {
                    faults.insert(format!("executes `{instruction}` in {}", function.name));
                }
            }
        }
        Ok(faults)
    }
}

/// A lock prefix, or `xchg` with memory (AT&T syntax; Intel SDM vol. 3A, 9.1.2.1).
fn is_atomic(instruction: &str) -> bool {
    let mut words = instruction.split_whitespace();
    match words.next() {
        // Prefixes such as segment overrides come first.
        Some("lock" | "xacquire" | "xrelease") => true,
        Some("xchg" | "xchgb" | "xchgw" | "xchgl" | "xchgq") => {
            words.next().is_some_and(|operands| operands.contains('('))
        }
        Some("cs" | "ds" | "es" | "ss" | "fs" | "gs" | "data16" | "rep" | "repz" | "repnz") => {
            is_atomic(instruction.split_once(' ').map_or("", |(_, rest)| rest.trim_start()))
        }
        _ => false,
    }
}

/// Whether a function allocates or locks, by its name in glibc and Rust's library.
fn is_heap_or_lock(name: &str) -> bool {
    const HEAP: [&str; 10] = [
        "malloc",
        "free",
        "calloc",
        "realloc",
        "reallocarray",
        "memalign",
        "aligned_alloc",
        "posix_memalign",
        "int_malloc",
        "int_free",
    ];
    const PARTS: [&str; 6] = [
        "pthread_mutex_",
        "pthread_rwlock_",
        "pthread_spin_",
        "rust_alloc",
        "rust_dealloc",
        "rust_realloc",
    ];
    let plain = name.split('@').next().unwrap_or(name).trim_start_matches('_');
    let plain = plain.strip_prefix("libc_").unwrap_or(plain);
    HEAP.contains(&plain) || PARTS.iter().any(|part| plain.contains(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORDED: &str = "
ours:     file format elf64-x86-64

Disassembly of section .text:

000000000003e580 <instructions::measure_batch>:
   3e580:\tpush   %rbp
   3e581:\tlock cmpxchg %rcx,0x10(%rip)        # 5f008 <COUNT>
   3e587:\txchg   %eax,(%rdi)
   3e589:\txchg   %ax,%ax
   3e58b:\tret

000000000003e590 <core::ptr::drop_in_place<x>>:
   3e590:\tjmp    *0x1234(%rip)        # 5f000 <free@GLIBC_2.2.5>
";

    fn objects() -> Objects {
        Objects(HashMap::from([("ours".to_owned(), Disassembly::parse(RECORDED))]))
    }

    fn executed(name: &str, addresses: &[u64]) -> Profile {
        let mut profile = format!("positions: instr line\nob=ours\nfn={name}\n");
        for address in addresses {
            profile += &format!("{address:#x} 0 1\n");
        }
        Profile::parse(&profile).unwrap()
    }

    #[test]
    fn what_runs_is_judged_and_what_lies_beside_it_is_not() {
        let mut objects = objects();
        let mut faults = |addresses: &[u64]| objects.faults(&executed("measure_batch", addresses)).unwrap();
        assert!(faults(&[0x3e580, 0x3e589, 0x3e58b]).is_empty());
        assert_eq!(
            faults(&[0x3e580, 0x3e581]).first().unwrap(),
            "executes `lock cmpxchg %rcx,0x10(%rip)` in measure_batch"
        );
        assert_eq!(faults(&[0x3e581, 0x3e587, 0x3e589]).len(), 2);
    }

    #[test]
    fn an_address_that_objdump_does_not_show_is_an_error() {
        assert!(objects().faults(&executed("measure_batch", &[0x3e582])).is_err());
    }

    #[test]
    fn the_providers_own_code_is_not_judged() {
        assert!(
            objects()
                .faults(&executed("stub_post_send", &[0x3e581]))
                .unwrap()
                .is_empty()
        );
    }

    #[test]
    fn the_heap_and_locks_are_known_by_name() {
        for name in [
            "malloc",
            "free",
            "__libc_free@@GLIBC_2.2.5",
            "_int_malloc",
            "pthread_mutex_lock@@GLIBC_2.2.5",
            "__rust_alloc",
        ] {
            let faults = objects().faults(&executed(name, &[0x3e580])).unwrap();
            assert_eq!(faults.first().unwrap(), &format!("calls {name}"));
        }
        assert!(!is_heap_or_lock("doorbell_verbs::wr::Batch::free_slots"));
    }

    #[test]
    fn atomics_are_known_by_prefix_and_operand() {
        for atomic in [
            "lock incl (%rax)",
            "xchg   %rax,0x8(%rbx)",
            "xchgb  %al,(%rdi)",
            "cs lock xadd %eax,(%rcx)",
            "ds xchg %eax,(%rdi)",
        ] {
            assert!(is_atomic(atomic), "{atomic}");
        }
        for plain in [
            "xchg   %ax,%ax",
            "cs nopw 0x0(%rax,%rax,1)",
            "mov    %rax,(%rbx)",
            "call   3e590 <unlock>",
            "cmpxchg %rcx,(%rdi)",
            "",
        ] {
            assert!(!is_atomic(plain), "{plain}");
        }
    }

    #[test]
    fn a_part_of_a_measured_function_is_found() {
        let part = |symbol: &str| {
            Disassembly::parse(&format!("00000000 <{symbol}>:\n"))
                .part_of_a_measure()
                .is_some()
        };
        for whole in [
            "instructions::measure_batch",
            "measure_drain_ex",
            "ours::measure_write::<ours::Rc>",
            "measure_drain.cold",
            "main",
        ] {
            assert!(!part(whole), "{whole}");
        }
        for split in [
            "instructions::measure_batch::{{closure}}",
            "ours::measure_batch::<x>::{closure#0}",
            "measure_drain.part.0",
        ] {
            assert!(part(split), "{split}");
        }
    }
}
