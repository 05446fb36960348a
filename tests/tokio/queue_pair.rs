//! Operations that tasks await.

use std::collections::VecDeque;
use std::time::Duration;

use doorbell::exchange::{Exchange, Listener};
use doorbell::{CompletionStatus, Local, PeerAll, ProtectionDomain, Remote, Success};
use doorbell_test::Context;
use doorbell_tokio::{AsyncQueuePair, OperationError};

use crate::{LIMIT, Result, cancelled, dropped_at, run};

type End = (AsyncQueuePair, Vec<u8>);

/// Two connected ends, and the data of each other's.
async fn pair(left: &ProtectionDomain, right: &ProtectionDomain, data: [&[u8]; 2]) -> Result<(End, End)> {
    let listener = Listener::bind("127.0.0.1:0")?;
    let address = listener.local_addr();
    let accepted = tokio::task::spawn_blocking(move || listener.accept(LIMIT));
    let connected = tokio::task::spawn_blocking(move || Exchange::connect(address, LIMIT));
    let (accepted, connected) = (accepted.await??, connected.await??);
    let (left, right) = (left.clone(), right.clone());
    let left = AsyncQueuePair::over(accepted, left, |qp| qp.max_inline_data(64), data[0]);
    let right = AsyncQueuePair::over(
        connected,
        right,
        |qp| qp.allow_remote_read().allow_remote_write().allow_remote_atomic(),
        data[1],
    );
    let (left, right) = tokio::join!(left, right);
    Ok((left?, right?))
}

#[doorbell_test::test(drop = 0.01, seed = 3)]
fn each_operation_gives_its_buffer_back(a: Context, b: Context) -> Result {
    run(async {
        let (pd, there) = (a.protection_domain()?, b.protection_domain()?);
        let memory = there.register(vec![1; 64], PeerAll)?;
        let key = memory.remote().to_bytes();
        let ((left, data), (right, _)) = pair(&pd, &there, [b"", &key]).await?;
        let remote = Remote::<doorbell::AllAccess>::from_bytes(&data)?;

        let block = left.write(pd.register(vec![2; 64], Local)?, remote).await?;
        assert_eq!(block[..], [2; 64]);
        let word = pd.register(vec![0; 8], Local)?.into_word().map_err(|_| "no word")?;
        let at = remote.word(8).ok_or("no word")?;
        let word = left.fetch_add(word, at, 5).await?;
        assert_eq!(word.get(), u64::from_ne_bytes([2; 8]));
        let sum = word.get() + 5;
        let word = left.compare_swap(word, at, sum, 9).await?;
        assert_eq!(word.get(), sum);
        let block = left.read(block, remote).await?;
        assert_eq!((block[7], &block[8..16]), (2, &9_u64.to_ne_bytes()[..]));

        let first = right.receive(there.register(vec![0; 64], Local)?);
        let second = right.receive(there.register(vec![0; 64], Local)?);
        let third = right.receive(there.register(vec![0; 64], Local)?);
        let sends = (left.send_inline(b"hello"), left.send(block));
        let write = left.write_imm(pd.register(vec![3; 8], Local)?, remote, 77);
        // Awaited in another order than posted.
        let (success, _) = third.await?;
        assert_eq!(success, Success::ReceiveWrite { len: 8, imm: 77 });
        let (success, message) = first.await?;
        assert_eq!(success, Success::Receive { len: 5, imm: None });
        assert_eq!(&message[..5], b"hello");
        assert_eq!(second.await?.1[..8], [2; 8]);
        sends.0.await?;
        assert_eq!(sends.1.await?.len(), 64);
        write.await?;
        Ok(())
    })
}

#[doorbell_test::test]
fn many_tasks_use_one_queue_pair(a: Context, b: Context) -> Result {
    run(async {
        let (pd, there) = (a.protection_domain()?, b.protection_domain()?);
        let memory = there.register(vec![0; 8], PeerAll)?;
        let ((left, data), _right) = pair(&pd, &there, [b"", &memory.remote().to_bytes()]).await?;
        let at = Remote::<doorbell::AllAccess>::from_bytes(&data)?
            .word(0)
            .ok_or("no word")?;
        let mut tasks = Vec::new();
        for _ in 0..20 {
            let (left, pd) = (left.clone(), pd.clone());
            tasks.push(tokio::spawn(async move {
                let mut word = pd.register(vec![0; 8], Local)?.into_word().map_err(|_| "no word")?;
                for _ in 0..50 {
                    word = left.fetch_add(word, at, 1).await?;
                }
                Result::Ok(())
            }));
        }
        for task in tasks {
            task.await??;
        }
        let mut sum = [0; 8];
        memory.read_at(0, &mut sum);
        assert_eq!(u64::from_ne_bytes(sum), 1000);
        Ok(())
    })
}

/// An operation of each kind for each of its points: before its first poll, after each of the 200
/// for which it does not sleep, and asleep. At the end their buffers are free; each has had its
/// effect, so that none was free before.
pub(crate) async fn operations_dropped_at_every_point(a: &doorbell::Context, b: &doorbell::Context) -> Result {
    const KINDS: usize = 8;
    const POINTS: usize = 202;
    const LEN: usize = 1024;
    let (pd, there) = (a.protection_domain()?, b.protection_domain()?);
    let memory = there.register(vec![0; KINDS * POINTS * LEN], PeerAll)?;
    let ((left, data), (right, _)) = pair(&pd, &there, [b"", &memory.remote().to_bytes()]).await?;
    let remote = Remote::<doorbell::AllAccess>::from_bytes(&data)?;
    let bytes: Vec<_> = (0..=KINDS * POINTS).flat_map(|round| [round as u8 | 1; LEN]).collect();
    let whole = pd.register(bytes, Local)?;
    let mut buffers: VecDeque<_> = whole.chunks(LEN).collect();
    let mut dropped = [0; KINDS];
    for (round, target) in remote.chunks(LEN as u64).enumerate() {
        let (kind, points) = (round % KINDS, (round / KINDS) as u32);
        let buffer = buffers.pop_front().ok_or("no buffer")?;
        let at = target.word(0).ok_or("no word")?;
        let word = || Result::Ok(left.register(vec![0; 8])?.into_word().map_err(|_| "no word")?);
        let receive = || Result::Ok(right.receive(right.register(vec![0; LEN])?));
        let ended = match kind {
            0 => dropped_at(left.write(buffer, target), points).await.is_some(),
            1 => dropped_at(left.read(buffer, target), points).await.is_some(),
            2 => dropped_at(left.fetch_add(word()?, at, 1), points).await.is_some(),
            3 => dropped_at(left.compare_swap(word()?, at, 0, 2), points).await.is_some(),
            4 => {
                let ended = dropped_at(receive()?, points).await.is_some();
                // Its message comes when it is gone, and this after all that is in flight.
                left.send(buffer).await?;
                ended
            }
            _ => {
                let receive = receive()?;
                let ended = match kind {
                    5 => dropped_at(left.send(buffer), points).await.is_some(),
                    6 => dropped_at(left.send_inline(&buffer[..8]), points).await.is_some(),
                    _ => dropped_at(left.write_imm(buffer, target, 0), points).await.is_some(),
                };
                drop(cancelled(receive, points % 5).await);
                ended
            }
        };
        dropped[kind] += usize::from(!ended);
    }
    // Completes after all others.
    left.read(left.register(vec![0; 8])?, remote).await?;
    // The region's last buffer is the one that was kept.
    let kept = buffers.pop_front().ok_or("no buffer")?;
    kept.into_memory().map_err(|_| "a buffer is still lent")?;
    for round in 0..KINDS * POINTS {
        let mut found = [0; LEN];
        memory.read_at(round * LEN, &mut found);
        let mut expected = [0; LEN];
        match round % KINDS {
            0 | 7 => expected = [round as u8 | 1; LEN],
            2 => expected[..8].copy_from_slice(&1_u64.to_ne_bytes()),
            3 => expected[..8].copy_from_slice(&2_u64.to_ne_bytes()),
            _ => {}
        }
        assert!(found == expected, "round {round}");
    }
    println!("dropped: {dropped:?}");
    assert_eq!(dropped[4], POINTS, "a receive without a message has ended");
    Ok(())
}

#[doorbell_test::test]
fn failures_give_the_buffers_back(a: Context, b: Context) -> Result {
    run(async {
        let (pd, there) = (a.protection_domain()?, b.protection_domain()?);
        let memory = there.register(vec![0; 64], PeerAll)?;
        let ((left, data), right) = pair(&pd, &there, [b"", &memory.remote().to_bytes()]).await?;
        let remote = Remote::<doorbell::AllAccess>::from_bytes(&data)?;

        // A full queue: the 129th is refused.
        let receives: Vec<_> = (0..128)
            .map(|_| Ok(left.receive(pd.register(vec![0; 8], Local)?)))
            .collect::<Result<_>>()?;
        let refused = left.receive(pd.register(vec![0; 8], Local)?).await;
        assert!(matches!(refused, Err(OperationError::Rejected(_))), "{refused:?}");

        drop(memory);
        match left.write(pd.register(vec![0; 64], Local)?, remote).await {
            Err(OperationError::Failed { error, mut buffers }) => {
                assert_eq!(error.status, CompletionStatus::RemoteAccess);
                assert_eq!(buffers.take::<Local>().map(|buffer| buffer.len()), Some(64));
            }
            other => panic!("{other:?}"),
        }
        // A task that waits for a message learns that the queue pair has failed.
        let flushed = receives.into_iter().next().ok_or("none")?.await;
        assert!(matches!(flushed, Err(OperationError::Failed { .. })), "{flushed:?}");
        drop(right);
        Ok(())
    })
}

#[doorbell_test::test]
fn a_receive_ends_when_the_peer_is_gone(a: Context, b: Context) -> Result {
    run(async {
        let pd = a.protection_domain()?;
        let ((left, _), right) = pair(&pd, &b.protection_domain()?, [b"", b""]).await?;
        let receive = tokio::spawn(left.receive(pd.register(vec![0; 8], Local)?));
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop(right);
        let gone = receive.await?;
        assert!(matches!(gone, Err(OperationError::PeerGone(_))), "{gone:?}");
        Ok(())
    })
}

/// The device retries it for seconds, while the task has other things to do.
#[doorbell_test::test]
fn a_request_to_a_peer_that_is_gone_does_not_block_its_task(a: Context, b: Context) -> Result {
    run(async {
        let (pd, there) = (a.protection_domain()?, b.protection_domain()?);
        let memory = there.register(vec![0; 64], PeerAll)?;
        let ((left, data), right) = pair(&pd, &there, [b"", &memory.remote().to_bytes()]).await?;
        let remote = Remote::<doorbell::AllAccess>::from_bytes(&data)?;
        drop(right);
        tokio::select! {
            biased;
            ended = left.write(pd.register(vec![0; 64], Local)?, remote) => Err(format!("{ended:?}").into()),
            () = tokio::time::sleep(Duration::from_millis(100)) => Ok(()),
        }
    })
}
