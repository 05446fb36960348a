//! The executor of messages between pairs of ranks: one launch of a kernel, in which blocks of
//! their own serve each peer and direction, more of them where there are more bytes.
//! `gpudirect/cuda/kernels/exchange.cu` has the protocol; it uses the area [`Areas::exchange`].
//!
//! It executes no plan: the programs of [`lower`](super::lower) have the same slices on all ranks,
//! so all ranks would have to know all lengths. Here a rank knows its own messages only.

use std::mem::offset_of;
use std::sync::atomic::Ordering;

use doorbell_cuda::collective::CollectiveKernels;
use doorbell_cuda::{Kernel, KernelFile, Span, Stream};

use super::error::GpuError;
use super::group::Group;
use super::peers::{Areas, MAX_PEERS, Peers};
use super::program::ROUND;
use super::sharing::{self, Blocks};
use crate::executor::Direction;
use crate::types::Rank;

/// The version of [`Arguments`].
const VERSION: u64 = 2;
/// Maximum messages of a launch; a message of a rank to itself counts twice.
const MAX_MESSAGES: usize = 224;
/// A queue per peer and direction, and one of this rank's messages to itself.
const MAX_QUEUES: usize = 32;
/// Maximum thread blocks of sends and receives, all of which must be resident, with those of a
/// second communicator.
const MAX_BLOCKS: u32 = 64;
/// Maximum thread blocks of copies, which wait for nothing.
const MAX_COPY_BLOCKS: u32 = 32;
/// The same beside messages, at whose rate these many copy.
const COPY_BLOCKS_BESIDE: u32 = 8;
/// Channels by which one queue reaches the rate of NVLink.
const FAST_CHANNELS: u32 = 16;
/// Slots of a channel.
const SLOTS: u64 = 4;
const MAX_SLOT: u64 = 256 << 10;
/// Shares of a message begin at multiples of this many bytes.
const GRANULE: u64 = 4096;
/// Bytes of the flags, and of the counts, of a channel per peer.
const FLAGS: u64 = 64;
const COUNTS: u64 = 8;
/// Offset of the reports of messages of unexpected lengths in [`Peers::control`], one per rank.
pub(super) const MISMATCHES: usize = 64;
/// Bytes of a report: the length that was sent, the expected one, and whether both are written.
const MISMATCH: usize = 32;

/// The kernel's layout of an arena, the same on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ExchangeLayout {
    /// Channels of a queue.
    channels: u32,
    /// Maximum thread blocks of a launch's sends and receives, if there are enough for its queues.
    blocks: u32,
    slot_bytes: u32,
    flags: u64,
    counts: u64,
    slots: u64,
}

impl ExchangeLayout {
    /// For launches of at most `blocks` thread blocks. Each of a queue's blocks serves as many
    /// channels in an exchange with all other ranks; with one of them, each serves one.
    fn new(areas: &Areas, ranks: u32, blocks: u32) -> Self {
        let peers = ranks.saturating_sub(1).max(1);
        let blocks = blocks.min(MAX_BLOCKS);
        let of_all_peers = (blocks / (2 * peers)).max(1);
        let channels = of_all_peers * (FAST_CHANNELS.min(blocks / 2) / of_all_peers).max(1);
        let flags = areas.exchange.start as u64;
        let of_all = |bytes: u64| u64::from(channels) * MAX_PEERS as u64 * bytes;
        let counts = flags + of_all(FLAGS);
        let slots = (counts + of_all(COUNTS)).next_multiple_of(512);
        let room = (areas.exchange.end as u64).saturating_sub(slots);
        let slot = room / (u64::from(peers) * u64::from(channels) * SLOTS);
        let granule = if slot < ROUND { 512 } else { ROUND };
        Self {
            channels,
            blocks,
            slot_bytes: (slot.min(MAX_SLOT) / granule * granule) as u32,
            flags,
            counts,
            slots,
        }
    }

    /// Assigns thread blocks to a launch's queues, of which copies are the last one. Behind it is
    /// [`Queue::NONE`]: where there are no copies, blocks of it complete clusters, and end at once.
    fn assign(&self, queues: &mut [Queue]) -> Blocks {
        let waiting = queues.iter().take_while(|queue| queue.kind != QueueKind::Copy).count();
        let (waiting, copies) = queues.split_at_mut(waiting);
        self.divide(waiting);
        let all = |queues: &[Queue]| queues.iter().map(|queue| queue.blocks).sum::<u32>();
        let wait = all(waiting);
        if let Some(copies) = copies.first_mut().filter(|_| wait > 0) {
            copies.blocks = sharing::in_clusters(wait, copies.blocks.min(COPY_BLOCKS_BESIDE));
        }
        Blocks {
            all: wait + all(copies),
            waiting: wait,
        }
    }

    /// Divides the thread blocks among queues by their bytes. Each has one; the next ones always go
    /// to the queue that would end last, as many as let its blocks serve fewer channels each. The
    /// other end of a queue may have another number.
    fn divide(&self, queues: &mut [Queue]) {
        queues.iter_mut().for_each(|queue| queue.blocks = 1);
        let mut left = self.blocks.saturating_sub(queues.len() as u32);
        while let Some(last) = queues.iter_mut().max_by_key(|queue| queue.longest()) {
            let more = match last.rounds() {
                1 => return,
                rounds => last.channels.div_ceil(rounds - 1) - last.blocks,
            };
            match left.checked_sub(more) {
                Some(rest) => left = rest,
                None => return,
            }
            last.blocks += more;
        }
    }
}

/// The messages of one direction and peer.
#[derive(Clone, Copy, Debug)]
struct Queue {
    kind: QueueKind,
    peer: Rank,
    /// The first message and the number of messages.
    first: usize,
    count: usize,
    bytes: u64,
    /// The channels that have a share of a message.
    channels: u32,
    blocks: u32,
}

impl Queue {
    const NONE: Self = Self {
        kind: QueueKind::Copy,
        peer: Rank(0),
        first: 0,
        count: 0,
        bytes: 0,
        channels: 0,
        blocks: 0,
    };

    /// The channels that a block serves one after another.
    fn rounds(&self) -> u32 {
        self.channels.div_ceil(self.blocks)
    }

    /// The bytes of a block that serves most channels.
    fn longest(&self) -> u64 {
        self.bytes
            .div_ceil(self.channels.into())
            .saturating_mul(self.rounds().into())
    }
}

doorbell_cuda::kernel_arguments! {
    constants {
        const EXCHANGE_VERSION: u64 = VERSION;
        /// Slots of a FIFO: a power of two.
        const SLOTS: u32 = SLOTS as u32;
        /// Shares of messages begin at multiples of this many bytes.
        const GRANULE: u64 = GRANULE;
    }
    /// The launch argument of a group.
    // fields: the layout of the kernel's parameter.
    #[derive(Clone, Copy, Debug)]
    struct Arguments as Exchange in "exchange" {
        version: u64,
        /// The address of a word that is set to nonzero to end all waits.
        stop: u64,
        /// The address of a `Mismatch` per rank.
        mismatches: u64,
        arenas: [u64; MAX_PEERS],
        /// Offsets in an arena: flags, counts, slots.
        flags: u64,
        counts: u64,
        slots: u64,
        rank: u32,
        /// Channels of a queue, the same on all ranks.
        channels: u32,
        slot_bytes: u32,
        reserved: u32,
        /// The direction, the peer, the blocks, the channels that have messages, the first message
        /// and the number of messages: 4, 12, 8, 8, 16 and 16 bits.
        queues: [u64; MAX_QUEUES],
        /// Address and length. Of a copy the target follows the source.
        messages: [[u64; 2]; MAX_MESSAGES],
    }
}

// Within the limit of launch parameters.
const _: () = assert!(size_of::<Arguments>() <= 4096);
// Two queues for each peer, and the copies.
const _: () = assert!(2 * (MAX_PEERS - 1) < MAX_QUEUES);

/// The kernel's `Direction`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum QueueKind {
    Send = 0,
    Receive = 1,
    /// From this rank to itself: each source is followed by its target.
    Copy = 2,
}

/// The executor of a rank.
#[derive(Debug)]
pub(super) struct ExchangeExecutor {
    kernel: Option<Kernel>,
    layout: ExchangeLayout,
    threads: u32,
    is_alone: bool,
    rank: Rank,
    arenas: Vec<u64>,
    control: u64,
}

impl ExchangeExecutor {
    /// Loads its kernel. `arenas` are the device pointers of all ranks' arenas, `control` that of
    /// [`Peers::control`]. Launches have at most `blocks` thread blocks of `threads` threads.
    /// `is_alone`: no other rank has this GPU.
    pub(super) fn new(
        kernels: &CollectiveKernels,
        peers: &Peers,
        arenas: Vec<u64>,
        control: u64,
        (blocks, threads, is_alone): (u32, u32, bool),
    ) -> Result<Self, GpuError> {
        kernels.load(KernelFile::Exchange, |_| true)?;
        Ok(Self {
            kernel: kernels.kernel("exchange"),
            layout: ExchangeLayout::new(peers.areas(), arenas.len() as u32, blocks),
            threads,
            is_alone,
            rank: peers.rank(),
            arenas,
            control,
        })
    }

    /// Enqueues a group on `stream`. `uses` is kept until it is done.
    ///
    /// # Safety
    /// The device can access the messages' memory until the group is done, and nothing else writes
    /// it, or accesses what is received, meanwhile.
    pub(super) unsafe fn launch(&self, stream: &Stream, group: &Group<'_>, uses: &[Span<'_>]) -> Result<(), GpuError> {
        let mut arguments = self.arguments();
        let (bytes, blocks) = self.encode(group, &mut arguments)?;
        if blocks.all == 0 {
            return Ok(());
        }
        let launch = sharing::launch(blocks, self.threads, bytes, self.is_alone);
        // SAFETY: the kernel's only parameter is this struct, in its version, of which it reads the
        // messages of its queues and what precedes them: these bytes. The caller vouches for the
        // memory that it names.
        unsafe { self.kernel()?.launch(stream, launch, &[&arguments], uses)? };
        Ok(())
    }

    fn kernel(&self) -> Result<&Kernel, GpuError> {
        self.kernel.as_ref().ok_or_else(|| GpuError::Refused {
            what: "kernels of messages",
            reason: "there is no kernel exchange".to_owned(),
        })
    }

    /// The parameter, without messages.
    fn arguments(&self) -> Arguments {
        let mut arenas = [0; MAX_PEERS];
        arenas[..self.arenas.len()].copy_from_slice(&self.arenas);
        let layout = &self.layout;
        Arguments {
            version: VERSION,
            stop: self.control,
            mismatches: self.control + MISMATCHES as u64,
            arenas,
            flags: layout.flags,
            counts: layout.counts,
            slots: layout.slots,
            rank: self.rank.0,
            channels: layout.channels,
            slot_bytes: layout.slot_bytes,
            reserved: 0,
            queues: [0; MAX_QUEUES],
            messages: [[0; 2]; MAX_MESSAGES],
        }
    }

    /// Adds a group's messages. Returns the bytes of the parameter up to the last one, and the
    /// thread blocks.
    fn encode(&self, group: &Group<'_>, arguments: &mut Arguments) -> Result<(usize, Blocks), GpuError> {
        if self.layout.slot_bytes == 0 {
            return Err(group.misuse("the area for messages is too small for so many ranks".to_owned()));
        }
        let (rank, ranks) = (self.rank.0, self.arenas.len() as u32);
        let mut encoder = Encoder {
            arguments,
            queues: [Queue::NONE; MAX_QUEUES],
            len: 0,
            messages: 0,
        };
        let too_many = || group.misuse(format!("a group has at most {MAX_MESSAGES} messages"));
        // Each rank begins with its successor, so that no rank is the first destination of all.
        for distance in 1..ranks {
            let next = Rank((rank + distance) % ranks);
            let before = Rank((rank + ranks - distance) % ranks);
            let sends = group.of(Direction::Send, next);
            encoder.queue(QueueKind::Send, next, sends).ok_or_else(too_many)?;
            let receives = group.of(Direction::Receive, before);
            encoder
                .queue(QueueKind::Receive, before, receives)
                .ok_or_else(too_many)?;
        }
        encoder
            .queue(QueueKind::Copy, self.rank, group.copies())
            .ok_or_else(too_many)?;
        Ok(encoder.end(&self.layout))
    }
}

struct Encoder<'e> {
    arguments: &'e mut Arguments,
    /// The first `len` of them.
    queues: [Queue; MAX_QUEUES],
    len: usize,
    messages: usize,
}

impl Encoder<'_> {
    /// Adds a queue, unless it has no messages; `None` if there are too many.
    fn queue<'a>(&mut self, kind: QueueKind, peer: Rank, memories: impl Iterator<Item = Span<'a>>) -> Option<()> {
        let (first, mut units, mut sum) = (self.messages, 1, 0_u64);
        for memory in memories {
            let bytes = memory.len() as u64;
            *self.arguments.messages.get_mut(self.messages)? = [memory.device_ptr().0, bytes];
            self.messages += 1;
            units = bytes.div_ceil(GRANULE).max(units);
            sum = sum.saturating_add(bytes);
        }
        let (count, channels) = match kind {
            QueueKind::Send | QueueKind::Receive => (self.messages - first, self.arguments.channels),
            QueueKind::Copy => ((self.messages - first) / 2, MAX_COPY_BLOCKS),
        };
        let channels = u64::from(channels).min(units) as u32;
        if count > 0 {
            *self.queues.get_mut(self.len)? = Queue {
                kind,
                peer,
                first,
                count,
                bytes: sum,
                channels,
                blocks: channels,
            };
            self.len += 1;
        }
        Some(())
    }

    /// The bytes of the parameter, and its thread blocks.
    fn end(mut self, layout: &ExchangeLayout) -> (usize, Blocks) {
        let queues = &mut self.queues[..=self.len];
        let blocks = layout.assign(queues);
        for (word, queue) in self.arguments.queues.iter_mut().zip(&*queues) {
            *word = queue.kind as u64
                | u64::from(queue.peer.0) << 4
                | u64::from(queue.blocks) << 16
                | u64::from(queue.channels) << 24
                | (queue.first as u64) << 32
                | (queue.count as u64) << 48;
        }
        let bytes = offset_of!(Arguments, messages) + self.messages * size_of_val(&self.arguments.messages[0]);
        (bytes, blocks)
    }
}

/// The report of a message whose length its receiver, this rank, does not expect.
pub(super) fn mismatch(peers: &Peers) -> Option<String> {
    let control = peers.control();
    let word = |at: usize| Some(control.atomic_u64(at).ok()?.load(Ordering::Acquire));
    (0..peers.ranks()).find_map(|peer| {
        let at = MISMATCHES + peer * MISMATCH;
        if word(at + 16)? == 0 {
            return None;
        }
        let (sent, expected) = (word(at)?, word(at + 8)?);
        Some(format!(
            "rank {peer} sends {sent} bytes to rank {}, which expects {expected}",
            peers.rank()
        ))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::peers::Sizes;
    use super::*;

    #[test]
    fn the_kernels_header_is_committed() {
        <Arguments as doorbell_cuda::arguments::Arguments>::header().check(env!("CARGO_MANIFEST_DIR"));
    }

    #[test]
    fn layout_fits_the_area_for_any_number_of_ranks() {
        for ranks in 1..=MAX_PEERS as u32 {
            for (exchange, blocks) in [(16 << 20, 128), (1 << 20, 16), (16 << 20, 1)] {
                let sizes = Sizes {
                    exchange,
                    ..Sizes::default()
                };
                let areas = Areas::new(ranks as usize, sizes);
                let layout = ExchangeLayout::new(&areas, ranks, blocks);
                let peers = u64::from(ranks.max(2) - 1);
                let slots = peers * u64::from(layout.channels) * SLOTS * u64::from(layout.slot_bytes);
                assert!(layout.slots + slots <= areas.exchange.end as u64, "{ranks}: {layout:?}");
                assert!(
                    layout.slot_bytes >= 512 && layout.flags.is_multiple_of(64) && layout.slots.is_multiple_of(512)
                );
                assert!(layout.channels <= MAX_BLOCKS);
            }
        }
    }

    proptest! {
        #[test]
        fn blocks_are_divided_by_bytes(
            blocks in 1_u32..=MAX_BLOCKS,
            peers in 1_u32..MAX_PEERS as u32,
            bytes in prop::collection::vec(0_u64..1 << 30, 1..2 * MAX_PEERS),
            copied in prop::option::of(1_u32..=MAX_COPY_BLOCKS),
        ) {
            let areas = Areas::new(MAX_PEERS, Sizes::default());
            let layout = ExchangeLayout::new(&areas, peers + 1, blocks);
            let mut queues: Vec<_> = bytes.iter().map(|&bytes| Queue {
                kind: QueueKind::Send,
                peer: Rank(0),
                first: 0,
                count: 1,
                bytes,
                channels: u64::from(layout.channels).min(bytes.div_ceil(GRANULE).max(1)) as u32,
                blocks: 0,
            }).collect();
            layout.divide(&mut queues);
            let all: u32 = queues.iter().map(|queue| queue.blocks).sum();
            prop_assert!(all <= blocks.max(queues.len() as u32));
            prop_assert!(queues.iter().all(|queue| (1..=queue.channels).contains(&queue.blocks)));
            // None ends later than if all had as many.
            let longest = queues.iter().map(Queue::longest).max();
            let even = (blocks / queues.len() as u32).max(1);
            queues.iter_mut().for_each(|queue| queue.blocks = even.min(queue.channels));
            prop_assert!(longest <= queues.iter().map(Queue::longest).max());
            // With copies behind them, or without.
            let copied = copied.map(|channels| Queue { count: 1, channels, blocks: channels, ..Queue::NONE });
            queues.extend(copied.into_iter().chain([Queue::NONE]));
            let launch = layout.assign(&mut queues);
            prop_assert_eq!(launch.waiting, all);
            let others = launch.all - all;
            prop_assert_eq!(others, queues.iter().map(|queue| queue.blocks).sum::<u32>() - all);
            prop_assert!(copied.is_none() || queues[queues.len() - 2].blocks > 0);
            prop_assert!(others < COPY_BLOCKS_BESIDE + 4);
            let is_clustered = sharing::launch(launch, 512, 0, true).cluster > 1;
            prop_assert_eq!(is_clustered, (16..=32).contains(&all));
        }
    }
}
