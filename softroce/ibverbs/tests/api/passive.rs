//! Targets that make no call: their progress thread serves them.

use std::time::{Duration, Instant};

use doorbell_verbs_sys::*;

use crate::common::*;

#[test]
fn target_that_polls_its_memory() {
    crate::setup();
    let (a, b) = pair(("soft0", "soft1"), &Setup::default());
    let (addr, rkey) = (b.addr(), b.rkey());
    let watcher = std::thread::spawn(move || {
        for round in 1..=200_u8 {
            let since = Instant::now();
            while b.byte(0) != round {
                std::hint::spin_loop();
                assert!(since.elapsed() < TIMEOUT, "round {round}");
            }
            // Occasionally long enough for the progress thread to go to sleep.
            if round % 50 == 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
            b.fill(8, &[round]);
        }
        b
    });
    for round in 1..=200_u8 {
        a.fill(0, &[round]);
        assert_eq!(a.post(rdma(1, IBV_WR_RDMA_WRITE, addr, rkey), &mut [a.sge(0, 1)]), 0);
        a.done(1);
        let since = Instant::now();
        while a.byte(8) != round {
            assert!(since.elapsed() < TIMEOUT, "round {round}");
            assert_eq!(a.post(rdma(2, IBV_WR_RDMA_READ, addr + 8, rkey), &mut [a.sge(8, 1)]), 0);
            a.done(2);
        }
    }
    drop(watcher.join().unwrap());
}
