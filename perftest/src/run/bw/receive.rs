//! The server of `bw send`: takes messages, with `--verify` looks at every byte, posts their buffers again, and says so.

use doorbell_verbs::{Buffer, Local, ProtectionDomain, Queue, Success};

use super::super::pattern::{Mismatch, Pattern};
use super::super::station::{Grants, Keys, Lane, Needs, Own, Station, Test, refused};
use super::super::watch::Watch;
use super::credit::{self, Credit, LastLook};
use crate::failure::Failure;

/// One lane's receives.
#[derive(Debug)]
pub(crate) struct Receives {
    fresh: Vec<Buffer<Local>>,
    slots: u32,
}

impl Own for Receives {
    fn needs(test: &Test<'_>) -> Needs {
        Needs {
            send: credit::DEPTH,
            receive: test.plan.receives(test.bytes),
            inline: 8,
            grants: Grants::Nothing,
        }
    }

    fn new(test: &Test<'_>, pd: &ProtectionDomain, lane: usize) -> Result<Self, Failure> {
        let (len, slots) = (test.len(), test.plan.receives(test.bytes));
        let mut fresh: Vec<_> = pd
            .register_chunks(test.memory(len * slots as usize)?, len, Local)
            .map_err(refused)?
            .collect();
        if test.plan.verify {
            // Receives are filled in the order they are posted.
            for (index, buffer) in (0..).zip(&mut fresh) {
                Pattern::new(test.plan.seed, lane, index).fill_wrong(buffer);
            }
        }
        Ok(Receives { fresh, slots })
    }

    fn keys(&self) -> Keys {
        Keys {
            slots: self.slots,
            ..Keys::default()
        }
    }

    fn take_receives(&mut self) -> Vec<Buffer<Local>> {
        std::mem::replace(&mut self.fresh, Vec::with_capacity(self.slots as usize))
    }
}

/// Serves until the client has finished and all it sent has arrived. Returns the messages per lane.
///
/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Test`] when data was wrong or the peer is lost.
pub(crate) fn serve(test: &Test<'_>, station: &mut Station<Receives>) -> Result<Vec<u64>, Failure> {
    let Station { cq, lanes } = station;
    let mut credits = lanes
        .iter()
        .map(|lane| Credit::new(&lane.theirs, lane.own.slots))
        .collect::<Result<Vec<_>, _>>()?;
    let mut watch = Watch::of_server(test.control);
    let mut last_look = LastLook::default();
    loop {
        let mut idle = true;
        for mut done in cq.poll().map_err(refused)? {
            let index = usize::try_from(done.tag()).unwrap_or(usize::MAX);
            let Some(lane) = lanes.get_mut(index) else {
                continue;
            };
            let len = match done.result() {
                Ok(Success::Receive { len, .. }) => len,
                Ok(_) => continue,
                Err(failure) => return Err(lane.theirs.failed(&failure)),
            };
            idle = false;
            if u64::from(len) != test.bytes {
                return Err(Failure::test(format!(
                    "{} sent {len} bytes where {} belong",
                    lane.theirs, test.bytes
                )));
            }
            debug_assert_eq!(done.queue(), Queue::Receive);
            let iteration = done.sequence();
            let Some(mut buffer) = done.take::<Local>() else {
                continue;
            };
            if test.plan.verify {
                if let Some(wrong) = Pattern::new(test.plan.seed, index, iteration).check(&buffer) {
                    let mismatch = Mismatch::at(test.bytes, index, iteration, wrong);
                    return Err(Failure::test(format!("{}: {mismatch}", lane.theirs)));
                }
                let next = iteration + u64::from(lane.own.slots);
                Pattern::new(test.plan.seed, index, next).fill_wrong(&mut buffer);
            }
            lane.own.fresh.push(buffer);
        }
        for (lane, credit) in lanes.iter_mut().zip(&mut credits) {
            post_again(lane, credit)?;
            credit.tell(&mut lane.qp, &lane.theirs, idle)?;
        }
        if !idle {
            watch.turn()?;
            continue;
        }
        watch.idle()?;
        if let Some(sent) = watch.finished() {
            let missing = || format!("peer {}: not all it sent has arrived", test.control.peer());
            if last_look.all(&credits, sent, missing)? {
                return Ok(sent.to_vec());
            }
        }
    }
}

/// Posts the buffers of the messages just taken, with one doorbell.
#[inline]
fn post_again(lane: &mut Lane<Receives>, credit: &mut Credit) -> Result<(), Failure> {
    let Lane { qp, own, theirs } = lane;
    if own.fresh.is_empty() {
        return Ok(());
    }
    qp.post_receives(|batch| {
        for buffer in own.fresh.drain(..) {
            batch.receive(buffer);
            credit.add();
        }
    })
    .map_err(|e| theirs.refused(&e))
}
