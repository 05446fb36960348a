//! How a server tells a client how many messages it is done with: a count, written into a word of the client's.

use std::time::Instant;

use doorbell_verbs::{QueuePair, Remote, Write as MayWrite};

use super::super::station::Theirs;
use super::stream::LAST_LOOK;
use crate::failure::Failure;

/// Requests of a server's send queue: enough that counts never wait for one another.
pub(crate) const DEPTH: u32 = 16;

/// The count of one lane.
#[derive(Debug)]
pub(crate) struct Credit {
    word: Remote<MayWrite>,
    done: u64,
    told: u64,
    /// It is told at least once in so many messages.
    every: u64,
}

impl Credit {
    /// For a lane with so many slots, told to the client's word.
    ///
    /// # Errors
    /// [`Failure::Test`] when the client's key is of no use.
    pub(crate) fn new(theirs: &Theirs, slots: u32) -> Result<Credit, Failure> {
        Ok(Credit {
            word: theirs.counter()?,
            done: 0,
            told: 0,
            every: (u64::from(slots) / 4).max(1),
        })
    }

    /// Messages done with.
    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    /// One more message is done with.
    #[inline]
    pub(crate) fn add(&mut self) {
        self.done += 1;
    }

    /// Tells the client if it is time, or if there is news and nothing else to do. A queue that is full just now says it the next time.
    ///
    /// # Errors
    /// [`Failure::Test`] when the device refuses.
    #[inline]
    pub(crate) fn tell(&mut self, qp: &mut QueuePair, theirs: &Theirs, idle: bool) -> Result<(), Failure> {
        let news = self.done - self.told;
        if (news >= self.every || (idle && news > 0)) && qp.send_room() > 0 {
            qp.write_inline(&self.done.to_le_bytes(), self.word)
                .map_err(|e| theirs.refused(&e))?;
            self.told = self.done;
        }
        Ok(())
    }

    /// Whether the client has been told all.
    pub(crate) fn is_told(&self) -> bool {
        self.told == self.done
    }
}

/// Waits for the last messages after the client has said how many it sent: they may still be on their way.
#[derive(Debug, Default)]
pub(crate) struct LastLook {
    since: Option<Instant>,
}

impl LastLook {
    /// Whether every lane is done with as many messages as were sent on it, and has told so.
    ///
    /// # Errors
    /// [`Failure::Test`] with what `missing` says when they have not come within [`LAST_LOOK`] of the first call.
    pub(crate) fn all(
        &mut self,
        credits: &[Credit],
        sent: &[u64],
        missing: impl FnOnce() -> String,
    ) -> Result<bool, Failure> {
        let all = sent.len() == credits.len()
            && credits
                .iter()
                .zip(sent)
                .all(|(credit, sent)| credit.done() == *sent && credit.is_told());
        if !all && self.since.get_or_insert_with(Instant::now).elapsed() > LAST_LOOK {
            return Err(Failure::test(missing()));
        }
        Ok(all)
    }
}
