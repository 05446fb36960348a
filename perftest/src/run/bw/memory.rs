//! The memory of a queue pair in a bandwidth test: for what this end sends, reads or does atomics
//! on, for what the peer does, or for both.

use doorbell_verbs::ProtectionDomain;

use super::super::test_end::{AdvertisedMemory, Peer, QpMemory, QpRequirements, Test};
use crate::engine::receiver::Receiver;
use crate::engine::test_end::TestQp;
use crate::engine::transport::TestTransport;
use crate::failure::Failure;

/// An end's part in the messages of its peer on one queue pair.
pub(crate) trait Service<T: TestTransport> {
    /// Whether the peer's operations are carried out by the device alone.
    const IS_PASSIVE: bool = false;

    /// Takes what has arrived, of which `receiver` knows in a test of SENDs; `is_idle` when no
    /// request has just completed. Returns whether there was anything.
    ///
    /// # Errors
    /// [`Failure::Test`] when data was wrong, or a request was refused.
    fn step(
        &mut self,
        test: &Test<'_>,
        test_qp: &mut TestQp<T>,
        receiver: Option<&Receiver>,
        is_idle: bool,
    ) -> Result<bool, Failure>;

    /// Messages done with, if this end sees them.
    fn done(&self) -> Option<u64>;

    /// Whether this end is done with all that the peer has `sent`.
    fn is_done(&self, sent: u64) -> bool;
}

/// A service with its receives, if messages are received.
pub(crate) type Served<S> = (Option<Receiver>, S);

#[derive(Debug)]
pub(crate) struct BwMemory<R, S> {
    requester: Option<R>,
    service: Option<S>,
}

/// Slots of the send queue that the service's own requests take.
pub(crate) fn reserved<S: QpMemory>(test: &Test<'_>) -> u32 {
    if test.serves() { S::requirements(test).send } else { 0 }
}

impl<R: QpMemory, S: QpMemory> QpMemory for BwMemory<R, S> {
    type Connected = (Option<R::Connected>, Option<S::Connected>);

    fn requirements(test: &Test<'_>) -> QpRequirements {
        match (test.sends(), test.serves()) {
            (true, true) => R::requirements(test).and(S::requirements(test)),
            (true, false) => R::requirements(test),
            (false, _) => S::requirements(test),
        }
    }

    fn new(test: &Test<'_>, pd: &ProtectionDomain, qp_index: usize) -> Result<Self, Failure> {
        Ok(BwMemory {
            requester: test.sends().then(|| R::new(test, pd, qp_index)).transpose()?,
            service: test.serves().then(|| S::new(test, pd, qp_index)).transpose()?,
        })
    }

    fn advertised_memory(&self) -> AdvertisedMemory {
        let of_service = self.service.as_ref().map(S::advertised_memory).unwrap_or_default();
        let of_requester = self.requester.as_ref().map(R::advertised_memory).unwrap_or_default();
        AdvertisedMemory {
            credit: of_requester.credit,
            ..of_service
        }
    }

    fn connect<T: TestTransport>(self, peer: Peer<'_, T>) -> Result<Self::Connected, Failure> {
        let Peer { test, test_qp, keys } = peer;
        let requester = self.requester.map(|requester| {
            let test_qp = &mut *test_qp;
            requester.connect(Peer { test, test_qp, keys })
        });
        let requester = requester.transpose()?;
        let service = self
            .service
            .map(|service| service.connect(Peer { test, test_qp, keys }));
        Ok((requester, service.transpose()?))
    }
}
