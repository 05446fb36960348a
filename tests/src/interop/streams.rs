//! Many requests in flight, from both ends at once.

use anyhow::{Context, Result, ensure};
use doorbell_verbs::{Buffer, Local, QueueKind, Success};

use super::end::{DEPTH, End, MARGIN, MAX_LEN, verify};
use super::pattern;

/// Size of each WRITE, READ and SEND; deliberately no multiple of a path MTU.
const PIECE: usize = 60_001;
/// Pieces of the region; its last bytes stay unused.
const PIECES: usize = MAX_LEN / PIECE;
/// How often each piece is written.
const TIMES: u64 = 4;

/// Writes, sends and reads; returns the number of bytes verified here.
pub(super) fn run(end: &mut End) -> Result<u64> {
    let local = end.take_local()?;
    let (body, rest) = local.split_at(PIECES * PIECE);
    let pieces: Vec<_> = body.chunks(PIECE).collect();
    let pieces = write(end, pieces).context("the stream of WRITEs")?;
    let pieces = send(end, pieces).context("the stream of SENDs")?;
    let pieces = read(end, pieces).context("the stream of READs")?;
    let join = |a: Buffer<Local>, b| a.join(b).map_err(|_| anyhow::anyhow!("the pieces are not adjacent"));
    let mut pieces = pieces.into_iter();
    let front = pieces.next().context("there are pieces")?;
    let whole = pieces.chain([rest]).try_fold(front, join)?;
    ensure!(whole.len() == MAX_LEN + MARGIN, "pieces are missing");
    end.put_back(whole);
    Ok(3 * (PIECES * PIECE) as u64)
}

/// Writes every piece several times: requests execute in order, so the last must remain.
fn write(end: &mut End, mut pieces: Vec<Buffer<Local>>) -> Result<Vec<Buffer<Local>>> {
    end.channel.barrier()?;
    for time in 0..TIMES {
        for (i, piece) in pieces.iter_mut().enumerate() {
            pattern::fill(1000 + time, i * PIECE, piece);
        }
        let targets = end.peer.chunks(PIECE as u64);
        end.qp.post(|batch| {
            pieces.drain(..).zip(targets).for_each(|(piece, target)| {
                batch.write(piece, target).signaled();
            })
        })?;
        pieces = collect(end, PIECES, 0, &Success::Write)?;
    }
    end.channel.barrier()?;
    let mut found = vec![0; PIECES * PIECE];
    end.exposed.read_at(0, &mut found);
    verify("what was written", 1000 + TIMES - 1, 0, &found)?;
    Ok(pieces)
}

/// Half of the pieces are sent, the other half receive; several messages are in flight.
fn send(end: &mut End, mut pieces: Vec<Buffer<Local>>) -> Result<Vec<Buffer<Local>>> {
    const { assert!(PIECES <= DEPTH as usize) };
    let receivers = pieces.split_off(PIECES / 2);
    let messages = pieces.len().min(receivers.len());
    let spare = receivers.len() - messages;
    end.qp
        .post_receives(|batch| receivers.into_iter().for_each(|piece| batch.receive(piece)))?;
    for (i, piece) in pieces.iter_mut().enumerate() {
        pattern::fill(2000, i * PIECE, piece);
    }
    end.channel.barrier()?;
    end.qp.post(|batch| {
        for (i, piece) in pieces.drain(..).enumerate() {
            let request = batch.send(piece).signaled();
            if i.is_multiple_of(2) {
                request.imm(i as u32);
            }
        }
        // Consumes the spare receives, so that all buffers are returned.
        (0..spare).for_each(|_| {
            batch.send_inline(&[]).signaled();
        });
    })?;
    let first = end.qp.next_receive() - (messages + spare) as u64;
    let mut sent = Vec::new();
    let mut received = Vec::new();
    end.wait(
        messages + spare,
        messages + spare,
        |queue, sequence, success, mut buffers| {
            let piece = buffers.take::<Local>();
            if queue == QueueKind::Send {
                sent.extend(piece);
                return Ok(());
            }
            let i = (sequence - first) as usize;
            let piece = piece.context("a receive gave no buffer back")?;
            let len = if i < messages { PIECE } else { 0 };
            let imm = (i < messages && i.is_multiple_of(2)).then_some(i as u32);
            ensure!(
                success == Success::Receive { len: len as u32, imm },
                "message {i} came as {success:?}"
            );
            verify("a message", 2000, i * PIECE, &piece[..len])?;
            received.push(piece);
            Ok(())
        },
    )?;
    sent.append(&mut received);
    Ok(sent)
}

fn read(end: &mut End, pieces: Vec<Buffer<Local>>) -> Result<Vec<Buffer<Local>>> {
    let mut bytes = vec![0; PIECES * PIECE];
    pattern::fill(3000, 0, &mut bytes);
    end.exposed.write_at(0, &bytes);
    end.channel.barrier()?;
    let sources = end.peer.chunks(PIECE as u64);
    end.qp.post(|batch| {
        pieces.into_iter().zip(sources).for_each(|(piece, source)| {
            batch.read(piece, source).signaled();
        })
    })?;
    let pieces = collect(end, PIECES, 0, &Success::Read)?;
    for (i, piece) in pieces.iter().enumerate() {
        verify("what was read", 3000, i * PIECE, piece)?;
    }
    end.channel.barrier()?;
    Ok(pieces)
}

/// Waits for requests that complete with `expected`, and returns their buffers in posting order.
fn collect(end: &mut End, sends: usize, receives: usize, expected: &Success) -> Result<Vec<Buffer<Local>>> {
    let mut pieces = Vec::new();
    end.wait(sends, receives, |_, _, success, mut buffers| {
        ensure!(success == *expected, "completed as {success:?}");
        pieces.push(buffers.take().context("a completion gave no buffer back")?);
        Ok(())
    })?;
    Ok(pieces)
}
