//! A sweep over failures: ranks as processes, of which one is killed, stopped or cut off, or the link between two of them is, at any step of any collective by any algorithm and protocol, on lanes and over UDP.
//!
//! Each time all others say within the deadline, and in the same words, who it was; those who are left shrink, and do a sum and what else there is with the group that they have then; and when a process leaves, nothing of it is left: no
//! descriptor, thread or mapping, and so no queue pair or region, without which its device would not close.
//!
//! - `fault` is what happens, and to whom; `rank` is what a rank's process does; `run` starts the processes and looks at what they say.
//!
//! A run is a list of faults, each of which leaves one rank fewer: five ranks, four, three, two. As a test there are a few runs; `DOORBELL_SWEEP` is how many otherwise, `all` for every collective and algorithm with every fault among every
//! number of ranks.

mod fault;
mod rank;
mod run;

use std::process::Command;

/// Set in the process that has a network namespace of its own.
const INSIDE: &str = "DOORBELL_SWEEP_INSIDE";

#[test]
fn on_lanes_whoever_goes_at_any_step_is_named_and_the_others_go_on() {
    run::sweep(fault::Wire::Lanes, 4);
}

/// The link between two is cut by the kernel, which then lets no packet from either to the other, so this is done in a network namespace of its own.
#[test]
fn over_udp_whoever_goes_at_any_step_is_named_and_the_others_go_on() {
    if std::env::var_os(INSIDE).is_some() {
        return run::sweep(fault::Wire::Udp, 2);
    }
    // What is on this host is found after what is forbidden.
    let order = "ip link set lo up && ip rule add pref 100 lookup local && ip rule del pref 0 lookup local";
    let unshare = |command: &str, args: &[&str]| {
        let mut unshared = Command::new("unshare");
        unshared.args(["-rn", "sh", "-c", command, "sh"]).args(args);
        unshared
    };
    if !unshare(order, &[]).output().is_ok_and(|output| output.status.success()) {
        println!("skipped: this machine lets nobody make a network namespace, or has no ip(8)");
        return;
    }
    let this = std::env::current_exe().unwrap();
    let name = "over_udp_whoever_goes_at_any_step_is_named_and_the_others_go_on";
    let status = unshare(
        &format!("{order} && exec \"$@\""),
        &[this.to_str().unwrap(), "--exact", name, "--nocapture"],
    )
    .env(INSIDE, "1")
    .status();
    assert!(status.unwrap().success(), "the sweep in the namespace failed");
}
