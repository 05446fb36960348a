//! Groups that do nothing wake nobody, and nothing is left of those that are gone: neither descriptors nor threads. A program of its own, as it counts what the process has.

use std::fs;
use std::thread;
use std::time::Duration;

use doorbell_collectives::bootstrap::{Exchange, Group};

fn count(what: &str) -> usize {
    fs::read_dir(format!("/proc/self/{what}")).unwrap().count()
}

/// How often each mesh's thread of this process has gone to sleep.
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
fn groups_sleep_when_idle_and_two_hundred_leave_neither_descriptors_nor_threads() {
    let groups = Group::local(3).unwrap();
    // What still came when the group came together is over soon; after that nothing wakes them.
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
    let before = (count("fd"), count("task"));
    for round in 0..200 {
        let groups = Group::local(3).unwrap();
        thread::scope(|scope| {
            for mut group in groups {
                scope.spawn(move || {
                    let me = group.rank().0;
                    let half = group.split(Some(me % 2), 0).unwrap();
                    group.control_mut().barrier().unwrap();
                    // Some leave in the middle, some are aborted, some are outlived by what was made of them.
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
    // The kernel takes a thread off the list a moment after it has been joined.
    for _ in 0..1000 {
        if count("task") == before.1 {
            break;
        }
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!((count("fd"), count("task")), before);
}
