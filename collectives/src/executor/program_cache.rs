//! The program cache: a short operation that repeats an earlier one, with nothing else in flight,
//! runs at once from its compiled form (a cache hit). Only the addresses of its data differ.

use core::slice;

use super::operation::{ActiveOperation, Data, Ticket};
use super::{Engine, Failed, drive_runners};
use crate::kernel::Op;

/// Idle steps until a cached operation is queued as any other: some tens of microseconds; fewer
/// where the processor is yielded earlier.
const MAX_IDLE_TURNS: u32 = 200;
/// Idle steps per poll of the completion queue; stores into the mailbox are seen without it.
const CQ_POLL_INTERVAL: u32 = 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CachedProgram(u64);

pub(crate) const CACHED_PROGRAMS: usize = 8;

#[derive(Default)]
pub(super) struct ProgramCache {
    /// Operations cached so far.
    count: u64,
    /// The last ones, round-robin, without their data.
    entries: [Option<ActiveOperation>; CACHED_PROGRAMS],
}

impl ProgramCache {
    fn get(&mut self, CachedProgram(number): CachedProgram) -> Option<&mut ActiveOperation> {
        self.entries[number as usize % CACHED_PROGRAMS].as_mut()
    }
}

impl Engine {
    /// Evicts the oldest of [`CACHED_PROGRAMS`]. `None` if the operation is long, its input is
    /// copied first, or its operator is user-defined.
    pub(crate) fn cache_program(&mut self, ticket: Ticket) -> Option<CachedProgram> {
        let op = self
            .operations
            .get(ticket.number)
            .filter(|op| {
                op.ready.only_slice.is_some()
                    && !op.ready.has_granted
                    && op.ready.lengths.is_none()
                    && op.ready.runners > 0
                    && !op.input_copied
                    && matches!(op.function.op(), Op::Builtin(_))
            })
            .map(|op| op.with_data(Data::None, Data::None))?;
        self.program_cache.count += 1;
        self.program_cache.entries[self.program_cache.count as usize % CACHED_PROGRAMS] = Some(op);
        Some(CachedProgram(self.program_cache.count))
    }

    #[inline]
    pub(crate) fn can_run_cached(&self, cached: CachedProgram) -> bool {
        self.program_cache.count - cached.0 < CACHED_PROGRAMS as u64
            && self.operations.is_empty()
            && self.failed.is_none()
            && !self.p2p.is_busy()
    }

    #[inline]
    pub(crate) fn next_number(&self) -> u64 {
        self.operations.next_number()
    }

    /// Requires [`can_run_cached`](Self::can_run_cached); the relative position of the data is the
    /// cached one's. If the operation is not done in a few microseconds, or `attention` is raised,
    /// or it fails, it is queued with the returned ticket; otherwise it is done, as if taken.
    ///
    /// # Safety
    /// As of [`submit`](Self::submit), for input and output at these addresses.
    pub(crate) unsafe fn run_cached(
        &mut self,
        cached: CachedProgram,
        (input, output): (*mut u8, *mut u8),
        attention: impl Fn() -> bool,
    ) -> Option<Ticket> {
        let op = self.program_cache.get(cached)?;
        (op.input, op.output) = (Data::Plain(input), Data::Plain(output));
        op.runners_left = op.ready.runners;
        let driven = self.drive_cached(cached, attention);
        let op = self.program_cache.get(cached)?;
        if op.runners_left == 0 {
            self.operations.skip();
            return None;
        }
        let running = ActiveOperation {
            runners_left: op.runners_left,
            ..op.with_data(Data::Plain(input), Data::Plain(output))
        };
        self.active_runners = self.active_runners.max(op.ready.active_runners);
        let ticket = Ticket::operation(self.operations.push(running));
        if let Err(failed) = driven {
            self.fail(failed);
        }
        Some(ticket)
    }

    #[inline]
    fn drive_cached(&mut self, cached: CachedProgram, attention: impl Fn() -> bool) -> Result<(), Failed> {
        let (number, mut idle) = (self.next_number(), 0);
        let most = MAX_IDLE_TURNS.min(self.backoff.spin_turns());
        while idle < most {
            let Some(op) = self.program_cache.get(cached) else {
                return Ok(());
            };
            let runners = &mut self.runners[..op.ready.active_runners as usize];
            let moved = drive_runners(runners, &mut self.links, number, slice::from_mut(op))?;
            if op.runners_left == 0 {
                return Ok(());
            }
            if !moved {
                idle += 1;
                let arrived = match runners {
                    [runner] if !self.backoff.is_oversubscribed() => runner.await_message(op, &self.links[0]),
                    _ => None,
                };
                if arrived.map_or(idle.is_multiple_of(CQ_POLL_INTERVAL), |arrived| !arrived) {
                    self.poll()?;
                    if attention() {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }
}
