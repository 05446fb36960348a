//! Byte streams.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Duration;

use doorbell::exchange::Exchange;
use doorbell::{CompletionQueue, Local, QueuePair};
use doorbell_test::Context;
use doorbell_tokio::{ConnectError, RdmaListener, RdmaStream, StreamConfig};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};

use crate::{LIMIT, Result, cancelled, run};

pub(crate) async fn pair(a: &Context, b: &Context, config: StreamConfig) -> Result<(RdmaStream, RdmaStream)> {
    let mut listener = RdmaListener::bind("127.0.0.1:0", a.protection_domain()?, config.clone()).await?;
    let client = RdmaStream::connect(listener.local_addr(), b.protection_domain()?, config);
    let (server, client) = tokio::join!(listener.accept(), client);
    Ok((server?, client?))
}

pub(crate) fn small() -> StreamConfig {
    StreamConfig::default().chunk(512).chunks(6).spins(3)
}

pub(crate) fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    std::iter::repeat_with(|| random.u8(..)).take(len).collect()
}

/// Writes all of `bytes` in pieces of random lengths, and ends them.
pub(crate) async fn write_pieces(
    stream: &mut (impl AsyncWrite + Unpin),
    bytes: &[u8],
    seed: u64,
    longest: usize,
) -> io::Result<()> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut rest = bytes;
    while !rest.is_empty() {
        let (piece, later) = rest.split_at(random.usize(1..=longest.min(rest.len())));
        stream.write_all(piece).await?;
        rest = later;
    }
    stream.shutdown().await
}

#[doorbell_test::test(drop = 0.01, seed = 5)]
fn every_byte_arrives_in_both_directions_under_loss(a: Context, b: Context) -> Result {
    run(async {
        let (mut left, right) = pair(&a, &b, StreamConfig::default()).await?;
        let (to_left, to_right) = (random_bytes(1, 700_000), random_bytes(2, 900_000));
        let (mut right_reader, mut right_writer) = tokio::io::split(right);
        let (expected_left, expected_right) = (to_left.clone(), to_right.clone());
        let writer = tokio::spawn(async move { write_pieces(&mut right_writer, &to_left, 3, 40_000).await });
        let reader = tokio::spawn(async move {
            let mut bytes = Vec::new();
            right_reader.read_to_end(&mut bytes).await.map(|_| bytes)
        });
        write_pieces(&mut left, &to_right, 4, 300).await?;
        let mut bytes = Vec::new();
        left.read_to_end(&mut bytes).await?;
        writer.await??;
        assert!(bytes == expected_left, "left has other bytes");
        assert!(reader.await?? == expected_right, "right has other bytes");
        Ok(())
    })
}

#[doorbell_test::test]
fn a_reader_that_does_not_read_holds_the_writer(a: Context, b: Context) -> Result {
    run(async {
        let (mut left, mut right) = pair(&a, &b, small()).await?;
        let mut written = 0;
        let held = async {
            loop {
                written += left.write(&[7; 512]).await?;
            }
        };
        let held: std::result::Result<Result, _> = tokio::time::timeout(Duration::from_millis(300), held).await;
        assert!(held.is_err(), "{held:?}");
        assert_eq!(written, 4 * 512, "six receives, two of them the reserve");
        let mut bytes = vec![0; written];
        right.read_exact(&mut bytes).await?;
        assert_eq!(left.write(&[8; 512]).await?, 512);
        Ok(())
    })
}

#[doorbell_test::test]
fn each_direction_ends_by_itself(a: Context, b: Context) -> Result {
    run(async {
        let (mut left, mut right) = pair(&a, &b, small()).await?;
        left.shutdown().await?;
        assert_eq!(right.read(&mut [0; 8]).await?, 0);
        let error = left.write(b"more").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        right.write_all(b"still open").await?;
        right.shutdown().await?;
        let mut text = String::new();
        left.read_to_string(&mut text).await?;
        assert_eq!(text, "still open");
        Ok(())
    })
}

/// Also with its acknowledgements lost: the peer says over TCP that it has everything.
#[doorbell_test::test(drop = 0.05, seed = 9)]
fn a_dropped_stream_delivers_what_was_written(a: Context, b: Context) -> Result {
    run(async {
        let (mut left, mut right) = pair(&a, &b, StreamConfig::default()).await?;
        let bytes = random_bytes(3, 100_000);
        let expected = bytes.clone();
        let writer = tokio::spawn(async move {
            left.write_all(&bytes).await?;
            drop(left);
            Ok::<_, io::Error>(())
        });
        let mut read = Vec::new();
        right.read_to_end(&mut read).await?;
        writer.await??;
        assert!(read == expected);
        right.shutdown().await?;
        Ok(())
    })
}

#[doorbell_test::test]
fn vectored_and_empty_writes(a: Context, b: Context) -> Result {
    run(async {
        let (mut left, mut right) = pair(&a, &b, small()).await?;
        assert_eq!(left.write(&[]).await?, 0);
        let (head, body) = (vec![1; 100], vec![2; 300]);
        let slices = [IoSlice::new(&head), IoSlice::new(&[]), IoSlice::new(&body)];
        assert_eq!(left.write_vectored(&slices).await?, 400);
        let mut bytes = vec![0; 400];
        right.read_exact(&mut bytes).await?;
        assert_eq!(bytes, [head, body].concat());
        Ok(())
    })
}

#[doorbell_test::test]
fn buffers_are_lent_without_a_copy(a: Context, b: Context) -> Result {
    run(async {
        let (mut left, mut right) = pair(&a, &b, small()).await?;
        let mut kept = Vec::new();
        for round in 0..4 {
            let mut chunk = left.reserve(1 << 20).await?;
            assert_eq!(chunk.len(), 512);
            chunk.fill(round);
            left.send(chunk).await?;
            kept.push(right.read_bytes().await?.ok_or("the end")?);
        }
        // All receives but the reserve are with the program: the peer waits until one is dropped.
        let chunk = left.reserve(10).await?;
        let mut send = pin!(left.send(chunk));
        let early = tokio::time::timeout(Duration::from_millis(100), &mut send).await;
        assert!(early.is_err());
        let rounds: Vec<_> = kept.iter().map(|bytes| (bytes.len(), bytes[511])).collect();
        assert_eq!(rounds, [(512, 0), (512, 1), (512, 2), (512, 3)]);
        // Another task drops them, while this one sleeps.
        let dropper = async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            kept.truncate(1);
        };
        let read = async {
            let bytes = right.read_bytes().await?.ok_or("the end")?;
            Result::Ok(bytes)
        };
        let (sent, bytes, ()) = tokio::join!(send, read, dropper);
        sent?;
        assert_eq!(bytes?.len(), 10);
        drop(right);
        assert_eq!(kept[0][..], [0; 512], "it outlives its stream");
        Ok(())
    })
}

/// The peer waits for the receive, and the stream for the peer: a buffer that another thread
/// drops must wake the stream whenever that happens, also while it is about to sleep.
#[doorbell_test::test]
fn a_buffer_dropped_by_another_thread_is_never_missed(a: Context, b: Context) -> Result {
    const ROUNDS: u32 = 3000;
    run(async {
        let (mut left, mut right) = pair(&a, &b, small().spins(0)).await?;
        let writer = tokio::spawn(async move {
            for _ in 0..ROUNDS {
                left.write_all(&[1; 512]).await?;
            }
            left.shutdown().await
        });
        // Credits return by twos: the next message but one takes a buffer that is dropped.
        let mut kept = std::collections::VecDeque::new();
        let (drops, dropped) = std::sync::mpsc::channel();
        let dropper = std::thread::spawn(move || {
            for (round, bytes) in dropped.into_iter().enumerate() {
                (0..round % 64 * 16).for_each(|_| std::hint::spin_loop());
                drop::<bytes::Bytes>(bytes);
            }
        });
        let mut received = 0;
        while received < ROUNDS {
            if kept.len() == 3
                && let Some(oldest) = kept.pop_front()
            {
                drops.send(oldest)?;
            }
            kept.push_back(right.read_bytes().await?.ok_or("the end")?);
            received += 1;
        }
        drop((kept, drops));
        // The end of the bytes takes a credit, too.
        assert!(right.read_bytes().await?.is_none());
        dropper.join().map_err(|_| "the thread panicked")?;
        Ok(writer.await??)
    })
}

/// Each future is polled 0 to 4 times: after the third it sleeps.
pub(crate) async fn futures_dropped_at_every_point(a: &Context, b: &Context) -> Result {
    let (mut left, mut right) = pair(a, b, small()).await?;
    let bytes = random_bytes(7, 60_000);
    let expected = bytes.clone();
    let writer = tokio::spawn(async move {
        let (mut sent, mut times, mut dropped) = (0, 0, [0_u32; 4]);
        while sent < bytes.len() {
            times = (times + 1) % 5;
            let piece = &bytes[sent..bytes.len().min(sent + 700)];
            if let Some(len) = cancelled(left.write(piece), times).await {
                sent += len?;
                continue;
            }
            dropped[0] += 1;
            let Some(chunk) = cancelled(left.reserve(piece.len()), times).await else {
                dropped[1] += 1;
                continue;
            };
            let mut chunk = chunk?;
            let len = chunk.len();
            chunk.copy_from_slice(&piece[..len]);
            match cancelled(left.send(chunk), times).await {
                Some(done) => {
                    done?;
                    sent += len;
                }
                None => dropped[2] += 1,
            }
        }
        while cancelled(left.shutdown(), times).await.transpose()?.is_none() {
            times = (times + 1) % 5;
            dropped[3] += 1;
        }
        io::Result::Ok(dropped)
    });
    let (mut read, mut times, mut dropped) = (Vec::new(), 0, [0_u32; 2]);
    loop {
        times = (times + 1) % 5;
        let mut piece = [0; 333];
        match cancelled(right.read(&mut piece), times).await {
            Some(len) => match len? {
                0 => break,
                len => read.extend_from_slice(&piece[..len]),
            },
            None => {
                dropped[0] += 1;
                match cancelled(right.read_bytes(), times).await {
                    Some(lent) => read.extend_from_slice(&lent?.unwrap_or_default()),
                    None => dropped[1] += 1,
                }
            }
        }
    }
    let written = writer.await??;
    assert!(read == expected);
    println!("dropped: {written:?} writing, {dropped:?} reading");
    assert!(written[0] >= 200 && dropped.iter().all(|&reads| reads >= 200));
    Ok(())
}

/// A peer by verbs, which says that it has six chunks of 512 bytes.
fn raw_peer(context: &Context, address: std::net::SocketAddr) -> Result<(Exchange, CompletionQueue, QueuePair)> {
    const SIZES: [u8; 8] = [0, 1, 0, 6, 0, 0, 2, 0];
    let pd = context.protection_domain()?;
    let cq = context.completion_queue(32)?;
    let mut qp = pd
        .queue_pair(&cq)
        .max_send_wr(8)
        .max_recv_wr(6)
        .max_inline_data(16)
        .rc()?;
    for _ in 0..6 {
        qp.receive(pd.register(vec![0; 512], Local)?)?;
    }
    let mut exchange = Exchange::connect(address, LIMIT)?;
    let (qp, _) = exchange.pair(qp, &SIZES)?;
    Ok((exchange, cq, qp))
}

type Peer = (Exchange, CompletionQueue, QueuePair);

async fn with_raw_peer(a: &Context, b: Context) -> Result<(RdmaStream, Peer)> {
    let mut listener = RdmaListener::bind("127.0.0.1:0", a.protection_domain()?, small()).await?;
    let address = listener.local_addr();
    let peer = tokio::task::spawn_blocking(move || raw_peer(&b, address));
    let peer = async { peer.await? };
    let (stream, peer) = tokio::try_join!(async { Ok(listener.accept().await?) }, peer)?;
    Ok((stream, peer))
}

#[doorbell_test::test]
fn a_peer_that_is_gone_resets_the_stream_after_its_bytes(a: Context, b: Context) -> Result {
    run(async {
        let (mut stream, (exchange, cq, mut qp)) = with_raw_peer(&a, b).await?;
        qp.post(|batch| {
            batch.send_inline(b"last").imm(0);
        })?;
        let mut bytes = [0; 4];
        stream.read_exact(&mut bytes).await?;
        assert_eq!(&bytes, b"last");
        // A task sleeps, with nothing sent, when the peer ends.
        let reader = tokio::spawn(async move {
            let error = stream.read(&mut [0; 4]).await.unwrap_err();
            (error.kind(), stream)
        });
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop((exchange, qp, cq));
        let (kind, mut stream) = reader.await?;
        assert_eq!(kind, io::ErrorKind::ConnectionReset);
        assert_eq!(stream.write(b"x").await.unwrap_err().kind(), kind);
        Ok(())
    })
}

#[doorbell_test::test]
fn a_peer_that_breaks_the_protocol_ends_the_stream(a: Context, b: Context) -> Result {
    /// Immediate data with more credits than there are, of no stream, and bytes after the end.
    const BROKEN: [(&[u32], &str); 3] = [
        (&[5], "more credits"),
        (&[1 << 20], "immediate data of no stream"),
        (&[1 << 31, 0], "bytes where none may be"),
    ];
    run(async {
        for (messages, reason) in BROKEN {
            let (mut stream, (_exchange, _cq, mut qp)) = with_raw_peer(&a, b.clone()).await?;
            for imm in messages {
                let bytes: &[u8] = if *imm == 1 << 31 { b"" } else { b"x" };
                qp.post(|batch| {
                    batch.send_inline(bytes).imm(*imm);
                })?;
            }
            let error = loop {
                // The end is read before the message after it may be.
                match stream.write(b"y").await {
                    Ok(_) => tokio::task::yield_now().await,
                    Err(error) => break error,
                }
            };
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{reason}");
            assert!(error.to_string().contains(reason), "{error}");
        }
        Ok(())
    })
}

#[doorbell_test::test]
fn a_client_that_says_nothing_delays_no_other(a: Context, b: Context) -> Result {
    run(async {
        let mut listener = RdmaListener::bind("127.0.0.1:0", a.protection_domain()?, small()).await?;
        let address = listener.local_addr();
        let _silent = std::net::TcpStream::connect(address)?;
        let client = RdmaStream::connect(address, b.protection_domain()?, small());
        let (server, client) = tokio::join!(listener.accept(), client);
        let (_server, _client) = (server?, client?);

        let stranger = async {
            let pd = b.protection_domain()?;
            let cq = b.completion_queue(8)?;
            let qp = pd.queue_pair(&cq).max_send_wr(4).max_recv_wr(4).rc()?;
            tokio::task::spawn_blocking(move || Exchange::connect(address, LIMIT)?.pair(qp, b"no sizes").map(drop))
                .await??;
            Result::Ok(())
        };
        let (refused, ()) = (tokio::join!(listener.accept(), stranger).0, ());
        assert!(matches!(refused, Err(ConnectError::NoStream { .. })), "{refused:?}");
        Ok(())
    })
}

/// Not cloned by [`tokio::io::split`]: reads and writes of one task.
#[doorbell_test::test]
fn a_task_that_sleeps_for_both_directions_is_woken_by_either(a: Context, b: Context) -> Result {
    run(async {
        let (mut left, mut right) = pair(&a, &b, small().spins(0)).await?;
        for _ in 0..4 {
            left.write_all(&[1; 512]).await?;
        }
        // `left` can neither write nor read now.
        let mut no_wait = TaskContext::from_waker(Waker::noop());
        assert!(Pin::new(&mut left).poll_write(&mut no_wait, b"x").is_pending());
        let either = poll_fn(|cx| {
            let mut byte = [0; 1];
            let mut into = ReadBuf::new(&mut byte);
            if Pin::new(&mut left).poll_read(cx, &mut into).is_ready() {
                return Poll::Ready("read");
            }
            match Pin::new(&mut left).poll_write(cx, b"x") {
                Poll::Ready(_) => Poll::Ready("written"),
                Poll::Pending => Poll::Pending,
            }
        });
        let other = async {
            tokio::time::sleep(Duration::from_millis(30)).await;
            right.write_all(b"y").await
        };
        let (which, written) = tokio::join!(either, other);
        written?;
        assert_eq!(which, "read");
        Ok(())
    })
}
