//! Again: a short operation like the one before, with nothing else under way, is driven at once and never taken in.
//!
//! What an operation costs beside its messages is what is worked out about it, kept of it and given back afterwards. Of one that is like the last all that is known but where its data lies.

use super::lane::Drive;
use super::operation::{Data, Running, Ticket};
use super::{Engine, Failed};
use crate::kernel::Op;

/// Turns without news until an operation is taken in as any other: a few microseconds, after which nobody minds.
const TURNS: u32 = 200;
/// Turns without news from one look for completions to the next: what is stored into the mailbox is seen without one, and what a device brings is not seen much later.
const POLL: u32 = 2;

/// An operation that an engine has remembered: which of those that it has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Remembered(u64);

/// Operations that are remembered at a time.
pub(crate) const KEPT: usize = 8;

/// What is remembered.
#[derive(Default)]
pub(super) struct Memory {
    /// How many there were.
    count: u64,
    /// The last of them by turns, without their data.
    last: [Option<Running>; KEPT],
}

impl Memory {
    fn get(&mut self, Remembered(number): Remembered) -> Option<&mut Running> {
        self.last[number as usize % KEPT].as_mut()
    }
}

impl Engine {
    /// Remembers an operation that has just been submitted, for others like it, and forgets the [eighth](KEPT) before. `None` if it is none that can be [repeated](Self::again): it is long, its input is changed before, or its operator is the user's.
    pub(crate) fn remember(&mut self, ticket: Ticket) -> Option<Remembered> {
        let index = ticket
            .0
            .checked_sub(self.first)
            .and_then(|index| usize::try_from(index).ok());
        let op = index.and_then(|index| self.operations.get(index));
        let op = op
            .filter(|op| {
                op.ready.short.is_some()
                    && op.ready.lanes > 0
                    && !op.changed
                    && matches!(op.function.op(), Op::Builtin(_))
            })
            .map(|op| op.with(Data::None, Data::None))?;
        self.again.count += 1;
        self.again.last[self.again.count as usize % KEPT] = Some(op);
        Some(Remembered(self.again.count))
    }

    /// Whether nothing is under way, and this is still remembered, so that it can be done at once.
    #[inline]
    pub(crate) fn is_ready_for(&self, remembered: Remembered) -> bool {
        self.again.count - remembered.0 < KEPT as u64
            && self.operations.is_empty()
            && self.failed.is_none()
            && !self.pairs.is_busy()
    }

    /// The number of the next operation.
    #[inline]
    pub(crate) fn next_number(&self) -> u64 {
        self.first + self.operations.len() as u64
    }

    /// Does an operation that is like one [remembered](Self::remember): all but where its data lies, and that in the same way: both of input and output there or not, one as far behind the other. The engine
    /// [is ready for it](Self::is_ready_for). If it is not done in a few microseconds, or somebody wants `attention`, or has failed, it is as one that was submitted, by the ticket given; else it is done, as if it had been taken.
    ///
    /// # Safety
    /// As of [`submit`](Self::submit), of input and output at these addresses.
    pub(crate) unsafe fn again(
        &mut self,
        remembered: Remembered,
        (input, output): (*mut u8, *mut u8),
        attention: impl Fn() -> bool,
    ) -> Option<Ticket> {
        let op = self.again.get(remembered)?;
        (op.input, op.output) = (Data::Plain(input), Data::Plain(output));
        let mut left = op.ready.lanes;
        let driven = self.drive_again(remembered, &mut left, attention);
        if left == 0 {
            self.first += 1;
            return None;
        }
        let op = self.again.get(remembered)?;
        let running = Running {
            lanes_left: left,
            ..op.with(Data::Plain(input), Data::Plain(output))
        };
        self.reach = self.reach.max(op.ready.reach);
        self.operations.push_back(running);
        if let Err(failed) = driven {
            self.fail(failed);
        }
        Some(Ticket(self.first))
    }

    #[inline]
    fn drive_again(
        &mut self,
        remembered: Remembered,
        left: &mut u32,
        attention: impl Fn() -> bool,
    ) -> Result<(), Failed> {
        let mut idle = 0;
        while idle < TURNS {
            let Some(op) = self.again.get(remembered) else {
                return Ok(());
            };
            let mut moved = false;
            for (lane, links) in self.lanes[..op.ready.reach as usize].iter_mut().zip(&mut self.links) {
                lane.next = lane.next.max(self.first);
                if lane.next > self.first {
                    continue;
                }
                if !op.uses(lane.channel, lane.strand) {
                    lane.next += 1;
                    continue;
                }
                match lane.drive(op, links, &self.rails[lane.rail].domain)? {
                    Drive::Idle => {}
                    Drive::Moved => moved = true,
                    Drive::Done => {
                        moved = true;
                        lane.next += 1;
                        *left -= 1;
                    }
                }
            }
            if *left == 0 {
                return Ok(());
            }
            if !moved {
                idle += 1;
                if idle.is_multiple_of(POLL) {
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
