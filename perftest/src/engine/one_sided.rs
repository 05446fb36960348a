//! One READ or atomic at a time, which the peer's device completes by itself.

use super::lat::Trips;
use super::requester::{Message, Requester};
use super::test_end::{TestEnd, TestQp, completions};
use super::transport::TestTransport;
use crate::failure::Failure;

#[derive(Debug)]
pub(crate) struct OneSided<'a, T: TestTransport, F> {
    end: &'a mut TestEnd<T>,
    requester: &'a mut F,
    /// Whether to sleep on the completion channel instead of polling.
    sleeps: bool,
}

impl<'a, T: TestTransport, F: Requester<T>> OneSided<'a, T, F> {
    /// Requests on the first queue pair of `end`.
    pub(crate) fn new(end: &'a mut TestEnd<T>, requester: &'a mut F, sleeps: bool) -> OneSided<'a, T, F> {
        OneSided { end, requester, sleeps }
    }
}

impl<T: TestTransport, F: Requester<T>> Trips for OneSided<'_, T, F> {
    #[inline]
    fn is_ready(&mut self) -> Result<bool, Failure> {
        Ok(true)
    }

    #[inline]
    fn send(&mut self, index: u64, _: bool) -> Result<(), Failure> {
        let test_qp = &mut self.end.qps[0];
        let TestQp { qp, to, .. } = &mut *test_qp;
        let message = Message {
            to: &*to,
            index,
            inline: None,
            signal: true,
        };
        let posted = qp.post(|batch| self.requester.stage(batch, message));
        posted.map_err(|e| test_qp.refused(&e))
    }

    #[cold]
    fn lost(&self, index: u64) -> Failure {
        self.end.qps[0].lost(index)
    }

    #[inline]
    fn has_arrived(&mut self, _: u64) -> Result<bool, Failure> {
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
