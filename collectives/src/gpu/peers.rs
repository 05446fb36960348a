//! What the ranks of a GPU communicator have in common: each an *arena* in its device's memory, mapped by all others, and memory of the user's that all have registered.
//!
//! An arena is made once, and is divided alike on all ranks ([`Areas`]). Its file descriptor goes to the other ranks of the host (`descriptors`), which map it for their devices. Whatever is in the way of
//! that is told to all ranks, so that all of them do without: [`Peers::meet`] gives the reason then.
//!
//! An allocation lives as long as anybody has it mapped: what is written to a rank that is gone goes nowhere, and does no harm.

use core::ops::Range;

use doorbell_cuda::{Context, DeviceMemory, HostMemory, Memory, Part, Shareable, Span, Stream};

use super::descriptors;
use super::error::GpuError;
use super::offer::{self, Offer};
use crate::bootstrap::Exchange;
use crate::types::Rank;

/// The most ranks that reach each other directly.
pub const MAX_PEERS: usize = 16;
/// Words that a rank has for each peer and direction: [`Areas::words`].
pub const WORDS: usize = 1024;
/// Areas begin at multiples of so many bytes.
const ALIGN: usize = 4096;
/// Bytes of [`Peers::control`].
const CONTROL: usize = 4096;

/// Bytes of the areas of an arena. All ranks say the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sizes {
    /// Flags of the kernels (default 1 MiB).
    pub flags: usize,
    /// Slots of short messages of the kernels (default 8 MiB).
    pub slots: usize,
    /// Slots of the kernel for short operations, and how far its blocks are (default 32 MiB).
    pub small: usize,
    /// Where the kernels put what they may not put where it belongs (default 128 MiB: slices of 64 KiB for 128 blocks of threads among four ranks).
    pub fifos: usize,
    /// The same of the copy engines (default 256 MiB).
    pub staging: usize,
}

impl Default for Sizes {
    fn default() -> Self {
        Self {
            flags: 1 << 20,
            slots: 8 << 20,
            small: 32 << 20,
            fifos: 128 << 20,
            staging: 256 << 20,
        }
    }
}

/// Where in an arena what lies, in bytes: the same on all ranks. All but the last two areas are zeros at first.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Areas {
    /// Words by which copy engines tell each other how far they are.
    pub words: Range<usize>,
    /// Flags of the kernels.
    pub flags: Range<usize>,
    /// Slots of short messages of the kernels.
    pub slots: Range<usize>,
    /// Slots of the kernel for short operations, and how far its blocks are.
    pub small: Range<usize>,
    /// FIFOs of the kernels.
    pub fifos: Range<usize>,
    /// Staging of the copy engines.
    pub staging: Range<usize>,
}

impl Areas {
    /// Of an arena among `ranks` ranks.
    #[must_use]
    pub fn new(ranks: usize, sizes: Sizes) -> Self {
        let mut end = 0;
        let mut next = |len: usize| {
            let start = end;
            end += len.next_multiple_of(ALIGN);
            start..start + len
        };
        Self {
            // One to be copied from, and for each rank the words that it writes: those of messages, and those of room.
            words: next(4 * (1 + 2 * ranks * WORDS)),
            flags: next(sizes.flags),
            slots: next(sizes.slots),
            small: next(sizes.small),
            fifos: next(sizes.fifos),
            staging: next(sizes.staging),
        }
    }

    /// Bytes of an arena.
    #[must_use]
    pub fn len(&self) -> usize {
        self.staging.end
    }

    /// Whether there is nothing in it: never.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A rank's arena and those of the others, mapped for its device.
#[derive(Debug)]
pub struct Peers {
    context: Context,
    rank: Rank,
    areas: Areas,
    arenas: Mapped,
    control: HostMemory,
}

/// One memory of each rank, mapped here.
#[derive(Debug)]
pub struct Mapped {
    memories: Vec<Part>,
    table: DeviceMemory,
    lent: bool,
}

impl Peers {
    /// Makes this rank's arena, and maps the others'. All ranks call it, with equal sizes; those that have no GPU too.
    ///
    /// In the inner `Err` is why the ranks do not all reach each other, the same on all of them.
    ///
    /// # Errors
    /// Of the exchange.
    pub fn meet(
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
        if let Some(reason) = complaint(exchange, own.as_ref().err().map_or("", String::as_str))? {
            return Ok(Err(reason));
        }
        let Ok((context, (memory, control))) = own else {
            return Ok(Err("this rank has no arena".to_owned()));
        };
        Ok(map(exchange, rank, &context, &memory)?.map(|arenas| Self {
            context,
            rank,
            areas,
            arenas,
            control,
        }))
    }

    /// Maps each rank's `memory` for all others. All ranks call it; in the inner `Err` is why one of them cannot.
    ///
    /// # Errors
    /// Of the exchange.
    pub fn map(&self, exchange: &mut dyn Exchange, memory: &dyn Shareable) -> Result<Result<Mapped, String>, GpuError> {
        map(exchange, self.rank, &self.context, memory)
    }

    /// The context that the arenas are mapped in.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Which rank this is.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How many there are.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.arenas.memories.len()
    }

    /// Where in an arena what lies.
    #[must_use]
    pub fn areas(&self) -> &Areas {
        &self.areas
    }

    /// The arenas, by rank.
    #[must_use]
    pub fn arenas(&self) -> &Mapped {
        &self.arenas
    }

    /// A page of pinned memory of the host, zeros at first. Its first word of 32 bits is not zero from when the communicator has failed: kernels that wait look at it.
    #[must_use]
    pub fn control(&self) -> &HostMemory {
        &self.control
    }
}

impl Mapped {
    /// The memory of a rank, as it is mapped here.
    #[must_use]
    pub fn of(&self, rank: Rank) -> &Part {
        &self.memories[rank.index()]
    }

    /// All of them, by rank.
    #[must_use]
    pub fn memories(&self) -> &[Part] {
        &self.memories
    }

    /// Whether any rank's must be kept by that rank as long as others have it mapped, for it does not go by descriptor. The same on all ranks.
    #[must_use]
    pub fn is_lent(&self) -> bool {
        self.lent
    }

    /// In device memory, by rank: the address of each as 64 bits, as this rank's device has it.
    #[must_use]
    pub fn table(&self) -> Span<'_> {
        self.table.all()
    }
}

/// An arena and a control page, as all areas are at first.
fn arena(context: &Context, areas: &Areas) -> Result<(DeviceMemory, HostMemory), doorbell_cuda::Error> {
    let memory = DeviceMemory::alloc(context, areas.len())?;
    let control = HostMemory::alloc(context, CONTROL)?;
    let stream = Stream::new(context)?;
    stream.fill(memory.span(..areas.fifos.start)?, 0)?;
    // What is copied to tell something: all of its bits are looked at alike.
    stream.fill(memory.span(..4)?, 0xff)?;
    stream.synchronize()?;
    Ok((memory, control))
}

/// Exports, exchanges and imports.
fn map(
    exchange: &mut dyn Exchange,
    rank: Rank,
    context: &Context,
    memory: &dyn Shareable,
) -> Result<Result<Mapped, String>, GpuError> {
    let exported = Offer::new(memory);
    let said = exported.as_ref().err().cloned().unwrap_or_default();
    if let Some(reason) = complaint(exchange, &said)? {
        return Ok(Err(reason));
    }
    let Ok(offer) = exported else {
        return Ok(Err("this rank's memory has no descriptor".to_owned()));
    };
    let terms = exchange.all_gather(&offer.terms())?;
    let mut given = descriptors::share(exchange, rank, offer.descriptor())?;
    let import = |peer: usize| {
        if peer == rank.index() {
            return Ok(memory.all().keep());
        }
        let Some(descriptor) = given[peer].take() else {
            return Err(format!(
                "gets no memory of rank {peer}: it is on another host, of another user, or in another network namespace"
            ));
        };
        let shared = offer::taken(descriptor, &terms[peer])
            .ok_or_else(|| format!("cannot make anything of what rank {peer} says of its memory"))?;
        // SAFETY: what goes by a handle is registered: its rank keeps it until all have come to deregister it, or its program has promised to.
        unsafe { shared.open(context) }.map_err(|e| format!("cannot map the memory of rank {peer}: {e}"))
    };
    let mapped = (0..terms.len())
        .map(import)
        .collect::<Result<Vec<_>, _>>()
        .and_then(|memories| {
            let table = table(context, &memories).map_err(|e| e.to_string())?;
            let lent = terms.iter().any(|terms| offer::is_lent(terms));
            Ok(Mapped { memories, table, lent })
        });
    let reason = complaint(exchange, mapped.as_ref().err().map_or("", String::as_str))?;
    Ok(match reason {
        Some(reason) => Err(reason),
        None => mapped,
    })
}

/// The addresses of memories, in device memory.
fn table(context: &Context, memories: &[Part]) -> Result<DeviceMemory, doorbell_cuda::Error> {
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

/// What the first rank says that has something to complain of, the same on all ranks.
fn complaint(exchange: &mut dyn Exchange, mine: &str) -> Result<Option<String>, GpuError> {
    let said = exchange.all_gather(mine.as_bytes())?;
    let first = said.iter().enumerate().find(|(_, said)| !said.is_empty());
    Ok(first.map(|(rank, said)| format!("rank {rank} {}", String::from_utf8_lossy(said))))
}
