//! Whether the memlock limit allows the memory that a test registers.

use super::cpu::status;
use super::sources::Sources;
use crate::report::{Code, Warning};
use crate::units::show_bytes;

/// The number of `CAP_IPC_LOCK` (capabilities(7)), which overrides the limit.
const CAP_IPC_LOCK: u32 = 14;

/// Whether so many bytes exceed the limit. Only for kernel devices: the userspace device locks no
/// memory.
pub(super) fn limit(sources: &Sources, registers_bytes: u64) -> Option<Warning> {
    if may_lock_all(sources) {
        return None;
    }
    let limit_bytes: u64 = sources.lines("proc/self/limits").into_iter().find_map(|line| {
        // The soft limit is the first number; "unlimited" is none.
        line.strip_prefix("Max locked memory")?
            .split_whitespace()
            .next()?
            .parse()
            .ok()
    })?;
    (limit_bytes < registers_bytes).then(|| {
        Code::Memlock.warning(format!(
                "only {} of memory may be locked, and the test registers up to {}: ulimit -l unlimited, or '* - memlock unlimited' in /etc/security/limits.conf",
                show_bytes(limit_bytes),
                show_bytes(registers_bytes)
            ))
    })
}

/// Whether the process has the capability in the initial user namespace, where it counts.
fn may_lock_all(sources: &Sources) -> bool {
    let capabilities = status(sources, "CapEff").and_then(|text| u64::from_str_radix(&text, 16).ok());
    let has_it = capabilities.is_some_and(|bits| bits >> CAP_IPC_LOCK & 1 == 1);
    let map = sources.text("proc/self/uid_map").unwrap_or_default();
    let everyone = map.split_whitespace().eq(["0", "0", "4294967295"]);
    has_it && everyone
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnose::sources::fake::FakeMachine;

    const HEAD: &str = "Limit                     Soft Limit           Hard Limit           Units\n";

    #[test]
    fn a_memlock_limit_below_the_registered_size_is_noticed() {
        let machine = FakeMachine::with([("proc/self/status", "CapEff:\t0000000000000000\n")]);
        for (soft, low) in [
            ("8388608", true),
            ("268435456", false),
            ("unlimited", false),
            ("-1", false),
        ] {
            machine.put(
                "proc/self/limits",
                format!("{HEAD}Max locked memory         {soft}     unlimited            bytes\n"),
            );
            let found = limit(&machine.sources(), 256 << 20);
            assert_eq!(found.is_some(), low, "{soft}: {found:?}");
            assert!(found.is_none_or(|warning| warning.to_string().starts_with(
                "only 8M of memory may be locked, and the test registers up to 256M: ulimit -l unlimited"
            )));
        }
    }

    #[test]
    fn the_capability_counts_in_the_initial_namespace_only() {
        let machine = FakeMachine::with([
            ("proc/self/limits", "Max locked memory 65536 65536 bytes\n"),
            ("proc/self/status", "CapEff:\t000001ffffffffff\n"),
            ("proc/self/uid_map", "         0          0 4294967295\n"),
        ]);
        assert_eq!(limit(&machine.sources(), 1 << 20), None);
        machine.put("proc/self/uid_map", "         0       1000          1\n");
        assert_eq!(limit(&machine.sources(), 1 << 20).unwrap().code, Code::Memlock);
        machine.put("proc/self/status", "CapEff:\t000001ffffffbfff\n");
        machine.put("proc/self/uid_map", "0 0 4294967295\n");
        assert_eq!(limit(&machine.sources(), 1 << 20).unwrap().code, Code::Memlock);
        assert_eq!(limit(&FakeMachine::with([]).sources(), 1 << 20), None);
    }
}
