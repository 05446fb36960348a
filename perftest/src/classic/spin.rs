//! What a loop does that has found nothing: it looks again, as the C tools do, and now and then lets others have its core.
//!
//! They never do. Where a core is all that both ends and their devices have, whoever waits there holds up what it waits for, for as long as the scheduler lets it: milliseconds a message. But whoever makes way
//! at every turn measures something else than they do wherever others always have something to run, as a kernel has that does a device's work in software.

// No PAUSE either: it lasts 140 cycles on some processors and ends a block of translated code in an emulator, which would be in every figure.

/// Turns after which a core is offered to others: some microseconds, of which a short round trip takes less.
const TURNS: u32 = 256;

/// The waiting of a loop.
#[derive(Debug, Default)]
pub(super) struct Spin {
    idle: u32,
}

impl Spin {
    /// Something was found.
    #[inline]
    pub(super) fn found(&mut self) {
        self.idle = 0;
    }

    /// Nothing was found.
    #[inline]
    pub(super) fn nothing(&mut self) {
        if self.idle < TURNS {
            self.idle += 1;
        } else {
            self.idle = 0;
            std::thread::yield_now();
        }
    }
}
