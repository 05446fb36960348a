//! Put exchanges of the same lengths, again and again: what the queue pairs carry at most.

use core::fmt;
use core::ops::Range;
use std::sync::Arc;

use super::{CollectiveError, Communicator};
use crate::executor::{Puts, Window};
use crate::memory::Segment;
use crate::plan::Collective;
use crate::types::Rank;

/// A put exchange that is repeated: each rank WRITEs bytes of registered memory into memory of
/// every other, one range for each, and then a line that announces them. Nothing is packed, and
/// nothing exchanged before. Collectives on the same queue pairs are measured beside it.
///
/// No rank waits until another has read what it wrote before, so no program uses the bytes.
pub struct RepeatedPut<'c> {
    comm: &'c Communicator,
    window: Arc<Window>,
    source: Arc<Segment>,
    /// By rank: what it is sent, and where that begins in its window.
    parts: Box<[(Range<usize>, usize)]>,
    /// Exchanges so far.
    number: u64,
}

impl Communicator {
    /// Memory for puts of `lengths` bytes, by rank, filled with `byte`. Those for this rank itself
    /// are copied. All ranks call it, each with its own lengths.
    ///
    /// # Errors
    /// [`CollectiveError::Misuse`] on all ranks, for other than one length for each rank, or more
    /// than memory can be; no memory; a missing rank.
    pub fn repeated_put(&self, lengths: &[usize], byte: u8) -> Result<RepeatedPut<'_>, CollectiveError> {
        let own: Vec<u8> = lengths
            .iter()
            .flat_map(|&length| (length as u64).to_le_bytes())
            .collect();
        let given = self.exchange(&own)?;
        let ranks = self.size() as usize;
        let all: Vec<Vec<usize>> = given
            .iter()
            .enumerate()
            .map(|(rank, bytes)| parse(bytes, ranks).ok_or_else(|| misuse(rank)))
            .collect::<Result<_, CollectiveError>>()?;
        let received = |to: usize| sum(all.iter().map(|lengths| lengths[to])).ok_or_else(|| misuse(to));
        let most = (0..ranks).map(received).collect::<Result<Vec<_>, _>>()?;
        let most = most.into_iter().max().unwrap_or(0);
        let sent = sum(lengths.iter().copied()).ok_or_else(|| misuse(self.rank().index()))?;
        let source = self.segment(sent)?;
        // SAFETY: the segment has at least so many bytes, and nothing uses it yet.
        unsafe { source.start().write_bytes(byte, sent) };
        let mut from = 0;
        let parts = lengths.iter().enumerate().map(|(to, &length)| {
            let into = all[..self.rank().index()].iter().map(|lengths| lengths[to]).sum();
            from += length;
            (from - length..from, into)
        });
        Ok(RepeatedPut {
            comm: self,
            parts: parts.collect(),
            window: self.window(most)?,
            source,
            number: 0,
        })
    }
}

/// Lengths that a rank has sent; `None` where there are more or fewer than ranks.
fn parse(bytes: &[u8], ranks: usize) -> Option<Vec<usize>> {
    let (words, rest) = bytes.as_chunks::<8>();
    let lengths = words.iter().map(|word| usize::try_from(u64::from_le_bytes(*word)).ok());
    let lengths: Vec<_> = lengths.collect::<Option<_>>()?;
    (rest.is_empty() && lengths.len() == ranks).then_some(lengths)
}

fn sum(mut lengths: impl Iterator<Item = usize>) -> Option<usize> {
    lengths.try_fold(0, usize::checked_add)
}

fn misuse(rank: usize) -> CollectiveError {
    CollectiveError::Misuse {
        collective: Collective::AllToAllV,
        what: format!("rank {rank} has lengths of a put that are impossible, or not one for each rank"),
    }
}

impl RepeatedPut<'_> {
    /// One exchange: returns when all ranks' bytes have arrived here, and this rank's have been
    /// sent. All ranks call it.
    ///
    /// # Errors
    /// When the communicator has failed: within the deadline, on all ranks, with the culprit.
    pub fn put(&mut self) -> Result<(), CollectiveError> {
        self.number += 1;
        let own = self.comm.rank();
        let mut puts = Puts::new(&self.window, (own, &self.source), self.number, (0, 0));
        for (to, (from, into)) in self.parts.iter().enumerate() {
            // SAFETY: nothing writes the source; no one reads the window, but by whole words.
            unsafe { puts.add(Rank(to as u32), from.start, *into, from.len()) };
        }
        self.comm.put(puts, self.comm.options().deadline)?.wait()?;
        Ok(())
    }
}

impl fmt::Debug for RepeatedPut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RepeatedPut")
            .field("parts", &self.parts)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Options;
    use crate::test_ranks::ranks;

    #[test]
    fn each_part_arrives_behind_those_of_the_ranks_before() {
        let length = |from: usize, to: usize| 100 * from + 3000 * to;
        ranks(3, &Options::default(), |comm| {
            let own = comm.rank().index();
            let lengths: Vec<_> = (0..3).map(|to| length(own, to)).collect();
            let mut put = comm.repeated_put(&lengths, own as u8 + 1).unwrap();
            for _ in 0..3 {
                put.put().unwrap();
            }
            comm.barrier().wait().unwrap();
            let received: usize = (0..3).map(|from| length(from, own)).sum();
            // SAFETY: in the window, which no rank writes behind the barrier.
            let bytes = unsafe { core::slice::from_raw_parts(put.window.start(), received) };
            let wanted: Vec<u8> = (0..3)
                .flat_map(|from| vec![from as u8 + 1; length(from, own)])
                .collect();
            assert!(bytes == wanted, "rank {own}");
        });
    }

    #[test]
    fn impossible_lengths_are_refused_on_all_ranks() {
        ranks(3, &Options::default(), |comm| {
            let lengths: &[usize] = if comm.rank().0 == 1 { &[1, 1] } else { &[1; 3] };
            let error = comm.repeated_put(lengths, 0).unwrap_err();
            assert!(error.to_string().contains("rank 1"), "{error}");
            let error = comm.repeated_put(&[usize::MAX, 1, 1], 0).unwrap_err();
            assert!(matches!(error, CollectiveError::Misuse { .. }), "{error}");
            comm.barrier().wait().unwrap();
        });
    }
}
