//! Short operations of the [rig](super::collective), by the kernel without a plan.

use anyhow::{Context as _, Result, bail};
use doorbell_collectives::gpu::program::Function;
use doorbell_collectives::gpu::small::{LaunchShape, Operation};
use doorbell_collectives::kernel::{F8E4M3, F8E5M2, bf16, f16};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::{Case, Number, input_element};
use doorbell_collectives::{DataType, Rank, ReduceOp};
use doorbell_cuda::Memory as _;

use super::collective::{Rig, Sample};

/// A variant of a case.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// In two exchanges instead of one.
    pub two_steps: bool,
    /// In place.
    pub in_place: bool,
    /// Misalignment of input and output in bytes.
    pub skew: (usize, usize),
}

impl Rig {
    /// The launch shape of a case; `None` if it is too long.
    #[must_use]
    pub fn short(&self, case: &Case, data: DataType, two_steps: bool) -> Option<LaunchShape> {
        let bytes = case.count * data.bytes() as u64;
        LaunchShape::new(case.collective, case.ranks, bytes, self.sizes.small, two_steps)
    }

    /// Enqueues one rank's part on its stream.
    pub fn launch_short(
        &self,
        rank: usize,
        case: &Case,
        place: (u64, u64),
        shape: LaunchShape,
        function: Function,
    ) -> Result<()> {
        let member = &self.ranks[rank];
        let operation = Operation {
            collective: case.collective,
            root: case.root,
            input: place.0,
            output: place.1,
            count: case.count,
        };
        let uses = [member.input.all(), member.output.all()];
        // SAFETY: the memories are long enough for the case, as `fits` ensures, and nothing else
        // uses them until the streams are synchronized; the launch shape is for the rig's own
        // sizes.
        unsafe {
            member
                .small
                .launch(&member.stream, &operation, function, shape, &uses)?
        };
        Ok(())
    }

    /// Runs a case `times` times, with inputs from the seed, and verifies each result.
    pub(crate) fn check_short<T: Number>(
        &self,
        case: &Case,
        variant: Variant,
        op: Option<ReduceOp>,
        seed: u64,
        times: u64,
    ) -> Result<()> {
        let Some(shape) = self.short(case, T::TYPE, variant.two_steps) else {
            bail!("it is too long");
        };
        let places = self.places(case, variant.in_place, variant.skew, size_of::<T>());
        for round in 0..times {
            self.round::<T>(case, &places, op, seed + round, |function| {
                (0..self.ranks.len()).try_for_each(|rank| {
                    self.launch_short(rank, case, places[rank], shape, function(Rank(rank as u32)))
                })
            })?;
        }
        Ok(())
    }

    /// Broadcasts `turns` times with the root as far ahead as possible, and verifies every rank.
    pub fn check_ahead(&self, turns: usize, count: u64, two_steps: bool) -> Result<()> {
        let case = Case {
            collective: Collective::Broadcast,
            ranks: self.ranks.len() as u32,
            root: Rank(1),
            count,
        };
        let Some(shape) = self.short(&case, DataType::U32, two_steps) else {
            bail!("it is too long");
        };
        let function = Function {
            data: DataType::U32,
            op: None,
            scalar: 0,
        };
        let all: Vec<u32> = (0..turns as u64 * count)
            .map(|at| input_element(7, case.root, at))
            .collect();
        for (rank, member) in self.ranks.iter().enumerate() {
            member.stream.fill(member.output.all(), 0xa5)?;
            member.stream.synchronize()?;
            if rank == case.root.index() {
                member.write(&member.input, 0, &all)?;
            }
        }
        let root = case.root.index();
        for rank in (root..self.ranks.len()).chain(0..root) {
            let (input, output) = (&self.ranks[rank].input, &self.ranks[rank].output);
            for turn in 0..turns as u64 {
                let at = turn * count * 4;
                let place = (input.device_ptr().0 + at, output.device_ptr().0 + at);
                self.launch_short(rank, &case, place, shape, function)?;
            }
            // Enough for the root to finish everything, if nothing held it back.
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        for (rank, member) in self.ranks.iter().enumerate() {
            member.stream.synchronize()?;
            let mut output = vec![0; all.len()];
            member.read(&member.output, 0, &mut output)?;
            if output != all {
                bail!("rank {rank} has something else than what was broadcast");
            }
        }
        Ok(())
    }
}

/// Verifies the sampled variants of a case; returns their number.
pub fn variants<T: Number>(rig: &Rig, case: &Case, ops: &[ReduceOp], sample: &mut Sample) -> Result<usize> {
    let mut done = 0;
    let none = [None];
    let some: Vec<_> = ops.iter().copied().map(Some).collect();
    let ops = if case.collective.reduces() {
        &some[..]
    } else {
        &none[..]
    };
    for two_steps in [false, true] {
        if rig.short(case, T::TYPE, two_steps).is_none() {
            continue;
        }
        for in_place in [false, true] {
            if in_place && !case.collective.runs_in_place() {
                continue;
            }
            for skew in [(0, 0), (3 * size_of::<T>(), size_of::<T>())] {
                for &op in ops {
                    if !sample.takes() {
                        continue;
                    }
                    let variant = Variant {
                        two_steps,
                        in_place,
                        skew,
                    };
                    rig.check_short::<T>(case, variant, op, done as u64, 2)
                        .with_context(|| {
                            let op = op.map_or("", ReduceOp::name);
                            format!(
                                "{} of {} {} {op} among {}, root {}: {variant:?}",
                                case.collective,
                                case.count,
                                T::TYPE,
                                case.ranks,
                                case.root
                            )
                        })?;
                    done += 1;
                }
            }
        }
    }
    Ok(done)
}

/// Verifies every variant of a case with every element type and operator; returns their number.
pub fn every_type(rig: &Rig, case: &Case, sample: &mut Sample) -> Result<usize> {
    let all = ReduceOp::ALL;
    Ok(variants::<i8>(rig, case, all, sample)?
        + variants::<u8>(rig, case, all, sample)?
        + variants::<i32>(rig, case, all, sample)?
        + variants::<u32>(rig, case, all, sample)?
        + variants::<i64>(rig, case, all, sample)?
        + variants::<u64>(rig, case, all, sample)?
        + variants::<f16>(rig, case, all, sample)?
        + variants::<bf16>(rig, case, all, sample)?
        + variants::<f32>(rig, case, all, sample)?
        + variants::<f64>(rig, case, all, sample)?
        + variants::<F8E4M3>(rig, case, all, sample)?
        + variants::<F8E5M2>(rig, case, all, sample)?)
}

/// The cases for this many ranks: little data, one and a half lines, and odd lengths.
#[must_use]
pub fn cases(ranks: u32, counts: &[u64]) -> Vec<Case> {
    let mut cases = Vec::new();
    for &collective in Collective::ALL {
        if matches!(collective, Collective::AllToAllV | Collective::Barrier) {
            continue;
        }
        for &count in counts {
            cases.push(Case {
                collective,
                ranks,
                root: Rank(count as u32 % ranks),
                count,
            });
        }
    }
    cases
}
