//! Executor, algorithm and launch shape by size and ranks, measured on four H200 (docs/RESULTS.md).

use super::options::{Executor, GpuOptions};
use super::peers::Sizes;
use super::program::{LaunchShape, MAX_THREADS, ROUND};
use super::sharing::Sharing;
use super::small;
use crate::algorithm::Algorithm;
use crate::plan::Collective;
use crate::types::DataType;

const MAX_SOURCES: u32 = doorbell_cuda::reduce::MAX_SOURCES as u32;
/// LL has flags within the data words; above, separate flags are faster.
const LL_MAX_BYTES: u64 = 64 << 10;
/// The maximum bytes of a short operation (of the whole; twice as many in two steps).
const SHORT_MAX_BYTES: u64 = 512 << 10;
/// Above this size, a short all-reduce among three or more ranks, or a broadcast, takes two steps.
const TWO_STEP_MIN_BYTES: u64 = 64 << 10;
const TWO_STEP_ROOTED_MIN_BYTES: u64 = 64 << 10;
/// Above, the part of the copy engines has more than one slice, and kernels alone are faster.
const SPLIT_MAX_BYTES: u64 = 2 << 30;
/// Bytes of a slice in each of so many thread blocks. Where the options allow fewer, slices of what
/// goes through FIFOs are as much longer, as waiting for one and signaling it takes a block a time
/// that does not depend on its length.
const SLICE: u64 = 64 << 10;
const SLICED_BLOCKS: u64 = 128;

#[derive(Clone, Copy, Debug)]
pub(super) enum Choice {
    Small(small::LaunchShape),
    Kernel(Algorithm, LaunchShape),
    /// As a group of sends and receives.
    Messages,
    /// By copy engines, with this slice size in bytes of the whole.
    Copies(Algorithm, u64),
    /// Elements before this index by copy engines, the others by kernels concurrently.
    Split(u64, (Algorithm, u64), (Algorithm, LaunchShape)),
}

/// Whether an operation may use the LL protocol: among few ranks, what is short enough for it is
/// an operation for [`small`].
pub(super) fn may_use_lines(options: &GpuOptions, ranks: u32) -> bool {
    options.executor.is_some() || options.sizes.is_some_and(|sizes| sizes.small < Sizes::default().small) || ranks > 8
}

/// Whether copy engines are next to reductions of memory that is not registered: on request alone.
/// Kernels of those reductions are then loaded with the communicator.
pub(super) fn reduces_unregistered_by_copies(options: &GpuOptions) -> bool {
    matches!(options.executor, Some(Executor::Copies | Executor::Split))
}

/// The same of registered memory, without a request: loaded when it is registered.
pub(super) const fn reduces_registered_by_copies(ranks: u32) -> bool {
    ranks > 2
}

impl Choice {
    /// For elements of a type, so many, and whether the output is registered. Without streams
    /// beside the caller's, kernels alone; where no kernel may wait, copies. Groups are not for
    /// ranks that share a GPU, which may not have enough blocks for two groups at once.
    pub(super) fn new(
        options: &GpuOptions,
        (ranks, sharing): (u32, &Sharing),
        collective: Collective,
        (data, count, registered): (DataType, usize, bool),
        has_streams: bool,
    ) -> Self {
        let bytes = (count as u64).saturating_mul(data.bytes() as u64);
        let whole = match collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce | Collective::SendRecv => bytes,
            _ => bytes.saturating_mul(ranks.into()),
        };
        if sharing.is_time_sliced && options.executor.is_none() {
            let (algorithm, slice) = copies(options, ranks, collective, whole);
            return Self::Copies(algorithm, slice);
        }
        if let Some(cut) = short(options, (ranks, sharing), collective, bytes, whole) {
            return Self::Small(cut);
        }
        // Parts of different ranks are not adjacent: only a contiguous range is split in two.
        let is_range = matches!(
            collective,
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce
        );
        let executor = options
            .executor
            .filter(|executor| *executor != Executor::Split || is_range)
            .unwrap_or_else(|| best_executor(ranks, collective, whole, registered));
        let executor = if has_streams { executor } else { Executor::Kernel };
        if executor == Executor::Split
            && let Some(choice) = split(options, (ranks, sharing), collective, (data, count, registered))
        {
            return choice;
        }
        match executor {
            Executor::Copies => {
                let (algorithm, slice) = copies(options, ranks, collective, whole);
                Self::Copies(algorithm, slice)
            }
            Executor::Kernel | Executor::Small | Executor::Split | Executor::Staged => {
                let (algorithm, cut) = kernel(options, (ranks, sharing), collective, (data, bytes, whole), registered);
                let may_send = options.executor.is_none() && !registered && !cut.ll && sharing.ranks == 1;
                match may_send && is_messages(collective) {
                    true => Self::Messages,
                    false => Self::Kernel(algorithm, cut),
                }
            }
        }
    }
}

/// Whether [`group::messages`](super::group::messages) has the collective: each part of an input
/// goes to its targets directly and unchanged. The blocks of a group send or receive; those of a
/// program do both by turns, 0.85 as fast (decision 128).
fn is_messages(collective: Collective) -> bool {
    matches!(
        collective,
        Collective::AllGather | Collective::AllToAll | Collective::Gather | Collective::Scatter | Collective::SendRecv
    )
}

fn short(
    options: &GpuOptions,
    (ranks, sharing): (u32, &Sharing),
    collective: Collective,
    bytes: u64,
    whole: u64,
) -> Option<small::LaunchShape> {
    let two_steps = match collective {
        Collective::AllReduce => ranks > 2 && bytes > TWO_STEP_MIN_BYTES,
        Collective::Broadcast => ranks > 2 && bytes > TWO_STEP_ROOTED_MIN_BYTES,
        _ => false,
    };
    // The bytes that cross one link when a single rank sends to, or receives from, all others.
    let moved = match collective {
        Collective::Reduce => bytes.saturating_mul(ranks.saturating_sub(1).into()),
        _ => whole,
    };
    // In two steps a root sends its message once; two ranks each send half, or all at once.
    let most = match (collective, ranks) {
        (Collective::Broadcast, 3..) => 2 * SHORT_MAX_BYTES,
        (Collective::Broadcast | Collective::SendRecv, _) => SHORT_MAX_BYTES,
        (_, ..=2) => 2 * SHORT_MAX_BYTES,
        _ => SHORT_MAX_BYTES,
    };
    let is_short = match options.executor {
        Some(Executor::Small) => true,
        Some(_) => false,
        None => moved <= most,
    };
    let area = options.sizes.unwrap_or_default().small;
    let blocks = sharing.blocks(small::MAX_BLOCKS);
    small::LaunchShape::within(blocks, collective, ranks, (bytes, area), two_steps).filter(|_| is_short)
}

fn split(
    options: &GpuOptions,
    (ranks, sharing): (u32, &Sharing),
    collective: Collective,
    (data, count, registered): (DataType, usize, bool),
) -> Option<Choice> {
    let unit = data.bytes() as u64;
    let share = match collective {
        Collective::AllReduce => 65,
        _ => 50,
    };
    let at = split_at(count, unit, options.share.unwrap_or(share));
    let first = at.saturating_mul(unit);
    let rest = (count as u64).saturating_mul(unit).saturating_sub(first);
    if first == 0 || rest == 0 {
        return None;
    }
    let (algorithm, slice) = copies(options, ranks, collective, first);
    let (beside, cut) = kernel(options, (ranks, sharing), collective, (data, rest, rest), registered);
    let cut = LaunchShape {
        // Half of the multiprocessors suffice, and the others reduce for the copy engines.
        blocks: cut.blocks.min(options.blocks.unwrap_or(64)),
        ..cut
    };
    Some(Choice::Split(at, (algorithm, slice), (beside, cut)))
}

/// The element index at which to split, for `share` percent in the first part: a multiple of 2 MiB,
/// the largest device page, for long operations, and of less for short ones.
fn split_at(count: usize, unit: u64, share: u8) -> u64 {
    let bytes = (count as u64).saturating_mul(unit);
    let granule = (bytes / 256).clamp(16, 2 << 20).next_power_of_two() / unit;
    let at = (u128::from(count as u64) * u128::from(share) / 100) as u64;
    at / granule * granule
}

/// Copy engines move more bytes between two GPUs than kernel stores, but start later, and collide
/// if three or more GPUs send to each other: kernels fill the gaps of long operations.
fn best_executor(ranks: u32, collective: Collective, whole: u64, registered: bool) -> Executor {
    let (from, executor) = match collective {
        // Unregistered outputs need another copy, which multiprocessors do concurrently.
        _ if !registered => (u64::MAX, Executor::Kernel),
        Collective::AllReduce if (3..=MAX_SOURCES).contains(&ranks) && whole > SPLIT_MAX_BYTES => {
            (u64::MAX, Executor::Kernel)
        }
        Collective::AllReduce if (3..=MAX_SOURCES).contains(&ranks) && whole >= 1 << 30 => (1 << 30, Executor::Split),
        Collective::AllReduce if reduces_registered_by_copies(ranks) => (512 << 20, Executor::Copies),
        Collective::AllGather | Collective::AllToAll => (256 << 20, Executor::Copies),
        Collective::SendRecv => (16 << 20, Executor::Copies),
        _ => (u64::MAX, Executor::Kernel),
    };
    if whole >= from { executor } else { Executor::Kernel }
}

fn copies(options: &GpuOptions, ranks: u32, collective: Collective, whole: u64) -> (Algorithm, u64) {
    let (algorithm, slice) = match collective {
        Collective::AllReduce | Collective::ReduceScatter | Collective::Reduce if ranks > MAX_SOURCES => {
            (Algorithm::Ring, 64 << 20)
        }
        // Copies to one GPU from two others slow each other down, the more so the more often they
        // coincide: so a single slice, subdivided only next to the reduction.
        Collective::AllReduce | Collective::ReduceScatter if ranks > 2 => (Algorithm::FullMesh, u64::MAX),
        Collective::AllReduce | Collective::ReduceScatter => (Algorithm::FullMesh, (whole / 4).max(16 << 20)),
        // A copy with its flag word takes some 6 µs, against which slices fill the pipeline.
        Collective::Broadcast | Collective::Reduce if ranks > 2 => {
            (Algorithm::Ring, whole / (whole >> 20).isqrt().max(1))
        }
        Collective::Reduce => (Algorithm::FullMesh, (whole / 4).max(16 << 20)),
        _ => (Algorithm::FullMesh, u64::MAX),
    };
    (algorithm, options.slice.unwrap_or(slice).max(1))
}

fn kernel(
    options: &GpuOptions,
    (ranks, sharing): (u32, &Sharing),
    collective: Collective,
    (data, bytes, whole): (DataType, u64, u64),
    registered: bool,
) -> (Algorithm, LaunchShape) {
    let algorithm = match collective {
        Collective::Barrier => Algorithm::RecursiveDoubling,
        Collective::AllReduce | Collective::ReduceScatter | Collective::Reduce if ranks > MAX_SOURCES => {
            Algorithm::Ring
        }
        Collective::AllReduce if whole <= LL_MAX_BYTES => Algorithm::OneShot,
        Collective::Broadcast | Collective::Reduce if ranks > 2 && whole > 2 * LL_MAX_BYTES => Algorithm::Ring,
        _ => Algorithm::FullMesh,
    };
    let message = match (algorithm, collective) {
        (Algorithm::FullMesh, Collective::AllReduce) => bytes.div_ceil(u64::from(ranks)),
        _ => bytes,
    };
    // Rings pass partial results on. Lines carry elements alone.
    let has_wide_partials = algorithm == Algorithm::Ring && collective.reduces() && data.accumulator() != data;
    let ll = message <= LL_MAX_BYTES
        && collective != Collective::Barrier
        && !has_wide_partials
        && may_use_lines(options, ranks);
    let cut = if ll {
        let threads = if message < 4096 { 128 } else { MAX_THREADS };
        LaunchShape {
            blocks: sharing.blocks(message.div_ceil(4096).clamp(1, 16) as u32),
            threads,
            slice: 4096,
            ll,
        }
    } else {
        // At least 4 KiB per block.
        let is_chain = algorithm == Algorithm::Ring && collective == Collective::Broadcast;
        let most = if whole > 16 << 20 || is_chain && whole >= 8 << 20 {
            128
        } else {
            64
        };
        let blocks = options.blocks.unwrap_or(message.div_ceil(4096).clamp(1, most) as u32);
        let blocks = sharing.blocks(blocks);
        let share = message / u64::from(blocks);
        let longest = match options.blocks.filter(|_| !registered) {
            Some(_) => (SLICE * SLICED_BLOCKS / u64::from(blocks)).max(SLICE),
            None => SLICE,
        };
        // Each turn of a pipelined all-reduce takes 12 µs and the time of its bytes. Longer slices
        // are whole rounds of the kernel.
        let shortest = match collective {
            Collective::AllReduce => longest.clamp(SLICE, 2 * ROUND),
            _ => SLICE,
        };
        // The next rank of a chain starts one slice later, but signaling a slice takes until all
        // its stores have arrived.
        let slice = match is_chain {
            true => (share / 4).clamp(32 << 10, longest).next_power_of_two(),
            false => (share / 4).clamp(shortest, longest),
        };
        LaunchShape {
            blocks,
            threads: MAX_THREADS,
            slice: options.cut.unwrap_or(slice as u32),
            ll,
        }
    };
    (algorithm, cut)
}

#[cfg(test)]
mod tests {
    use super::super::sharing::tests::on_one_gpu;
    use super::*;

    /// A GPU each.
    fn alone() -> Sharing {
        on_one_gpu(1)
    }

    fn split(collective: Collective, data: DataType, count: usize, share: u8) -> Choice {
        let options = GpuOptions {
            executor: Some(Executor::Split),
            share: Some(share),
            ..GpuOptions::default()
        };
        Choice::new(&options, (4, &alone()), collective, (data, count, true), true)
    }

    #[test]
    fn only_contiguous_ranges_are_split() {
        for &collective in Collective::ALL {
            let is_range = matches!(
                collective,
                Collective::AllReduce | Collective::Broadcast | Collective::Reduce
            );
            let choice = split(collective, DataType::F32, 1 << 20, 50);
            assert_eq!(matches!(choice, Choice::Split(..)), is_range, "{collective}");
        }
    }

    #[test]
    fn long_operations_split_at_device_pages_and_short_ones_at_sixteen_bytes() {
        for (data, count, share, wanted) in [
            (
                DataType::F32,
                128 << 20,
                65,
                (512 << 20) / 100 * 65 / (2 << 20) * (2 << 20) / 4,
            ),
            (DataType::U8, 33, 50, 16),
            (DataType::F64, 5, 50, 2),
            (DataType::Bf16, 1 << 20, 99, 1_038_080 / 4096 * 4096),
        ] {
            let Choice::Split(at, ..) = split(Collective::AllReduce, data, count, share) else {
                panic!("{count} of {data} are not cut");
            };
            assert_eq!(at, wanted as u64, "{count} of {data}");
        }
    }

    #[test]
    fn long_all_reduces_of_three_or_more_ranks_are_split_by_default() {
        for (ranks, mib, registered, wanted) in [
            (4, 1024, true, Executor::Split),
            (3, 2048, true, Executor::Split),
            (3, 4096, true, Executor::Kernel),
            (4, 1023, true, Executor::Copies),
            (4, 512, true, Executor::Copies),
            (4, 511, true, Executor::Kernel),
            (4, 1024, false, Executor::Kernel),
            (2, 1024, true, Executor::Kernel),
            (9, 1024, true, Executor::Copies),
        ] {
            let usual = GpuOptions::default();
            let given = (DataType::F32, mib << 18, registered);
            let choice = Choice::new(&usual, (ranks, &alone()), Collective::AllReduce, given, true);
            let executor = match choice {
                Choice::Small(..) => Executor::Small,
                Choice::Kernel(..) => Executor::Kernel,
                Choice::Copies(..) => Executor::Copies,
                Choice::Split(..) => Executor::Split,
                Choice::Messages => panic!("an all-reduce changes what it moves"),
            };
            assert_eq!(executor, wanted, "{ranks} ranks, {mib} MiB: {choice:?}");
        }
    }

    /// In memory that is not registered, by ranks with a GPU each.
    #[test]
    fn long_parts_that_move_unchanged_are_messages() {
        let moves = [
            Collective::AllGather,
            Collective::AllToAll,
            Collective::Gather,
            Collective::Scatter,
            Collective::SendRecv,
        ];
        let by_kernels = GpuOptions {
            executor: Some(Executor::Kernel),
            ..GpuOptions::default()
        };
        let any = GpuOptions::default();
        for &collective in Collective::ALL {
            let of = |options, sharing: &Sharing, count, registered| {
                let given = (DataType::F32, count, registered);
                let choice = Choice::new(options, (4, sharing), collective, given, true);
                matches!(choice, Choice::Messages)
            };
            assert_eq!(
                of(&any, &alone(), 1 << 20, false),
                moves.contains(&collective),
                "{collective}"
            );
            assert!(!of(&any, &alone(), 1 << 20, true), "{collective}");
            assert!(!of(&any, &alone(), 1 << 10, false), "{collective}");
            assert!(!of(&any, &on_one_gpu(4), 1 << 20, false), "{collective}");
            assert!(!of(&by_kernels, &alone(), 1 << 20, false), "{collective}");
        }
    }

    #[test]
    fn chain_slices_shrink_with_the_message() {
        let slice = |mib: usize| {
            let usual = GpuOptions::default();
            match Choice::new(
                &usual,
                (4, &alone()),
                Collective::Broadcast,
                (DataType::F32, mib << 18, true),
                true,
            ) {
                Choice::Kernel(Algorithm::Ring, cut) => (cut.blocks, cut.slice),
                choice => panic!("{mib} MiB: {choice:?}"),
            }
        };
        assert_eq!(slice(2), (64, 32 << 10));
        assert_eq!(slice(8), (128, 32 << 10));
        assert_eq!(slice(32), (128, 64 << 10));
        assert_eq!(slice(1024), (128, 64 << 10));
    }

    #[test]
    fn few_blocks_have_long_slices_of_what_is_not_registered() {
        let slice_of = |collective, blocks, mib: usize, registered| {
            let options = GpuOptions {
                blocks,
                ..GpuOptions::default()
            };
            let given = (DataType::F32, mib << 18, registered);
            match Choice::new(&options, (2, &alone()), collective, given, true) {
                Choice::Kernel(_, cut) => cut.slice,
                choice => panic!("{mib} MiB: {choice:?}"),
            }
        };
        let slice = |blocks, mib, registered| slice_of(Collective::Broadcast, blocks, mib, registered);
        assert_eq!(slice(Some(32), 256, false), 256 << 10);
        assert_eq!(slice(Some(32), 16, false), 128 << 10);
        assert_eq!(slice(Some(32), 8, false), 64 << 10);
        assert_eq!(slice(Some(32), 2, false), 64 << 10);
        for (blocks, registered) in [(Some(32), true), (None, false), (Some(256), false)] {
            assert_eq!(slice(blocks, 256, registered), 64 << 10, "{blocks:?}, {registered}");
        }
        for (blocks, mib, wanted) in [
            (Some(32), 4, 120),
            (Some(32), 16, 120),
            (Some(32), 256, 256),
            (None, 16, 64),
        ] {
            assert_eq!(
                slice_of(Collective::AllReduce, blocks, mib, false),
                wanted << 10,
                "{mib} MiB"
            );
        }
    }

    #[test]
    fn lines_are_loaded_where_an_operation_may_use_them() {
        let options = GpuOptions::default();
        for ranks in 1..=16 {
            let uses = |collective: Collective, count: usize| {
                let choice = Choice::new(
                    &options,
                    (ranks, &alone()),
                    collective,
                    (DataType::U8, count, false),
                    true,
                );
                matches!(choice, Choice::Kernel(_, cut) if cut.ll)
            };
            let counts = (0..24).flat_map(|bits| [1 << bits, (1 << bits) + 1, 3 << bits >> 1]);
            let any = counts
                .flat_map(|count| Collective::ALL.iter().map(move |collective| (*collective, count)))
                .find(|(collective, count)| uses(*collective, *count));
            assert_eq!(any.is_some(), may_use_lines(&options, ranks), "{ranks} ranks: {any:?}");
        }
    }

    #[test]
    fn too_small_shares_are_not_split() {
        for (data, count) in [(DataType::U8, 0), (DataType::U8, 31), (DataType::F64, 3)] {
            let choice = split(Collective::AllReduce, data, count, 50);
            assert!(matches!(choice, Choice::Kernel(..)), "{choice:?}");
        }
        let choice = split(Collective::AllReduce, DataType::U8, usize::MAX, 99);
        assert!(matches!(choice, Choice::Split(..)), "{choice:?}");
    }

    /// Those of two communicators at once, whatever the options say, and a multiprocessor each.
    #[test]
    fn the_thread_blocks_of_all_ranks_fit_the_gpu_that_they_share() {
        let room = 132 / 2;
        for ranks in [2u32, 3, 4, 8, 16] {
            let sharing = on_one_gpu(ranks as usize);
            for blocks in [None, Some(32), Some(256)] {
                let options = GpuOptions {
                    blocks,
                    ..GpuOptions::default()
                };
                for &collective in Collective::ALL {
                    for count in (0..33).map(|power| 1 << power).chain([100, 70_000, 600_000]) {
                        let given = (DataType::Bf16, count, true);
                        let launched = match Choice::new(&options, (ranks, &sharing), collective, given, true) {
                            Choice::Small(cut) => cut.blocks(),
                            Choice::Kernel(_, cut) | Choice::Split(.., (_, cut)) => cut.blocks,
                            Choice::Copies(..) => 0,
                            Choice::Messages => panic!("{collective} of ranks that share a GPU"),
                        };
                        assert!(
                            launched * ranks < room,
                            "{launched} blocks of {ranks} ranks: {collective} of {count}, {blocks:?}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn no_kernel_waits_where_contexts_are_time_sliced() {
        let mut sharing = on_one_gpu(4);
        sharing.is_time_sliced = true;
        for &collective in Collective::ALL {
            for count in [0, 1, 5000, 1 << 28] {
                for (registered, has_streams) in [(false, false), (false, true), (true, true)] {
                    let given = (DataType::F32, count, registered);
                    let choice = Choice::new(&GpuOptions::default(), (4, &sharing), collective, given, has_streams);
                    assert!(
                        matches!(choice, Choice::Copies(..)),
                        "{collective} of {count}: {choice:?}"
                    );
                }
            }
        }
    }
}
