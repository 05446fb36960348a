//! Dispatch and combine of [expert parallelism](crate::moe) between GPUs, by kernels that store
//! rows in the memory of their receivers.
//!
//! A [`GpuExpertParallel`] has memory for one dispatch, which all ranks map. Each operation has a
//! part that sends and returns, and one that receives; between the two, no thread of a GPU waits.
//! The host has no part in either: the numbers of operations are in device memory, so that all of
//! them can be captured in a graph and launched again.
//!
//! The kernels are in `gpudirect/cuda/kernels/moe.cu`, which has the protocol; [`arguments`]
//! describes their parameter, [`memory`] the memory, [`report`] how an impossible routing is
//! reported.

mod arguments;
mod executor;
mod memory;
pub(super) mod report;

use std::sync::Arc;

use doorbell_cuda::{Event, HostMemory, Memory as _, Span, Stream};

use self::arguments::{MAX_BLOCKS, MAX_CELLS, MAX_EXPERTS};
use self::executor::{BLOCKS, Executor, Step, Work};
use self::memory::{Own, Window};
use super::communicator::GpuCommunicator;
use super::error::GpuError;
use super::peers::Peers;
use crate::moe::{Mode, MoeOptions, Payload, ReceivedRows};
use crate::types::DataType;

/// The routing of one rank's tokens in device memory, as [`Routing`](crate::moe::Routing) describes
/// it. The kernels check the indices: an expert that does not exist fails the communicator, and
/// nothing is written for it. All negative indices but −1 are such experts.
#[derive(Clone, Copy, Debug)]
pub struct GpuRouting<'a> {
    /// `[tokens, top_k]` experts, −1 for none, each at most once for a token.
    #[doc(alias = "topk_idx")]
    pub indices: Span<'a>,
    /// The type of the indices: [`DataType::I32`] or [`DataType::I64`].
    pub index: DataType,
    /// `[tokens, top_k]` weights of `f32`.
    #[doc(alias = "topk_weights")]
    pub weights: Span<'a>,
}

/// A rank's part of a mixture-of-experts layer, or of several that take turns.
///
/// All ranks call the same operations in the same order, also with respect to those of the
/// communicator. Each rank may have another number of tokens, or none. One dispatch is in use at a
/// time; micro-batches whose operations overlap take one `GpuExpertParallel` each.
#[derive(Debug)]
#[doc(alias = "Buffer")]
pub struct GpuExpertParallel<'c> {
    comm: &'c GpuCommunicator,
    peers: Arc<Peers>,
    executor: Executor,
    options: MoeOptions,
    /// For the table of counts: an allocation may wait for work that waits for this rank.
    counts: HostMemory,
    /// Whether a part that sends has been enqueued, and the one that receives has not.
    is_sending: bool,
}

/// A dispatch of which the sending part is enqueued.
#[derive(Debug)]
#[must_use = "the layer can be used again only after it has received"]
pub struct GpuDispatching<'l, 'c> {
    layer: &'l mut GpuExpertParallel<'c>,
    routing: GpuRouting<'l>,
    tokens: usize,
}

/// What a dispatch has received, and what combine needs of it.
#[derive(Debug)]
pub struct GpuReceived<'l, 'c> {
    layer: &'l mut GpuExpertParallel<'c>,
    routing: GpuRouting<'l>,
    tokens: usize,
}

/// A combine of which the sending part is enqueued.
#[derive(Debug)]
#[must_use = "the layer can be used again only after it has received"]
pub struct GpuCombining<'l, 'c> {
    layer: &'l mut GpuExpertParallel<'c>,
    routing: GpuRouting<'l>,
    tokens: usize,
}

impl GpuCommunicator {
    /// Makes a layer's memory, and maps that of the other ranks. Collective, with the same options
    /// on all ranks, while no work of the GPUs waits for another rank.
    ///
    /// A rank has memory for [`MoeOptions::rows`], and for the outputs of its own pairs.
    ///
    /// # Errors
    /// [`GpuError::Refused`] where the GPUs do not reach each other's memory, ranks are
    /// [time-sliced](Self::is_time_sliced), or there are more than 1024 experts, or 8192 times
    /// ranks; [`GpuError::Moe`] for options that are invalid, or not the same on all ranks.
    pub fn expert_parallel(&self, options: MoeOptions) -> Result<GpuExpertParallel<'_>, GpuError> {
        let refused = |reason| GpuError::Refused {
            what: "expert parallelism on GPUs",
            reason,
        };
        self.host().agree_on_experts(&options)?;
        let (experts, ranks) = (options.shape.experts(), options.shape.ranks());
        if experts > MAX_EXPERTS || u64::from(experts) * u64::from(ranks) > MAX_CELLS.into() {
            return Err(refused(format!(
                "{experts} experts on {ranks} ranks: at most {MAX_EXPERTS} experts, and {MAX_CELLS} times ranks, are \
                 supported"
            )));
        }
        let (peers, kernels) = self.waiting_kernels().map_err(refused)?;
        let own = executor::load(kernels, options.payload).and_then(|kernels| {
            let window = Window::new(&options).alloc(self.context())?;
            let counts = HostMemory::alloc(self.context(), experts as usize * 4)?;
            Ok((kernels, window, Own::new(&options.shape).alloc(self.context())?, counts))
        });
        // The others would wait for this rank until the deadline.
        let own = own.inspect_err(|error| self.abort(&format!("it cannot make a layer of experts: {error}")));
        let (kernels, window, memory, counts) = own?;
        let mapped = self.map(peers, &window)?.map_err(refused)?;
        let blocks = self.blocks(BLOCKS).min(MAX_BLOCKS);
        Ok(GpuExpertParallel {
            comm: self,
            peers: Arc::clone(peers),
            executor: Executor::new((kernels, peers), &options, (mapped, memory), blocks),
            options,
            counts,
            is_sending: false,
        })
    }
}

impl<'c> GpuExpertParallel<'c> {
    /// The options.
    #[must_use]
    pub fn options(&self) -> &MoeOptions {
        &self.options
    }

    /// Enqueues the sending part of a dispatch of so many tokens on `stream`: `input` has their
    /// elements as bf16, aligned to 16 bytes. What an earlier dispatch has received is undefined
    /// from now on, on all ranks.
    ///
    /// `input` may be changed once the stream has come here; the routing is read until the combine
    /// is done.
    ///
    /// # Errors
    /// [`GpuError::Experts`] for more tokens than the shape has, memory that is too short or not
    /// aligned, and when an earlier operation has not received; an earlier failure, as
    /// [`GpuCommunicator::check`]; the driver's.
    #[doc(alias("low_latency_dispatch", "return_recv_hook"))]
    pub fn dispatch_send<'l>(
        &'l mut self,
        input: Span<'_>,
        tokens: usize,
        routing: GpuRouting<'l>,
        stream: &Stream,
    ) -> Result<GpuDispatching<'l, 'c>, GpuError> {
        self.refuse_sending()?;
        let routed = self.checked_routing(&routing, tokens)?;
        let work = Work {
            input: address("the tokens", input, tokens * self.token_bytes(), 16)?,
            ..routed
        };
        let steps: &[Step] = match self.options.mode {
            Mode::LowLatency => &[Step::Send],
            Mode::HighThroughput => &[Step::Count, Step::Place, Step::Write],
        };
        let uses = [input, routing.indices];
        // SAFETY: the memory was checked, and is kept. That nothing else writes it meanwhile is the
        // caller's obligation, and concerns device memory, of which no references exist.
        unsafe { self.enqueue("a dispatch", steps, work, &uses, stream)? };
        self.is_sending = true;
        Ok(GpuDispatching {
            layer: self,
            routing,
            tokens,
        })
    }

    fn checked_routing(&self, routing: &GpuRouting<'_>, tokens: usize) -> Result<Work, GpuError> {
        let index_bytes = match routing.index {
            DataType::I32 => 4,
            DataType::I64 => 8,
            other => {
                return Err(GpuError::Experts(format!(
                    "indices of {other}: they must be i32 or i64"
                )));
            }
        };
        if tokens > self.options.shape.max_tokens() as usize {
            let max = self.options.shape.max_tokens();
            return Err(GpuError::Experts(format!(
                "{tokens} tokens, and a rank has at most {max}"
            )));
        }
        let pairs = tokens * self.options.shape.top_k() as usize;
        Ok(Work {
            indices: address("the indices", routing.indices, pairs * index_bytes, index_bytes)?,
            index_bytes: index_bytes as u32,
            weights: address("the weights", routing.weights, pairs * 4, 4)?,
            tokens: tokens as u32,
            ..Work::default()
        })
    }

    /// Bytes of a token, and of an expert's output, in bf16.
    fn token_bytes(&self) -> usize {
        Payload::Bf16.row_bytes(self.options.shape.hidden())
    }

    fn refuse_sending(&self) -> Result<(), GpuError> {
        match self.is_sending {
            true => Err(GpuError::Experts(
                "an earlier operation was sent, and not received".to_owned(),
            )),
            false => Ok(()),
        }
    }

    /// # Safety
    /// As [`Executor::launch`].
    unsafe fn enqueue(
        &self,
        what: &str,
        steps: &[Step],
        work: Work,
        uses: &[Span<'_>],
        stream: &Stream,
    ) -> Result<(), GpuError> {
        self.comm.enqueue_kernels(what, stream, || {
            steps.iter().try_for_each(|step| {
                // SAFETY: the caller's obligations.
                unsafe { self.executor.launch(*step, work, uses, (&self.peers, stream)) }
            })
        })
    }
}

impl<'l, 'c> GpuDispatching<'l, 'c> {
    /// Enqueues the receiving part on `stream`: what follows there has the rows.
    ///
    /// # Errors
    /// As [`GpuCommunicator::enqueue`].
    #[doc(alias("recv_hook", "hook"))]
    pub fn receive(self, stream: &Stream) -> Result<GpuReceived<'l, 'c>, GpuError> {
        let Self { layer, routing, tokens } = self;
        // SAFETY: this step uses the layer's memory alone.
        unsafe { layer.enqueue("a dispatch", &[Step::Receive], Work::default(), &[], stream)? };
        layer.is_sending = false;
        Ok(GpuReceived { layer, routing, tokens })
    }
}

impl<'l, 'c> GpuReceived<'l, 'c> {
    /// The rows, each of [`Payload::row_bytes`], where [`ReceivedRows`] says: defined until combine
    /// receives. The same memory in every dispatch.
    ///
    /// # Errors
    /// None, unless the layer's memory has been freed.
    #[doc(alias = "recv_x")]
    pub fn rows(&self) -> Result<Span<'_>, GpuError> {
        self.layer.executor.rows()
    }

    /// In device memory, by local expert and source: how many rows there are, and the number of the
    /// first, as `u32`. The same memory in every dispatch.
    ///
    /// # Errors
    /// As [`rows`](Self::rows).
    #[doc(alias("recv_count", "layout_range"))]
    pub fn tables(&self) -> Result<(Span<'_>, Span<'_>), GpuError> {
        self.layer.executor.tables()
    }

    /// Copies the table of counts to the host, and waits for it.
    ///
    /// # Errors
    /// An earlier failure, as [`GpuCommunicator::check`]; the driver's.
    pub fn received_rows(&self, stream: &Stream) -> Result<ReceivedRows, GpuError> {
        let (counts, _) = self.tables()?;
        let host = &self.layer.counts;
        stream.copy(host.all(), counts)?;
        let end = Event::new(stream.context())?;
        stream.record(&end)?;
        end.synchronize()?;
        self.layer.comm.check()?;
        let mut bytes = vec![0; counts.len()];
        host.copy_out(0, &mut bytes)?;
        let words = bytes.as_chunks::<4>().0.iter();
        let counts: Vec<u32> = words.map(|word| u32::from_ne_bytes(*word)).collect();
        let layer = &self.layer;
        Ok(ReceivedRows::new(&layer.options.shape, layer.options.mode, &counts))
    }

    /// Enqueues the sending part of combine on `stream`: `outputs` has a token of bf16 for each
    /// row, in the same places, aligned to 16 bytes. It may be [`rows`](Self::rows), if they are of
    /// bf16.
    ///
    /// # Errors
    /// [`GpuError::Experts`] for memory that is not aligned; as [`GpuCommunicator::enqueue`]. Fewer
    /// outputs than rows fail the communicator.
    #[doc(alias("low_latency_combine"))]
    pub fn combine_send(self, outputs: Span<'_>, stream: &Stream) -> Result<GpuCombining<'l, 'c>, GpuError> {
        let Self { layer, routing, tokens } = self;
        let given = outputs.len() / layer.token_bytes();
        let work = Work {
            input: address("the outputs", outputs, 0, 16)?,
            given: u32::try_from(given).unwrap_or(u32::MAX),
            ..Work::default()
        };
        // SAFETY: the kernel reads no more outputs than are given; they are kept, and as above.
        unsafe { layer.enqueue("a combine", &[Step::Return], work, &[outputs], stream)? };
        layer.is_sending = true;
        Ok(GpuCombining { layer, routing, tokens })
    }
}

impl GpuCombining<'_, '_> {
    /// Enqueues the receiving part on `stream`: `output` gets the combined tokens as bf16, aligned
    /// to 16 bytes.
    ///
    /// # Errors
    /// [`GpuError::Experts`] for memory that is too short or not aligned; as
    /// [`GpuCommunicator::enqueue`].
    pub fn receive(self, output: Span<'_>, stream: &Stream) -> Result<(), GpuError> {
        let Self { layer, routing, tokens } = self;
        let bytes = tokens * layer.token_bytes();
        let work = Work {
            output: address("the combined tokens", output, bytes, 16)?,
            ..layer.checked_routing(&routing, tokens)?
        };
        let uses = [routing.indices, routing.weights, output];
        // SAFETY: as in `dispatch_send`.
        unsafe { layer.enqueue("a combine", &[Step::Await, Step::Reduce], work, &uses, stream)? };
        layer.is_sending = false;
        Ok(())
    }
}

/// The address of memory that has so many bytes.
fn address(what: &str, memory: Span<'_>, bytes: usize, align: usize) -> Result<u64, GpuError> {
    let address = memory.device_ptr().0;
    if memory.len() < bytes {
        let len = memory.len();
        return Err(GpuError::Experts(format!(
            "{what} have {len} bytes, and {bytes} are required"
        )));
    }
    match memory.is_empty() || address.is_multiple_of(align as u64) {
        true => Ok(address),
        false => Err(GpuError::Experts(format!("{what} are not aligned to {align} bytes"))),
    }
}
