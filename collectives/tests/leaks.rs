//! Idle groups wake no thread, and dropped ones leave no descriptors or threads in this process.

#[path = "common/held.rs"]
mod held;

use std::fs;
use std::thread;
use std::time::Duration;

use doorbell_collectives::bootstrap::{Exchange, Group};
use held::held;

fn naps() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task")
        .unwrap()
        .map(|task| task.unwrap().path());
    let meshes =
        tasks.filter(|task| fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "control mesh"));
    let status = meshes.map(|task| fs::read_to_string(task.join("status")).unwrap());
    let mut naps: Vec<_> = status
        .map(|status| {
            status
                .lines()
                .filter(|line| line.starts_with("Pid:") || line.contains("voluntary_ctxt"))
                .collect()
        })
        .collect();
    naps.sort();
    naps
}

#[test]
fn idle_groups_sleep_and_two_hundred_leave_no_descriptors_or_threads() {
    let groups = Group::local(3).unwrap();
    // Late messages of the bootstrap end soon; after that the threads sleep.
    let mut before = Vec::new();
    for tries in 0.. {
        thread::sleep(Duration::from_millis(300));
        let after = naps();
        if after.len() == 3 && after == before {
            break;
        }
        assert!(tries < 20, "they wake though there is nothing to do: {after:?}");
        before = after;
    }
    drop(groups);
    let before = held();
    for round in 0..200 {
        let groups = Group::local(3).unwrap();
        thread::scope(|scope| {
            for mut group in groups {
                scope.spawn(move || {
                    let me = group.rank().0;
                    let half = group.split(Some(me % 2), 0).unwrap();
                    group.control_mut().barrier().unwrap();
                    // Some leave early, some are aborted, some are outlived by derived groups.
                    match round % 4 {
                        0 => drop((group, half)),
                        1 => drop((half, group)),
                        2 if me == 1 => group.control().give_up("a test"),
                        _ => drop(group),
                    }
                });
            }
        });
    }
    // The kernel removes a thread from the list shortly after it was joined.
    for _ in 0..1000 {
        if held().1 == before.1 {
            break;
        }
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(held(), before, "descriptors, threads, shared mappings");
}
