//! The server of `bw send`: takes messages, checks every byte with `--verify`, reposts their
//! buffers, and advertises that as credits.

use doorbell_verbs::{ProtectionDomain, ReliableConnection};

use super::super::test_end::{AdvertisedMemory, Peer, QpMemory, QpRequirements, Test, TestEnd};
use super::client::sinks;
use super::credit::{self, CreditWriter};
use crate::engine::bw::{BwLoop, PostParams};
use crate::engine::message::{Payloads, Sinks};
use crate::engine::receiver::Receiver;
use crate::engine::requester::{MessageRequester, SendOp};
use crate::engine::setup::RemoteAccess;
use crate::engine::transport::TestTransport;
use crate::failure::Failure;

#[derive(Debug)]
pub(crate) struct ReceiveRing(Sinks);

impl QpMemory for ReceiveRing {
    type Connected = (Receiver, CreditWriter);

    fn requirements(test: &Test<'_>) -> QpRequirements {
        QpRequirements::new(credit::DEPTH, test.plan.receives(test.bytes), 8, RemoteAccess::Nothing)
    }

    fn new(test: &Test<'_>, pd: &ProtectionDomain, qp_index: usize) -> Result<Self, Failure> {
        let payloads = Payloads::new(test.plan.seed, qp_index);
        sinks(test, pd, payloads, test.plan.receives(test.bytes) as usize).map(ReceiveRing)
    }

    fn advertised_memory(&self) -> AdvertisedMemory {
        AdvertisedMemory {
            slots: self.0.len() as u32,
            ..AdvertisedMemory::default()
        }
    }

    fn connect<T: TestTransport>(self, peer: Peer<'_, T>) -> Result<(Receiver, CreditWriter), Failure> {
        let credit = CreditWriter::new(peer.keys, self.0.len() as u32)?;
        let mut receiver = Receiver::new(self.0, 1, Some(peer.test.bytes));
        receiver.post(peer.test_qp, None)?;
        Ok((receiver, credit))
    }
}

/// Returns the messages per queue pair.
///
/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Test`] when data was wrong or the peer is lost.
pub(crate) fn serve(
    test: &Test<'_>,
    test_end: &mut TestEnd<ReliableConnection, ReceiveRing>,
) -> Result<Vec<u64>, Failure> {
    let TestEnd { end, memory } = test_end;
    let (mut receivers, credits): (Vec<_>, Vec<_>) = std::mem::take(memory).into_iter().unzip();
    let sleeps = test.plan.events;
    let slots = u64::from(test.plan.receives(test.bytes));
    let params = PostParams::new(1, 1, 1, 0);
    let mut bw = BwLoop::<_, MessageRequester<SendOp>>::new(end, &mut [], &mut receivers, params, None, sleeps);
    credit::serve(test, credits, |credits| {
        let arrived = bw.poll()?;
        for ((test_qp, receiver), credit) in bw.receivers().zip(credits) {
            // The first receives were posted before the first message.
            credit.set_done(receiver.posted() - slots);
            // Before it sleeps, all of them: the client may wait for these.
            credit.advertise(test_qp, !arrived || sleeps)?;
        }
        Ok(arrived)
    })
}
