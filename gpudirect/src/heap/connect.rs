//! Making a heap: memory, queue pairs to all ranks, and what they tell each other.

use std::sync::Arc;

use doorbell_cuda::Context as CudaContext;
use doorbell_verbs::{All, CompletionQueue, Context, Endpoint, PreparedQueuePair, ProtectionDomain, Remote};

use super::allocator::Allocator;
use super::region::{Region, Registered, host_words};
use super::{BARRIER, Exchange, HeapError, Shared, SymmetricHeap};
use crate::proxy::{Idle, PeerMemory, Proxy, Queue, Wire};
use crate::words::{WORD, Words};

/// How a [`SymmetricHeap`] is to be.
#[derive(Debug, Clone)]
#[must_use = "nothing is made until connect() is called"]
pub struct HeapBuilder<'a> {
    device: &'a Context,
    bytes: u64,
    signals: u32,
    depth: u32,
    slots: u32,
    place: Where<'a>,
    idle: Idle,
}

#[derive(Debug, Clone, Copy)]
enum Where<'a> {
    Host,
    Pinned(&'a CudaContext),
    Gpu(&'a CudaContext),
}

/// Bytes of an endpoint, and of a key.
const ENDPOINT: usize = 32;
const REMOTE: usize = 24;

impl<'a> HeapBuilder<'a> {
    pub(super) fn new(device: &'a Context) -> Self {
        Self {
            device,
            bytes: 64 << 20,
            signals: 1024,
            depth: 256,
            slots: 256,
            place: Where::Host,
            idle: Idle::default(),
        }
    }

    /// How many bytes each part has, up to 2 GiB: 64 MiB, if nothing is said.
    pub fn bytes(mut self, bytes: u64) -> Self {
        self.bytes = bytes;
        self
    }

    /// How many signals: 1024, if nothing is said. A [`HeapStream`](super::HeapStream) takes some of them.
    pub fn signals(mut self, signals: u32) -> Self {
        self.signals = signals;
        self
    }

    /// How many requests may be under way to each rank: 256, if nothing is said.
    pub fn depth(mut self, requests: u32) -> Self {
        self.depth = requests;
        self
    }

    /// How many puts the host may have asked for that are not taken yet: 256, if nothing is said.
    pub fn slots(mut self, slots: u32) -> Self {
        self.slots = slots;
        self
    }

    /// What the thread does that finds nothing to do.
    pub fn idle(mut self, idle: Idle) -> Self {
        self.idle = idle;
        self
    }

    /// This rank's part lies in the host's memory, where kernels of the device reach it.
    pub fn pinned(mut self, context: &'a CudaContext) -> Self {
        self.place = Where::Pinned(context);
        self
    }

    /// This rank's part lies in the GPU's memory.
    pub fn gpu(mut self, context: &'a CudaContext) -> Self {
        self.place = Where::Gpu(context);
        self
    }

    /// Makes this rank's part, and connects it to all others: each rank calls it, with as many bytes and signals.
    ///
    /// # Errors
    /// [`HeapError::Unlike`], [`HeapError::Exchange`], and what the device or the GPU's driver says. When one rank fails, all do.
    pub fn connect<E: Exchange + ?Sized>(self, exchange: &mut E) -> Result<SymmetricHeap, HeapError> {
        let (rank, ranks) = (exchange.rank(), exchange.ranks());
        if rank >= ranks {
            return Err(HeapError::Peer { peer: rank, ranks });
        }
        // A rank that fails takes part to the end, so that the others hear of it and do not wait.
        let made = self.prepare(rank, ranks);
        let said = made
            .as_ref()
            .map_or_else(|_| vec![Vec::new(); ranks as usize], Prepared::say);
        let heard = exchange.all_to_all(said)?;
        let connected = made.and_then(|made| made.connect(rank, &heard));
        let all = exchange.all_to_all(vec![vec![u8::from(connected.is_ok())]; ranks as usize])?;
        let connected = connected?;
        if let Some(peer) = all.iter().position(|said| said != &[1]) {
            return Err(HeapError::PeerFailed { peer: peer as u32 });
        }
        self.start(connected, rank, ranks)
    }

    /// What can be made before anything is known of the others.
    fn prepare(&self, rank: u32, ranks: u32) -> Result<Prepared, HeapError> {
        let pd = self.device.protection_domain()?;
        let pinned = match self.place {
            Where::Host => None,
            Where::Pinned(context) | Where::Gpu(context) => Some(context),
        };
        // A multiple of a word, wherever it lies, so that parts are alike.
        let bytes = self.bytes.checked_next_multiple_of(WORD as u64).unwrap_or(self.bytes);
        let (data, data_keys) = match self.place {
            Where::Gpu(context) => Region::on_gpu(&pd, context, bytes)?,
            Where::Host | Where::Pinned(_) => Region::on_host(&pd, pinned, bytes)?,
        };
        let words = BARRIER as usize + self.signals as usize;
        let (signals, signal_keys) = host_words(&pd, pinned, words * WORD)?;
        // One for each rank, and the other end of the one to this rank.
        let cq = self
            .device
            .completion_queue((ranks + 1).saturating_mul(self.depth + 1))?;
        let pair = |tag: u32| {
            let builder = pd
                .queue_pair(&cq)
                .send_depth(self.depth)
                .recv_depth(1)
                .max_inline(WORD as u32);
            builder
                .allow_remote_read()
                .allow_remote_write()
                .allow_remote_atomic()
                .tag(u64::from(tag))
                .rc()
        };
        Ok(Prepared {
            pairs: (0..ranks).map(pair).collect::<Result<_, _>>()?,
            // Nothing is posted to it, so none of its completions is ever looked for.
            mirror: pair(rank)?,
            cq,
            pd,
            data,
            data_keys,
            signals,
            signal_keys,
        })
    }

    fn start(&self, connected: Connected, rank: u32, ranks: u32) -> Result<SymmetricHeap, HeapError> {
        let Connected { wire, data, signals } = connected;
        let proxy = Proxy::new(wire).spawn(self.idle)?;
        Ok(SymmetricHeap {
            queue: Queue::open(proxy.door(), self.slots),
            allocator: Allocator::new(data.len()),
            next_signal: BARRIER,
            epoch: 0,
            shared: Arc::new(Shared {
                proxy,
                data,
                signals,
                rank,
                ranks,
            }),
        })
    }
}

/// What is to be connected.
struct Prepared {
    pairs: Vec<PreparedQueuePair>,
    mirror: PreparedQueuePair,
    cq: CompletionQueue,
    pd: ProtectionDomain,
    data: Region,
    data_keys: Registered,
    signals: Words,
    signal_keys: Registered,
}

/// What is left to be started.
struct Connected {
    wire: Wire,
    data: Region,
    signals: Words,
}

impl Prepared {
    /// For each rank: the endpoint that is for it, and the keys.
    fn say(&self) -> Vec<Vec<u8>> {
        let keys = [self.data_keys.remote.to_bytes(), self.signal_keys.remote.to_bytes()].concat();
        let said = |pair: &PreparedQueuePair| [&pair.endpoint().to_bytes(), keys.as_slice()].concat();
        self.pairs.iter().map(said).collect()
    }

    fn connect(self, rank: u32, heard: &[Vec<u8>]) -> Result<Connected, HeapError> {
        let mirror = self.mirror.endpoint();
        let own = self.pairs.get(rank as usize).map(PreparedQueuePair::endpoint);
        let mut links = Vec::with_capacity(self.pairs.len());
        for ((peer, pair), said) in (0..).zip(self.pairs).zip(heard) {
            let (endpoint, memory) = understand(peer, said)?;
            let unlike = memory.data.len() != self.data_keys.remote.len()
                || memory.signals.len() != self.signal_keys.remote.len();
            if unlike {
                return Err(HeapError::Unlike {
                    peer,
                    theirs: memory.data.len(),
                    their_signals: memory.signals.len() / WORD as u64,
                    here: self.data_keys.remote.len(),
                    signals: self.signal_keys.remote.len() / WORD as u64,
                });
            }
            let endpoint = if peer == rank { mirror } else { endpoint };
            links.push((pair.connect(&endpoint)?, memory));
        }
        let mirror = own.map(|own| self.mirror.connect(&own)).transpose()?;
        let local = (self.data_keys.alias, self.data.len());
        let keep = Box::new((mirror, self.data_keys.keep, self.signal_keys.keep));
        Ok(Connected {
            wire: Wire::new(&self.pd, self.cq, links, local, keep)?,
            data: self.data,
            signals: self.signals,
        })
    }
}

/// What a rank has said.
fn understand(peer: u32, said: &[u8]) -> Result<(Endpoint, PeerMemory), HeapError> {
    let nonsense = |what: String| HeapError::Nonsense { peer, what };
    if said.is_empty() {
        return Err(HeapError::PeerFailed { peer });
    }
    let length = || nonsense(format!("{} bytes", said.len()));
    let (endpoint, keys) = said.split_first_chunk::<ENDPOINT>().ok_or_else(length)?;
    let ([data, signals], []) = keys.as_chunks::<REMOTE>() else {
        return Err(length());
    };
    let remote = |bytes| Remote::<All>::from_bytes(bytes).map_err(|error| nonsense(error.to_string()));
    Ok((
        Endpoint::from_bytes(endpoint).map_err(|error| nonsense(error.to_string()))?,
        PeerMemory {
            data: remote(data)?,
            signals: remote(signals)?,
        },
    ))
}
