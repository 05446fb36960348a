//! The same by the safe API, whose objects are dropped in the order that the device requires.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use doorbell_tests::interop::Channel;
use doorbell_verbs::{
    Completion, CompletionQueue, CompletionStatus, Context, Endpoint, KeyAccess, Library, Local, ProtectionDomain,
    QueuePair, Remote, WindowType, WindowType2, Windowed, WriteAccess,
};
use doorbell_verbs_sys::Api;

const TIMEOUT: Duration = Duration::from_secs(30);
const LEN: usize = 3000;

/// Runs with the windows on this end when `owner`, else on the peer.
pub(crate) fn run(api: &'static Api, device: &str, address: IpAddr, channel: &mut Channel, owner: bool) -> Result<()> {
    let context = Library::new(api).open(device)?;
    dropped_with_its_queue_pair(&context, address, channel, owner).context("a type 2 window by the safe API")
}

fn connect(
    context: &Context,
    address: IpAddr,
    channel: &mut Channel,
) -> Result<(QueuePair, CompletionQueue, ProtectionDomain)> {
    let gids = context.gids(1)?;
    let gid = gids.iter().find(|entry| entry.gid.to_ip() == address);
    let gid = gid.with_context(|| format!("no GID for {address}"))?;
    let pd = context.protection_domain()?;
    let cq = context.completion_queue(16)?;
    let builder = pd.queue_pair(&cq).gid_index(u8::try_from(gid.index)?);
    let prepared = builder.max_send_wr(8).max_recv_wr(8).allow_remote_write().rc()?;
    let peer = Endpoint::from_bytes(&channel.exchange(prepared.endpoint().to_bytes())?)?;
    let qp = prepared.connect(&peer)?;
    channel.barrier()?;
    Ok((qp, cq, pd))
}

fn next<R>(cq: &mut CompletionQueue, take: impl FnOnce(Completion<'_>) -> Result<R>) -> Result<R> {
    let since = Instant::now();
    loop {
        if let Some(done) = cq.poll()?.next() {
            return take(done);
        }
        ensure!(since.elapsed() < TIMEOUT, "no completion after {TIMEOUT:?}");
    }
}

fn bound<K: KeyAccess, T: WindowType>(mut done: Completion<'_>) -> Result<doorbell_verbs::BoundWindow<K, T>> {
    done.result()?;
    done.take_bound_window().context("the window did not come back")
}

/// Writes as the peer, and returns an error status.
fn write(
    (qp, cq, pd): (&mut QueuePair, &mut CompletionQueue, &ProtectionDomain),
    byte: u8,
    to: Remote<WriteAccess>,
) -> Result<Option<CompletionStatus>> {
    let buffer = pd.register(vec![byte; LEN], Local)?;
    qp.post(|batch| drop(batch.write(buffer, to).signaled()))?;
    next(cq, |done| Ok(done.result().err().map(|failure| failure.status)))
}

/// The window is bound, written through, invalidated and bound again before.
fn dropped_with_its_queue_pair(context: &Context, address: IpAddr, channel: &mut Channel, owner: bool) -> Result<()> {
    let (mut qp, mut cq, pd) = connect(context, address, channel)?;
    let nothing = Remote::<WriteAccess>::from_raw(0, 0, 0).to_bytes();
    if !owner {
        for round in [1, 2] {
            let key = Remote::<WriteAccess>::from_bytes(&channel.exchange(nothing)?)?;
            ensure!(
                write((&mut qp, &mut cq, &pd), round, key)?.is_none(),
                "the WRITE of round {round} failed"
            );
            channel.barrier()?;
        }
        return channel.barrier();
    }
    let inbox = pd.register(vec![0; LEN], Windowed)?;
    let mut window = pd.memory_window()?;
    qp.bind(window, &inbox, .., WriteAccess)?;
    let first = next(&mut cq, bound::<WriteAccess, WindowType2>)?;
    channel.exchange(first.remote().to_bytes())?;
    channel.barrier()?;
    let mut bytes = vec![0; LEN];
    inbox.read_at(0, &mut bytes);
    ensure!(bytes == [1; LEN], "memory is not as written");
    qp.invalidate(first)?;
    window = next(&mut cq, |mut done| {
        done.result()?;
        done.take_window().context("the window did not come back")
    })?;
    qp.bind(window, &inbox, .., WriteAccess)?;
    let second = next(&mut cq, bound::<WriteAccess, WindowType2>)?;
    channel.exchange(second.remote().to_bytes())?;
    channel.barrier()?;
    inbox.read_at(0, &mut bytes);
    ensure!(bytes == [2; LEN], "memory is not as written");
    drop(qp);
    drop(second);
    inbox.into_memory()?;
    channel.barrier()
}
