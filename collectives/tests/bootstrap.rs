//! Groups that come together over loopback, in threads and in processes.

use std::thread;

use doorbell_collectives::bootstrap::{Exchange, Group};

/// Runs `each` for all ranks of a group, in a thread each.
fn with_all<T: Send>(groups: Vec<Group>, each: impl Fn(Group) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let each = &each;
        let threads: Vec<_> = groups
            .into_iter()
            .map(|group| scope.spawn(move || each(group)))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn every_rank_gets_what_each_gave_it() {
    for ranks in [1, 2, 3, 8] {
        with_all(Group::local(ranks).unwrap(), |mut group| {
            let me = group.rank().0 as u8;
            for round in 0..20_u8 {
                let outgoing = (0..ranks as u8)
                    .map(|to| [me, to, round].repeat(usize::from(to) * 1000 + 1))
                    .collect();
                let got = group.control_mut().all_to_all(outgoing).unwrap();
                for (from, bytes) in got.iter().enumerate() {
                    assert_eq!(bytes, &[from as u8, me, round].repeat(usize::from(me) * 1000 + 1));
                }
            }
            group.control_mut().barrier().unwrap();
        });
    }
}
