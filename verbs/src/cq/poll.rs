//! Taking completions: each confirms its own request and the unsignaled ones before it.

use core::convert::Infallible;
use core::ops::ControlFlow;

use super::kind::{ClassicCq, CqKind, Cursor};
use crate::wr::completion::Completion;

/// The completed requests that one poll found (ibv_poll_cq(3); IBTA vol 1, 11.4.2.1).
///
/// [`for_each`](Self::for_each) and [`try_for_each`](Self::try_for_each) are the fastest: their
/// loop state stays in registers. Completions of a classic queue are also an iterator, and may be
/// collected; one of an extended queue can be read only until the next is taken.
#[doc(alias("ibv_poll_cq", "ibv_start_poll", "ibv_next_poll", "ibv_end_poll"))]
pub struct Completions<'a, Q: CqKind = ClassicCq> {
    cursor: Q::Cursor<'a>,
}

impl<'a, Q: CqKind> Completions<'a, Q> {
    #[inline(always)]
    pub(super) fn new(cursor: Q::Cursor<'a>) -> Self {
        Self { cursor }
    }

    /// Calls `each` with every completed request.
    #[inline]
    pub fn for_each(self, mut each: impl FnMut(Completion<'_, Q>)) {
        let ControlFlow::Continue(()) = self.drive(|done| -> ControlFlow<Infallible> {
            each(done);
            ControlFlow::Continue(())
        });
    }

    /// As [`for_each`](Self::for_each), up to the first failure; the next poll yields the rest.
    ///
    /// # Errors
    /// Those of `each`.
    #[inline]
    pub fn try_for_each<E>(self, mut each: impl FnMut(Completion<'_, Q>) -> Result<(), E>) -> Result<(), E> {
        let flow = self.drive(|done| match each(done) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => ControlFlow::Break(error),
        });
        match flow {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(error) => Err(error),
        }
    }

    /// The next completed request, to be dropped before another is taken, as `while let` does.
    #[doc(alias = "ibv_next_poll")]
    #[inline]
    pub fn next_completion(&mut self) -> Option<Completion<'_, Q>> {
        if !self.cursor.resume() {
            return None;
        }
        let Some(buffers) = self.cursor.advance() else {
            self.cursor.save_position();
            return None;
        };
        // SAFETY: just returned; the completion borrows `self`, and with it the cursor.
        let (entry, retired) = unsafe { self.cursor.retire() };
        self.cursor.save_position();
        Some(Completion::new(entry, retired, buffers))
    }

    /// One call site of `each`, so that it is inlined into the loop.
    #[inline(always)]
    fn drive<B>(self, mut each: impl FnMut(Completion<'_, Q>) -> ControlFlow<B>) -> ControlFlow<B> {
        let mut guard = DriveGuard::<Q>(self.cursor);
        let mut more = guard.0.begin();
        while more && let Some(buffers) = guard.0.advance() {
            // SAFETY: just returned; `each` accepts any lifetime, so it cannot keep the completion.
            let (entry, retired) = unsafe { guard.0.retire() };
            each(Completion::new(entry, retired, buffers))?;
            more = guard.0.step();
        }
        ControlFlow::Continue(())
    }
}

/// Saves the position when the loop ends, also by an unwinding panic.
struct DriveGuard<'a, Q: CqKind>(Q::Cursor<'a>);

impl<Q: CqKind> Drop for DriveGuard<'_, Q> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.save_position();
    }
}

impl<'a> Iterator for Completions<'a> {
    type Item = Completion<'a>;

    #[inline]
    fn next(&mut self) -> Option<Completion<'a>> {
        let buffers = self.cursor.advance();
        let done = buffers.map(|buffers| {
            // SAFETY: just returned; it is of a classic queue, whose poller stays borrowed for 'a.
            let (entry, retired) = unsafe { self.cursor.retire() };
            Completion::new(entry, retired, buffers)
        });
        self.cursor.save_position();
        done
    }
}

impl<Q: CqKind> core::fmt::Debug for Completions<'_, Q> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Completions").finish_non_exhaustive()
    }
}
