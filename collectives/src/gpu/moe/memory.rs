//! The memory of a layer: what peers write, mapped by all ranks, and what is the rank's own.

use doorbell_cuda::{Context, DeviceMemory, Memory as _, Stream};

use super::arguments::MAX_BLOCKS;
use crate::gpu::error::GpuError;
use crate::gpu::peers::MAX_PEERS;
use crate::moe::{MoeOptions, Payload, Shape};

const ALIGN: usize = 256;
/// Kinds of epochs: of dispatch and of combine.
const KINDS: usize = 2;
/// Tables of what is received: counts, first rows, and positions.
const TABLES: usize = 3;

/// Offsets in the memory that peers write, the same on all ranks: the rows of
/// [`ReceivedRows`](crate::moe::ReceivedRows), the outputs of the rank's own pairs in send order,
/// and words that are initially zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Window {
    pub(super) rows: usize,
    pub(super) outputs: usize,
    pub(super) ready: usize,
    pub(super) counts: usize,
    pub(super) arrived: usize,
    pub(super) returned: usize,
    end: usize,
}

/// Offsets in the rank's own memory, initially zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Own {
    pub(super) state: usize,
    pub(super) order: usize,
    pub(super) positions: usize,
    pub(super) bases: usize,
    pub(super) tables: usize,
    end: usize,
}

/// Places parts one after another.
struct Places(usize);

impl Places {
    fn next(&mut self, bytes: usize) -> usize {
        let start = self.0.next_multiple_of(ALIGN);
        self.0 = start + bytes;
        start
    }
}

impl Window {
    pub(super) fn new(options: &MoeOptions) -> Self {
        let shape = &options.shape;
        let row = |payload: Payload| payload.row_bytes(shape.hidden());
        let mut places = Places(0);
        let of_blocks = MAX_PEERS * MAX_BLOCKS as usize * 4;
        Self {
            rows: places.next(options.rows() * row(options.payload)),
            outputs: places.next(shape.max_pairs() * row(Payload::Bf16)),
            ready: places.next(KINDS * MAX_PEERS * 4),
            counts: places.next(shape.ranks() as usize * shape.experts() as usize * 8),
            arrived: places.next(of_blocks),
            returned: places.next(of_blocks),
            end: places.0,
        }
    }

    pub(super) fn alloc(&self, context: &Context) -> Result<DeviceMemory, GpuError> {
        zeroed(context, self.ready, self.end)
    }
}

impl Own {
    pub(super) fn new(shape: &Shape) -> Self {
        let (experts, pairs) = (shape.experts() as usize, shape.max_pairs());
        let mut places = Places(0);
        Self {
            state: places.next(ALIGN),
            order: places.next(pairs * 4),
            positions: places.next(pairs * 4),
            bases: places.next(experts * 4),
            tables: places.next(TABLES * experts * 4),
            end: places.0,
        }
    }

    pub(super) fn alloc(&self, context: &Context) -> Result<DeviceMemory, GpuError> {
        zeroed(context, 0, self.end)
    }
}

fn zeroed(context: &Context, start: usize, end: usize) -> Result<DeviceMemory, GpuError> {
    let memory = DeviceMemory::alloc(context, end)?;
    let stream = Stream::new(context)?;
    stream.fill(memory.span(start..end)?, 0)?;
    stream.synchronize()?;
    Ok(memory)
}
