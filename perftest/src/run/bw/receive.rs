//! The receiver of `bw send`: takes messages, checks every byte with `--verify`, and reposts their
//! buffers, which it advertises as credits. A transport that may lose messages has no credits, and
//! what arrives is counted.

use std::marker::PhantomData;

use doorbell_verbs::{Connected, GRH_BYTES, ProtectionDomain};

use super::super::test_end::{AdvertisedMemory, Peer, PeerQp, QpMemory, QpRequirements, Test};
use super::client::sinks;
use super::credit::{self, CreditWriter};
use super::memory::{Served, Service};
use crate::cli::Transport;
use crate::engine::message::{Payloads, Sinks};
use crate::engine::receiver::Receiver;
use crate::engine::setup::RemoteAccess;
use crate::engine::test_end::TestQp;
use crate::engine::transport::TestTransport;
use crate::failure::Failure;

/// Bytes before each message that is received.
pub(crate) fn header(test: &Test<'_>) -> usize {
    match test.plan.mode.transport {
        Transport::Rc | Transport::Uc => 0,
        Transport::Ud => GRH_BYTES,
    }
}

/// A service `S` of SENDs.
#[derive(Debug)]
pub(crate) struct ReceiveRing<S>(Sinks, PhantomData<S>);

/// What becomes of the count of messages that are received and whose receives are reposted.
pub(crate) trait Count: Sized {
    /// For so many receives.
    ///
    /// # Errors
    /// [`Failure::Test`] when the sender's key is unusable.
    fn new(test: &Test<'_>, peer: &PeerQp, slots: u32) -> Result<Self, Failure>;
}

impl<S: Count> QpMemory for ReceiveRing<S> {
    type Connected = Served<S>;

    fn requirements(test: &Test<'_>) -> QpRequirements {
        let receives = test.plan.receives(test.bytes);
        if test.counts_arrivals() {
            QpRequirements::new(1, receives, 0, RemoteAccess::Nothing)
        } else {
            QpRequirements::new(credit::DEPTH, receives, 8, RemoteAccess::Nothing)
        }
    }

    fn new(test: &Test<'_>, pd: &ProtectionDomain, qp_index: usize) -> Result<Self, Failure> {
        let payloads = Payloads {
            header: header(test),
            ..Payloads::new(test.plan.seed, qp_index)
        };
        let sinks = sinks(test, pd, payloads, test.plan.receives(test.bytes) as usize)?;
        Ok(ReceiveRing(sinks, PhantomData))
    }

    fn advertised_memory(&self) -> AdvertisedMemory {
        AdvertisedMemory {
            slots: self.0.len() as u32,
            ..AdvertisedMemory::default()
        }
    }

    fn connect<T: TestTransport>(self, peer: Peer<'_, T>) -> Result<Served<S>, Failure> {
        let count = S::new(peer.test, peer.keys, self.0.len() as u32)?;
        let mut receiver = Receiver::new(self.0, 1, Some(peer.test.bytes + T::HEADER));
        receiver.post(peer.test_qp, None)?;
        Ok((Some(receiver), count))
    }
}

/// Messages whose receives are reposted. The first receives were posted before the first message.
fn reposted(test: &Test<'_>, receiver: Option<&Receiver>) -> u64 {
    let slots = u64::from(test.plan.receives(test.bytes));
    receiver.map_or(0, |receiver| receiver.posted() - slots)
}

impl Count for CreditWriter {
    fn new(test: &Test<'_>, peer: &PeerQp, slots: u32) -> Result<CreditWriter, Failure> {
        CreditWriter::new(test, peer, slots)
    }
}

impl<T: TestTransport + Connected> Service<T> for CreditWriter {
    #[inline]
    fn step(
        &mut self,
        test: &Test<'_>,
        test_qp: &mut TestQp<T>,
        receiver: Option<&Receiver>,
        is_idle: bool,
    ) -> Result<bool, Failure> {
        self.set_done(reposted(test, receiver));
        // Before it sleeps, all of them: the sender may wait for these.
        self.advertise(test_qp, is_idle).map(|()| false)
    }

    fn done(&self) -> Option<u64> {
        Some(CreditWriter::done(self))
    }

    fn is_done(&self, sent: u64) -> bool {
        self.has_advertised(sent)
    }
}

/// Messages that have arrived.
#[derive(Debug)]
pub(crate) struct Arrived(u64);

impl Count for Arrived {
    fn new(_: &Test<'_>, _: &PeerQp, _: u32) -> Result<Arrived, Failure> {
        Ok(Arrived(0))
    }
}

impl<T: TestTransport> Service<T> for Arrived {
    #[inline]
    fn step(
        &mut self,
        test: &Test<'_>,
        _: &mut TestQp<T>,
        receiver: Option<&Receiver>,
        _: bool,
    ) -> Result<bool, Failure> {
        self.0 = reposted(test, receiver);
        Ok(false)
    }

    fn done(&self) -> Option<u64> {
        Some(self.0)
    }

    fn is_done(&self, sent: u64) -> bool {
        self.0 >= sent
    }
}
