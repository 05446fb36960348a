//! The machine's own limits, which `doorbell limits` prints as ceilings for the device.
//!
//! Each function measures for about the given time with the device's means (link, copies, CRC) but
//! no protocol: the device's result beside it is the cost of the protocol.
//!
//! No model: each flag has one writer and one reader thread.

mod idle;
mod process;
#[cfg(test)]
mod tests;

use crossbeam_utils::CachePadded;
use doorbell_roce_proto::{Instant as LinkTime, icrc::crc32};
use doorbell_softroce::OpenError;
use doorbell_softroce::links::udp::{BindError, Envelope, Link, MAX_RUN, RxBatch, TxBatch};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::hint::{black_box, spin_loop};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

pub use idle::{Idle, idle};
pub use process::process_vm_writev;

/// A measured bandwidth.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Bandwidth {
    /// Payload bytes that arrived, per second.
    pub bytes_per_s: f64,
}

impl Bandwidth {
    fn new(bytes: u64, time: Duration) -> Self {
        Self {
            bytes_per_s: bytes as f64 / time.as_secs_f64(),
        }
    }
}

/// A measured latency.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Latency {
    /// Half of a round trip, in nanoseconds.
    pub ns: f64,
}

/// Why a limit cannot be measured here.
#[derive(Debug, thiserror::Error)]
pub enum LimitError {
    /// No socket on the loopback address.
    #[error("no UDP socket on the loopback interface: {0}")]
    Bind(BindError),
    /// The link failed, or the system refused memory, a thread or a process.
    #[error("the system refused a resource that the measurement needs: {0}")]
    Io(io::Error),
    /// Two busy-polling threads need a CPU each.
    #[error("this needs two CPUs, and the process may use one")]
    OneCpu,
    /// Nothing arrived.
    #[error("no datagram arrived over the loopback interface: is it up, and does a firewall drop UDP?")]
    NothingArrived,
    /// No device could be opened.
    #[error("no device could be opened: {0}")]
    Device(OpenError),
    /// The kernel does not let a process write to its own child's memory.
    #[error("process_vm_writev to a child process is forbidden here (seccomp, or Yama's ptrace_scope): {0}")]
    Forbidden(io::Error),
}

impl From<io::Error> for LimitError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Block size of copies, the message size that bandwidth is quoted for.
pub const BLOCK: usize = 1 << 20;

/// Single-threaded memcpy in blocks of 1 MiB between two areas of 64 MiB, more than a second-level
/// cache holds. Each byte copied counts once.
pub fn memcpy(duration: Duration) -> Bandwidth {
    const AREA: usize = 64 << 20;
    let source = vec![1u8; AREA];
    let mut target = vec![2u8; AREA];
    let (mut bytes, start) = (0, Instant::now());
    loop {
        for (to, from) in target.chunks_exact_mut(BLOCK).zip(source.chunks_exact(BLOCK)) {
            to.copy_from_slice(black_box(from));
            black_box(&mut *to);
            bytes += BLOCK as u64;
        }
        let elapsed = start.elapsed();
        if elapsed >= duration {
            return Bandwidth::new(bytes, elapsed);
        }
    }
}

/// Single-threaded memcpy of one block to one other, like a repeated WRITE in the cache.
pub fn memcpy_repeated(duration: Duration, block: usize) -> Bandwidth {
    let source = vec![1u8; block];
    let mut target = vec![2u8; block];
    let (mut bytes, start) = (0, Instant::now());
    loop {
        // Amortizes the clock read.
        for _ in 0..BLOCK.div_ceil(block.max(1)) {
            target.copy_from_slice(black_box(&source));
            black_box(&mut target);
            bytes += block as u64;
        }
        let elapsed = start.elapsed();
        if elapsed >= duration {
            return Bandwidth::new(bytes, elapsed);
        }
    }
}

/// Two threads that busy-poll shared memory and exchange a counter: the core-to-core latency. The
/// median over groups of round trips, so that preemption of a thread does not count.
///
/// # Errors
/// [`LimitError::OneCpu`]; or when there is no second thread.
pub fn shm_pingpong(duration: Duration) -> Result<Latency, LimitError> {
    const GROUP: u64 = 256;
    const END: u64 = u64::MAX;
    if thread::available_parallelism()?.get() < 2 {
        return Err(LimitError::OneCpu);
    }
    let (ping, pong) = (CachePadded::new(AtomicU64::new(0)), CachePadded::new(AtomicU64::new(0)));
    let mut groups = thread::scope(|scope| {
        let echo = || {
            let mut last = 0;
            while last != END {
                let seen = ping.load(Ordering::Acquire);
                if seen == last {
                    spin_loop();
                } else {
                    pong.store(seen, Ordering::Release);
                    last = seen;
                }
            }
        };
        thread::Builder::new()
            .name("pingpong".into())
            .spawn_scoped(scope, echo)?;
        let (mut groups, mut round, start) = (Vec::new(), 0, Instant::now());
        while start.elapsed() < duration || groups.is_empty() {
            let group = Instant::now();
            for _ in 0..GROUP {
                round += 1;
                ping.store(round, Ordering::Release);
                while pong.load(Ordering::Acquire) != round {
                    spin_loop();
                }
            }
            groups.push(group.elapsed());
        }
        ping.store(END, Ordering::Release);
        io::Result::Ok(groups)
    })?;
    groups.sort_unstable();
    let median = groups[groups.len() / 2];
    Ok(Latency {
        ns: median.as_nanos() as f64 / (2 * GROUP) as f64,
    })
}

/// The payload of a datagram, at the largest path MTU.
const PAYLOAD: usize = 4096;
/// With BTH and ICRC, as a MIDDLE packet.
const PACKET: usize = 12 + PAYLOAD + 4;
const RUN_PACKETS: usize = MAX_RUN / PACKET;
/// The most bytes in flight, if the socket has space for them.
const WINDOW: u64 = 512 << 10;

/// Datagrams of 4096 payload bytes from one thread to another over loopback, in GSO runs of 15,
/// with one memcpy (of 1 MiB) and one CRC-32 on each side, and a window so that none is lost.
///
/// # Errors
/// When the loopback interface does not work, or there is no second thread.
pub fn udp_gso(duration: Duration) -> Result<Bandwidth, LimitError> {
    let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let open = || Link::udp(loopback).map_err(LimitError::Bind);
    let (sender, receiver) = (open()?, open()?);
    let window = WINDOW
        .min(receiver.receive_buffer as u64 / 2)
        .max((RUN_PACKETS * PACKET) as u64);
    let shared = Shared {
        received: AtomicU64::new(0),
        end: AtomicBool::new(false),
    };
    let to = receiver.local;
    let (payload, time) = thread::scope(|scope| {
        let receive = || receive_all(receiver, &shared);
        let thread = thread::Builder::new()
            .name("udp_gso".into())
            .spawn_scoped(scope, receive)?;
        let sent = send_for(duration, sender, to, window, &shared);
        shared.end.store(true, Ordering::Release);
        let received = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        received.and(sent)
    })?;
    if payload == 0 {
        return Err(LimitError::NothingArrived);
    }
    Ok(Bandwidth::new(payload, time))
}

struct Shared {
    received: AtomicU64,
    end: AtomicBool,
}

fn seal(packet: &mut [u8], _: &Envelope) {
    if let Some((body, check)) = packet.split_last_chunk_mut::<4>() {
        *check = crc32(body).to_le_bytes();
    }
}

fn is_intact(packet: &[u8]) -> bool {
    packet
        .split_last_chunk::<4>()
        .is_some_and(|(body, check)| crc32(body).to_le_bytes() == *check)
}

/// Keeps `window` bytes in flight; returns what was received and the time it took.
fn send_for(
    duration: Duration,
    mut link: Link,
    to: SocketAddr,
    window: u64,
    shared: &Shared,
) -> io::Result<(u64, Duration)> {
    /// A running receiver has received something by then.
    const YIELD_AFTER: Duration = Duration::from_micros(100);
    /// After this long without progress, packets in flight count as lost.
    const LOST: Duration = Duration::from_millis(10);
    /// Additional time while nothing arrives: on a busy machine the receiver may not have run yet.
    const FIRST: Duration = Duration::from_secs(2);
    let mut batch = TxBatch::new(link.local, seal);
    let source = vec![0x5au8; BLOCK];
    let mut blocks = source.chunks_exact(PAYLOAD).cycle();
    let (mut sent, mut progress) = (0, (0, Instant::now()));
    let start = Instant::now();
    loop {
        let received = shared.received.load(Ordering::Acquire);
        let end = if received == 0 { duration + FIRST } else { duration };
        if start.elapsed() >= end {
            break;
        }
        if progress.0 != received {
            progress = (received, Instant::now());
        } else if progress.1.elapsed() > LOST {
            (sent, progress.1) = (received, Instant::now());
        }
        if sent + (RUN_PACKETS * PAYLOAD) as u64 > received + window {
            if progress.1.elapsed() > YIELD_AFTER {
                // The other thread may be waiting for this CPU.
                thread::yield_now();
            }
            spin_loop();
            continue;
        }
        for payload in blocks.by_ref().take(RUN_PACKETS) {
            let Some(mut slot) = batch.slot() else {
                break;
            };
            slot[..12].fill(0);
            slot[12..12 + PAYLOAD].copy_from_slice(payload);
            slot.send(PACKET, to);
            sent += PAYLOAD as u64;
        }
        link.tx.transmit(&mut batch, LinkTime::ZERO)?;
        if !batch.is_empty() {
            // A timeout is a lost datagram.
            let mut socket = [PollFd::new(link.files.as_fd(), PollFlags::POLLIN | PollFlags::POLLOUT)];
            poll(&mut socket, PollTimeout::try_from(LOST).unwrap_or(PollTimeout::ZERO))?;
        }
    }
    Ok((shared.received.load(Ordering::Acquire), start.elapsed()))
}

fn receive_all(mut link: Link, shared: &Shared) -> io::Result<()> {
    /// A running sender has sent something after so many empty polls, some 300 ns each.
    const YIELD_AFTER: u32 = 256;
    let mut batch = RxBatch::new(link.local);
    let mut target = vec![0u8; BLOCK];
    let (mut at, mut empty) = (0, 0_u32);
    while !shared.end.load(Ordering::Acquire) {
        if link.rx.receive(&mut batch)? == 0 {
            empty = empty.saturating_add(1);
            if empty > YIELD_AFTER {
                thread::yield_now();
            }
            spin_loop();
            continue;
        }
        empty = 0;
        let mut payload = 0;
        for datagram in batch.datagrams() {
            if datagram.bytes.len() == PACKET && is_intact(datagram.bytes) {
                target[at..at + PAYLOAD].copy_from_slice(&datagram.bytes[12..12 + PAYLOAD]);
                at = (at + PAYLOAD) % BLOCK;
                payload += PAYLOAD as u64;
            }
        }
        black_box(&mut target);
        shared.received.fetch_add(payload, Ordering::Release);
    }
    Ok(())
}
