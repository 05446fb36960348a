//! A key-value store of tasks: one task serves all clients, by one completion queue and one shared
//! receive queue, and clients await their operations. A GET is RDMA READs, without the server's
//! CPU; a short PUT is a SEND, a long one a WRITE with immediate data.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 03_tokio ['soft?drop=0.01']
//! ```

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::env;
use std::process::ExitCode;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use doorbell::exchange::Exchange;
use doorbell::tasks::AsyncQueuePair;
use doorbell::{
    Buffer, Context, Local, Notify, PeerRead, PeerWrite, ProtectionDomain, QueueKind, QueuePair, ReadAccess,
    ReliableConnection, Remote, Success, TokioChannel, WithSrq, WriteAccess,
};
use doorbell_examples::{Error, report};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

const CLIENTS: u32 = 8;
const ROUNDS: usize = 50;
const TIMEOUT: Duration = Duration::from_secs(60);
/// A key is the number of a slot: a version, odd while the rest changes, a length and a value.
const SLOTS: u32 = 64;
const SLOT: usize = 16 + LONGEST;
const LONGEST: usize = 4096;
/// A longer value is written to the client's inbox at the server.
const SHORT: usize = 256;
/// Of all clients together: a client that finds none tries again.
const RECEIVES: u32 = 16;

fn main() -> ExitCode {
    let device = env::args().nth(1).unwrap_or_else(|| "soft".to_owned());
    let run = || -> Result<(), Error> {
        let (server, clients) = (doorbell::open(&device)?, doorbell::open(&device)?);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async { tokio::time::timeout(TIMEOUT, demo(server, clients)).await? })
    };
    report(run())
}

async fn demo(server: Context, device: Context) -> Result<(), Error> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let server = tokio::spawn(serve(server, listener));
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..CLIENTS {
        let pd = device.protection_domain()?;
        tasks.spawn(async move { Client::connect(address, pd).await?.work(number).await });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    server.abort();
    println!("{CLIENTS} clients, {ROUNDS} values of each put and got");
    Ok(())
}

/// A client, as the server has it.
struct Peer {
    qp: QueuePair<WithSrq<ReliableConnection>>,
    inbox: Buffer<PeerWrite>,
    /// Its end would say that the server is gone.
    _exchange: Exchange,
}

async fn serve(device: Context, listener: TcpListener) -> Result<(), Error> {
    let pd = device.protection_domain()?;
    let channel = TokioChannel::new(device.completion_channel()?)?;
    let mut cq = device.completion_queue_on(channel.channel(), 1024)?;
    let mut srq = pd.shared_receive_queue(RECEIVES).create()?;
    for buffer in pd.register_chunks(vec![0; RECEIVES as usize * (4 + SHORT)], 4 + SHORT, Local)? {
        srq.receive(buffer)?;
    }
    let table = pd.register(vec![0; SLOTS as usize * SLOT], PeerRead)?;
    let key = table.remote().to_bytes();
    let mut slots: Vec<_> = table.chunks(SLOT).collect();
    let (connected, mut arrivals) = mpsc::unbounded_channel();
    let mut peers = HashMap::new();
    for number in 0.. {
        tokio::select! {
            accepted = listener.accept() => {
                let mut exchange = Exchange::over(accepted?.0.into_std()?, TIMEOUT)?;
                let inbox = pd.register(vec![0; LONGEST], PeerWrite)?;
                let keys = [key, inbox.remote().to_bytes()].concat();
                let qp = pd.queue_pair(&cq).max_send_wr(16).max_inline_data(1).tag(number);
                let qp = qp.allow_remote_read().allow_remote_write().shared_receive_queue(&srq).rc()?;
                let connected = connected.clone();
                tokio::task::spawn_blocking(move || {
                    let (qp, _) = exchange.pair(qp, &keys)?;
                    connected.send((number, Peer { qp, inbox, _exchange: exchange })).map_err(|_| "the server has ended")?;
                    Ok::<_, Error>(())
                });
            }
            Some((number, mut peer)) = arrivals.recv() => {
                // The client waits for it, so that it sends nothing before the server knows it.
                peer.qp.send_inline(&[1])?;
                peers.insert(number, peer);
            }
            completions = channel.completions(&mut cq, Notify::Any) => for mut done in completions? {
                if done.queue() == QueueKind::Send || !done.is_ok() {
                    if !done.is_ok() {
                        peers.remove(&done.tag());
                    }
                    continue;
                }
                let (success, buffer) = (done.result()?, done.take::<Local>().ok_or("no buffer")?);
                if let Some(peer) = peers.get_mut(&done.tag()) {
                    let stored = match success {
                        Success::Receive { len, .. } => put(&mut slots, &buffer[..4], &buffer[4..len as usize]),
                        Success::ReceiveWrite { len, imm } => {
                            let mut value = vec![0; len as usize];
                            peer.inbox.read_at(0, &mut value);
                            put(&mut slots, &imm.to_be_bytes(), &value)
                        }
                        _ => false,
                    };
                    peer.qp.send_inline(&[stored.into()])?;
                }
                srq.receive(buffer)?;
            },
        }
    }
    Ok(())
}

/// Writes as a seqlock does. False for a key that is none.
fn put(slots: &mut [Buffer<PeerRead>], key: &[u8], value: &[u8]) -> bool {
    let key = key.try_into().map_or(SLOTS, u32::from_be_bytes);
    let Some(slot) = slots.get_mut(key as usize) else {
        return false;
    };
    let version = slot[..8].try_into().map_or(0, u64::from_be_bytes);
    slot.store_u64(0, (version + 1).to_be(), Ordering::Relaxed);
    fence(Ordering::Release);
    slot.write_at(8, &(value.len() as u64).to_be_bytes());
    slot.write_at(16, value);
    slot.store_u64(0, (version + 2).to_be(), Ordering::Release);
    true
}

struct Client {
    pd: ProtectionDomain,
    qp: AsyncQueuePair,
    slots: Vec<Remote<ReadAccess>>,
    inbox: Remote<WriteAccess>,
}

impl Client {
    async fn connect(server: std::net::SocketAddr, pd: ProtectionDomain) -> Result<Self, Error> {
        let exchange = tokio::task::spawn_blocking(move || Exchange::connect(server, TIMEOUT)).await??;
        let (qp, keys) = AsyncQueuePair::connect(exchange, pd.clone(), |qp| qp, b"").await?;
        let (table, inbox) = keys.split_at_checked(keys.len() / 2).ok_or("no keys")?;
        let slots = Remote::from_bytes(table)?.chunks(SLOT as u64).collect();
        let client = Self {
            slots,
            inbox: Remote::from_bytes(inbox)?,
            pd,
            qp,
        };
        client.qp.receive(client.buffer(1)?).await?;
        Ok(client)
    }

    fn buffer(&self, len: usize) -> Result<Buffer, Error> {
        Ok(self.pd.register(vec![0; len], Local)?)
    }

    async fn put(&self, key: u32, value: &[u8]) -> Result<(), Error> {
        let answer = self.qp.receive(self.buffer(1)?);
        if value.len() <= SHORT {
            let message = [&key.to_be_bytes(), value].concat();
            self.qp.send(self.pd.register(message, Local)?).await?;
        } else {
            let value = self.pd.register(value.to_vec(), Local)?;
            self.qp.write_imm(value, self.inbox, key).await?;
        }
        match answer.await?.1[0] {
            1 => Ok(()),
            _ => Err(format!("{key}: no such key").into()),
        }
    }

    /// READs the version, the entry and the version again, until nothing was put between.
    async fn get(&self, key: u32) -> Result<Vec<u8>, Error> {
        let (version, entry) = self.slots.get(key as usize).ok_or("no such key")?.split_at(8);
        loop {
            let before = self.qp.read(self.buffer(8)?, version);
            let entry = self.qp.read(self.buffer(8 + LONGEST)?, entry);
            let after = self.qp.read(self.buffer(8)?, version);
            let (before, entry, after) = tokio::try_join!(before, entry, after)?;
            if before[..] == after[..] && before[7].is_multiple_of(2) {
                let len = u64::from_be_bytes(entry[..8].try_into()?) as usize;
                return Ok(entry[8..][..len.min(LONGEST)].to_vec());
            }
        }
    }

    /// Puts values of its own key, and gets them and those of its neighbour: each of one byte.
    async fn work(&self, number: u32) -> Result<(), Error> {
        for round in 0..ROUNDS {
            let value = vec![round as u8; 1 + round * 79 % LONGEST];
            self.put(number, &value).await?;
            if self.get(number).await? != value {
                return Err(format!("client {number}: not what was put").into());
            }
            let other = self.get((number + 1) % CLIENTS).await?;
            if other.windows(2).any(|pair| pair[0] != pair[1]) {
                return Err(format!("client {number}: a torn value").into());
            }
        }
        match self.put(SLOTS, b"x").await {
            Ok(()) => Err("a key that is none was taken".into()),
            Err(_) => Ok(()),
        }
    }
}
