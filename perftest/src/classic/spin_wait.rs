//! Busy-polling with a rare `sched_yield`.
//!
//! The C tools never yield. On a core shared by both ends and their devices, a polling end holds up
//! the thread it waits for until the scheduler preempts it: milliseconds a message. Yielding at
//! every poll would distort results wherever other threads are always runnable, such as a kernel
//! thread that is a software device.

// No PAUSE either: it takes 140 cycles on some processors and ends a block of translated code in an
// emulator, which would be in every result.

/// Polls before a yield: some microseconds, longer than a short round trip.
const YIELD_AFTER: u32 = 256;

/// Counts the idle polls of a loop.
#[derive(Debug, Default)]
pub(super) struct SpinWait {
    idle: u32,
}

impl SpinWait {
    /// A poll that found something.
    #[inline]
    pub(super) fn progress(&mut self) {
        self.idle = 0;
    }

    /// A poll that found nothing.
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
