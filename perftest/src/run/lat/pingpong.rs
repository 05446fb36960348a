//! `lat write` and `lat send`: a ping-pong; both ends send, wait for the peer's message, and send
//! again.
//!
//! The receiver of a WRITE polls the last byte, which counts (modulo 256) and is written last. The
//! CPU cannot poll GPU memory: where messages lie there, at either end, a WRITE carries immediate
//! data and its receive completion is polled. With `--verify` each end checks every byte before it
//! answers, and inverts the memory for the next message.

use std::sync::atomic::Ordering;

use doorbell_verbs::{
    Batch, Buffer, Completion, Local, Memory, Opaque, PeerWrite, ProtectionDomain, QueueKind, ReliableConnection,
    Remote, Source, Success, WriteAccess,
};

use super::super::meter::{LatencyMeter, Meter};
use super::super::monitor::{Deadline, LoopMonitor};
use super::super::test_end::{AdvertisedMemory, PeerQp, QpMemory, QpRequirements, RemoteAccess, Test, TestEnd};
use crate::engine::gpu::{Chunking, Content, GpuMessages, GpuPool};
use crate::engine::pattern::{Mismatch, Pattern};
use crate::engine::test_end::{self, TestQp};
use crate::failure::{Failure, refused};
use crate::plan::Verb;
use crate::stats::Latency;

/// Buffers per direction: the completion of a message may arrive after its answer.
const BUFFERS: u32 = 8;
/// One message in so many is signaled.
const SIGNAL_EVERY: u64 = 4;
/// Memory polls between two polls of the completion queue.
const POLLS_PER_CHECK: u32 = 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Role {
    /// Sends first, and measures.
    Client,
    Server,
}

impl Role {
    /// The payloads of the two directions differ.
    fn direction(self) -> usize {
        match self {
            Role::Client => 0,
            Role::Server => 1,
        }
    }

    fn other(self) -> Role {
        match self {
            Role::Client => Role::Server,
            Role::Server => Role::Client,
        }
    }
}

#[derive(Debug)]
pub(crate) struct PingPongMemory {
    bytes: u64,
    seed: u64,
    verify: bool,
    free: Vec<Buffer<Local>>,
    /// Send buffers in a GPU's memory; with `lat send` also receive buffers.
    pool: Option<Box<GpuPool>>,
    /// The buffer that the peer writes to, in a GPU's memory.
    gpu_recv_buffer: Option<(Box<GpuMessages>, Buffer<Opaque<PeerWrite>>)>,
    /// Whether a WRITE carries immediate data.
    with_imm: bool,
    /// The inline message; empty where messages are not inline.
    inline: Vec<u8>,
    /// The buffer that the peer writes to, in `lat write`.
    recv_buffer: Option<Buffer<PeerWrite>>,
    receives: Vec<Buffer<Local>>,
    target: Option<Remote<WriteAccess>>,
    scratch: Vec<u8>,
}

impl QpMemory for PingPongMemory {
    type Connected = PingPongMemory;

    fn requirements(test: &Test<'_>) -> QpRequirements {
        let (receive, access) = match test.plan.verb {
            Verb::Send => (BUFFERS, RemoteAccess::Nothing),
            Verb::Write if test.plan.gpu => (BUFFERS, RemoteAccess::Write),
            Verb::Write | Verb::Read | Verb::Atomic(_) => (1, RemoteAccess::Write),
        };
        QpRequirements {
            send: BUFFERS,
            receive,
            inline: 0,
            access,
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
        let with_imm = test.plan.gpu && !sends;
        let gpu = test.device.gpu.as_ref();
        // Both directions of `lat send` use one pool.
        let pooled = messages(test) as usize * if sends { 2 } else { 1 };
        let pool = gpu
            .map(|gpu| GpuPool::new(gpu, pd, len, pooled).map(Box::new))
            .transpose()?;
        let gpu_recv_buffer = match gpu {
            Some(gpu) if !sends => {
                let (messages, mut recv_buffer) = GpuMessages::new(gpu, pd, (len, 1), Chunking::Whole, PeerWrite)?;
                recv_buffer.pop().map(|recv_buffer| (Box::new(messages), recv_buffer))
            }
            _ => None,
        };
        let receives = if with_imm {
            let few = Memory::zeroed(BUFFERS as usize);
            pd.register_chunks(few, 1, Local).map_err(refused)?.collect()
        } else if sends && gpu.is_none() {
            several(messages(test))?
        } else {
            Vec::new()
        };
        Ok(PingPongMemory {
            bytes: test.bytes,
            seed: test.plan.seed,
            verify: test.plan.verify,
            free: if test.is_inline() || pool.is_some() {
                Vec::new()
            } else {
                several(messages(test))?
            },
            pool,
            with_imm,
            inline: if test.is_inline() { vec![0; len] } else { Vec::new() },
            recv_buffer: if sends || gpu_recv_buffer.is_some() {
                None
            } else {
                Some(pd.register(test.memory(len)?, PeerWrite).map_err(refused)?)
            },
            gpu_recv_buffer,
            receives,
            target: None,
            scratch: if test.plan.verify { vec![0; len] } else { Vec::new() },
        })
    }

    fn advertised_memory(&self) -> AdvertisedMemory {
        AdvertisedMemory {
            slots: 1,
            data: match (&self.recv_buffer, &self.gpu_recv_buffer) {
                (Some(recv_buffer), _) => Some(recv_buffer.remote().to_bytes()),
                (None, Some((_, recv_buffer))) => Some(recv_buffer.remote().to_bytes()),
                (None, None) => None,
            },
            counter: None,
        }
    }

    fn connect(
        mut self,
        _: &Test<'_>,
        test_qp: &mut TestQp<ReliableConnection>,
        peer: &PeerQp,
    ) -> Result<Self, Failure> {
        if self.recv_buffer.is_some() || self.gpu_recv_buffer.is_some() {
            self.target = Some(peer.data(self.bytes)?);
        }
        for buffer in self.receives.drain(..) {
            test_qp.qp.receive(buffer).map_err(refused)?;
        }
        if let Some(pool) = self.pool.as_mut().filter(|_| self.gpu_recv_buffer.is_none()) {
            // Half of the pool; the other half is for sending.
            for _ in 0..pool.len() / 2 {
                if let Some(buffer) = pool.take(Content::Nothing) {
                    test_qp.qp.receive(buffer).map_err(refused)?;
                }
            }
        }
        Ok(self)
    }
}

fn messages(test: &Test<'_>) -> u32 {
    test.window().min(BUFFERS)
}

impl PingPongMemory {
    #[inline]
    fn has_free_buffer(&self) -> bool {
        match &self.pool {
            Some(pool) => pool.len() > 0,
            None => !self.inline.is_empty() || !self.free.is_empty(),
        }
    }

    fn polls_last_byte(&self) -> bool {
        self.recv_buffer.is_some() && !self.with_imm
    }

    fn fill_message(&self, role: Role, index: u64, message: &mut [u8]) {
        if self.verify {
            Pattern::new(self.seed, role.direction(), index).fill(message);
        }
        if let (Some(last), true) = (message.last_mut(), self.polls_last_byte()) {
            *last = flag(index);
        }
    }

    /// Finds the first wrong byte of a message from `from`.
    fn check_message(&self, from: Role, index: u64, message: &mut [u8]) -> Option<Mismatch> {
        let pattern = Pattern::new(self.seed, from.direction(), index);
        if let (Some(last), true) = (message.last_mut(), self.polls_last_byte()) {
            // The last byte holds the flag, not the pattern.
            *last = pattern.last_byte(self.bytes);
        }
        pattern
            .check(message)
            .map(|wrong| Mismatch::at(self.bytes, 0, index, wrong))
    }

    fn reclaim(&mut self, mut done: Completion<'_>) {
        match &mut self.pool {
            Some(pool) => {
                if let Some(buffer) = done.take::<Opaque<Local>>() {
                    pool.release(buffer);
                }
            }
            None => self.free.extend(done.take::<Local>()),
        }
    }
}

/// The last byte of a written message: never that of the previous one, and not 0 at first.
fn flag(index: u64) -> u8 {
    (index.wrapping_add(1) & 0xff) as u8
}

/// The client: sends first and measures. The meter holds what was measured even when it fails.
/// Returns the messages sent.
///
/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Test`] when data was wrong or the peer is lost.
pub(crate) fn run(
    test: &Test<'_>,
    test_end: &mut TestEnd<PingPongMemory>,
    meter: &mut Meter<'_, Latency>,
) -> Result<Vec<u64>, Failure> {
    let mut pingpong = PingPong::new(test, test_end, Role::Client, LoopMonitor::of_client(test))?;
    let warmup = test.plan.warmup(test.bytes);
    let total = test
        .plan
        .iterations(test.bytes)
        .map_or(u64::MAX, |iterations| warmup.saturating_add(iterations));
    let mut deadline = Deadline::after(test.plan.duration());
    let mut latency_meter = LatencyMeter::new(meter, test.plan.rate_per_s);
    let (mut index, mut over) = (0, false);
    while index < total && !over {
        if index == warmup {
            deadline.start(latency_meter.start());
        }
        pingpong.monitor.await_due(&mut latency_meter)?;
        pingpong.send(index)?;
        pingpong.await_message(index)?;
        over = deadline.is_over_at(latency_meter.end());
        index += 1;
    }
    Ok(vec![index])
}

/// The server: answers until the client has finished. Returns the messages received.
pub(crate) fn serve(test: &Test<'_>, test_end: &mut TestEnd<PingPongMemory>) -> Result<Vec<u64>, Failure> {
    let mut pingpong = PingPong::new(test, test_end, Role::Server, LoopMonitor::of_server(test))?;
    let mut index = 0;
    loop {
        if !pingpong.await_message(index)? {
            return match pingpong.monitor.finished() {
                Some([sent]) if *sent == index => Ok(vec![index]),
                _ => Err(Failure::test(format!(
                    "peer {}: finished without sending all",
                    test.control.peer()
                ))),
            };
        }
        pingpong.send(index)?;
        index += 1;
    }
}

struct PingPong<'a> {
    test_end: &'a mut TestEnd<PingPongMemory>,
    role: Role,
    monitor: LoopMonitor<'a>,
    /// Messages received and not yet consumed, in `lat send`.
    arrived: u64,
}

impl<'a> PingPong<'a> {
    fn new(
        test: &Test<'a>,
        test_end: &'a mut TestEnd<PingPongMemory>,
        role: Role,
        monitor: LoopMonitor<'a>,
    ) -> Result<PingPong<'a>, Failure> {
        if test_end.memory.is_empty() {
            return Err(Failure::test(format!(
                "peer {}: no queue pair to test",
                test.control.peer()
            )));
        }
        Ok(PingPong {
            test_end,
            role,
            monitor,
            arrived: 0,
        })
    }

    #[inline]
    fn send(&mut self, index: u64) -> Result<(), Failure> {
        while self.test_end.end.qps[0].qp.free_send_slots() == 0 || !self.test_end.memory[0].has_free_buffer() {
            self.poll()?;
            self.monitor.idle()?;
        }
        let TestEnd { end, memory } = &mut *self.test_end;
        let (test_qp, memory) = (&mut end.qps[0], &mut memory[0]);
        let qp = &mut test_qp.qp;
        let signal = index % SIGNAL_EVERY == SIGNAL_EVERY - 1;
        let target = memory.target;
        let imm = memory.with_imm.then_some(index as u32);
        if let Some(pool) = &mut memory.pool {
            let content = if memory.verify {
                Content::Pattern(Pattern::new(memory.seed, self.role.direction(), index))
            } else {
                Content::Any
            };
            let Some(buffer) = pool.take(content) else {
                return Ok(());
            };
            let signal = signal || pool.len() == 0;
            if let Some(failure) = pool.take_error() {
                return Err(failure);
            }
            return qp
                .post(|batch| from_buffer(batch, buffer, target, imm, signal))
                .map_err(|e| test_qp.refused(&e));
        }
        let posted = match memory.free.pop() {
            Some(mut buffer) => {
                // A signal reclaims the buffer when the message takes the last free one.
                let signal = signal || memory.free.is_empty();
                memory.fill_message(self.role, index, &mut buffer);
                qp.post(|batch| from_buffer(batch, buffer, target, imm, signal))
            }
            None => {
                let mut message = std::mem::take(&mut memory.inline);
                memory.fill_message(self.role, index, &mut message);
                memory.inline = message;
                let message = &memory.inline;
                qp.post(|batch| inline(batch, message, target, signal))
            }
        };
        posted.map_err(|e| test_qp.refused(&e))
    }

    /// Waits for the peer's message `index`. False when the peer has finished instead.
    #[inline]
    fn await_message(&mut self, index: u64) -> Result<bool, Failure> {
        let last = self.test_end.memory[0].bytes as usize - 1;
        loop {
            for _ in 0..POLLS_PER_CHECK {
                let seen = match &self.test_end.memory[0].recv_buffer {
                    Some(recv_buffer) if !self.test_end.memory[0].with_imm => {
                        recv_buffer.load_u8(last, Ordering::Acquire) == flag(index)
                    }
                    _ => self.arrived > 0,
                };
                if seen {
                    // Resets the idle count; otherwise the loop would soon yield the CPU at every
                    // poll, which costs more than the message.
                    self.monitor.busy()?;
                    self.arrived = self.arrived.saturating_sub(1);
                    return self.verify_received(index).map(|()| true);
                }
            }
            self.poll()?;
            if self.monitor.finished().is_some() && self.arrived == 0 {
                return Ok(false);
            }
            self.monitor.idle()?;
        }
    }

    /// With `--verify`, checks what was written and inverts it.
    #[inline]
    fn verify_received(&mut self, index: u64) -> Result<(), Failure> {
        let TestEnd { end, memory } = &mut *self.test_end;
        let (peer, memory) = (&end.qps[0].peer, &mut memory[0]);
        if !memory.verify {
            return match &mut memory.gpu_recv_buffer {
                Some((recv_buffer, _)) => recv_buffer.pull(0),
                None => Ok(()),
            };
        }
        let mut message = std::mem::take(&mut memory.scratch);
        let mut wrong = None;
        if let Some((recv_buffer, _)) = &mut memory.gpu_recv_buffer {
            recv_buffer.read(0, &mut message)?;
            wrong = memory.check_message(self.role.other(), index, &mut message);
            Pattern::new(memory.seed, self.role.other().direction(), index + 1).fill_inverse(&mut message);
        }
        if let Some(recv_buffer) = &memory.recv_buffer {
            recv_buffer.read_at(0, &mut message);
            wrong = memory.check_message(self.role.other(), index, &mut message);
            Pattern::new(memory.seed, self.role.other().direction(), index + 1).fill_inverse(&mut message);
            if let (Some(last), true) = (message.last_mut(), memory.polls_last_byte()) {
                *last = flag(index);
            }
        }
        if let Some(recv_buffer) = &mut memory.recv_buffer {
            recv_buffer.write_at(0, &message);
        }
        if let Some((recv_buffer, _)) = &mut memory.gpu_recv_buffer {
            recv_buffer.write(0, &message)?;
        }
        memory.scratch = message;
        wrong.map_or(Ok(()), |wrong| Err(Failure::test(format!("{peer}: {wrong}"))))
    }

    #[inline]
    fn poll(&mut self) -> Result<(), Failure> {
        let TestEnd { end, memory } = &mut *self.test_end;
        let test_end::TestEnd { cq, qps, .. } = end;
        let (test_qp, memory) = (&mut qps[0], &mut memory[0]);
        for mut done in cq.poll().map_err(refused)? {
            let success = done.result().map_err(|failure| test_qp.failed(&failure))?;
            if done.queue() == QueueKind::Send {
                memory.reclaim(done);
                continue;
            }
            let (index, len) = match success {
                Success::Receive { len, .. } | Success::ReceiveWrite { len, .. } => (done.sequence(), len),
                _ => continue,
            };
            if u64::from(len) != memory.bytes {
                return Err(Failure::test(format!(
                    "{} sent {len} bytes instead of {}",
                    test_qp.peer, memory.bytes
                )));
            }
            if memory.with_imm {
                // The payload is in the buffer written to; this completion only reports it.
                self.arrived += 1;
                if let Some(byte) = done.take::<Local>() {
                    test_qp.qp.receive(byte).map_err(|e| test_qp.refused(&e))?;
                }
                continue;
            }
            if let Some(pool) = &mut memory.pool {
                let Some(buffer) = done.take::<Opaque<Local>>() else {
                    continue;
                };
                let from = self.role.other().direction();
                let pattern = |index| Pattern::new(memory.seed, from, index);
                let wrong = pool.check(&buffer, memory.verify.then(|| pattern(index)))?;
                pool.release(buffer);
                if let Some(wrong) = wrong {
                    let mismatch = Mismatch::at(memory.bytes, 0, index, wrong);
                    return Err(Failure::test(format!("{}: {mismatch}", test_qp.peer)));
                }
                let content = if memory.verify {
                    Content::Inverse(pattern(index + 1))
                } else {
                    Content::Nothing
                };
                if let Some(buffer) = pool.take(content) {
                    test_qp.qp.receive(buffer).map_err(|e| test_qp.refused(&e))?;
                }
                self.arrived += 1;
                continue;
            }
            let Some(mut buffer) = done.take::<Local>() else {
                continue;
            };
            if memory.verify {
                if let Some(wrong) = memory.check_message(self.role.other(), index, &mut buffer) {
                    return Err(Failure::test(format!("{}: {wrong}", test_qp.peer)));
                }
                buffer.iter_mut().for_each(|byte| *byte = !*byte);
            }
            self.arrived += 1;
            test_qp.qp.receive(buffer).map_err(|e| test_qp.refused(&e))?;
        }
        Ok(())
    }
}

#[inline]
fn from_buffer(
    batch: &mut Batch<'_, '_>,
    buffer: impl Source,
    target: Option<Remote<WriteAccess>>,
    imm: Option<u32>,
    signal: bool,
) {
    match (target, imm, signal) {
        (Some(target), Some(imm), true) => drop(batch.write(buffer, target).imm(imm).signaled()),
        (Some(target), Some(imm), false) => drop(batch.write(buffer, target).imm(imm)),
        (Some(target), None, true) => drop(batch.write(buffer, target).signaled()),
        (Some(target), None, false) => drop(batch.write(buffer, target)),
        (None, _, true) => drop(batch.send(buffer).signaled()),
        (None, _, false) => drop(batch.send(buffer)),
    }
}

#[inline]
fn inline<'d>(batch: &mut Batch<'_, 'd>, message: &'d [u8], target: Option<Remote<WriteAccess>>, signal: bool) {
    match (target, signal) {
        (Some(target), true) => drop(batch.write_inline(message, target).signaled()),
        (Some(target), false) => drop(batch.write_inline(message, target)),
        (None, true) => drop(batch.send_inline(message).signaled()),
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
