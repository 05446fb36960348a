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

impl Collective {
    /// The error of a call whose arguments are invalid.
    #[cold]
    pub(super) fn misuse<T>(self, what: impl Into<String>) -> Result<T, CollectiveError> {
        Err(CollectiveError::Misuse {
            collective: self,
            what: what.into(),
        })
    }
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
            collective.misuse(format!(
                "{len} elements are not as many for each of {ranks} ranks: use alltoallv, or gather_v and scatter_v"
            ))
        }
    }

    pub(super) fn with_root(&self, spec: OperationSpec, root: Rank) -> Result<OperationSpec, CollectiveError> {
        if root.0 < self.ranks {
            Ok(OperationSpec { root, ..spec })
        } else {
            spec.collective
                .misuse(format!("rank {root} cannot be the root of {} ranks", self.ranks))
        }
    }

    #[inline(always)]
    pub(super) fn with_reduction(
        mut spec: OperationSpec,
        reduction: Reduction,
    ) -> Result<OperationSpec, CollectiveError> {
        use crate::kernel::Op;
        if matches!(reduction.op, Op::Builtin(ReduceOp::PreMulSum)) && reduction.scale.is_none() {
            return spec
                .collective
                .misuse("a premulsum needs its scalar: give PreMulSum(scalar) as the operator");
        }
        spec.reduction = reduction;
        Ok(spec)
    }

    #[inline]
    pub(super) fn equal_length(collective: Collective, input: usize, output: usize) -> Result<usize, CollectiveError> {
        if input == output {
            Ok(input)
        } else {
            collective.misuse(format!(
                "the input has {input} elements, and the output {output}: they must have as many"
            ))
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
            collective.misuse(format!(
                "{all} elements are not {part} for each of {} ranks",
                self.ranks
            ))
        }
    }

    /// An operation with separate input and output; lengths are checked first.
    #[inline]
    fn apart<X: Source, Y: Target<Element = X::Element>>(
        &self,
        collective: Collective,
        (mut input, mut output): (X, Y),
        root: Option<Rank>,
        reduction: Option<Reduction>,
    ) -> Call<'_, (X, Y)> {
        let ((from, given), (into, wanted)) = (input.region(), output.region());
        let is_root = root.is_none_or(|root| root == self.rank);
        let length = || match collective {
            Collective::AllGather | Collective::Gather => self.per_rank_length(collective, given, wanted),
            Collective::ReduceScatter | Collective::Scatter => self.per_rank_length(collective, wanted, given),
            Collective::AllToAll => self.part(collective, Self::equal_length(collective, given, wanted)?),
            _ => Self::equal_length(collective, given, wanted),
        };
        let count = match collective {
            Collective::Broadcast | Collective::Scatter if !is_root => Ok((wanted, BufferRef::NONE, into)),
            Collective::Reduce | Collective::Gather if !is_root => Ok((given, from, BufferRef::NONE)),
            _ => length().map(|count| (count, from, into)),
        };
        let spec = count.map(|(count, from, into)| self.spec::<X::Element>(collective, count, from, into));
        Call::new(self, self.completed(spec, root, reduction), (input, output))
    }

    /// An operation in place, as [`Shape::shared`](crate::plan::Shape::shared) defines.
    #[inline]
    fn in_place<X: Target>(
        &self,
        collective: Collective,
        mut data: X,
        root: Option<Rank>,
        reduction: Option<Reduction>,
    ) -> Call<'_, X> {
        let (at, len) = data.region();
        let is_root = root.is_none_or(|root| root == self.rank);
        let part = || {
            let part = self.part(collective, len)?;
            Ok((part, at.offset_by(part * self.rank.index(), X::Element::TYPE)))
        };
        let count = match collective {
            Collective::Broadcast | Collective::Scatter if !is_root => Ok((len, BufferRef::NONE, at)),
            Collective::Reduce | Collective::Gather if !is_root => Ok((len, at, BufferRef::NONE)),
            Collective::AllGather | Collective::Gather => part().map(|(part, own)| (part, own, at)),
            Collective::ReduceScatter | Collective::Scatter => part().map(|(part, own)| (part, at, own)),
            _ => Ok((len, at, at)),
        };
        let spec = count.map(|(count, from, into)| self.spec::<X::Element>(collective, count, from, into));
        Call::new(self, self.completed(spec, root, reduction), data)
    }

    /// Adds the reduction and the root of operations that have them.
    #[inline]
    fn completed(
        &self,
        spec: Result<OperationSpec, CollectiveError>,
        root: Option<Rank>,
        reduction: Option<Reduction>,
    ) -> Result<OperationSpec, CollectiveError> {
        let spec = match reduction {
            Some(reduction) => Self::with_reduction(spec?, reduction)?,
            None => spec?,
        };
        match root {
            Some(root) => self.with_root(spec, root),
            None => Ok(spec),
        }
    }

    /// All ranks get the reduction of all `data`, in place.
    #[doc(alias("ncclAllReduce", "MPI_Allreduce"))]
    pub fn all_reduce<X: Target>(&self, data: X, op: impl Into<Reduction>) -> Call<'_, X> {
        self.in_place(Collective::AllReduce, data, None, Some(op.into()))
    }

    /// All ranks get the reduction of all `input`s.
    #[doc(alias("ncclAllReduce", "MPI_Allreduce"))]
    pub fn all_reduce_into<X: Source, Y: Target<Element = X::Element>>(
        &self,
        input: X,
        output: Y,
        op: impl Into<Reduction>,
    ) -> Call<'_, (X, Y)> {
        self.apart(Collective::AllReduce, (input, output), None, Some(op.into()))
    }

    /// All ranks get all parts, in place: the own part of `data` is the input.
    #[doc(alias("ncclAllGather", "MPI_Allgather"))]
    pub fn all_gather<X: Target>(&self, data: X) -> Call<'_, X> {
        self.in_place(Collective::AllGather, data, None, None)
    }

    /// All ranks get all `input`s, by rank.
    #[doc(alias("ncclAllGather", "MPI_Allgather"))]
    pub fn all_gather_into<X: Source, Y: Target<Element = X::Element>>(&self, input: X, output: Y) -> Call<'_, (X, Y)> {
        self.apart(Collective::AllGather, (input, output), None, None)
    }

    /// Each rank gets its part of the reduction, in place of that part of its `data`; the rest is
    /// unchanged.
    #[doc(alias("ncclReduceScatter", "MPI_Reduce_scatter_block"))]
    pub fn reduce_scatter<X: Target>(&self, data: X, op: impl Into<Reduction>) -> Call<'_, X> {
        self.in_place(Collective::ReduceScatter, data, None, Some(op.into()))
    }

    /// Each rank gets its part of the reduction of all `input`s.
    #[doc(alias("ncclReduceScatter", "MPI_Reduce_scatter_block"))]
    pub fn reduce_scatter_into<X: Source, Y: Target<Element = X::Element>>(
        &self,
        input: X,
        output: Y,
        op: impl Into<Reduction>,
    ) -> Call<'_, (X, Y)> {
        self.apart(Collective::ReduceScatter, (input, output), None, Some(op.into()))
    }

    /// All ranks get the root's `data`.
    #[doc(alias("ncclBroadcast", "ncclBcast", "MPI_Bcast"))]
    pub fn broadcast<X: Target>(&self, data: X, root: Rank) -> Call<'_, X> {
        self.in_place(Collective::Broadcast, data, Some(root), None)
    }

    /// All ranks get the root's `input`; that of the others is ignored.
    #[doc(alias = "ncclBroadcast")]
    pub fn broadcast_into<X: Source, Y: Target<Element = X::Element>>(
        &self,
        input: X,
        output: Y,
        root: Rank,
    ) -> Call<'_, (X, Y)> {
        self.apart(Collective::Broadcast, (input, output), Some(root), None)
    }

    /// The root gets the reduction of all `data`, in place; that of the others is unchanged.
    #[doc(alias("ncclReduce", "MPI_Reduce"))]
    pub fn reduce<X: Target>(&self, data: X, op: impl Into<Reduction>, root: Rank) -> Call<'_, X> {
        self.in_place(Collective::Reduce, data, Some(root), Some(op.into()))
    }

    /// The root gets the reduction of all `input`s; the `output` of the others is unused and may be
    /// empty.
    #[doc(alias("ncclReduce", "MPI_Reduce"))]
    pub fn reduce_into<X: Source, Y: Target<Element = X::Element>>(
        &self,
        input: X,
        output: Y,
        op: impl Into<Reduction>,
        root: Rank,
    ) -> Call<'_, (X, Y)> {
        self.apart(Collective::Reduce, (input, output), Some(root), Some(op.into()))
    }

    /// The root gets all parts, in place, one per rank; the others' `data` is their part.
    #[doc(alias("ncclGather", "MPI_Gather"))]
    pub fn gather<X: Target>(&self, data: X, root: Rank) -> Call<'_, X> {
        self.in_place(Collective::Gather, data, Some(root), None)
    }

    /// The root gets all `input`s, by rank; the `output` of the others is unused and may be empty.
    #[doc(alias("ncclGather", "MPI_Gather"))]
    pub fn gather_into<X: Source, Y: Target<Element = X::Element>>(
        &self,
        input: X,
        output: Y,
        root: Rank,
    ) -> Call<'_, (X, Y)> {
        self.apart(Collective::Gather, (input, output), Some(root), None)
    }

    /// Each rank gets its part of the root's `data`; the root's own part stays in place.
    #[doc(alias("ncclScatter", "MPI_Scatter"))]
    pub fn scatter<X: Target>(&self, data: X, root: Rank) -> Call<'_, X> {
        self.in_place(Collective::Scatter, data, Some(root), None)
    }

    /// Each rank gets its part of the root's `input`; that of the others is ignored and may be
    /// empty.
    #[doc(alias("ncclScatter", "MPI_Scatter"))]
    pub fn scatter_into<X: Source, Y: Target<Element = X::Element>>(
        &self,
        input: X,
        output: Y,
        root: Rank,
    ) -> Call<'_, (X, Y)> {
        self.apart(Collective::Scatter, (input, output), Some(root), None)
    }

    /// Each rank gets its part of every rank's `input`, by rank; all parts have one length.
    #[doc(alias("ncclAlltoAll", "MPI_Alltoall"))]
    pub fn all_to_all<X: Source, Y: Target<Element = X::Element>>(&self, input: X, output: Y) -> Call<'_, (X, Y)> {
        self.apart(Collective::AllToAll, (input, output), None, None)
    }

    /// Each rank sends its `input` to the next rank, and receives that of the previous one.
    #[doc(alias = "MPI_Sendrecv")]
    pub fn send_receive<X: Source, Y: Target<Element = X::Element>>(&self, input: X, output: Y) -> Call<'_, (X, Y)> {
        self.apart(Collective::SendRecv, (input, output), None, None)
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
