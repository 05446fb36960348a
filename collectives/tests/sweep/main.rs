//! Fault sweep: ranks as processes, of which one is killed, stopped or cut off, or a link between
//! two is cut, at any step of any collective, over shared memory and over UDP.
//!
//! All other ranks report the culprit within the deadline in the same words; the survivors shrink
//! and continue; an exiting process leaves no descriptor, thread or mapping. So do dispatch and
//! combine of experts.
//!
//! A run is a list of faults, each of which removes one of five ranks. `DOORBELL_SWEEP` sets the
//! number of runs, or `all` for every algorithm with every fault among every number of ranks.

mod fault;
#[path = "../common/held.rs"]
mod held;
mod rank;
mod run;

use std::process::Command;

/// Set in the process that has a network namespace of its own.
const INSIDE: &str = "DOORBELL_SWEEP_INSIDE";

#[test]
fn over_shared_memory_a_failed_rank_is_named_at_any_step() {
    run::sweep(fault::Wire::SharedMemory, 4);
}

#[test]
fn over_shared_memory_a_rank_that_fails_in_dispatch_or_combine_is_named() {
    run::perform_all(fault::Wire::SharedMemory, &fault::runs_of_moe());
}

/// Blocked packets cut a link, so this runs in a network namespace of its own.
#[test]
fn over_udp_a_failed_rank_is_named_at_any_step() {
    if std::env::var_os(INSIDE).is_some() {
        return run::sweep(fault::Wire::Udp, 2);
    }
    // Local addresses are routed after blocked ones.
    let order = "ip link set lo up && ip rule add pref 100 lookup local && ip rule del pref 0 lookup local";
    let unshare = |command: &str, args: &[&str]| {
        let mut unshared = Command::new("unshare");
        unshared.args(["-rn", "sh", "-c", command, "sh"]).args(args);
        unshared
    };
    if !unshare(order, &[]).output().is_ok_and(|output| output.status.success()) {
        println!("skipped: network namespaces are not permitted, or has no ip(8)");
        return;
    }
    let this = std::env::current_exe().unwrap();
    let name = "over_udp_a_failed_rank_is_named_at_any_step";
    let status = unshare(
        &format!("{order} && exec \"$@\""),
        &[this.to_str().unwrap(), "--exact", name, "--nocapture"],
    )
    .env(INSIDE, "1")
    .status();
    assert!(status.unwrap().success(), "the sweep in the namespace failed");
}
