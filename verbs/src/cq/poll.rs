//! Taking completions: each confirms its own request and the unsignalled ones before it.

use core::convert::Infallible;
use core::ops::ControlFlow;

use super::kind::{Classic, CqKind, Cursor};
use crate::wr::completion::Completion;

/// The requests that one [`poll`](super::CompletionQueue::poll) has found completed (ibv_poll_cq(3); IBTA vol 1, 11.4.2.1).
///
/// [`for_each`](Self::for_each) and [`try_for_each`](Self::try_for_each) are the fastest way through them: all that they carry from one request to the next stays in
/// registers. They do for both kinds of queue, as does [`next_completion`](Self::next_completion). Those of a classic queue are an iterator besides, and may be collected; one
/// of an extended queue can be read only until the next is asked for.
pub struct Completions<'a, Q: CqKind = Classic> {
    cursor: Q::Cursor<'a>,
}

impl<'a, Q: CqKind> Completions<'a, Q> {
    #[inline(always)]
    pub(super) fn new(cursor: Q::Cursor<'a>) -> Self {
        Self { cursor }
    }

    /// Calls `each` with every request that has completed.
    #[inline]
    pub fn for_each(self, mut each: impl FnMut(Completion<'_, Q>)) {
        let ControlFlow::Continue(()) = self.drive(|done| -> ControlFlow<Infallible> {
            each(done);
            ControlFlow::Continue(())
        });
    }

    /// Calls `each` with every request that has completed, up to the first for which it fails; the next poll yields those after it.
    ///
    /// # Errors
    /// That of `each`.
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

    /// The next request that has completed. To be done with before the one after it is asked for, which `while let` sees to.
    #[inline]
    pub fn next_completion(&mut self) -> Option<Completion<'_, Q>> {
        if !self.cursor.resume() {
            return None;
        }
        let Some(buffers) = self.cursor.advance() else {
            self.cursor.put_down();
            return None;
        };
        // SAFETY: just returned; the completion borrows `self`, and with it the cursor.
        let (entry, retired) = unsafe { self.cursor.retire() };
        self.cursor.put_down();
        Some(Completion::new(entry, retired, buffers))
    }

    /// Gives every request that has completed to `each`, until that breaks off. It is called in one place, so that it is compiled into the loop.
    #[inline(always)]
    fn drive<B>(self, mut each: impl FnMut(Completion<'_, Q>) -> ControlFlow<B>) -> ControlFlow<B> {
        let mut going = Going::<Q>(self.cursor);
        let mut more = going.0.begin();
        while more && let Some(buffers) = going.0.advance() {
            // SAFETY: just returned; `each` gets it for any lifetime, so it cannot keep it.
            let (entry, retired) = unsafe { going.0.retire() };
            each(Completion::new(entry, retired, buffers))?;
            more = going.0.follow();
        }
        ControlFlow::Continue(())
    }
}

/// Completions on their way: tells the poller how far they came when it is over, be it by an unwinding panic.
struct Going<'a, Q: CqKind>(Q::Cursor<'a>);

impl<Q: CqKind> Drop for Going<'_, Q> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.put_down();
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
        self.cursor.put_down();
        done
    }
}

impl<Q: CqKind> core::fmt::Debug for Completions<'_, Q> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Completions").finish_non_exhaustive()
    }
}
