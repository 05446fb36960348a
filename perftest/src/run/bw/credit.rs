//! Credits: the server advertises how many messages it is done with, by writing the count to a word
//! of the client's memory.

use std::time::Instant;

use doorbell_verbs::{ReliableConnection, Remote, WriteAccess};

use super::super::test_end::PeerQp;
use super::bw_loop::DRAIN_TIMEOUT;
use crate::engine::test_end::TestQp;
use crate::failure::Failure;

/// Send queue depth of a server: enough that the writes of the count never wait.
pub(crate) const DEPTH: u32 = 16;

#[derive(Debug)]
pub(crate) struct CreditWriter {
    word: Remote<WriteAccess>,
    done: u64,
    advertised: u64,
    /// The count is advertised at least once in so many messages.
    every: u64,
}

impl CreditWriter {
    /// # Errors
    /// [`Failure::Test`] when the client's key is unusable.
    pub(crate) fn new(peer: &PeerQp, slots: u32) -> Result<CreditWriter, Failure> {
        Ok(CreditWriter {
            word: peer.counter()?,
            done: 0,
            advertised: 0,
            every: (u64::from(slots) / 4).max(1),
        })
    }

    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    #[inline]
    pub(crate) fn set_done(&mut self, done: u64) {
        self.done = done;
    }

    /// Advertises the count if enough messages have accumulated, or if there are any and the server
    /// is idle. With a full send queue it is deferred to the next call.
    #[inline]
    pub(crate) fn advertise(&mut self, test_qp: &mut TestQp<ReliableConnection>, idle: bool) -> Result<(), Failure> {
        let pending = self.done - self.advertised;
        if (pending >= self.every || (idle && pending > 0)) && test_qp.qp.free_send_slots() > 0 {
            let posted = test_qp.qp.write_inline(&self.done.to_le_bytes(), self.word);
            posted.map_err(|e| test_qp.refused(&e))?;
            self.advertised = self.done;
        }
        Ok(())
    }

    /// Whether the whole count has been advertised.
    pub(crate) fn is_advertised(&self) -> bool {
        self.advertised == self.done
    }
}

/// The last messages may still be in flight when the client has reported how many it sent.
#[derive(Debug, Default)]
pub(crate) struct DrainWait {
    since: Option<Instant>,
}

impl DrainWait {
    /// Whether every queue pair is done with, and has advertised, all messages sent on it.
    ///
    /// # Errors
    /// [`Failure::Test`] with the text of `missing` when they have not arrived within
    /// [`DRAIN_TIMEOUT`] of the first call.
    pub(crate) fn all(
        &mut self,
        credits: &[CreditWriter],
        sent: &[u64],
        missing: impl FnOnce() -> String,
    ) -> Result<bool, Failure> {
        let all = sent.len() == credits.len()
            && credits
                .iter()
                .zip(sent)
                .all(|(credit, sent)| credit.done() == *sent && credit.is_advertised());
        if !all && self.since.get_or_insert_with(Instant::now).elapsed() > DRAIN_TIMEOUT {
            return Err(Failure::test(missing()));
        }
        Ok(all)
    }
}
