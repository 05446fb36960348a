//! Ranks that share a GPU.
//!
//! The thread blocks of a kernel wait for those of other ranks, so on one GPU the blocks of all its
//! ranks must be resident together, and those of a second communicator beside them. A
//! multiprocessor has room for a block of 512 threads of any kernel (up to 128 registers each). So
//! a launch has at most as many blocks as its rank has multiprocessors, however few threads they
//! have. Some multiprocessors are no rank's: a rank that is late may need kernels of the program
//! first, and a multiprocessor with waiting blocks on it may take no block of another kernel.
//!
//! That is of no use to contexts that are not executed concurrently: a GPU time-slices those of
//! different processes, some 2 ms each, unless they are clients of one MPS daemon. Then no kernel
//! may wait, as the one that it waits for has no time slice meanwhile.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex, PoisonError};

use doorbell_cuda::{Attribute, Context, Device, Launch};
use serde::{Deserialize, Serialize};

use super::error::GpuError;

/// Threads of a thread block for which each multiprocessor has room.
const BLOCK: u32 = 512;
/// Communicators whose operations may be executed at once.
const CONCURRENT: u32 = 2;
/// Multiprocessors without a waiting block, at least.
const UNOCCUPIED: u32 = 4;
/// Thread blocks of a cluster, and those that wait in launches in clusters. Fewer are for short
/// operations. More might not all be resident beside those of another communicator, as a cluster
/// needs multiprocessors of one GPC.
const CLUSTER: u32 = 4;
const CLUSTERED: RangeInclusive<u32> = 16..=32;
/// Thread block sizes of sends and receives, of which each peer needs two blocks.
const EXCHANGE_THREADS: [u32; 5] = [512, 256, 128, 64, 32];
/// The variable with the number of ranks on each GPU.
const VARIABLE: &str = "DOORBELL_RANKS_PER_GPU";
/// The most that it may say: the clients of an MPS server.
const MAX_RANKS: u32 = 48;

/// What a rank says of its GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct GpuOffer {
    /// Of the GPU, or of the MIG instance.
    uuid: [u8; 16],
    multiprocessors: u32,
    concurrency: Concurrency,
    known: Known,
}

/// Contexts of one GPU are executed concurrently if this is equal.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
enum Concurrency {
    /// A context of this process.
    Context(u64),
    /// Clients of the MPS daemon with this folder: its device and inode.
    Mps(u64, u64),
}

/// What a process knows of a GPU apart from the communicator at hand.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
struct Known {
    ranks: u32,
    is_time_sliced: bool,
}

/// How the ranks share GPUs, the same on all of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Sharing {
    /// The most ranks on a GPU.
    pub(super) ranks: u32,
    /// Whether contexts of a GPU are time-sliced, or too many ranks share it: kernels may not wait.
    pub(super) is_time_sliced: bool,
    /// Thread blocks that a launch may have; `None` where no GPU is shared.
    blocks: Option<u32>,
    /// Whether all queues of sends and receives may have blocks that wait.
    pub(super) has_room_for_exchanges: bool,
}

impl GpuOffer {
    pub(super) fn new(context: &Context) -> Result<Self, GpuError> {
        let device = context.device();
        let multiprocessors = device.attribute(Attribute::MultiprocessorCount)?;
        let concurrency = concurrency(context);
        let of_all = ranks_of_environment()?;
        // Ranks of other communicators are other processes, unless they have been met.
        let known = known(device).unwrap_or(Known {
            ranks: 1,
            is_time_sliced: false,
        });
        let is_time_sliced = of_all > 1 && !matches!(concurrency, Concurrency::Mps(..));
        Ok(Self {
            uuid: device.uuid()?.0,
            multiprocessors: u32::try_from(multiprocessors).unwrap_or(0),
            concurrency,
            known: Known {
                ranks: known.ranks.max(of_all),
                is_time_sliced: known.is_time_sliced || is_time_sliced,
            },
        })
    }
}

fn ranks_of_environment() -> Result<u32, GpuError> {
    let Some(text) = doorbell_trust::text_variable(VARIABLE).filter(|text| !text.is_empty()) else {
        return Ok(1);
    };
    let ranks = text.parse().ok().filter(|ranks| (1..=MAX_RANKS).contains(ranks));
    ranks.ok_or_else(|| GpuError::Refused {
        what: VARIABLE,
        reason: format!("{text:?} is no number from 1 to {MAX_RANKS}"),
    })
}

fn concurrency(context: &Context) -> Concurrency {
    /// Of this process, which has one primary context of a GPU, and its other contexts.
    static PROCESS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    // An older driver does not say: then contexts are taken to be time-sliced.
    if context.device().has(Attribute::MpsEnabled) {
        let folder = doorbell_trust::variable("CUDA_MPS_PIPE_DIRECTORY").filter(|folder| !folder.is_empty());
        let folder = folder.map_or_else(|| PathBuf::from("/tmp/nvidia-mps"), PathBuf::from);
        if let Ok(about) = fs::metadata(folder) {
            return Concurrency::Mps(about.dev(), about.ino());
        }
    }
    let mut hasher = PROCESS.build_hasher();
    if !context.is_primary() {
        hasher.write_u64(RandomState::new().hash_one(0));
    }
    Concurrency::Context(hasher.finish())
}

/// What earlier communicators of this process have found. Those of some ranks of a GPU learn in
/// this way of the others.
static KNOWN: Mutex<Vec<(Device, Known)>> = Mutex::new(Vec::new());

fn known(device: Device) -> Option<Known> {
    let all = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    all.iter().find(|(of, _)| *of == device).map(|(_, known)| *known)
}

fn remember(device: Device, found: Known) {
    let mut all = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    match all.iter_mut().find(|(of, _)| *of == device) {
        Some((_, known)) => {
            known.ranks = known.ranks.max(found.ranks);
            known.is_time_sliced |= found.is_time_sliced;
        }
        None => all.push((device, found)),
    }
}

impl Sharing {
    /// Of the ranks' GPUs, where they have one. `own` is this rank's.
    pub(super) fn agree(offers: &[Option<GpuOffer>], own: Option<(&Context, GpuOffer)>) -> Self {
        let (sharing, by_gpu) = Self::of(offers);
        if let Some((context, offer)) = own
            && let Some(found) = by_gpu.get(&offer.uuid)
        {
            remember(context.device(), *found);
        }
        sharing
    }

    fn of(offers: &[Option<GpuOffer>]) -> (Self, BTreeMap<[u8; 16], Known>) {
        let mut by_gpu: BTreeMap<[u8; 16], Vec<&GpuOffer>> = BTreeMap::new();
        for offer in offers.iter().flatten() {
            by_gpu.entry(offer.uuid).or_default().push(offer);
        }
        let found: BTreeMap<_, _> = by_gpu.iter().map(|(uuid, offers)| (*uuid, together(offers))).collect();
        let shared = || found.iter().filter(|(_, known)| known.ranks > 1);
        // For all ranks of a GPU.
        let room = |uuid: &[u8; 16]| {
            let multiprocessors = by_gpu[uuid].iter().map(|offer| offer.multiprocessors).min();
            multiprocessors.unwrap_or(0).saturating_sub(UNOCCUPIED)
        };
        let blocks = shared()
            .map(|(uuid, known)| room(uuid) / (known.ranks * CONCURRENT))
            .min();
        let queues = exchange_queues(offers.len() as u32);
        let sharing = Self {
            ranks: found.values().map(|known| known.ranks).max().unwrap_or(1),
            is_time_sliced: blocks == Some(0) || shared().any(|(_, known)| known.is_time_sliced),
            blocks,
            has_room_for_exchanges: shared().all(|(uuid, known)| queues * known.ranks <= room(uuid)),
        };
        (sharing, found)
    }

    /// Thread blocks of a launch, at most.
    pub(super) fn blocks(&self, most: u32) -> u32 {
        self.blocks.map_or(most, |all| most.min(all).max(1))
    }

    /// Threads of a thread block of sends and receives with this many peers.
    pub(super) fn exchange_threads(&self, ranks: u32) -> u32 {
        let [most, .., least] = EXCHANGE_THREADS;
        let Some(all) = self.blocks else { return most };
        let fits = |threads: &u32| exchange_queues(ranks) * threads <= all * BLOCK;
        EXCHANGE_THREADS.into_iter().find(fits).unwrap_or(least)
    }
}

/// Thread blocks of a launch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Blocks {
    pub(super) all: u32,
    /// The first ones, which wait for other ranks.
    pub(super) waiting: u32,
}

impl Blocks {
    /// All of which wait.
    pub(super) fn waiting(blocks: u32) -> Self {
        Self {
            all: blocks,
            waiting: blocks,
        }
    }
}

/// Of blocks that do not wait, how many there are to be beside `waiting` ones for whole clusters.
pub(super) fn in_clusters(waiting: u32, others: u32) -> u32 {
    match CLUSTERED.contains(&waiting) {
        true => (waiting + others).next_multiple_of(CLUSTER) - waiting,
        false => others,
    }
}

/// A launch of thread blocks, some of which wait for those of other ranks, with an argument of
/// which the kernel reads `argument_bytes`.
///
/// In clusters the driver places blocks elsewhere: of the places it chooses for 32 single blocks,
/// NVLink takes 0.85 of the bytes per second that it takes from clusters of four (docs/LOG.md).
pub(super) fn launch(blocks: Blocks, threads: u32, argument_bytes: usize, is_alone: bool) -> Launch {
    let clustered = is_alone && CLUSTERED.contains(&blocks.waiting) && blocks.all.is_multiple_of(CLUSTER);
    Launch {
        cluster: if clustered { CLUSTER } else { 1 },
        argument_bytes: Some(argument_bytes),
        ..Launch::linear(blocks.all, threads)
    }
}

/// Queues of sends and receives, of which each needs a thread block.
fn exchange_queues(ranks: u32) -> u32 {
    2 * ranks.saturating_sub(1).max(1)
}

/// What the ranks of a GPU know together.
fn together(offers: &[&GpuOffer]) -> Known {
    let are_concurrent = offers.windows(2).all(|two| two[0].concurrency == two[1].concurrency);
    let known = offers.iter().map(|offer| offer.known);
    Known {
        ranks: known
            .clone()
            .map(|known| known.ranks)
            .max()
            .unwrap_or(0)
            .max(offers.len() as u32),
        is_time_sliced: !are_concurrent || known.clone().any(|known| known.is_time_sliced),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn offer(gpu: u8, concurrency: Concurrency) -> Option<GpuOffer> {
        Some(GpuOffer {
            uuid: [gpu; 16],
            multiprocessors: 132,
            concurrency,
            known: Known {
                ranks: 1,
                is_time_sliced: false,
            },
        })
    }

    /// Clients of one MPS daemon, on a GPU with as many multiprocessors as an H100.
    pub(in crate::gpu) fn on_one_gpu(ranks: usize) -> Sharing {
        Sharing::of(&vec![offer(0, Concurrency::Mps(1, 2)); ranks]).0
    }

    #[test]
    fn the_shares_of_two_communicators_fit_one_gpu() {
        assert_eq!(on_one_gpu(1).blocks(256), 256, "not shared");
        for ranks in 2..=16 {
            let sharing = on_one_gpu(ranks as usize);
            assert!(!sharing.is_time_sliced, "{ranks}");
            assert!(
                sharing.blocks(u32::MAX) * ranks * CONCURRENT <= 132 - UNOCCUPIED,
                "{ranks} ranks"
            );
            let threads = sharing.exchange_threads(ranks);
            assert!(
                exchange_queues(ranks) * threads * ranks * CONCURRENT <= 132 * BLOCK,
                "{ranks}"
            );
            assert_eq!(
                sharing.has_room_for_exchanges,
                exchange_queues(ranks) * ranks <= 132 - UNOCCUPIED,
                "{ranks} ranks"
            );
        }
        assert_eq!(
            [2, 4, 8, 16].map(|ranks| on_one_gpu(ranks as usize).blocks(128)),
            [32, 16, 8, 4]
        );
        assert_eq!(
            [1, 8, 9].map(|ranks| on_one_gpu(ranks).has_room_for_exchanges),
            [true, true, false]
        );
    }

    #[test]
    fn contexts_take_turns_unless_one_process_or_daemon_has_them() {
        let is_time_sliced = |offers: &[Option<GpuOffer>]| Sharing::of(offers).0.is_time_sliced;
        let [one, other] = [1, 2].map(|context| offer(0, Concurrency::Context(context)));
        assert!(!is_time_sliced(&[one, one]), "one process");
        assert!(is_time_sliced(&[one, other]), "two processes");
        assert!(!is_time_sliced(&[one, offer(1, Concurrency::Context(2))]), "two GPUs");
        let [first, second] = [3, 4].map(|inode| offer(0, Concurrency::Mps(1, inode)));
        assert!(!is_time_sliced(&[first, first]), "one daemon");
        assert!(
            is_time_sliced(&[first, second]) && is_time_sliced(&[first, one]),
            "different daemons"
        );
        assert!(!is_time_sliced(&[one, None, None]), "ranks without a GPU");
    }

    #[test]
    fn ranks_of_other_communicators_count() {
        let mut offers = [offer(0, Concurrency::Mps(1, 2)), offer(1, Concurrency::Mps(1, 2))];
        assert_eq!(Sharing::of(&offers).0.blocks, None);
        offers[1].as_mut().unwrap().known.ranks = 4;
        let (sharing, _) = Sharing::of(&offers);
        assert_eq!((sharing.ranks, sharing.blocks(128)), (4, 16));
        offers[1].as_mut().unwrap().known.is_time_sliced = true;
        assert!(Sharing::of(&offers).0.is_time_sliced);
    }

    #[test]
    fn ranks_that_a_small_instance_has_no_room_for_take_turns() {
        let of = |multiprocessors, ranks| {
            let mut offer = offer(0, Concurrency::Mps(1, 2));
            offer.as_mut().unwrap().multiprocessors = multiprocessors;
            Sharing::of(&vec![offer; ranks]).0
        };
        assert!(!of(20, 8).is_time_sliced, "a block each");
        assert!(
            of(20, 16).is_time_sliced && of(18, 8).is_time_sliced,
            "less than a block each"
        );
    }
}
