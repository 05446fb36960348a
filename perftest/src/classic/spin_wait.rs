//! Busy-polling with a rare `sched_yield`.
//!
//! The C tools never yield: on a core shared by both ends and their devices, an idle poller then
//! delays the thread it waits for by milliseconds a message. A yield at every poll would distort
//! results wherever other threads are always runnable, such as a software device's kernel thread.

// No PAUSE either: it takes 140 cycles on some processors and ends a block of translated code in an
// emulator, which would be in every result.

/// Polls before a yield: some microseconds, longer than a short round trip.
const YIELD_AFTER: u32 = 256;

#[derive(Debug, Default)]
pub(super) struct SpinWait {
    idle: u32,
}

impl SpinWait {
    #[inline]
    pub(super) fn progress(&mut self) {
        self.idle = 0;
    }

    #[inline]
    pub(super) fn idle(&mut self) {
        if self.idle < YIELD_AFTER {
            self.idle += 1;
        } else {
            self.idle = 0;
            std::thread::yield_now();
        }
    }
}
