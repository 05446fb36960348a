//! A stream of RDMA WRITEs into a peer's memory with credit-based flow control.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 06_stream_writes
//! ```
//!
//! Each WRITE fills a slot of the reader's window and carries its number as immediate data, which
//! wakes the reader; the reader returns a credit for each slot that it has emptied.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use doorbell_examples::{Error, report, soft_pair};
use doorbell_verbs::{
    Buffer, BufferPool, CompletionQueue, Context, Local, PeerWrite, PreparedQueuePair, ProtectionDomain, QueuePair,
    Remote, Success, WriteAccess,
};

const TIMEOUT: Duration = Duration::from_secs(30);
const CHUNK: usize = 16 << 10;
/// How many chunks may be in flight or unread.
const SLOTS: u32 = 8;
const CHUNKS: u32 = 1024;

fn main() -> ExitCode {
    report(run())
}

/// `SLOTS` receives are posted: for credits, or consumed by WRITEs with immediate data.
struct End {
    pd: ProtectionDomain,
    cq: CompletionQueue,
    qp: PreparedQueuePair,
}

impl End {
    fn prepare(context: &Context) -> Result<Self, Error> {
        let pd = context.protection_domain()?;
        let channel = context.completion_channel()?;
        let cq = context.completion_queue_on(&channel, 4 * SLOTS)?;
        let builder = pd.queue_pair(&cq).max_send_wr(2 * SLOTS).max_recv_wr(SLOTS);
        let mut qp = builder.allow_remote_write().rc()?;
        // No message here has a payload; a receive has a buffer all the same.
        let receives = pd.register_chunks(vec![0; SLOTS as usize], 1, Local)?;
        qp.post_receives(|batch| receives.for_each(|byte| batch.receive(byte)))?;
        Ok(Self { pd, cq, qp })
    }
}

fn run() -> Result<(), Error> {
    let (writing, reading) = soft_pair()?;
    let (writer, reader) = (End::prepare(&writing)?, End::prepare(&reading)?);
    let window = reader.pd.register(vec![0; CHUNK * SLOTS as usize], PeerWrite)?;
    // In place of an exchange over TCP: see 04_exchange.
    let (to_writer, to_reader, key) = (writer.qp.endpoint(), reader.qp.endpoint(), window.remote());
    let mut sink = reader.qp.connect(&to_writer)?;
    let mut source = writer.qp.connect(&to_reader)?;

    thread::scope(|scope| {
        let (mut cq, pd) = (writer.cq, writer.pd);
        let stream = scope.spawn(move || write(&mut source, &mut cq, &pd, key));
        let mut cq = reader.cq;
        read(&mut sink, &mut cq, &window)?;
        stream.join().map_err(|_| "the writer panicked")?
    })?;
    println!("{CHUNKS} chunks of {CHUNK} bytes through a window of {SLOTS}, each as it was written");
    Ok(())
}

fn byte(number: u32) -> u8 {
    (number % 251) as u8
}

fn write(
    qp: &mut QueuePair,
    cq: &mut CompletionQueue,
    pd: &ProtectionDomain,
    window: Remote<WriteAccess>,
) -> Result<(), Error> {
    let slots: Vec<_> = window.chunks(CHUNK as u64).collect();
    let mut free = BufferPool::from_iter(pd.register_chunks(vec![0; CHUNK * SLOTS as usize], CHUNK, Local)?);
    let (mut next, mut credits) = (0, SLOTS);
    // Done when every slot is empty again, so that the reader has all.
    while next < CHUNKS || credits < SLOTS {
        let ready = credits.min(CHUNKS - next).min(free.count() as u32);
        let mut chunks = Vec::new();
        for number in next..next + ready {
            let mut chunk = free.pop().ok_or("a buffer is missing")?;
            chunk.fill(byte(number));
            chunks.push((number, chunk));
        }
        if ready > 0 {
            // One doorbell for all, and one signaled completion, which confirms those before it.
            qp.post(|batch| {
                for (number, chunk) in chunks {
                    let slot = slots[(number % SLOTS) as usize];
                    batch
                        .write(chunk, slot)
                        .imm(number)
                        .signaled_if(number + 1 == next + ready);
                }
            })?;
            (next, credits) = (next + ready, credits - ready);
        }
        let mut any = false;
        for mut done in cq.wait(TIMEOUT)? {
            any = true;
            match done.result()? {
                Success::Receive { imm: Some(emptied), .. } => {
                    credits += emptied;
                    let byte: Buffer = done.take().ok_or("a receive gives its buffer back")?;
                    qp.receive(byte)?;
                }
                _ => free.push(done.take().ok_or("a WRITE gives its buffer back")?),
            }
        }
        if !any {
            return Err("the reader does not read".into());
        }
    }
    Ok(())
}

fn read(qp: &mut QueuePair, cq: &mut CompletionQueue, window: &Buffer<PeerWrite>) -> Result<(), Error> {
    let mut chunk = vec![0; CHUNK];
    let (mut next, mut unacknowledged) = (0, 0);
    // Dropping the queue pair before the writer's device has the last credit would flush it.
    while next < CHUNKS || unacknowledged > 0 {
        let (mut any, mut emptied) = (false, 0);
        for mut done in cq.wait(TIMEOUT)? {
            any = true;
            match done.result()? {
                Success::ReceiveWrite { imm: number, .. } => {
                    // The slot is filled, and not written again before its credit is returned.
                    window.read_at((number % SLOTS) as usize * CHUNK, &mut chunk);
                    if number != next || chunk.iter().any(|&found| found != byte(number)) {
                        return Err(format!("chunk {number} in place of {next}, or not as it was written").into());
                    }
                    let byte: Buffer = done.take().ok_or("a receive gives its buffer back")?;
                    qp.receive(byte)?;
                    (next, emptied) = (next + 1, emptied + 1);
                }
                _ => unacknowledged -= 1,
            }
        }
        if !any {
            return Err("the writer stopped sending".into());
        }
        if emptied > 0 {
            // The receives are posted again already, ready for the WRITEs that the credits allow.
            qp.post(|batch| {
                batch.send_inline(&[]).imm(emptied).signaled();
            })?;
            unacknowledged += 1;
        }
    }
    Ok(())
}
