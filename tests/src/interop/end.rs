//! One end: its queue pair, its memory, and waiting for completions.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use doorbell_verbs::{
    AllAccess, Buffer, Buffers, CompletionQueue, Context, Endpoint, Local, Memory, Mtu, PeerAll, QueueKind, QueuePair,
    Remote, Success,
};

use super::channel::Channel;
use super::pattern;

pub(super) const MAX_LEN: usize = 1 << 20;
/// Guard bytes behind the longest message, to detect writes past it.
pub(super) const MARGIN: usize = 64;
pub(super) const DEPTH: u32 = 64;
/// The queue pair's timeout and retries end after about half a minute and report their own error.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A connected end.
#[derive(Debug)]
pub struct End {
    pub(super) qp: QueuePair,
    cq: CompletionQueue,
    pub(super) channel: Channel,
    /// The memory exposed to the peer.
    pub(super) exposed: Buffer<PeerAll>,
    pub(super) peer: Remote<AllAccess>,
    /// Source or destination of requests; `None` while one is in flight.
    local: Option<Buffer<Local>>,
}

impl End {
    /// Connects a new queue pair to the peer; fails when the device refuses, or the peer is gone.
    pub fn connect(
        context: &Context,
        gid: u8,
        mtu: Option<Mtu>,
        timeout: Option<u8>,
        mut channel: Channel,
    ) -> Result<Self> {
        let pd = context.protection_domain()?;
        let cq = context.completion_queue(2 * DEPTH)?;
        let mut builder = pd
            .queue_pair(&cq)
            .max_send_wr(DEPTH)
            .max_recv_wr(DEPTH)
            .max_inline_data(64)
            .gid_index(gid)
            .allow_remote_read()
            .allow_remote_write()
            .allow_remote_atomic();
        if let Some(mtu) = mtu {
            builder = builder.mtu(mtu);
        }
        if let Some(exponent) = timeout {
            builder = builder.timeout(exponent);
        }
        let prepared = builder.rc()?;
        // Memory that other processes can map, so that the shared-memory link can copy directly.
        let mut exposed = Memory::shared(MAX_LEN + MARGIN)?;
        exposed.fill(pattern::BACKGROUND);
        let exposed = pd.register(exposed, PeerAll)?;
        let local = pd.register(Memory::shared(MAX_LEN + MARGIN)?, Local)?;
        let peer = Endpoint::from_bytes(&channel.exchange(prepared.endpoint().to_bytes())?)?;
        let theirs = Remote::from_bytes(&channel.exchange(exposed.remote().to_bytes())?)?;
        let qp = prepared.connect(&peer)?;
        channel.barrier()?;
        Ok(Self {
            qp,
            cq,
            channel,
            exposed,
            peer: theirs,
            local: Some(local),
        })
    }

    /// The path MTU in bytes.
    pub fn mtu(&self) -> u32 {
        self.qp.mtu().bytes()
    }

    /// Takes the local buffer, to post or read it; return it with [`put_back`](Self::put_back).
    pub(super) fn take_local(&mut self) -> Result<Buffer<Local>> {
        self.local.take().context("the local buffer is in flight")
    }

    pub(super) fn put_back(&mut self, buffer: Buffer<Local>) {
        self.local = Some(buffer);
    }

    /// Passes that many completions of each queue to `on_completion`, with their numbers.
    pub(super) fn wait(
        &mut self,
        mut sends: usize,
        mut receives: usize,
        mut on_completion: impl FnMut(QueueKind, u64, Success, Buffers) -> Result<()>,
    ) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        while sends + receives > 0 {
            for done in self.cq.poll()? {
                let left = if done.queue() == QueueKind::Send {
                    &mut sends
                } else {
                    &mut receives
                };
                ensure!(*left > 0, "a completion too many: {done:?}");
                *left -= 1;
                let (queue, sequence, success) = (done.queue(), done.sequence(), done.result()?);
                on_completion(queue, sequence, success, done.into_buffers())?;
            }
            if Instant::now() > deadline {
                bail!("{sends} sends and {receives} receives have not completed after {TIMEOUT:?}");
            }
        }
        Ok(())
    }

    pub(super) fn wait_one(&mut self, queue: QueueKind) -> Result<(Success, Buffers)> {
        let mut found = None;
        let (sends, receives) = if queue == QueueKind::Send { (1, 0) } else { (0, 1) };
        self.wait(sends, receives, |_, _, success, buffers| {
            found = Some((success, buffers));
            Ok(())
        })?;
        found.context("one completion was waited for")
    }

    /// Synchronizes with the peer, so that neither end loses the last acknowledgement.
    pub(super) fn finish(mut self) -> Result<()> {
        self.channel.barrier()
    }
}

/// Checks that `bytes` hold the pattern of `round` from `offset` on.
pub(super) fn verify(what: &str, round: u64, offset: usize, bytes: &[u8]) -> Result<()> {
    match pattern::mismatch(round, offset, bytes) {
        None => Ok(()),
        Some((at, found, expected)) => {
            bail!(
                "{what}: byte {} of {} is {found:#04x} instead of {expected:#04x}",
                offset + at,
                bytes.len()
            )
        }
    }
}
