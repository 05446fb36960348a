//! Short operations of the [rig](super::collective), by the kernel that does one without a plan.

use anyhow::{Context as _, Result, bail};
use doorbell_collectives::gpu::program::Function;
use doorbell_collectives::gpu::small::{Cut, Operation};
use doorbell_collectives::kernel::{F8E4M3, F8E5M2, bf16, f16};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::{Case, Number, given};
use doorbell_collectives::{DataType, Rank, ReduceOp};
use doorbell_cuda::Memory as _;

use super::collective::{Rig, Sample};

/// How a case is run.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// In one exchange or two.
    pub two_steps: bool,
    /// Input and output in one memory.
    pub in_place: bool,
    /// Bytes by which memory is off its alignment, input and output.
    pub skew: (usize, usize),
}

impl Rig {
    /// How a case is cut; `None` if it is too long.
    #[must_use]
    pub fn short(&self, case: &Case, data: DataType, two_steps: bool) -> Option<Cut> {
        let bytes = case.count * data.bytes() as u64;
        Cut::new(case.collective, case.ranks, bytes, self.sizes.small, two_steps)
    }

    /// Puts one rank's part into its stream.
    ///
    /// # Errors
    /// What the executor says.
    pub fn launch_short(
        &self,
        rank: usize,
        case: &Case,
        place: (u64, u64),
        cut: Cut,
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
        // SAFETY: the memories are long enough for the case, as `fits` has it, and nothing else is done with them until the streams are waited for; the cut is of the rig's own sizes.
        unsafe { member.small.launch(&member.stream, &operation, function, cut, &uses)? };
        Ok(())
    }

    /// Runs a case of the type `T` so many times, from inputs of the seed, and fails unless the results are right each time.
    ///
    /// # Errors
    /// What is wrong, or the driver's error.
    pub fn check_short<T: Number>(
        &self,
        case: &Case,
        way: Way,
        op: Option<ReduceOp>,
        seed: u64,
        times: u64,
    ) -> Result<()> {
        let Some(cut) = self.short(case, T::TYPE, way.two_steps) else {
            bail!("it is too long");
        };
        let places = self.places(case, way.in_place, way.skew, size_of::<T>());
        for member in &self.ranks {
            member.small.prepare(Function {
                data: T::TYPE,
                op,
                scalar: 0,
            })?;
        }
        for round in 0..times {
            self.round::<T>(case, &places, op, seed + round, |function| {
                (0..self.ranks.len())
                    .try_for_each(|rank| self.launch_short(rank, case, places[rank], cut, function(Rank(rank as u32))))
            })?;
        }
        Ok(())
    }

    /// Broadcasts by turns what begins at each of `turns` places, the root as far ahead of the others as it can be, and fails unless all of them have all of it.
    ///
    /// # Errors
    /// What is wrong, or the driver's error.
    pub fn check_ahead(&self, turns: usize, count: u64, two_steps: bool) -> Result<()> {
        let case = Case {
            collective: Collective::Broadcast,
            ranks: self.ranks.len() as u32,
            root: Rank(1),
            count,
        };
        let Some(cut) = self.short(&case, DataType::U32, two_steps) else {
            bail!("it is too long");
        };
        let function = Function {
            data: DataType::U32,
            op: None,
            scalar: 0,
        };
        let all: Vec<u32> = (0..turns as u64 * count).map(|at| given(7, case.root, at)).collect();
        for (rank, member) in self.ranks.iter().enumerate() {
            member.small.prepare(function)?;
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
                self.launch_short(rank, &case, place, cut, function)?;
            }
            // The root would be done with all by then, if it could.
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

/// Ways of a case, of those that the sample has: how many were right.
///
/// # Errors
/// The first that is not.
pub fn ways<T: Number>(rig: &Rig, case: &Case, ops: &[ReduceOp], sample: &mut Sample) -> Result<usize> {
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
                    let way = Way {
                        two_steps,
                        in_place,
                        skew,
                    };
                    rig.check_short::<T>(case, way, op, done as u64, 2).with_context(|| {
                        let op = op.map_or("", ReduceOp::name);
                        format!(
                            "{} of {} {} {op} among {}, root {}: {way:?}",
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

/// Every way of a case with every type of elements and every operator: how many were right.
///
/// # Errors
/// The first that is not.
pub fn every_type(rig: &Rig, case: &Case, sample: &mut Sample) -> Result<usize> {
    let all = ReduceOp::ALL;
    Ok(ways::<i8>(rig, case, all, sample)?
        + ways::<u8>(rig, case, all, sample)?
        + ways::<i32>(rig, case, all, sample)?
        + ways::<u32>(rig, case, all, sample)?
        + ways::<i64>(rig, case, all, sample)?
        + ways::<u64>(rig, case, all, sample)?
        + ways::<f16>(rig, case, all, sample)?
        + ways::<bf16>(rig, case, all, sample)?
        + ways::<f32>(rig, case, all, sample)?
        + ways::<f64>(rig, case, all, sample)?
        + ways::<F8E4M3>(rig, case, all, sample)?
        + ways::<F8E5M2>(rig, case, all, sample)?)
}

/// What is checked among so many ranks: with a little, a line and a half, and what is ragged.
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
