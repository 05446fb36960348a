//! A key-value store of tasks: one task serves all clients, by one completion queue and one shared
//! receive queue, and clients await their operations. A GET is RDMA READs, without the server's
//! CPU; a short PUT is a SEND, a long one a WRITE with immediate data.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 03_tokio ['soft?drop=0.01']
//! ```

#![forbid(unsafe_code)]

use std::env;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use doorbell::tasks::{AsyncQueuePair, RdmaServer, ServerConfig};
use doorbell::{Buffer, PeerRead, PeerWrite, ProtectionDomain, ReadAccess, Remote, Success, WriteAccess};
use doorbell_examples::{Error, report};
use tokio::task::JoinSet;

const CLIENTS: u32 = 8;
const ROUNDS: usize = 50;
const TIMEOUT: Duration = Duration::from_secs(60);
/// A key is the number of a slot: a version, odd while the rest changes, a length and a value.
const SLOTS: u32 = 64;
const SLOT: usize = 16 + LONGEST;
const LONGEST: usize = 4096;
/// A longer value is written to the client's inbox at the server.
const SHORT: usize = 256;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let device = env::args().nth(1).unwrap_or_else(|| "soft".to_owned());
    let done = tokio::time::timeout(TIMEOUT, demo(&device)).await;
    report(done.unwrap_or_else(|late| Err(late.into())))
}

async fn demo(device: &str) -> Result<(), Error> {
    let (server, clients) = (doorbell::open(device)?, doorbell::open(device)?);
    let server = Server::bind(server.protection_domain()?).await?;
    let address = server.clients.local_addr();
    let server = tokio::spawn(server.serve());
    let mut tasks = JoinSet::new();
    for number in 0..CLIENTS {
        let pd = clients.protection_domain()?;
        tasks.spawn(async move { Client::connect(address, pd).await?.work(number).await });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    server.abort();
    println!("{CLIENTS} clients, {ROUNDS} values of each put and got");
    Ok(())
}

struct Server {
    /// With the inbox of each.
    clients: RdmaServer<Buffer<PeerWrite>>,
    slots: Vec<Buffer<PeerRead>>,
}

impl Server {
    async fn bind(pd: ProtectionDomain) -> Result<Self, Error> {
        let table = pd.register(vec![0; SLOTS as usize * SLOT], PeerRead)?;
        let key = table.remote().to_bytes();
        let config = ServerConfig::default().message(4 + SHORT as u32).receives(16);
        let clients = RdmaServer::bind(
            "127.0.0.1:0",
            pd,
            config,
            |qp| qp.allow_remote_read().allow_remote_write().max_inline_data(1),
            move |pd| {
                let inbox = pd.register(vec![0; LONGEST], PeerWrite)?;
                Ok(([key, inbox.remote().to_bytes()].concat(), inbox))
            },
        );
        Ok(Self {
            clients: clients.await?,
            slots: table.chunks(SLOT).collect(),
        })
    }

    async fn serve(mut self) -> Result<(), Error> {
        loop {
            let message = self.clients.next().await?;
            let stored = match (message.success, message.bytes.split_first_chunk()) {
                (Success::ReceiveWrite { len, imm }, _) => {
                    let mut value = vec![0; len as usize];
                    message.client.state.read_at(0, &mut value);
                    put(&mut self.slots, imm, &value)
                }
                (_, Some((key, value))) => put(&mut self.slots, u32::from_be_bytes(*key), value),
                _ => false,
            };
            message.client.qp.send_inline(&[stored.into()])?;
        }
    }
}

/// Writes as a seqlock does. False for a key that is none.
fn put(slots: &mut [Buffer<PeerRead>], key: u32, value: &[u8]) -> bool {
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
    qp: AsyncQueuePair,
    slots: Vec<Remote<ReadAccess>>,
    inbox: Remote<WriteAccess>,
}

impl Client {
    async fn connect(server: SocketAddr, pd: ProtectionDomain) -> Result<Self, Error> {
        let (qp, keys) = AsyncQueuePair::connect(server, pd, |qp| qp, b"").await?;
        let (table, inbox) = keys.split_at_checked(keys.len() / 2).ok_or("no keys")?;
        let slots = Remote::from_bytes(table)?.chunks(SLOT as u64).collect();
        let inbox = Remote::from_bytes(inbox)?;
        Ok(Self { qp, slots, inbox })
    }

    async fn put(&self, key: u32, value: &[u8]) -> Result<(), Error> {
        let answer = self.qp.receive(self.qp.register(vec![0; 1])?);
        if value.len() <= SHORT {
            let message = [&key.to_be_bytes(), value].concat();
            self.qp.send(self.qp.register(message)?).await?;
        } else {
            let value = self.qp.register(value.to_vec())?;
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
            let before = self.qp.read(self.qp.register(vec![0; 8])?, version);
            let entry = self.qp.read(self.qp.register(vec![0; 8 + LONGEST])?, entry);
            let after = self.qp.read(self.qp.register(vec![0; 8])?, version);
            let (before, entry, after) = tokio::try_join!(before, entry, after)?;
            if before[..] == after[..] && before[7].is_multiple_of(2) {
                let len = u64::from_be_bytes(entry[..8].try_into()?) as usize;
                return Ok(entry[8..][..len.min(LONGEST)].to_vec());
            }
        }
    }

    /// Puts values of its own key, and gets each whole, and those of its neighbour.
    async fn work(&self, number: u32) -> Result<(), Error> {
        let neighbour = (number + 1) % CLIENTS;
        for round in 0..ROUNDS {
            self.put(number, &value(number, round)).await?;
            let (own, other) = (self.get(number).await?, self.get(neighbour).await?);
            let whole = other.is_empty() || other == value(neighbour, other[0].into());
            if own != value(number, round) || !whole {
                return Err(format!("client {number}: not what was put").into());
            }
        }
        let refused = self.put(SLOTS, b"x").await.err();
        refused.map(drop).ok_or("a key that is none was taken".into())
    }
}

/// Begins with the round; each byte depends on its place, too.
fn value(client: u32, round: usize) -> Vec<u8> {
    let byte = |at| (round + at * (3 + client as usize)) as u8;
    (0..1 + round * 79 % LONGEST).map(byte).collect()
}
