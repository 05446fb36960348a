//! What the loop of a bandwidth test records with: the clock, the CPU time, and the timeline.

use crate::stats::{Clock, CpuMeter, Timeline};

/// Measures one repeat.
#[derive(Debug)]
pub(crate) struct Meter<'a> {
    pub(crate) clock: &'a Clock,
    /// Accumulates over the repeats of a size.
    pub(crate) cpu: &'a mut CpuMeter,
    pub(crate) figures: &'a mut Timeline,
}

impl Meter<'_> {
    /// The warm-up is over: `done` messages. Returns the time.
    pub(crate) fn start(&mut self, done: u64) -> u64 {
        self.cpu.start();
        let now = self.clock.now();
        self.figures.start(now, done);
        now
    }

    pub(crate) fn finish(&mut self, done: u64) {
        self.figures.finish(self.clock.now(), done);
        self.cpu.stop();
    }
}
