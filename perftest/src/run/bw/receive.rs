//! The server of `bw send`: takes messages, checks every byte with `--verify`, reposts their
//! buffers, and advertises that as credits.

use doorbell_verbs::{Buffer, Local, Opaque, PreparedQueuePair, ProtectionDomain, QueueKind, Success};

use super::super::gpu::{Content, GpuPool};
use super::super::monitor::LoopMonitor;
use super::super::pattern::{Mismatch, Pattern};
use super::super::test_end::{AdvertisedMemory, QpMemory, QpRequirements, RemoteAccess, Test, TestEnd, TestQp};
use super::credit::{self, CreditWriter, DrainWait};
use crate::failure::{Failure, refused};

#[derive(Debug)]
pub(crate) struct ReceiveRing {
    free: FreeReceives,
    slots: u32,
}

#[derive(Debug)]
enum FreeReceives {
    Host(Vec<Buffer<Local>>),
    /// With the content that each shall have.
    Gpu(Box<GpuPool>, Vec<Content>),
}

impl QpMemory for ReceiveRing {
    fn requirements(test: &Test<'_>) -> QpRequirements {
        QpRequirements {
            send: credit::DEPTH,
            receive: test.plan.receives(test.bytes),
            inline: 8,
            access: RemoteAccess::Nothing,
        }
    }

    fn new(test: &Test<'_>, pd: &ProtectionDomain, qp_index: usize) -> Result<Self, Failure> {
        let (len, slots) = (test.len(), test.plan.receives(test.bytes));
        if let Some(gpu) = &test.device.gpu {
            let content = |index| initial_content(test, qp_index, index);
            let pool = Box::new(GpuPool::new(gpu, pd, len, slots as usize)?);
            let contents = (0..slots.into()).map(content).collect();
            return Ok(ReceiveRing {
                free: FreeReceives::Gpu(pool, contents),
                slots,
            });
        }
        let mut free: Vec<_> = pd
            .register_chunks(test.memory(len * slots as usize)?, len, Local)
            .map_err(refused)?
            .collect();
        if test.plan.verify {
            // Receives are filled in the order they are posted.
            for (index, buffer) in (0..).zip(&mut free) {
                Pattern::new(test.plan.seed, qp_index, index).fill_inverse(buffer);
            }
        }
        Ok(ReceiveRing {
            free: FreeReceives::Host(free),
            slots,
        })
    }

    fn advertised_memory(&self) -> AdvertisedMemory {
        AdvertisedMemory {
            slots: self.slots,
            ..AdvertisedMemory::default()
        }
    }

    fn post_receives(&mut self, qp: &mut PreparedQueuePair) -> Result<(), Failure> {
        match &mut self.free {
            FreeReceives::Host(free) => free
                .drain(..)
                .try_for_each(|buffer| qp.receive(buffer).map_err(|e| refused(&*e))),
            FreeReceives::Gpu(pool, contents) => {
                for content in contents.drain(..) {
                    if let Some(buffer) = pool.take(content) {
                        qp.receive(buffer).map_err(|e| refused(&*e))?;
                    }
                }
                pool.take_error().map_or(Ok(()), Err)
            }
        }
    }
}

/// The content of the buffer that message `index` overwrites.
fn initial_content(test: &Test<'_>, qp_index: usize, index: u64) -> Content {
    if test.plan.verify {
        Content::Inverse(Pattern::new(test.plan.seed, qp_index, index))
    } else {
        Content::Nothing
    }
}

/// Serves until the client has finished and all its messages have arrived. Returns the messages per
/// queue pair.
///
/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Test`] when data was wrong or the peer is lost.
pub(crate) fn serve(test: &Test<'_>, test_end: &mut TestEnd<ReceiveRing>) -> Result<Vec<u64>, Failure> {
    let TestEnd { cq, qps } = test_end;
    let mut credits = qps
        .iter()
        .map(|test_qp| CreditWriter::new(&test_qp.peer, test_qp.memory.slots))
        .collect::<Result<Vec<_>, _>>()?;
    let mut monitor = LoopMonitor::of_server(test);
    let mut drain = DrainWait::default();
    loop {
        let mut idle = true;
        for mut done in cq.poll().map_err(refused)? {
            let index = usize::try_from(done.tag()).unwrap_or(usize::MAX);
            let Some(test_qp) = qps.get_mut(index) else {
                continue;
            };
            let len = match done.result() {
                Ok(Success::Receive { len, .. }) => len,
                Ok(_) => continue,
                Err(failure) => return Err(test_qp.peer.failed(&failure)),
            };
            idle = false;
            if u64::from(len) != test.bytes {
                return Err(Failure::test(format!(
                    "{} sent {len} bytes instead of {}",
                    test_qp.peer, test.bytes
                )));
            }
            debug_assert_eq!(done.queue(), QueueKind::Receive);
            let iteration = done.sequence();
            let (right, next) = (
                Pattern::new(test.plan.seed, index, iteration),
                iteration + u64::from(test_qp.memory.slots),
            );
            let wrong = match &mut test_qp.memory.free {
                FreeReceives::Host(free) => {
                    let Some(mut buffer) = done.take::<Local>() else {
                        continue;
                    };
                    let wrong = if test.plan.verify { right.check(&buffer) } else { None };
                    if test.plan.verify && wrong.is_none() {
                        Pattern::new(test.plan.seed, index, next).fill_inverse(&mut buffer);
                    }
                    free.push(buffer);
                    wrong
                }
                FreeReceives::Gpu(pool, contents) => {
                    let Some(buffer) = done.take::<Opaque<Local>>() else {
                        continue;
                    };
                    let wrong = pool.check(&buffer, test.plan.verify.then_some(right))?;
                    pool.release(buffer);
                    contents.push(initial_content(test, index, next));
                    wrong
                }
            };
            if let Some(wrong) = wrong {
                let mismatch = Mismatch::at(test.bytes, index, iteration, wrong);
                return Err(Failure::test(format!("{}: {mismatch}", test_qp.peer)));
            }
        }
        for (test_qp, credit) in qps.iter_mut().zip(&mut credits) {
            repost(test_qp, credit)?;
            credit.advertise(&mut test_qp.qp, &test_qp.peer, idle)?;
        }
        if !idle {
            monitor.busy()?;
            continue;
        }
        monitor.idle()?;
        if let Some(sent) = monitor.finished() {
            let missing = || format!("peer {}: not all it sent has arrived", test.control.peer());
            if drain.all(&credits, sent, missing)? {
                return Ok(sent.to_vec());
            }
        }
    }
}

/// Reposts the buffers of the messages just taken, with one doorbell.
#[inline]
fn repost(test_qp: &mut TestQp<ReceiveRing>, credit: &mut CreditWriter) -> Result<(), Failure> {
    let TestQp { qp, memory, peer } = test_qp;
    match &mut memory.free {
        FreeReceives::Host(free) if free.is_empty() => Ok(()),
        FreeReceives::Gpu(_, contents) if contents.is_empty() => Ok(()),
        FreeReceives::Host(free) => qp
            .post_receives(|batch| {
                for buffer in free.drain(..) {
                    batch.receive(buffer);
                    credit.add();
                }
            })
            .map_err(|e| peer.refused(&e)),
        FreeReceives::Gpu(pool, contents) => {
            qp.post_receives(|batch| {
                for content in contents.drain(..) {
                    if let Some(buffer) = pool.take(content) {
                        batch.receive(buffer);
                        credit.add();
                    }
                }
            })
            .map_err(|e| peer.refused(&e))?;
            pool.take_error().map_or(Ok(()), Err)
        }
    }
}
