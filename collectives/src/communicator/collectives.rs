//! The collectives as methods.
//!
//! The plain name is in place: the output replaces the input, as
//! [`Shape::shared`](crate::plan::Shape::shared) defines; `…_into` has separate input and output.

use super::call::{Call, OperationSpec, Reduction};
use super::data::{BufferRef, Source, Target};
use super::{CollectiveError, Communicator};
use crate::kernel::Element;
use crate::plan::Collective;
use crate::types::{DataType, Rank, ReduceOp};

#[cold]
pub(super) fn misuse<T>(collective: Collective, what: impl Into<String>) -> Result<T, CollectiveError> {
    let what = what.into();
    Err(CollectiveError::Misuse { collective, what })
}

pub(crate) fn displacements(counts: &[usize]) -> (Vec<(u64, u64)>, usize) {
    let mut at = 0usize;
    let parts = counts.iter().map(|&len| {
        let start = at;
        at = at.saturating_add(len);
        (start as u64, len as u64)
    });
    (parts.collect(), at)
}

impl Communicator {
    #[inline(always)]
    pub(super) fn spec<T: Element>(
        &self,
        collective: Collective,
        count: usize,
        input: BufferRef,
        output: BufferRef,
    ) -> OperationSpec {
        self.spec_of(collective, (T::TYPE, count as u64), input, output)
    }

    #[inline(always)]
    pub(super) fn spec_of(
        &self,
        collective: Collective,
        (data, count): (DataType, u64),
        input: BufferRef,
        output: BufferRef,
    ) -> OperationSpec {
        let bytes = count.saturating_mul(data.bytes() as u64);
        let parts = match collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce | Collective::SendRecv => 1,
            Collective::AllToAllV | Collective::Barrier => 0,
            _ => u64::from(self.ranks),
        };
        OperationSpec {
            collective,
            root: Rank(0),
            reduction: ReduceOp::Sum.into(),
            data,
            count,
            bytes: bytes.saturating_mul(parts),
            parts: None,
            message: None,
            input,
            output,
        }
    }

    pub(super) fn part(&self, collective: Collective, len: usize) -> Result<usize, CollectiveError> {
        let ranks = self.ranks as usize;
        if len.is_multiple_of(ranks) {
            Ok(len / ranks)
        } else {
            misuse(
                collective,
                format!(
                    "{len} elements are not as many for each of {ranks} ranks: use alltoallv, or gather_v and scatter_v"
                ),
            )
        }
    }

    pub(super) fn with_root(&self, spec: OperationSpec, root: Rank) -> Result<OperationSpec, CollectiveError> {
        if root.0 < self.ranks {
            Ok(OperationSpec { root, ..spec })
        } else {
            misuse(
                spec.collective,
                format!("rank {root} cannot be the root of {} ranks", self.ranks),
            )
        }
    }

    #[inline(always)]
    pub(super) fn with_reduction(
        mut spec: OperationSpec,
        reduction: Reduction,
    ) -> Result<OperationSpec, CollectiveError> {
        use crate::kernel::Op;
        if matches!(reduction.op, Op::Builtin(ReduceOp::PreMulSum)) && reduction.scale.is_none() {
            return misuse(
                spec.collective,
                "a premulsum needs its scalar: give PreMulSum(scalar) as the operator",
            );
        }
        spec.reduction = reduction;
        Ok(spec)
    }

    #[inline]
    pub(super) fn equal_length(collective: Collective, input: usize, output: usize) -> Result<usize, CollectiveError> {
        if input == output {
            Ok(input)
        } else {
            misuse(
                collective,
                format!("the input has {input} elements, and the output {output}: they must have as many"),
            )
        }
    }

    pub(super) fn per_rank_length(
        &self,
        collective: Collective,
        part: usize,
        all: usize,
    ) -> Result<usize, CollectiveError> {
        if part.checked_mul(self.ranks as usize) == Some(all) {
            Ok(part)
        } else {
            misuse(
                collective,
                format!("{all} elements are not {part} for each of {} ranks", self.ranks),
            )
        }
    }

    /// All ranks get the reduction of all `data`, in place.
    #[doc(alias("ncclAllReduce", "MPI_Allreduce"))]
    pub fn all_reduce<X: Target>(&self, mut data: X, op: impl Into<Reduction>) -> Call<'_, X> {
        let (at, len) = data.region();
        let spec = self.spec::<X::Element>(Collective::AllReduce, len, at, at);
        Call::new(self, Self::with_reduction(spec, op.into()), data)
    }

    /// All ranks get the reduction of all `input`s.
    #[doc(alias("ncclAllReduce", "MPI_Allreduce"))]
    pub fn all_reduce_into<X: Source, Y: Target<Element = X::Element>>(
        &self,
        mut input: X,
        mut output: Y,
        op: impl Into<Reduction>,
    ) -> Call<'_, (X, Y)> {
        const COLLECTIVE: Collective = Collective::AllReduce;
        let ((from, given), (into, wanted)) = (input.region(), output.region());
        let spec = Self::equal_length(COLLECTIVE, given, wanted)
            .and_then(|len| Self::with_reduction(self.spec::<X::Element>(COLLECTIVE, len, from, into), op.into()));
        Call::new(self, spec, (input, output))
    }

    /// All ranks get all parts, in place: the own part of `data` is the input.
    #[doc(alias("ncclAllGather", "MPI_Allgather"))]
    pub fn all_gather<X: Target>(&self, mut data: X) -> Call<'_, X> {
        const COLLECTIVE: Collective = Collective::AllGather;
        let (at, len) = data.region();
        let spec = self.part(COLLECTIVE, len).map(|part| {
            let own = at.offset_by(part * self.rank.index(), X::Element::TYPE);
            self.spec::<X::Element>(COLLECTIVE, part, own, at)
        });
        Call::new(self, spec, data)
    }

    /// All ranks get all `input`s, by rank.
    #[doc(alias("ncclAllGather", "MPI_Allgather"))]
    pub fn all_gather_into<X: Source, Y: Target<Element = X::Element>>(
        &self,
        mut input: X,
        mut output: Y,
    ) -> Call<'_, (X, Y)> {
        const COLLECTIVE: Collective = Collective::AllGather;
        let ((from, given), (into, wanted)) = (input.region(), output.region());
        let spec = self
            .per_rank_length(COLLECTIVE, given, wanted)
            .map(|part| self.spec::<X::Element>(COLLECTIVE, part, from, into));
        Call::new(self, spec, (input, output))
    }

    /// Each rank gets its part of the reduction, in place of that part of its `data`; the rest is
    /// unchanged.
    #[doc(alias("ncclReduceScatter", "MPI_Reduce_scatter_block"))]
    pub fn reduce_scatter<X: Target>(&self, mut data: X, op: impl Into<Reduction>) -> Call<'_, X> {
        const COLLECTIVE: Collective = Collective::ReduceScatter;
        let (at, len) = data.region();
        let spec = self.part(COLLECTIVE, len).and_then(|part| {
            let own = at.offset_by(part * self.rank.index(), X::Element::TYPE);
            Self::with_reduction(self.spec::<X::Element>(COLLECTIVE, part, at, own), op.into())
        });
        Call::new(self, spec, data)
    }

    /// Each rank gets its part of the reduction of all `input`s.
    #[doc(alias("ncclReduceScatter", "MPI_Reduce_scatter_block"))]
    pub fn reduce_scatter_into<X: Source, Y: Target<Element = X::Element>>(
        &self,
        mut input: X,
        mut output: Y,
        op: impl Into<Reduction>,
    ) -> Call<'_, (X, Y)> {
        const COLLECTIVE: Collective = Collective::ReduceScatter;
        let ((from, given), (into, wanted)) = (input.region(), output.region());
        let spec = self
            .per_rank_length(COLLECTIVE, wanted, given)
            .and_then(|part| Self::with_reduction(self.spec::<X::Element>(COLLECTIVE, part, from, into), op.into()));
        Call::new(self, spec, (input, output))
    }

    /// All ranks get the root's `data`.
    #[doc(alias("ncclBroadcast", "ncclBcast", "MPI_Bcast"))]
    pub fn broadcast<X: Target>(&self, mut data: X, root: Rank) -> Call<'_, X> {
        let (at, len) = data.region();
        let given = if self.rank == root { at } else { BufferRef::NONE };
        let spec = self.spec::<X::Element>(Collective::Broadcast, len, given, at);
        Call::new(self, self.with_root(spec, root), data)
    }

    /// All ranks get the root's `input`; that of the others is ignored.
    #[doc(alias = "ncclBroadcast")]
    pub fn broadcast_into<X: Source, Y: Target<Element = X::Element>>(
        &self,
        mut input: X,
        mut output: Y,
        root: Rank,
    ) -> Call<'_, (X, Y)> {
        const COLLECTIVE: Collective = Collective::Broadcast;
        let ((from, given), (into, wanted)) = (input.region(), output.region());
        let spec = if self.rank == root {
            Self::equal_length(COLLECTIVE, given, wanted)
                .map(|len| self.spec::<X::Element>(COLLECTIVE, len, from, into))
        } else {
            Ok(self.spec::<X::Element>(COLLECTIVE, wanted, BufferRef::NONE, into))
        };
        let spec = spec.and_then(|spec| self.with_root(spec, root));
        Call::new(self, spec, (input, output))
    }

    /// The root gets the reduction of all `data`, in place; that of the others is unchanged.
    #[doc(alias("ncclReduce", "MPI_Reduce"))]
    pub fn reduce<X: Target>(&self, mut data: X, op: impl Into<Reduction>, root: Rank) -> Call<'_, X> {
        let (at, len) = data.region();
        let wanted = if self.rank == root { at } else { BufferRef::NONE };
        let spec = self.spec::<X::Element>(Collective::Reduce, len, at, wanted);
        let spec = Self::with_reduction(spec, op.into()).and_then(|spec| self.with_root(spec, root));
        Call::new(self, spec, data)
    }

    /// The root gets the reduction of all `input`s; the `output` of the others is unused and may be
    /// empty.
    #[doc(alias("ncclReduce", "MPI_Reduce"))]
    pub fn reduce_into<X: Source, Y: Target<Element = X::Element>>(
        &self,
        mut input: X,
        mut output: Y,
        op: impl Into<Reduction>,
        root: Rank,
    ) -> Call<'_, (X, Y)> {
        const COLLECTIVE: Collective = Collective::Reduce;
        let ((from, given), (into, wanted)) = (input.region(), output.region());
        let spec = if self.rank == root {
            Self::equal_length(COLLECTIVE, given, wanted)
                .map(|len| self.spec::<X::Element>(COLLECTIVE, len, from, into))
        } else {
            Ok(self.spec::<X::Element>(COLLECTIVE, given, from, BufferRef::NONE))
        };
        let spec = spec
            .and_then(|spec| Self::with_reduction(spec, op.into()))
            .and_then(|spec| self.with_root(spec, root));
        Call::new(self, spec, (input, output))
    }

    /// The root gets all parts, in place, one per rank; the others' `data` is their part.
    #[doc(alias("ncclGather", "MPI_Gather"))]
    pub fn gather<X: Target>(&self, mut data: X, root: Rank) -> Call<'_, X> {
        const COLLECTIVE: Collective = Collective::Gather;
        let (at, len) = data.region();
        let spec = if self.rank == root {
            self.part(COLLECTIVE, len).map(|part| {
                let own = at.offset_by(part * self.rank.index(), X::Element::TYPE);
                self.spec::<X::Element>(COLLECTIVE, part, own, at)
            })
        } else {
            Ok(self.spec::<X::Element>(COLLECTIVE, len, at, BufferRef::NONE))
        };
        let spec = spec.and_then(|spec| self.with_root(spec, root));
        Call::new(self, spec, data)
    }

    /// The root gets all `input`s, by rank; the `output` of the others is unused and may be empty.
    #[doc(alias("ncclGather", "MPI_Gather"))]
    pub fn gather_into<X: Source, Y: Target<Element = X::Element>>(
        &self,
        mut input: X,
        mut output: Y,
        root: Rank,
    ) -> Call<'_, (X, Y)> {
        const COLLECTIVE: Collective = Collective::Gather;
        let ((from, given), (into, wanted)) = (input.region(), output.region());
        let spec = if self.rank == root {
            self.per_rank_length(COLLECTIVE, given, wanted)
                .map(|part| self.spec::<X::Element>(COLLECTIVE, part, from, into))
        } else {
            Ok(self.spec::<X::Element>(COLLECTIVE, given, from, BufferRef::NONE))
        };
        let spec = spec.and_then(|spec| self.with_root(spec, root));
        Call::new(self, spec, (input, output))
    }

    /// Each rank gets its part of the root's `data`; the root's own part stays in place.
    #[doc(alias("ncclScatter", "MPI_Scatter"))]
    pub fn scatter<X: Target>(&self, mut data: X, root: Rank) -> Call<'_, X> {
        const COLLECTIVE: Collective = Collective::Scatter;
        let (at, len) = data.region();
        let spec = if self.rank == root {
            self.part(COLLECTIVE, len).map(|part| {
                let own = at.offset_by(part * self.rank.index(), X::Element::TYPE);
                self.spec::<X::Element>(COLLECTIVE, part, at, own)
            })
        } else {
            Ok(self.spec::<X::Element>(COLLECTIVE, len, BufferRef::NONE, at))
        };
        let spec = spec.and_then(|spec| self.with_root(spec, root));
        Call::new(self, spec, data)
    }

    /// Each rank gets its part of the root's `input`; that of the others is ignored and may be
    /// empty.
    #[doc(alias("ncclScatter", "MPI_Scatter"))]
    pub fn scatter_into<X: Source, Y: Target<Element = X::Element>>(
        &self,
        mut input: X,
        mut output: Y,
        root: Rank,
    ) -> Call<'_, (X, Y)> {
        const COLLECTIVE: Collective = Collective::Scatter;
        let ((from, given), (into, wanted)) = (input.region(), output.region());
        let spec = if self.rank == root {
            self.per_rank_length(COLLECTIVE, wanted, given)
                .map(|part| self.spec::<X::Element>(COLLECTIVE, part, from, into))
        } else {
            Ok(self.spec::<X::Element>(COLLECTIVE, wanted, BufferRef::NONE, into))
        };
        let spec = spec.and_then(|spec| self.with_root(spec, root));
        Call::new(self, spec, (input, output))
    }

    /// Each rank gets its part of every rank's `input`, by rank; all parts have one length.
    #[doc(alias("ncclAlltoAll", "MPI_Alltoall"))]
    pub fn all_to_all<X: Source, Y: Target<Element = X::Element>>(
        &self,
        mut input: X,
        mut output: Y,
    ) -> Call<'_, (X, Y)> {
        const COLLECTIVE: Collective = Collective::AllToAll;
        let ((from, given), (into, wanted)) = (input.region(), output.region());
        let spec = Self::equal_length(COLLECTIVE, given, wanted)
            .and_then(|len| self.part(COLLECTIVE, len))
            .map(|part| self.spec::<X::Element>(COLLECTIVE, part, from, into));
        Call::new(self, spec, (input, output))
    }

    /// Each rank sends its `input` to the next rank, and receives that of the previous one.
    #[doc(alias = "MPI_Sendrecv")]
    pub fn send_receive<X: Source, Y: Target<Element = X::Element>>(
        &self,
        mut input: X,
        mut output: Y,
    ) -> Call<'_, (X, Y)> {
        const COLLECTIVE: Collective = Collective::SendRecv;
        let ((from, given), (into, wanted)) = (input.region(), output.region());
        let spec = Self::equal_length(COLLECTIVE, given, wanted)
            .map(|len| self.spec::<X::Element>(COLLECTIVE, len, from, into));
        Call::new(self, spec, (input, output))
    }

    /// Returns once all ranks have called it.
    #[doc(alias = "MPI_Barrier")]
    pub fn barrier(&self) -> Call<'_, ()> {
        Call::new(
            self,
            Ok(self.spec::<u8>(Collective::Barrier, 0, BufferRef::NONE, BufferRef::NONE)),
            (),
        )
    }
}
