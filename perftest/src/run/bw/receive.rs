//! The server of `bw send`: takes messages, with `--verify` looks at every byte, posts their buffers again, and says so.

use doorbell_verbs::{Buffer, Local, Opaque, PreparedQueuePair, ProtectionDomain, Queue, Success};

use super::super::gpu::{Content, Pool};
use super::super::pattern::{Mismatch, Pattern};
use super::super::station::{Grants, Keys, Lane, Needs, Own, Station, Test, refused};
use super::super::watch::Watch;
use super::credit::{self, Credit, LastLook};
use crate::failure::Failure;

/// One lane's receives.
#[derive(Debug)]
pub(crate) struct Receives {
    fresh: Fresh,
    slots: u32,
}

/// What is to be posted.
#[derive(Debug)]
enum Fresh {
    Host(Vec<Buffer<Local>>),
    /// With the contents that they are to have.
    Gpu(Box<Pool>, Vec<Content>),
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
        if let Some(gpu) = &test.device.gpu {
            let content = |index| spoilt(test, lane, index);
            let pool = Box::new(Pool::new(gpu, pd, len, slots as usize)?);
            let contents = (0..slots.into()).map(content).collect();
            return Ok(Receives {
                fresh: Fresh::Gpu(pool, contents),
                slots,
            });
        }
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
        Ok(Receives {
            fresh: Fresh::Host(fresh),
            slots,
        })
    }

    fn keys(&self) -> Keys {
        Keys {
            slots: self.slots,
            ..Keys::default()
        }
    }

    fn post_receives(&mut self, qp: &mut PreparedQueuePair) -> Result<(), Failure> {
        match &mut self.fresh {
            Fresh::Host(fresh) => fresh
                .drain(..)
                .try_for_each(|buffer| qp.receive(buffer).map_err(|e| refused(&*e))),
            Fresh::Gpu(pool, contents) => {
                for content in contents.drain(..) {
                    if let Some(buffer) = pool.take(content) {
                        qp.receive(buffer).map_err(|e| refused(&*e))?;
                    }
                }
                pool.failed().map_or(Ok(()), Err)
            }
        }
    }
}

/// What is received over by message `index`.
fn spoilt(test: &Test<'_>, lane: usize, index: u64) -> Content {
    if test.plan.verify {
        Content::Wrong(Pattern::new(test.plan.seed, lane, index))
    } else {
        Content::Nothing
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
            let (right, next) = (
                Pattern::new(test.plan.seed, index, iteration),
                iteration + u64::from(lane.own.slots),
            );
            let wrong = match &mut lane.own.fresh {
                Fresh::Host(fresh) => {
                    let Some(mut buffer) = done.take::<Local>() else {
                        continue;
                    };
                    let wrong = if test.plan.verify { right.check(&buffer) } else { None };
                    if test.plan.verify && wrong.is_none() {
                        Pattern::new(test.plan.seed, index, next).fill_wrong(&mut buffer);
                    }
                    fresh.push(buffer);
                    wrong
                }
                Fresh::Gpu(pool, contents) => {
                    let Some(buffer) = done.take::<Opaque<Local>>() else {
                        continue;
                    };
                    let wrong = pool.look(&buffer, test.plan.verify.then_some(right))?;
                    pool.give(buffer);
                    contents.push(spoilt(test, index, next));
                    wrong
                }
            };
            if let Some(wrong) = wrong {
                let mismatch = Mismatch::at(test.bytes, index, iteration, wrong);
                return Err(Failure::test(format!("{}: {mismatch}", lane.theirs)));
            }
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
    match &mut own.fresh {
        Fresh::Host(fresh) if fresh.is_empty() => Ok(()),
        Fresh::Gpu(_, contents) if contents.is_empty() => Ok(()),
        Fresh::Host(fresh) => qp
            .post_receives(|batch| {
                for buffer in fresh.drain(..) {
                    batch.receive(buffer);
                    credit.add();
                }
            })
            .map_err(|e| theirs.refused(&e)),
        Fresh::Gpu(pool, contents) => {
            qp.post_receives(|batch| {
                for content in contents.drain(..) {
                    if let Some(buffer) = pool.take(content) {
                        batch.receive(buffer);
                        credit.add();
                    }
                }
            })
            .map_err(|e| theirs.refused(&e))?;
            pool.failed().map_or(Ok(()), Err)
        }
    }
}
