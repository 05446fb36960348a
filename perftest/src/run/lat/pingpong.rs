//! `lat write` and `lat send`: both ends send, wait for the other's message, and send again.
//!
//! A written message is seen by its last byte, which counts (modulo 256) and is written last; a sent one by its completion. Where messages lie in a GPU's memory, at either end, the processor
//! cannot wait for a byte there: a written one carries immediate data then, and is seen by the completion of that. With `--verify` each
//! end looks at every byte of each message before it answers, and spoils the memory for the next.

use std::sync::atomic::Ordering;

use doorbell_verbs::{
    Batch, Buffer, Completion, Local, Memory, Opaque, PreparedQueuePair, ProtectionDomain, Queue, Remote, RemoteWrite,
    Source, Success, Write as MayWrite,
};

use super::super::gpu::{Content, Cut, Messages, Pool};
use super::super::meter::{Meter, Turns};
use super::super::pattern::{Mismatch, Pattern};
use super::super::station::{Grants, Keys, Lane, Needs, Own, Station, Test, Theirs, refused};
use super::super::watch::{Deadline, Watch};
use crate::failure::Failure;
use crate::plan::Verb;
use crate::stats::Latency;

/// Messages of which the memory may not have come back yet: the completion of one may be late while its answer is there.
const SOURCES: u32 = 8;
/// A completion is asked for once in so many messages.
const SIGNAL_EVERY: u64 = 4;
/// Looks at memory between two looks at the completion queue.
const LOOKS: u32 = 2;

/// Which end of the ping-pong this is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    /// Sends first, and measures.
    Client,
    /// Answers.
    Server,
}

impl End {
    /// Payloads of the two directions differ.
    fn lane(self) -> usize {
        match self {
            End::Client => 0,
            End::Server => 1,
        }
    }

    fn other(self) -> End {
        match self {
            End::Client => End::Server,
            End::Server => End::Client,
        }
    }
}

/// The memory of one end.
#[derive(Debug)]
pub(crate) struct Ball {
    bytes: u64,
    seed: u64,
    verify: bool,
    /// Messages to send, those not under way.
    free: Vec<Buffer<Local>>,
    /// The same in a GPU's memory; also what `lat send` receives into.
    pool: Option<Box<Pool>>,
    /// Where the peer writes to, in a GPU's memory.
    gpu_court: Option<(Box<Messages>, Buffer<Opaque<RemoteWrite>>)>,
    /// Whether a written message says by immediate data that it has come.
    announced: bool,
    /// The message to send inline; empty where messages do not travel so.
    inline: Vec<u8>,
    /// Where the peer writes to, in `lat write`.
    court: Option<Buffer<RemoteWrite>>,
    /// Buffers to receive into, in `lat send`.
    receives: Vec<Buffer<Local>>,
    /// Where to write to, in `lat write`.
    target: Option<Remote<MayWrite>>,
    /// A message to look at.
    scratch: Vec<u8>,
}

impl Own for Ball {
    fn needs(test: &Test<'_>) -> Needs {
        let (receive, grants) = match test.plan.verb {
            Verb::Send => (SOURCES, Grants::Nothing),
            Verb::Write if test.plan.gpu => (SOURCES, Grants::Write),
            Verb::Write | Verb::Read | Verb::Atomic(_) => (1, Grants::Write),
        };
        Needs {
            send: SOURCES,
            receive,
            inline: 0,
            grants,
        }
    }

    fn new(test: &Test<'_>, pd: &ProtectionDomain, _lane: usize) -> Result<Self, Failure> {
        let len = test.len();
        let several = |count: u32| -> Result<Vec<Buffer<Local>>, Failure> {
            Ok(pd
                .register_chunks(test.memory(len * count as usize)?, len, Local)
                .map_err(refused)?
                .collect())
        };
        let sends = test.plan.verb == Verb::Send;
        let announced = test.plan.gpu && !sends;
        let gpu = test.device.gpu.as_ref();
        // Both directions of `lat send` take from one pool.
        let pooled = messages(test) as usize * if sends { 2 } else { 1 };
        let pool = gpu
            .map(|gpu| Pool::new(gpu, pd, len, pooled).map(Box::new))
            .transpose()?;
        let gpu_court = match gpu {
            Some(gpu) if !sends => {
                let (messages, mut court) = Messages::new(gpu, pd, (len, 1), Cut::Whole, RemoteWrite)?;
                court.pop().map(|court| (Box::new(messages), court))
            }
            _ => None,
        };
        let receives = if announced {
            let few = Memory::zeroed(SOURCES as usize);
            pd.register_chunks(few, 1, Local).map_err(refused)?.collect()
        } else if sends && gpu.is_none() {
            several(messages(test))?
        } else {
            Vec::new()
        };
        Ok(Ball {
            bytes: test.bytes,
            seed: test.plan.seed,
            verify: test.plan.verify,
            free: if test.is_inline() || pool.is_some() {
                Vec::new()
            } else {
                several(messages(test))?
            },
            pool,
            announced,
            inline: if test.is_inline() { vec![0; len] } else { Vec::new() },
            court: if sends || gpu_court.is_some() {
                None
            } else {
                Some(pd.register(test.memory(len)?, RemoteWrite).map_err(refused)?)
            },
            gpu_court,
            receives,
            target: None,
            scratch: if test.plan.verify { vec![0; len] } else { Vec::new() },
        })
    }

    fn keys(&self) -> Keys {
        Keys {
            slots: 1,
            data: match (&self.court, &self.gpu_court) {
                (Some(court), _) => Some(court.remote().to_bytes()),
                (None, Some((_, court))) => Some(court.remote().to_bytes()),
                (None, None) => None,
            },
            counter: None,
        }
    }

    fn post_receives(&mut self, qp: &mut PreparedQueuePair) -> Result<(), Failure> {
        for buffer in self.receives.drain(..) {
            qp.receive(buffer).map_err(|e| refused(&*e))?;
        }
        if let Some(pool) = self.pool.as_mut().filter(|_| self.gpu_court.is_none()) {
            // Half of it; the other is for what is sent.
            for _ in 0..pool.len() / 2 {
                if let Some(buffer) = pool.take(Content::Nothing) {
                    qp.receive(buffer).map_err(|e| refused(&*e))?;
                }
            }
        }
        Ok(())
    }
}

/// Messages there is memory for, in each direction.
fn messages(test: &Test<'_>) -> u32 {
    test.window().min(SOURCES)
}

impl Ball {
    fn attach(&mut self, theirs: &Theirs) -> Result<(), Failure> {
        if self.court.is_some() || self.gpu_court.is_some() {
            self.target = Some(theirs.data(self.bytes)?);
        }
        Ok(())
    }

    /// Whether there is memory for a message to be sent.
    #[inline]
    fn has_message(&self) -> bool {
        match &self.pool {
            Some(pool) => pool.len() > 0,
            None => !self.inline.is_empty() || !self.free.is_empty(),
        }
    }

    /// Whether messages are seen by their last byte.
    fn is_flagged(&self) -> bool {
        self.court.is_some() && !self.announced
    }

    /// Writes a message down.
    fn compose(&self, end: End, index: u64, message: &mut [u8]) {
        if self.verify {
            Pattern::new(self.seed, end.lane(), index).fill(message);
        }
        if let (Some(last), true) = (message.last_mut(), self.is_flagged()) {
            *last = flag(index);
        }
    }

    /// Finds what is wrong with a message that the other end composed.
    fn inspect(&self, from: End, index: u64, message: &mut [u8]) -> Option<Mismatch> {
        let pattern = Pattern::new(self.seed, from.lane(), index);
        if let (Some(last), true) = (message.last_mut(), self.is_flagged()) {
            // The flag has been seen; what the pattern has in its place is not sent.
            *last = pattern.last_byte(self.bytes);
        }
        pattern
            .check(message)
            .map(|wrong| Mismatch::at(self.bytes, 0, index, wrong))
    }

    fn take_back(&mut self, mut done: Completion<'_>) {
        match &mut self.pool {
            Some(pool) => {
                if let Some(buffer) = done.take::<Opaque<Local>>() {
                    pool.give(buffer);
                }
            }
            None => self.free.extend(done.take::<Local>()),
        }
    }
}

/// What the last byte of a written message is: never what the one before had, and not 0 at first.
fn flag(index: u64) -> u8 {
    (index.wrapping_add(1) & 0xff) as u8
}

/// The client: `pings` and measures. What was measured is in the meter even when it fails. Returns the messages sent.
///
/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Test`] when data was wrong or the peer is lost.
pub(crate) fn run(
    test: &Test<'_>,
    station: &mut Station<Ball>,
    meter: &mut Meter<'_, Latency>,
) -> Result<Vec<u64>, Failure> {
    let mut rally = Rally::new(test, station, End::Client, Watch::of_client(test.control))?;
    let warmup = test.plan.warmup(test.bytes);
    let total = test
        .plan
        .iterations(test.bytes)
        .map_or(u64::MAX, |iterations| warmup.saturating_add(iterations));
    let mut deadline = Deadline::after(test.plan.duration());
    let mut turns = Turns::new(meter, test.plan.rate_per_s);
    let (mut index, mut over) = (0, false);
    while index < total && !over {
        if index == warmup {
            deadline.start(turns.start());
        }
        if !turns.is_due() {
            while !turns.is_due() {
                rally.watch.idle()?;
            }
            // Or the waiting for the answer would begin with giving the core away.
            rally.watch.turn()?;
        }
        rally.hit(index)?;
        rally.await_return(index)?;
        over = deadline.is_over_at(turns.end());
        index += 1;
    }
    Ok(vec![index])
}

/// The server: answers until the client has finished. Returns the messages seen.
///
/// # Errors
/// As [`run`].
pub(crate) fn serve(test: &Test<'_>, station: &mut Station<Ball>) -> Result<Vec<u64>, Failure> {
    let mut rally = Rally::new(test, station, End::Server, Watch::of_server(test.control))?;
    let mut index = 0;
    loop {
        if !rally.await_return(index)? {
            return match rally.watch.finished() {
                Some([sent]) if *sent == index => Ok(vec![index]),
                _ => Err(Failure::test(format!(
                    "peer {}: finished without sending all",
                    test.control.peer()
                ))),
            };
        }
        rally.hit(index)?;
        index += 1;
    }
}

/// One end of the ping-pong under way.
struct Rally<'a> {
    station: &'a mut Station<Ball>,
    end: End,
    watch: Watch<'a>,
    /// Messages received and not yet waited for, in `lat send`.
    arrived: u64,
}

impl<'a> Rally<'a> {
    fn new(test: &Test<'a>, station: &'a mut Station<Ball>, end: End, watch: Watch<'a>) -> Result<Rally<'a>, Failure> {
        for Lane { own, theirs, .. } in &mut station.lanes {
            own.attach(theirs)?;
        }
        if station.lanes.is_empty() {
            return Err(Failure::test(format!(
                "peer {}: no queue pair to test",
                test.control.peer()
            )));
        }
        Ok(Rally {
            station,
            end,
            watch,
            arrived: 0,
        })
    }

    /// Sends message `index`, when there is memory for it.
    #[inline]
    fn hit(&mut self, index: u64) -> Result<(), Failure> {
        while self.station.lanes[0].qp.send_room() == 0 || !self.station.lanes[0].own.has_message() {
            self.poll()?;
            self.watch.idle()?;
        }
        let Lane { qp, own, theirs } = &mut self.station.lanes[0];
        let signal = index % SIGNAL_EVERY == SIGNAL_EVERY - 1;
        let target = own.target;
        let imm = own.announced.then_some(index as u32);
        if let Some(pool) = &mut own.pool {
            let content = if own.verify {
                Content::Right(Pattern::new(own.seed, self.end.lane(), index))
            } else {
                Content::Any
            };
            let Some(buffer) = pool.take(content) else {
                return Ok(());
            };
            let signal = signal || pool.len() == 0;
            if let Some(failure) = pool.failed() {
                return Err(failure);
            }
            return qp
                .post(|batch| from_buffer(batch, buffer, target, imm, signal))
                .map_err(|e| theirs.refused(&e));
        }
        let posted = match own.free.pop() {
            Some(mut buffer) => {
                // Where there is little memory the last of it has to come back by itself.
                let signal = signal || own.free.is_empty();
                own.compose(self.end, index, &mut buffer);
                qp.post(|batch| from_buffer(batch, buffer, target, imm, signal))
            }
            None => {
                let mut message = std::mem::take(&mut own.inline);
                own.compose(self.end, index, &mut message);
                own.inline = message;
                let message = &own.inline;
                qp.post(|batch| inline(batch, message, target, signal))
            }
        };
        posted.map_err(|e| theirs.refused(&e))
    }

    /// Waits for the other end's message `index`. False when the other end has finished instead.
    #[inline]
    fn await_return(&mut self, index: u64) -> Result<bool, Failure> {
        let last = self.station.lanes[0].own.bytes as usize - 1;
        loop {
            for _ in 0..LOOKS {
                let seen = match &self.station.lanes[0].own.court {
                    Some(court) if !self.station.lanes[0].own.announced => {
                        court.load_u8(last, Ordering::Acquire) == flag(index)
                    }
                    _ => self.arrived > 0,
                };
                if seen {
                    // Without it the loop would soon offer its core at every turn, which costs more than the message.
                    self.watch.turn()?;
                    self.arrived = self.arrived.saturating_sub(1);
                    return self.look_at_court(index).map(|()| true);
                }
            }
            self.poll()?;
            if self.watch.finished().is_some() && self.arrived == 0 {
                return Ok(false);
            }
            self.watch.idle()?;
        }
    }

    /// With `--verify`, looks at what was written, and spoils it.
    #[inline]
    fn look_at_court(&mut self, index: u64) -> Result<(), Failure> {
        let Lane { own, theirs, .. } = &mut self.station.lanes[0];
        if !own.verify {
            return match &mut own.gpu_court {
                Some((court, _)) => court.pull(0),
                None => Ok(()),
            };
        }
        let mut message = std::mem::take(&mut own.scratch);
        let mut wrong = None;
        if let Some((court, _)) = &mut own.gpu_court {
            court.read(0, &mut message)?;
            wrong = own.inspect(self.end.other(), index, &mut message);
            Pattern::new(own.seed, self.end.other().lane(), index + 1).fill_wrong(&mut message);
        }
        if let Some(court) = &own.court {
            court.read_at(0, &mut message);
            wrong = own.inspect(self.end.other(), index, &mut message);
            Pattern::new(own.seed, self.end.other().lane(), index + 1).fill_wrong(&mut message);
            if let (Some(last), true) = (message.last_mut(), own.is_flagged()) {
                *last = flag(index);
            }
        }
        if let Some(court) = &mut own.court {
            court.write_at(0, &message);
        }
        if let Some((court, _)) = &mut own.gpu_court {
            court.write(0, &message)?;
        }
        own.scratch = message;
        wrong.map_or(Ok(()), |wrong| Err(Failure::test(format!("{theirs}: {wrong}"))))
    }

    /// Takes what has completed: memory that may be used again, and messages received.
    #[inline]
    fn poll(&mut self) -> Result<(), Failure> {
        let Station { cq, lanes } = &mut *self.station;
        let Lane { qp, own, theirs } = &mut lanes[0];
        for mut done in cq.poll().map_err(refused)? {
            let success = done.result().map_err(|failure| theirs.failed(&failure))?;
            if done.queue() == Queue::Send {
                own.take_back(done);
                continue;
            }
            let (index, len) = match success {
                Success::Receive { len, .. } | Success::ReceiveWrite { len, .. } => (done.sequence(), len),
                _ => continue,
            };
            if u64::from(len) != own.bytes {
                return Err(Failure::test(format!(
                    "{theirs} sent {len} bytes where {} belong",
                    own.bytes
                )));
            }
            if own.announced {
                // It has come where it was written to; this is what has told so.
                self.arrived += 1;
                if let Some(byte) = done.take::<Local>() {
                    qp.receive(byte).map_err(|e| theirs.refused(&e))?;
                }
                continue;
            }
            if let Some(pool) = &mut own.pool {
                let Some(buffer) = done.take::<Opaque<Local>>() else {
                    continue;
                };
                let from = self.end.other().lane();
                let pattern = |index| Pattern::new(own.seed, from, index);
                let wrong = pool.look(&buffer, own.verify.then(|| pattern(index)))?;
                pool.give(buffer);
                if let Some(wrong) = wrong {
                    let mismatch = Mismatch::at(own.bytes, 0, index, wrong);
                    return Err(Failure::test(format!("{theirs}: {mismatch}")));
                }
                let content = if own.verify {
                    Content::Wrong(pattern(index + 1))
                } else {
                    Content::Nothing
                };
                if let Some(buffer) = pool.take(content) {
                    qp.receive(buffer).map_err(|e| theirs.refused(&e))?;
                }
                self.arrived += 1;
                continue;
            }
            let Some(mut buffer) = done.take::<Local>() else {
                continue;
            };
            if own.verify {
                if let Some(wrong) = own.inspect(self.end.other(), index, &mut buffer) {
                    return Err(Failure::test(format!("{theirs}: {wrong}")));
                }
                buffer.iter_mut().for_each(|byte| *byte = !*byte);
            }
            self.arrived += 1;
            qp.receive(buffer).map_err(|e| theirs.refused(&e))?;
        }
        Ok(())
    }
}

#[inline]
fn from_buffer(
    batch: &mut Batch<'_, '_>,
    buffer: impl Source,
    target: Option<Remote<MayWrite>>,
    imm: Option<u32>,
    signal: bool,
) {
    match (target, imm, signal) {
        (Some(target), Some(imm), true) => drop(batch.write(buffer, target).imm(imm).signalled()),
        (Some(target), Some(imm), false) => drop(batch.write(buffer, target).imm(imm)),
        (Some(target), None, true) => drop(batch.write(buffer, target).signalled()),
        (Some(target), None, false) => drop(batch.write(buffer, target)),
        (None, _, true) => drop(batch.send(buffer).signalled()),
        (None, _, false) => drop(batch.send(buffer)),
    }
}

#[inline]
fn inline<'d>(batch: &mut Batch<'_, 'd>, message: &'d [u8], target: Option<Remote<MayWrite>>, signal: bool) {
    match (target, signal) {
        (Some(target), true) => drop(batch.write_inline(message, target).signalled()),
        (Some(target), false) => drop(batch.write_inline(message, target)),
        (None, true) => drop(batch.send_inline(message).signalled()),
        (None, false) => drop(batch.send_inline(message)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_is_never_the_one_before() {
        assert_ne!(flag(0), 0);
        for index in 0..600 {
            assert_ne!(flag(index), flag(index + 1));
        }
    }
}
