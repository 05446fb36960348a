//! Messages between two ranks of a communicator.

use super::call::{Call, OperationSpec};
use super::data::{BufferRef, Source, Target};
use super::{CollectiveError, Communicator};
use crate::executor::Direction;
use crate::kernel::Element;
use crate::plan::Collective;
use crate::types::Rank;

impl Communicator {
    /// Sends `data` to rank `to`, which [receives](Self::receive) as many elements from this one. Only these two call it. It is done when it has arrived.
    ///
    /// Messages from one rank to another arrive in the order in which they are sent, and are received in the order in which that is called. They have no order with anything else: neither with messages between other ranks nor with
    /// operations of all. In a [group](Self::group), sends and receives get on in any order, with any number of ranks; without one, or being [started](Call::start), each is waited for before the next, and two ranks that send to each other
    /// before they receive wait for ever. A message to itself needs a group, too.
    ///
    /// There is nothing to choose: the call's deadline is all that is looked at, and an algorithm or another protocol than [`Simple`](crate::Protocol::Simple) is refused.
    ///
    /// # Errors
    /// Of the [`Call`]: if the receiver means another length, the communicator fails on all ranks, and the error says both; if it does not come, it is named.
    pub fn send<X: Source>(&self, mut data: X, to: Rank) -> Call<'_, X> {
        let (at, len) = data.region(self.number);
        Call::new(self, self.message::<X::Element>(Direction::Send, to, at, len), data)
    }

    /// Receives what rank `from` [sends](Self::send) to this one: as many elements as `data` has. It is done when they are there.
    ///
    /// # Errors
    /// As of `send`.
    pub fn receive<X: Target>(&self, mut data: X, from: Rank) -> Call<'_, X> {
        let (at, len) = data.region(self.number);
        Call::new(
            self,
            self.message::<X::Element>(Direction::Receive, from, at, len),
            data,
        )
    }

    fn message<T: Element>(
        &self,
        direction: Direction,
        peer: Rank,
        data: BufferRef,
        len: usize,
    ) -> Result<OperationSpec, CollectiveError> {
        const COLLECTIVE: Collective = Collective::SendRecv;
        if peer.0 >= self.ranks {
            let what = format!(
                "there is no rank {peer} of {} ranks to exchange messages with",
                self.ranks
            );
            return Err(CollectiveError::Misuse {
                collective: COLLECTIVE,
                what,
            });
        }
        let spec = match direction {
            Direction::Send => self.spec::<T>(COLLECTIVE, len, data, BufferRef::NONE),
            Direction::Receive => self.spec::<T>(COLLECTIVE, len, BufferRef::NONE, data),
        };
        Ok(OperationSpec {
            message: Some((peer, direction)),
            ..spec
        })
    }
}
