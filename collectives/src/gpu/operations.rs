//! The operations of a GPU communicator.
//!
//! Memory may be longer than the operation needs. In place, the output is located as in
//! [`Shape::shared`](crate::plan::Shape::shared): for all-gather and gather the input is this
//! rank's part of the output, for reduce-scatter and scatter the output is this rank's part of the
//! input. Errors are those of [`enqueue`](GpuCommunicator::enqueue).

use doorbell_cuda::{Span, Stream};

use super::call::GpuCall;
use super::communicator::GpuCommunicator;
use super::error::GpuError;
use crate::communicator::Reduction;
use crate::plan::Collective;
use crate::types::{DataType, Rank, ReduceOp};

impl GpuCommunicator {
    /// Every rank gets the reduction of all `input`s.
    #[doc(alias = "ncclAllReduce")]
    pub fn all_reduce<'a>(
        &self,
        input: Span<'a>,
        output: Span<'a>,
        count: usize,
        data: DataType,
        op: impl Into<Reduction>,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        let mut call = call(Collective::AllReduce, data, count, Some(input), Some(output));
        call.reduction = op.into();
        self.enqueue(&call, stream)
    }

    /// Every rank gets all `input`s, concatenated; `count` is per rank.
    #[doc(alias = "ncclAllGather")]
    pub fn all_gather<'a>(
        &self,
        input: Span<'a>,
        output: Span<'a>,
        count: usize,
        data: DataType,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        let call = call(Collective::AllGather, data, count, Some(input), Some(output));
        self.enqueue(&call, stream)
    }

    /// Each rank gets its part of the reduction of all `input`s; `count` is per part.
    #[doc(alias = "ncclReduceScatter")]
    pub fn reduce_scatter<'a>(
        &self,
        input: Span<'a>,
        output: Span<'a>,
        count: usize,
        data: DataType,
        op: impl Into<Reduction>,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        let mut call = call(Collective::ReduceScatter, data, count, Some(input), Some(output));
        call.reduction = op.into();
        self.enqueue(&call, stream)
    }

    /// Every rank gets the root's `input`, which only the root passes.
    #[doc(alias = "ncclBroadcast")]
    pub fn broadcast<'a>(
        &self,
        input: Option<Span<'a>>,
        output: Span<'a>,
        count: usize,
        data: DataType,
        root: Rank,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        let call = call(Collective::Broadcast, data, count, input, Some(output));
        self.enqueue(&GpuCall { root, ..call }, stream)
    }

    /// The root gets the reduction of all `input`s. Only the root passes an `output`.
    #[expect(clippy::too_many_arguments, reason = "as the others of its kind have them")]
    #[doc(alias = "ncclReduce")]
    pub fn reduce<'a>(
        &self,
        input: Span<'a>,
        output: Option<Span<'a>>,
        count: usize,
        data: DataType,
        op: impl Into<Reduction>,
        root: Rank,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        let mut call = call(Collective::Reduce, data, count, Some(input), output);
        call.root = root;
        call.reduction = op.into();
        self.enqueue(&call, stream)
    }

    /// The root gets all `input`s; `count` is per rank. Only the root passes an `output`.
    #[doc(alias = "ncclGather")]
    pub fn gather<'a>(
        &self,
        input: Span<'a>,
        output: Option<Span<'a>>,
        count: usize,
        data: DataType,
        root: Rank,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        let call = call(Collective::Gather, data, count, Some(input), output);
        self.enqueue(&GpuCall { root, ..call }, stream)
    }

    /// Each rank gets its part of the root's `input`; `count` is per part.
    #[doc(alias = "ncclScatter")]
    pub fn scatter<'a>(
        &self,
        input: Option<Span<'a>>,
        output: Span<'a>,
        count: usize,
        data: DataType,
        root: Rank,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        let call = call(Collective::Scatter, data, count, input, Some(output));
        self.enqueue(&GpuCall { root, ..call }, stream)
    }

    /// Each rank gets its part of every rank's `input`; `count` is per part. Never in place.
    #[doc(alias = "ncclAlltoAll")]
    pub fn all_to_all<'a>(
        &self,
        input: Span<'a>,
        output: Span<'a>,
        count: usize,
        data: DataType,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        let call = call(Collective::AllToAll, data, count, Some(input), Some(output));
        self.enqueue(&call, stream)
    }

    /// Each rank sends its `input` to the next rank. Never in place.
    #[doc(alias("ncclSend", "ncclRecv"))]
    pub fn send_receive<'a>(
        &self,
        input: Span<'a>,
        output: Span<'a>,
        count: usize,
        data: DataType,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        let call = call(Collective::SendRecv, data, count, Some(input), Some(output));
        self.enqueue(&call, stream)
    }

    /// A barrier: later work of `stream` runs when all ranks' streams have reached it.
    pub fn barrier(&self, stream: &Stream) -> Result<(), GpuError> {
        self.enqueue(&call(Collective::Barrier, DataType::U8, 0, None, None), stream)
    }
}

fn call<'a>(
    collective: Collective,
    data: DataType,
    count: usize,
    input: Option<Span<'a>>,
    output: Option<Span<'a>>,
) -> GpuCall<'a> {
    GpuCall {
        collective,
        root: Rank(0),
        data,
        count,
        reduction: ReduceOp::Sum.into(),
        input,
        output,
    }
}
