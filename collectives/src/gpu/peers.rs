//! Memory shared among the ranks of a GPU communicator: each rank's *arena* of device memory,
//! mapped by all others, and user memory that all ranks have registered.
//!
//! Arenas have the same layout on all ranks ([`Areas`]); file descriptors pass them to the other
//! ranks of the host. If any rank fails, all do without ([`Peers::connect`] returns the reason). An
//! allocation lives as long as any process maps it: writes to a rank that is gone are harmless.

use core::ops::Range;

use doorbell_cuda::{Context, DeviceMemory, HostMemory, Memory, OwnedSpan, Shareable, Span, Stream};
use serde::{Deserialize, Serialize};

use super::control::{ControlPage, ControlPages};
use super::descriptors;
use super::error::GpuError;
use super::offer::{self, MemoryOffer};
use crate::bootstrap::Exchange;
use crate::types::Rank;

/// The maximum number of ranks with direct access to each other.
pub const MAX_PEERS: usize = 16;
/// Words that a rank has per peer and direction: [`Areas::words`].
pub const WORDS: usize = 1024;
const ALIGN: usize = 4096;

/// Bytes of the areas of an arena, the same on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Sizes {
    /// The kernels' flags (default 1 MiB).
    pub flags: usize,
    /// The kernels' slots for LL messages (default 8 MiB).
    pub slots: usize,
    /// Slots and progress counters of the kernel for short operations (default 32 MiB).
    pub small: usize,
    /// Flags and slots of messages between pairs of ranks, and of collectives that move long parts
    /// unchanged (default 16 MiB).
    pub exchange: usize,
    /// The kernels' FIFOs (default 128 MiB: slices of 64 KiB for 128 thread blocks, four ranks).
    pub fifos: usize,
    /// Staging memory of the copy engines (default 256 MiB).
    pub staging: usize,
}

impl Default for Sizes {
    fn default() -> Self {
        Self {
            flags: 1 << 20,
            slots: 8 << 20,
            small: 32 << 20,
            exchange: 16 << 20,
            fifos: 128 << 20,
            staging: 256 << 20,
        }
    }
}

/// The layout of an arena, as byte ranges. All but the last two areas are initially zero.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Areas {
    /// Flag words of the copy engines.
    pub words: Range<usize>,
    /// Flags of the kernels.
    pub flags: Range<usize>,
    /// The kernels' slots for LL messages.
    pub slots: Range<usize>,
    /// Slots and progress counters of the kernel for short operations.
    pub small: Range<usize>,
    /// Flags and slots of messages between pairs of ranks.
    pub exchange: Range<usize>,
    /// FIFOs of the kernels.
    pub fifos: Range<usize>,
    /// Staging memory of the copy engines.
    pub staging: Range<usize>,
}

impl Areas {
    /// The layout of an arena among `ranks` ranks.
    #[must_use]
    pub fn new(ranks: usize, sizes: Sizes) -> Self {
        let mut end = 0;
        let mut next = |len: usize| {
            let start = end;
            end += len.next_multiple_of(ALIGN);
            start..start + len
        };
        Self {
            // One constant word as a copy source; per rank its words for messages and for credits.
            words: next(4 * (1 + 2 * ranks * WORDS)),
            flags: next(sizes.flags),
            slots: next(sizes.slots),
            small: next(sizes.small),
            exchange: next(sizes.exchange),
            fifos: next(sizes.fifos),
            staging: next(sizes.staging),
        }
    }

    /// Bytes of an arena.
    #[must_use]
    pub fn len(&self) -> usize {
        self.staging.end
    }

    /// Whether it is empty: never.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A rank's arena and those of its peers, mapped for its device.
#[derive(Debug)]
pub struct Peers {
    context: Context,
    rank: Rank,
    areas: Areas,
    arenas: Mapped,
    pages: ControlPages,
}

/// One memory of each rank, mapped here.
#[derive(Debug)]
pub struct Mapped {
    memories: Vec<OwnedSpan>,
    table: DeviceMemory,
    ipc_shared: bool,
}

impl Peers {
    /// Allocates this rank's arena, and maps the others'. Collective, with equal sizes; ranks
    /// without a GPU call it too.
    ///
    /// The inner `Err` is the reason, the same on all ranks, why not all have access to each other.
    pub fn connect(
        exchange: &mut dyn Exchange,
        rank: Rank,
        context: Option<&Context>,
        sizes: Sizes,
    ) -> Result<Result<Self, String>, GpuError> {
        let ranks = exchange.ranks() as usize;
        let areas = Areas::new(ranks, sizes);
        let own = context.ok_or_else(|| "has no GPU".to_owned()).and_then(|context| {
            if ranks > MAX_PEERS {
                return Err(format!(
                    "is one of {ranks} ranks: at most {MAX_PEERS} reach each other directly"
                ));
            }
            arena(context, &areas)
                .map(|made| (context.clone(), made))
                .map_err(|e| e.to_string())
        });
        if let Some(reason) = first_error(exchange, own.as_ref().err().map_or("", String::as_str))? {
            return Ok(Err(reason));
        }
        let Ok((context, (memory, page))) = own else {
            return Ok(Err("this rank has no arena".to_owned()));
        };
        let pages = page.exchange(exchange, rank)?;
        Ok(map(exchange, rank, &context, &memory)?.map(|arenas| Self {
            context,
            rank,
            areas,
            arenas,
            pages,
        }))
    }

    /// Maps each rank's `memory` for all others. Collective; the inner `Err` is the reason why not.
    pub fn map(&self, exchange: &mut dyn Exchange, memory: &dyn Shareable) -> Result<Result<Mapped, String>, GpuError> {
        map(exchange, self.rank, &self.context, memory)
    }

    /// The context in which the arenas are mapped.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The number of ranks.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.arenas.memories.len()
    }

    /// The layout of an arena.
    #[must_use]
    pub fn areas(&self) -> &Areas {
        &self.areas
    }

    /// The arenas, by rank.
    #[must_use]
    pub fn arenas(&self) -> &Mapped {
        &self.arenas
    }

    /// A zeroed page of pinned host memory; kernels abort once its first 32-bit word is nonzero,
    /// and report messages of unexpected lengths and impossible routings behind it.
    #[must_use]
    pub fn control(&self) -> &HostMemory {
        self.pages.own()
    }

    /// The control pages of all ranks.
    pub(super) fn pages(&self) -> &ControlPages {
        &self.pages
    }
}

impl Mapped {
    /// The memory of a rank, as mapped here.
    #[must_use]
    pub fn of(&self, rank: Rank) -> &OwnedSpan {
        &self.memories[rank.index()]
    }

    /// All of them, by rank.
    #[must_use]
    pub fn memories(&self) -> &[OwnedSpan] {
        &self.memories
    }

    /// Whether any rank must keep memory shared by IPC handle while others map it. The same on all.
    #[must_use]
    pub fn is_ipc_shared(&self) -> bool {
        self.ipc_shared
    }

    /// A table in device memory: by rank, the 64-bit device pointers in this rank's context.
    #[must_use]
    pub fn table(&self) -> Span<'_> {
        self.table.all()
    }
}

fn arena(context: &Context, areas: &Areas) -> Result<(DeviceMemory, ControlPage), GpuError> {
    let memory = DeviceMemory::alloc(context, areas.len())?;
    let page = ControlPage::new(context)?;
    let stream = Stream::new(context)?;
    stream.fill(memory.span(..areas.fifos.start)?, 0)?;
    // The source of signal copies: all bits are compared alike.
    stream.fill(memory.span(..4)?, 0xff)?;
    stream.synchronize()?;
    Ok((memory, page))
}

fn map(
    exchange: &mut dyn Exchange,
    rank: Rank,
    context: &Context,
    memory: &dyn Shareable,
) -> Result<Result<Mapped, String>, GpuError> {
    let exported = MemoryOffer::new(memory);
    let messages = exported.as_ref().err().cloned().unwrap_or_default();
    if let Some(reason) = first_error(exchange, &messages)? {
        return Ok(Err(reason));
    }
    let Ok(offer) = exported else {
        return Ok(Err("this rank's memory has no descriptor".to_owned()));
    };
    let attributes = exchange.all_gather(&offer.attributes())?;
    let mut given = descriptors::exchange_descriptors(exchange, rank, offer.descriptor())?;
    let import = |peer: usize| {
        if peer == rank.index() {
            return Ok(memory.all().keep());
        }
        let Some(descriptor) = given[peer].take() else {
            return Err(format!(
                "gets no memory of rank {peer}: it is on another host, of another user, or in another network namespace"
            ));
        };
        let shared = offer::parse(descriptor, &attributes[peer])
            .ok_or_else(|| format!("cannot make anything of what rank {peer} says of its memory"))?;
        // SAFETY: memory shared by IPC handle is registered memory: its rank keeps it until all
        // have deregistered it, or its program has promised to.
        unsafe { shared.open(context) }.map_err(|e| format!("cannot map the memory of rank {peer}: {e}"))
    };
    let mapped = (0..attributes.len())
        .map(import)
        .collect::<Result<Vec<_>, _>>()
        .and_then(|memories| {
            let table = table(context, &memories).map_err(|e| e.to_string())?;
            let ipc_shared = attributes.iter().any(|attributes| offer::is_ipc_shared(attributes));
            Ok(Mapped {
                memories,
                table,
                ipc_shared,
            })
        });
    let reason = first_error(exchange, mapped.as_ref().err().map_or("", String::as_str))?;
    Ok(match reason {
        Some(reason) => Err(reason),
        None => mapped,
    })
}

fn table(context: &Context, memories: &[OwnedSpan]) -> Result<DeviceMemory, doorbell_cuda::Error> {
    let bytes: Vec<u8> = memories
        .iter()
        .flat_map(|memory| memory.device_ptr().0.to_ne_bytes())
        .collect();
    let host = HostMemory::alloc(context, bytes.len())?;
    host.copy_in(0, &bytes)?;
    let table = DeviceMemory::alloc(context, bytes.len())?;
    let stream = Stream::new(context)?;
    stream.copy(table.all(), host.all())?;
    stream.synchronize()?;
    Ok(table)
}

/// The error of the lowest rank that has one, the same on all ranks.
fn first_error(exchange: &mut dyn Exchange, mine: &str) -> Result<Option<String>, GpuError> {
    let messages = exchange.all_gather(mine.as_bytes())?;
    let first = messages.iter().enumerate().find(|(_, messages)| !messages.is_empty());
    Ok(first.map(|(rank, messages)| format!("rank {rank} {}", String::from_utf8_lossy(messages))))
}
