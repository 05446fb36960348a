//! The cost of a shm ring between two busy-polling processes: half a round trip of a small record,
//! and the bandwidth of each copy mode beside memcpy and process_vm_readv(2) alone.
//!
//! `cargo run --release -p doorbell-softroce --example shm_ring`

use std::error::Error;
use std::fs::File;
use std::hint::{black_box, spin_loop};
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use doorbell_softroce::links::shm_ring::segment::{self, SegmentId};
use doorbell_softroce::links::shm_ring::{
    LARGEST, Payload, Received, Receiver, Record, RecordKind, Reference, Referrer, Sender,
};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork};

type Failure = Box<dyn Error>;

const TIME: Duration = Duration::from_millis(300);
/// Bytes of the buffer that messages are taken from.
const BUFFER: usize = 4 << 20;
const HEADER: [u8; 28] = [7; 28];
const REFERRER: Referrer<'static> = Referrer { qpn: 1, keys: &[1] };

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CopyMode {
    Shared,
    Ring,
}

/// A command of the measuring process, in the header of a record.
#[derive(Clone, Copy)]
struct Command {
    mode: CopyMode,
    bytes: usize,
    messages: usize,
}

impl Command {
    fn encode(self) -> [u8; 17] {
        let mut bytes = [self.mode as u8; 17];
        bytes[1..9].copy_from_slice(&(self.bytes as u64).to_ne_bytes());
        bytes[9..].copy_from_slice(&(self.messages as u64).to_ne_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; 17] = bytes.try_into().ok()?;
        let number = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?) as usize);
        let mode = [CopyMode::Shared, CopyMode::Ring][usize::from(bytes[0])];
        Some(Self {
            mode,
            bytes: number(1)?,
            messages: number(9)?,
        })
    }
}

fn send(sender: &mut Sender, header: &[u8], payload: Payload<'_>) -> Result<(), Failure> {
    while !sender.has_space()? {
        spin_loop();
    }
    let kind = RecordKind::Packet;
    Ok(sender.push(&Record { kind, header, payload }, REFERRER)?)
}

fn receive<R>(receiver: &mut Receiver, mut take: impl FnMut(Received<'_>) -> R) -> Result<R, Failure> {
    let mut begin = None;
    for poll in 1_u64.. {
        if let Some(taken) = receiver.pop(&mut take)? {
            return Ok(taken);
        }
        spin_loop();
        // Read seldom enough to cost nothing.
        if poll % (1 << 20) == 0 && begin.get_or_insert_with(Instant::now).elapsed() > Duration::from_secs(10) {
            break;
        }
    }
    Err("the other process says nothing any more".into())
}

/// The other process: echoes small records, and sends the requested messages.
fn serve(mut sender: Sender, mut receiver: Receiver, buffer: &[u8], id: SegmentId) -> Result<(), Failure> {
    let mut inline = vec![0; 1 << 16];
    loop {
        let command = receive(&mut receiver, |record| {
            let len = record.body.len();
            record
                .body
                .copy_to_slice(0, &mut inline[..len])
                .map(|()| (Command::decode(record.header), len, record.header.len()))
        })?;
        let (command, len, header) = command?;
        let command = match command {
            Some(command) => command,
            _ if header == 0 => return Ok(()),
            _ => {
                send(&mut sender, &HEADER, Payload::Inline(&inline[..len]))?;
                continue;
            }
        };
        for message in 0..command.messages {
            let start = message * command.bytes % (BUFFER - command.bytes + 1);
            let message = &buffer[start..start + command.bytes];
            for (index, packet) in message.chunks(LARGEST).enumerate() {
                while !sender.has_space()? {
                    spin_loop();
                }
                let len = packet.len() as u32;
                let reference = match command.mode {
                    CopyMode::Shared => {
                        let offset = (start + index * LARGEST) as u64;
                        Reference::Segment { id, offset, len }
                    }
                    CopyMode::Ring => {
                        let (reference, at) = sender.copy_in(packet.len())?;
                        // SAFETY: as many bytes of the ring, which only the receiver shares, and it
                        // only copies.
                        unsafe { std::ptr::copy_nonoverlapping(packet.as_ptr(), at, packet.len()) };
                        reference
                    }
                };
                send(&mut sender, &HEADER, Payload::Referred(&[reference]))?;
            }
        }
    }
}

fn half_round_trip(sender: &mut Sender, receiver: &mut Receiver, bytes: usize) -> Result<f64, Failure> {
    let payload = vec![1; bytes];
    let mut back = vec![0; bytes];
    let mut best = f64::INFINITY;
    let begin = Instant::now();
    while begin.elapsed() < TIME {
        const ROUNDS: u32 = 2000;
        let start = Instant::now();
        for _ in 0..ROUNDS {
            send(sender, &HEADER, Payload::Inline(&payload))?;
            receive(receiver, |record| record.body.copy_to_slice(0, &mut back))??;
        }
        best = best.min(start.elapsed().as_nanos() as f64 / f64::from(ROUNDS) / 2.0);
    }
    Ok(best)
}

/// From a command to the end of the copy of one referenced payload.
fn answer(sender: &mut Sender, receiver: &mut Receiver, mode: CopyMode, bytes: usize) -> Result<f64, Failure> {
    let mut target = vec![0_u8; bytes];
    let mut best = f64::INFINITY;
    let messages = 1;
    let command = Command { mode, bytes, messages }.encode();
    let begin = Instant::now();
    while begin.elapsed() < TIME {
        const ROUNDS: u32 = 500;
        let start = Instant::now();
        for _ in 0..ROUNDS {
            send(sender, &command, Payload::Inline(&[]))?;
            receive(receiver, |record| record.body.copy_to_slice(0, &mut target))??;
        }
        best = best.min(start.elapsed().as_nanos() as f64 / f64::from(ROUNDS));
    }
    Ok(best)
}

fn bandwidth(sender: &mut Sender, receiver: &mut Receiver, mode: CopyMode, bytes: usize) -> Result<f64, Failure> {
    let mut target = vec![0_u8; BUFFER];
    let messages = ((1 << 30) / bytes).max(100);
    let command = Command { mode, bytes, messages };
    send(sender, &command.encode(), Payload::Inline(&[]))?;
    let mut begin = Instant::now();
    // The first tenth warms up pages and caches.
    let warm = messages / 10;
    for message in 0..messages {
        if message == warm {
            begin = Instant::now();
        }
        let start = message * bytes % (BUFFER - bytes + 1);
        for packet in target[start..start + bytes].chunks_mut(LARGEST) {
            receive(receiver, |record| record.body.copy_to_slice(0, packet))??;
        }
    }
    black_box(&target);
    Ok(((messages - warm) * bytes) as f64 / begin.elapsed().as_secs_f64())
}

/// Bytes per second of one thread that copies messages of `bytes` with `copy(from, to)`.
fn bandwidth_alone(
    bytes: usize,
    mut copy: impl FnMut(usize, &mut [u8]) -> Result<(), Failure>,
) -> Result<f64, Failure> {
    let mut target = vec![0_u8; BUFFER];
    let mut moved = 0;
    let mut begin = Instant::now();
    for message in 0.. {
        let start = message * bytes % (BUFFER - bytes + 1);
        copy(start, black_box(&mut target[start..start + bytes]))?;
        moved += bytes;
        if message == 100 {
            (begin, moved) = (Instant::now(), 0);
        }
        if message > 100 && begin.elapsed() > TIME {
            break;
        }
    }
    Ok(moved as f64 / begin.elapsed().as_secs_f64())
}

fn main() -> Result<(), Failure> {
    let file = File::from(memfd_create(
        c"shm-ring-example",
        MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING,
    )?);
    file.set_len(BUFFER as u64)?;
    fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK))?;
    let len = NonZeroUsize::new(BUFFER).ok_or("no buffer")?;
    let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a new mapping, which is never unmapped.
    let start = unsafe { mmap(None, len, rights, MapFlags::MAP_SHARED, &file, 0) }?;
    // SAFETY: all of the mapping; neither process of this example writes to it after the fork.
    let buffer = unsafe { std::slice::from_raw_parts_mut(start.as_ptr().cast::<u8>(), BUFFER) };
    buffer.fill(3);
    let segment = segment::of(file.as_fd()).ok_or("the buffer is no segment")?;
    let id = segment.id();

    let (mut sender, there) = Sender::create()?;
    let (other, here) = Sender::create()?;
    // SAFETY: this process has one thread, so that the child may run any code.
    let child = match unsafe { fork() }? {
        ForkResult::Parent { child } => child,
        ForkResult::Child => {
            let mut other = other;
            other.announce(id);
            let receiver = Receiver::attach(there)?;
            return serve(other, receiver, buffer, id);
        }
    };
    let mut receiver = Receiver::attach(here)?;
    receiver.add_segment(id, segment.fd().try_clone_to_owned()?)?;

    println!("half a round trip of a record, best of many rounds:");
    for bytes in [0, 64, 128, 192, 256, 512, 1024, 2048, 4096, 8192] {
        println!(
            "{bytes:>8} B {:>8.0} ns",
            half_round_trip(&mut sender, &mut receiver, bytes)?
        );
    }
    println!("a round trip whose way back is referred to, ns:   shared     ring");
    for bytes in [64, 256, 1024, 2048, 4096, 8192, 16384, 65536] {
        print!("{bytes:>48} B");
        for mode in [CopyMode::Shared, CopyMode::Ring] {
            print!(" {:>8.0}", answer(&mut sender, &mut receiver, mode, bytes)?);
        }
        println!();
    }
    println!("bandwidth, GB/s:   memcpy  vm_readv   shared     ring");
    for bytes in [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20] {
        let memcpy = bandwidth_alone(bytes, |at, to| {
            to.copy_from_slice(&buffer[at..at + to.len()]);
            Ok(())
        })?;
        let readv = bandwidth_alone(bytes, |at, to| {
            let base = buffer.as_ptr().addr() + at;
            let remote = RemoteIoVec { base, len: to.len() };
            process_vm_readv(child, &mut [std::io::IoSliceMut::new(to)], &[remote])?;
            Ok(())
        })?;
        print!("{:>12} KiB {:>9.2} {:>9.2}", bytes >> 10, memcpy / 1e9, readv / 1e9);
        for mode in [CopyMode::Shared, CopyMode::Ring] {
            print!(" {:>8.2}", bandwidth(&mut sender, &mut receiver, mode, bytes)? / 1e9);
        }
        println!();
    }
    send(&mut sender, &[], Payload::Inline(&[]))?;
    waitpid(child, None)?;
    Ok(())
}
