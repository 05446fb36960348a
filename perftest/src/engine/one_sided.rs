//! One READ or atomic at a time, which the peer's device completes by itself.

use super::requester::Requester;
use super::test_end::{TestEnd, TestQp, completions};
use super::transport::TestTransport;
use crate::failure::Failure;

#[derive(Debug)]
pub(crate) struct OneSided<'a, T: TestTransport, F> {
    end: &'a mut TestEnd<T>,
    requester: &'a mut F,
    /// Whether to sleep on the completion channel instead of polling.
    sleeps: bool,
    next: u64,
}

impl<'a, T: TestTransport, F: Requester<T>> OneSided<'a, T, F> {
    /// Requests on the first queue pair of `end`.
    pub(crate) fn new(end: &'a mut TestEnd<T>, requester: &'a mut F, sleeps: bool) -> OneSided<'a, T, F> {
        OneSided {
            end,
            requester,
            sleeps,
            next: 0,
        }
    }

    /// # Errors
    /// [`Failure::Test`] when it is refused.
    #[inline]
    pub(crate) fn post(&mut self) -> Result<(), Failure> {
        let test_qp = &mut self.end.qps[0];
        let TestQp { qp, to, .. } = &mut *test_qp;
        let (to, index) = (&*to, self.next);
        self.next += 1;
        let posted = qp.post(|batch| self.requester.stage(batch, to, index, None, true));
        posted.map_err(|e| test_qp.refused(&e))
    }

    /// Polls whether the request has completed.
    ///
    /// # Errors
    /// [`Failure::Test`] when it has failed, or data was wrong.
    #[inline]
    pub(crate) fn is_complete(&mut self) -> Result<bool, Failure> {
        let TestEnd { cq, qps, .. } = &mut *self.end;
        let mut complete = false;
        for done in completions(cq, self.sleeps)? {
            done.check().map_err(|failure| qps[0].failed(&failure))?;
            self.requester
                .retire(done)
                .map_err(|error| error.into_failure(&qps[0].peer))?;
            complete = true;
        }
        Ok(complete)
    }
}
