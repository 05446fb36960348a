//! Nothing is left of groups that are gone: neither descriptors nor threads. A program of its own, as it counts what the process has.

use std::fs;
use std::thread;

use doorbell_collectives::bootstrap::{Exchange, Group};

fn count(what: &str) -> usize {
    fs::read_dir(format!("/proc/self/{what}")).unwrap().count()
}

#[test]
fn two_hundred_groups_leave_neither_descriptors_nor_threads() {
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
        thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!((count("fd"), count("task")), before);
}
