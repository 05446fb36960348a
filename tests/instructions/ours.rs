//! `instructions ROW ITERATIONS`: this toolkit's column of `cargo xtask instructions`. Only
//! functions named `measure_` are counted; the device is `provider.c`.

#![forbid(unsafe_code)]

use std::hint::black_box;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};
use doorbell_verbs::{
    Buffer, BufferPool, CompletionError, CompletionQueue, Context, CqKind, Endpoint, Gid, Library, Lid, Local, Mtu,
    PostError, Psn, Qpn, QueuePair, ReliableConnection, Remote, WrPost, WriteAccess,
};

/// As in the C columns.
const DEPTH: u32 = 128;
const BATCH: usize = 16;
const BYTES: usize = 64;

type Target = Remote<WriteAccess>;

#[inline(never)]
fn measure_write(qp: &mut QueuePair, buffer: Buffer, remote: &Target) -> Result<(), PostError> {
    qp.write(buffer, *remote)
}

#[inline(never)]
fn measure_inline(qp: &mut QueuePair, bytes: &[u8], remote: &Target) -> Result<(), PostError> {
    qp.write_inline(bytes, *remote)
}

#[inline(never)]
fn measure_batch(qp: &mut QueuePair, pool: &mut BufferPool, remote: &Target) -> Result<(), PostError> {
    qp.post(|batch| {
        for buffer in pool.drain(BATCH) {
            batch.write(buffer, *remote);
        }
    })
}

#[inline(never)]
fn measure_write_wr(
    qp: &mut QueuePair<ReliableConnection, WrPost>,
    buffer: Buffer,
    remote: &Target,
) -> Result<(), PostError> {
    qp.write(buffer, *remote)
}

#[inline(never)]
fn measure_inline_wr(
    qp: &mut QueuePair<ReliableConnection, WrPost>,
    bytes: &[u8],
    remote: &Target,
) -> Result<(), PostError> {
    qp.write_inline(bytes, *remote)
}

#[inline(never)]
fn measure_batch_wr(
    qp: &mut QueuePair<ReliableConnection, WrPost>,
    pool: &mut BufferPool,
    remote: &Target,
) -> Result<(), PostError> {
    qp.post(|batch| {
        for buffer in pool.drain(BATCH) {
            batch.write(buffer, *remote);
        }
    })
}

#[inline(never)]
fn measure_receive(qp: &mut QueuePair, buffer: Buffer) -> Result<(), PostError> {
    qp.receive(buffer)
}

#[inline(never)]
fn measure_list(qp: &mut QueuePair, pool: &mut BufferPool) -> Result<(), PostError> {
    qp.post_receives(|batch| {
        for buffer in pool.drain(BATCH) {
            batch.receive(buffer);
        }
    })
}

#[inline(never)]
fn measure_drain<Q: CqKind>(cq: &mut CompletionQueue<Q>, pool: &mut BufferPool) -> bool {
    let Ok(completions) = cq.poll() else { return false };
    let drained = completions.try_for_each(|done| {
        done.check()?;
        if let Some(buffer) = done.into_buffer() {
            pool.push(buffer);
        }
        Ok::<_, CompletionError>(())
    });
    drained.is_ok()
}

fn main() -> ExitCode {
    match run(std::env::args().skip(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(mut arguments: impl Iterator<Item = String>) -> Result<()> {
    let row = arguments.next().context("which row?")?;
    let iterations: u64 = arguments.next().context("how many iterations?")?.parse()?;
    let context = Library::system()?.open("stub0")?;
    if row.ends_with("_ex") {
        repeat(
            &row,
            iterations,
            &context,
            context.extended_completion_queue(4 * DEPTH).create()?,
        )
    } else {
        repeat(&row, iterations, &context, context.completion_queue(4 * DEPTH)?)
    }
}

fn repeat<Q: CqKind>(row: &str, iterations: u64, context: &Context, mut cq: CompletionQueue<Q>) -> Result<()> {
    let (mut qp, mut calls, mut pool) = set_up(context, &cq)?;
    let (bytes, remote) = ([0; BATCH], Target::from_raw(0x10000, 0x4321, 1 << 20));
    for _ in 0..iterations {
        let (bytes, remote) = (black_box(&bytes), black_box(&remote));
        match row {
            "write" => measure_write(&mut qp, pool.pop().context("no buffer")?, remote)?,
            "inline" => measure_inline(&mut qp, bytes, remote)?,
            "batch" => measure_batch(&mut qp, &mut pool, remote)?,
            "receive" => measure_receive(&mut qp, pool.pop().context("no buffer")?)?,
            "list" | "drain" | "drain_ex" => measure_list(&mut qp, &mut pool)?,
            "write_wr" => measure_write_wr(&mut calls, pool.pop().context("no buffer")?, remote)?,
            "inline_wr" => measure_inline_wr(&mut calls, bytes, remote)?,
            "batch_wr" => measure_batch_wr(&mut calls, &mut pool, remote)?,
            other => bail!("no row {other}"),
        }
        ensure!(measure_drain(&mut cq, &mut pool), "a completion failed");
    }
    Ok(())
}

fn set_up<Q: CqKind>(
    context: &Context,
    cq: &CompletionQueue<Q>,
) -> Result<(QueuePair, QueuePair<ReliableConnection, WrPost>, BufferPool)> {
    let pd = context.protection_domain()?;
    let builder = pd
        .queue_pair(cq)
        .max_send_wr(DEPTH)
        .max_recv_wr(DEPTH)
        .max_inline_data(64);
    let (qp, calls) = (builder.clone().rc()?, builder.wr_post().rc()?);
    let peer = Endpoint {
        gid: Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 2]),
        lid: Lid(0),
        qpn: Qpn::truncated(0x77),
        psn: Psn::truncated(0),
        mtu: Mtu::B4096,
        max_dest_rd_atomic: 1,
    };
    let buffers = pd
        .register(vec![0_u8; BYTES * 2 * DEPTH as usize], Local)?
        .chunks(BYTES)
        .collect();
    Ok((qp.connect(&peer)?, calls.connect(&peer)?, buffers))
}
