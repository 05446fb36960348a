//! Credits: the receiver advertises how many messages it is done with, by writing the count to a
//! word of the sender's memory.

use doorbell_verbs::{Connected, Remote, WriteAccess};

use super::super::test_end::{PeerQp, Test};
use crate::engine::test_end::TestQp;
use crate::engine::transport::TestTransport;
use crate::failure::Failure;

/// Send queue slots of a receiver: enough that the writes of the count never wait.
pub(crate) const DEPTH: u32 = 16;

#[derive(Debug)]
pub(crate) struct CreditWriter {
    word: Remote<WriteAccess>,
    done: u64,
    advertised: u64,
    /// The count is advertised at least once in so many messages.
    every: u64,
    /// Whether every write is signaled: on a send queue that is shared with messages, those may
    /// otherwise wait for room that only a signaled request gives back.
    signals: bool,
}

impl CreditWriter {
    /// # Errors
    /// [`Failure::Test`] when the client's key is unusable.
    pub(crate) fn new(test: &Test<'_>, peer: &PeerQp, slots: u32) -> Result<CreditWriter, Failure> {
        Ok(CreditWriter {
            word: peer.credit()?,
            done: 0,
            advertised: 0,
            every: (u64::from(slots) / 4).max(1),
            signals: test.sends(),
        })
    }

    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    /// Whether all of so many messages are done with, and advertised.
    pub(crate) fn has_advertised(&self, sent: u64) -> bool {
        self.done == sent && self.advertised == sent
    }

    #[inline]
    pub(crate) fn set_done(&mut self, done: u64) {
        self.done = done;
    }

    /// Advertises the count if enough messages have accumulated, or if there are any and the server
    /// is idle. With a full send queue it is deferred to the next call.
    #[inline]
    pub(crate) fn advertise<T: TestTransport + Connected>(
        &mut self,
        test_qp: &mut TestQp<T>,
        idle: bool,
    ) -> Result<(), Failure> {
        let pending = self.done - self.advertised;
        if (pending >= self.every || (idle && pending > 0)) && test_qp.qp.free_send_slots() > 0 {
            let (count, word, signals) = (self.done.to_le_bytes(), self.word, self.signals);
            let posted = test_qp.qp.post(|batch| {
                batch.write_inline(&count, word).signaled_if(signals);
            });
            posted.map_err(|e| test_qp.refused(&e))?;
            self.advertised = self.done;
        }
        Ok(())
    }
}
