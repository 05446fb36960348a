//! Point-to-point messages of a communicator.

use super::call::{Call, OperationSpec};
use super::data::{BufferRef, Source, Target};
use super::{CollectiveError, Communicator};
use crate::executor::Direction;
use crate::kernel::Element;
use crate::plan::Collective;
use crate::types::Rank;

impl Communicator {
    /// Sends `data` to rank `to`, which [receives](Self::receive) as many elements from this one.
    /// Only these two ranks call it. It is complete when the message has arrived.
    ///
    /// Messages from one rank to another are received in the order in which they are sent. There is
    /// no order with messages between other ranks, or with collectives. In a [group](Self::group),
    /// sends and receives progress in any order, with any number of ranks. Without one, and unless
    /// [started](Call::start), each call blocks until it is complete, so two ranks that both send
    /// before they receive deadlock. A message to the own rank needs a group, too.
    ///
    /// Of the settings only the deadline applies; an algorithm, or another protocol than
    /// [`Simple`](crate::Protocol::Simple), is refused.
    ///
    /// # Errors
    /// Of the [`Call`]: if the receiver expects another length, the communicator fails on all
    /// ranks, and the error has both; if it does not receive, it is named.
    #[doc(alias("ncclSend", "MPI_Send"))]
    pub fn send<X: Source>(&self, mut data: X, to: Rank) -> Call<'_, X> {
        let (at, len) = data.region();
        Call::new(self, self.message::<X::Element>(Direction::Send, to, at, len), data)
    }

    /// Receives the message that rank `from` [sends](Self::send) to this one: as many elements as
    /// `data` has. It is complete when they have arrived.
    ///
    /// # Errors
    /// As of `send`.
    #[doc(alias("ncclRecv", "MPI_Recv"))]
    pub fn receive<X: Target>(&self, mut data: X, from: Rank) -> Call<'_, X> {
        let (at, len) = data.region();
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
