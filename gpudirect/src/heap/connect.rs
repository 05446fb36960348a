//! Construction of a heap: registration, queue pairs, and the exchange of their attributes.

use std::sync::Arc;

use doorbell_cuda::Context as CudaContext;
use doorbell_verbs::{AllAccess, CompletionQueue, Context, Endpoint, PreparedQueuePair, ProtectionDomain, Remote};

use super::allocator::Allocator;
use super::region::{Region, Registered, host_words};
use super::{BARRIER_SIGNALS, Exchange, HeapError, HeapState, SymmetricHeap};
use crate::proxy::{Connections, IdlePolicy, PeerMemory, Proxy, Queue};
use crate::words::{SharedWords, WORD};

/// Options of a [`SymmetricHeap`].
#[derive(Debug, Clone)]
#[must_use = "nothing is made until connect() is called"]
pub struct HeapBuilder<'a> {
    device: &'a Context,
    bytes: u64,
    signals: u32,
    depth: u32,
    slots: u32,
    placement: Placement<'a>,
    idle: IdlePolicy,
}

#[derive(Debug, Clone, Copy)]
enum Placement<'a> {
    Host,
    Pinned(&'a CudaContext),
    Gpu(&'a CudaContext),
}

const ENDPOINT_BYTES: usize = 32;
const REMOTE_KEY_BYTES: usize = 24;

impl<'a> HeapBuilder<'a> {
    pub(super) fn new(device: &'a Context) -> Self {
        Self {
            device,
            bytes: 64 << 20,
            signals: 1024,
            depth: 256,
            slots: 256,
            placement: Placement::Host,
            idle: IdlePolicy::default(),
        }
    }

    /// Bytes of each rank's part, up to 2 GiB; 64 MiB by default.
    pub fn bytes(mut self, bytes: u64) -> Self {
        self.bytes = bytes;
        self
    }

    /// The number of signals, 1024 by default; each [`HeapStream`](super::HeapStream) uses some.
    pub fn signals(mut self, signals: u32) -> Self {
        self.signals = signals;
        self
    }

    /// The maximum number of outstanding requests per rank, 256 by default.
    pub fn depth(mut self, requests: u32) -> Self {
        self.depth = requests;
        self
    }

    /// Slots of the host's queue (puts not yet consumed by the proxy), 256 by default.
    pub fn slots(mut self, slots: u32) -> Self {
        self.slots = slots;
        self
    }

    /// The idle policy of the proxy thread.
    pub fn idle(mut self, idle: IdlePolicy) -> Self {
        self.idle = idle;
        self
    }

    /// Places this rank's part in pinned host memory, accessible to kernels of the device.
    pub fn pinned(mut self, context: &'a CudaContext) -> Self {
        self.placement = Placement::Pinned(context);
        self
    }

    /// Places this rank's part in GPU memory.
    pub fn gpu(mut self, context: &'a CudaContext) -> Self {
        self.placement = Placement::Gpu(context);
        self
    }

    /// Allocates this rank's part and connects it to all others. Collective: each rank calls it
    /// with the same bytes and signals.
    ///
    /// # Errors
    /// [`HeapError::SizeMismatch`], [`HeapError::Exchange`], device and driver errors; if one
    /// rank fails, all do.
    pub fn connect<E: Exchange + ?Sized>(self, exchange: &mut E) -> Result<SymmetricHeap, HeapError> {
        let (rank, ranks) = (exchange.rank(), exchange.ranks());
        if rank >= ranks {
            return Err(HeapError::Peer { peer: rank, ranks });
        }
        // A failing rank completes the exchanges, so that the others learn of its failure.
        let prepared = self.prepare(rank, ranks);
        let message = prepared
            .as_ref()
            .map_or_else(|_| vec![Vec::new(); ranks as usize], Prepared::hellos);
        let messages = exchange.all_to_all(message).map_err(HeapError::Exchange)?;
        let connected = prepared.and_then(|prepared| prepared.connect(rank, &messages));
        let all = exchange.all_to_all(vec![vec![u8::from(connected.is_ok())]; ranks as usize]);
        let all = all.map_err(HeapError::Exchange)?;
        let connected = connected?;
        if let Some(peer) = all.iter().position(|message| message != &[1]) {
            return Err(HeapError::PeerFailed { peer: peer as u32 });
        }
        self.start(connected, rank, ranks)
    }

    fn prepare(&self, rank: u32, ranks: u32) -> Result<Prepared, HeapError> {
        let pd = self.device.protection_domain()?;
        let pinned = match self.placement {
            Placement::Host => None,
            Placement::Pinned(context) | Placement::Gpu(context) => Some(context),
        };
        // A multiple of a word for every placement, so that all parts have the same size.
        let bytes = self.bytes.checked_next_multiple_of(WORD as u64).unwrap_or(self.bytes);
        let (data, data_keys) = match self.placement {
            Placement::Gpu(context) => Region::alloc_gpu(&pd, context, bytes)?,
            Placement::Host | Placement::Pinned(_) => Region::alloc_host(&pd, pinned, bytes)?,
        };
        let words = BARRIER_SIGNALS as usize + self.signals as usize;
        let (signals, signal_keys) = host_words(&pd, pinned, words * WORD)?;
        // One per rank, plus the peer of the loopback queue pair.
        let cq = self
            .device
            .completion_queue((ranks + 1).saturating_mul(self.depth + 1))?;
        let pair = |tag: u32| {
            let builder = pd
                .queue_pair(&cq)
                .max_send_wr(self.depth)
                .max_recv_wr(1)
                .max_inline_data(WORD as u32);
            builder
                .allow_remote_read()
                .allow_remote_write()
                .allow_remote_atomic()
                .tag(u64::from(tag))
                .rc()
        };
        Ok(Prepared {
            pairs: (0..ranks).map(pair).collect::<Result<_, _>>()?,
            // Nothing is posted to it, so its completions are never polled.
            loopback: pair(rank)?,
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
            queue: Queue::open(proxy.registry(), self.slots),
            allocator: Allocator::new(data.len()),
            next_signal: BARRIER_SIGNALS,
            epoch: 0,
            shared: Arc::new(HeapState {
                proxy,
                data,
                signals,
                rank,
                ranks,
            }),
        })
    }
}

struct Prepared {
    pairs: Vec<PreparedQueuePair>,
    loopback: PreparedQueuePair,
    cq: CompletionQueue,
    pd: ProtectionDomain,
    data: Region,
    data_keys: Registered,
    signals: SharedWords,
    signal_keys: Registered,
}

struct Connected {
    wire: Connections,
    data: Region,
    signals: SharedWords,
}

impl Prepared {
    fn hellos(&self) -> Vec<Vec<u8>> {
        let keys = [self.data_keys.remote.to_bytes(), self.signal_keys.remote.to_bytes()].concat();
        let message = |pair: &PreparedQueuePair| [&pair.endpoint().to_bytes(), keys.as_slice()].concat();
        self.pairs.iter().map(message).collect()
    }

    fn connect(self, rank: u32, messages: &[Vec<u8>]) -> Result<Connected, HeapError> {
        let loopback = self.loopback.endpoint();
        let own = self.pairs.get(rank as usize).map(PreparedQueuePair::endpoint);
        let mut connections = Vec::with_capacity(self.pairs.len());
        for ((peer, pair), message) in (0..).zip(self.pairs).zip(messages) {
            let (endpoint, memory) = parse_hello(peer, message)?;
            let differs = memory.data.len() != self.data_keys.remote.len()
                || memory.signals.len() != self.signal_keys.remote.len();
            if differs {
                return Err(HeapError::SizeMismatch {
                    peer,
                    theirs: memory.data.len(),
                    their_signals: memory.signals.len() / WORD as u64,
                    here: self.data_keys.remote.len(),
                    signals: self.signal_keys.remote.len() / WORD as u64,
                });
            }
            let endpoint = if peer == rank { loopback } else { endpoint };
            connections.push((pair.connect(&endpoint)?, memory));
        }
        let loopback = own.map(|own| self.loopback.connect(&own)).transpose()?;
        let local = (self.data_keys.alias, self.data.len());
        let keep = Box::new((loopback, self.data_keys.keep, self.signal_keys.keep));
        Ok(Connected {
            wire: Connections::new(&self.pd, self.cq, connections, local, keep)?,
            data: self.data,
            signals: self.signals,
        })
    }
}

fn parse_hello(peer: u32, message: &[u8]) -> Result<(Endpoint, PeerMemory), HeapError> {
    let invalid = |what: String| HeapError::InvalidMessage { peer, what };
    if message.is_empty() {
        return Err(HeapError::PeerFailed { peer });
    }
    let length = || invalid(format!("{} bytes", message.len()));
    let (endpoint, keys) = message.split_first_chunk::<ENDPOINT_BYTES>().ok_or_else(length)?;
    let ([data, signals], []) = keys.as_chunks::<REMOTE_KEY_BYTES>() else {
        return Err(length());
    };
    let remote = |bytes| Remote::<AllAccess>::from_bytes(bytes).map_err(|error| invalid(error.to_string()));
    Ok((
        Endpoint::from_bytes(endpoint).map_err(|error| invalid(error.to_string()))?,
        PeerMemory {
            data: remote(data)?,
            signals: remote(signals)?,
        },
    ))
}
