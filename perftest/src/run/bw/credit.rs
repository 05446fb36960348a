//! Credits: the server advertises how many messages it is done with, by writing the count to a word
//! of the client's memory.

use std::time::Instant;

use doorbell_verbs::{ReliableConnection, Remote, WriteAccess};

use super::super::monitor::LoopMonitor;
use super::super::test_end::{PeerQp, Test};
use super::bw_loop::DRAIN_TIMEOUT;
use crate::engine::lat::Monitor;
use crate::engine::test_end::TestQp;
use crate::failure::Failure;
use crate::plan::Verb;

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
}

/// Serves by `step`, which returns whether anything has arrived, until the client has finished and
/// every queue pair is done with, and has advertised, all messages sent on it. Returns the messages
/// per queue pair.
///
/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Test`] when the peer is lost, or its last messages have not
/// arrived within [`DRAIN_TIMEOUT`]; those of `step`.
pub(crate) fn serve(
    test: &Test<'_>,
    mut credits: Vec<CreditWriter>,
    mut step: impl FnMut(&mut [CreditWriter]) -> Result<bool, Failure>,
) -> Result<Vec<u64>, Failure> {
    let mut monitor = LoopMonitor::of_server(test);
    let mut since = None;
    loop {
        if step(&mut credits)? {
            monitor.busy()?;
            continue;
        }
        monitor.idle()?;
        let Some(sent) = monitor.finished() else { continue };
        let is_done = |(credit, sent): (&CreditWriter, &u64)| credit.done == *sent && credit.advertised == *sent;
        if sent.len() == credits.len() && credits.iter().zip(sent).all(is_done) {
            return Ok(sent.to_vec());
        }
        // The last messages may still be in flight.
        if since.get_or_insert_with(Instant::now).elapsed() > DRAIN_TIMEOUT {
            let (peer, verb) = (test.control.peer(), test.plan.verb);
            let has_sent = if verb == Verb::Write { "wrote" } else { "sent" };
            return Err(Failure::test(format!("peer {peer}: not all it {has_sent} has arrived")));
        }
    }
}
