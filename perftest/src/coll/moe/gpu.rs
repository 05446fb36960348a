//! Dispatch and combine on the memory of GPUs, and the all-to-all-v beside them. Times are between
//! events of a stream.

use std::time::Duration;

use doorbell_collectives::DataType;
use doorbell_collectives::gpu::{
    GpuCommunicator, GpuError, GpuExpertParallel, GpuReceived, GpuRouting, as_bytes, as_bytes_mut,
};
use doorbell_collectives::kernel::bf16;
use doorbell_collectives::moe::{NO_EXPERT, Payload};
use doorbell_cuda::{DeviceMemory, Event, HostMemory, Memory, Stream};

use super::Part;
use super::job::Job;
use super::measure::Bench;
use crate::coll::gpu::{CHUNK, Stop, copy_in, copy_out};

/// Operations that are enqueued before their times are read.
const ENQUEUED: u32 = 32;

/// One rank's memory.
pub(super) struct OnGpu<'a> {
    job: Job<'a>,
    gpu: &'a GpuCommunicator,
    of: GpuExpertParallel<'a>,
    memories: Memories,
    stream: Stream,
    events: Vec<(Event, Event)>,
    sent: Vec<usize>,
    received: Vec<usize>,
}

struct Memories {
    tokens: DeviceMemory,
    indices: DeviceMemory,
    weights: DeviceMemory,
    outputs: DeviceMemory,
    combined: DeviceMemory,
    /// The same bytes for all-to-all-v.
    input: DeviceMemory,
    output: DeviceMemory,
    /// For copies.
    host: HostMemory,
}

impl<'a> OnGpu<'a> {
    pub(super) fn new(job: Job<'a>, gpu: &'a GpuCommunicator) -> Result<Self, Stop> {
        let (sent, received) = job.bytes();
        let stream = Stream::new(gpu.context())?;
        // Before the ranks meet: an allocation may wait for work that waits for this rank.
        let memories = Memories::new(&job, gpu, &stream)?;
        let pair = |_| Ok::<_, doorbell_cuda::Error>((Event::timed(gpu.context())?, Event::timed(gpu.context())?));
        Ok(Self {
            events: (0..ENQUEUED).map(pair).collect::<Result<_, _>>()?,
            of: gpu.expert_parallel(job.layer.options(job.routings))?,
            job,
            gpu,
            memories,
            stream,
            sent,
            received,
        })
    }
}

impl Memories {
    fn new(job: &Job<'_>, gpu: &GpuCommunicator, stream: &Stream) -> Result<Self, Stop> {
        let (sent, received) = job.bytes();
        let shape = &job.layer.shape;
        let token_bytes = Payload::Bf16.row_bytes(shape.hidden());
        let rows = job.layer.options(job.routings).rows();
        let alloc = |bytes: usize| DeviceMemory::alloc(gpu.context(), bytes.max(16));
        let tokens = shape.max_tokens() as usize * token_bytes;
        let memories = Self {
            tokens: alloc(tokens)?,
            indices: alloc(shape.max_pairs() * size_of::<i64>())?,
            weights: alloc(shape.max_pairs() * size_of::<f32>())?,
            outputs: alloc(rows * token_bytes)?,
            combined: alloc(tokens)?,
            input: alloc(sent.iter().sum())?,
            output: alloc(received.iter().sum())?,
            host: HostMemory::alloc(gpu.context(), CHUNK)?,
        };
        stream.fill(memories.outputs.all(), 0)?;
        stream.fill(memories.input.all(), 1)?;
        let (mut indices, mut weights) = (Vec::new(), Vec::new());
        for token in 0..shape.max_tokens() as usize {
            for choice in job.routing().choices(token) {
                indices.push(i64::from(choice.expert));
                weights.push(choice.weight);
            }
            indices.resize((token + 1) * shape.top_k() as usize, NO_EXPERT);
            weights.resize((token + 1) * shape.top_k() as usize, 0.0);
        }
        let host = &memories.host;
        copy_in(stream, host, memories.tokens.all(), as_bytes(&job.tokens()))?;
        copy_in(stream, host, memories.indices.all(), as_bytes(&indices))?;
        copy_in(stream, host, memories.weights.all(), as_bytes(&weights))?;
        Ok(memories)
    }

    fn routing(&self) -> GpuRouting<'_> {
        GpuRouting {
            indices: self.indices.all(),
            index: DataType::I64,
            weights: self.weights.all(),
        }
    }
}

impl<'a> OnGpu<'a> {
    /// Enqueues `work` so many times, and returns the time between both events of all of them.
    fn time(
        &mut self,
        times: u32,
        mut work: impl FnMut(&mut Self, usize) -> Result<(), GpuError>,
    ) -> Result<Duration, Stop> {
        let mut time = Duration::ZERO;
        let mut left = times as usize;
        while left > 0 {
            let now = left.min(self.events.len());
            (0..now).try_for_each(|index| work(self, index))?;
            self.stream.synchronize()?;
            self.gpu.check()?;
            for (began, ended) in &self.events[..now] {
                time += ended.since(began)?;
            }
            left -= now;
        }
        Ok(time)
    }

    fn dispatch<'l>(
        of: &'l mut GpuExpertParallel<'a>,
        (memories, tokens, stream): (&'l Memories, usize, &Stream),
    ) -> Result<GpuReceived<'l, 'a>, GpuError> {
        of.dispatch_send(memories.tokens.all(), tokens, memories.routing(), stream)?
            .receive(stream)
    }

    /// An operation between a pair of events: of a combine, the dispatch is before them.
    fn enqueue(&mut self, pair: usize) -> Result<(), GpuError> {
        let (memories, stream, (began, ended)) = (&self.memories, &self.stream, &self.events[pair]);
        let tokens = self.job.routing().tokens();
        if self.job.part == Part::Dispatch {
            stream.record(began)?;
        }
        let received = Self::dispatch(&mut self.of, (memories, tokens, stream))?;
        if self.job.part == Part::Combine {
            stream.record(began)?;
            let combine = received.combine_send(memories.outputs.all(), stream)?;
            combine.receive(memories.combined.all(), stream)?;
        }
        Ok(stream.record(ended)?)
    }
}

impl Bench for OnGpu<'_> {
    fn operations(&mut self, times: u32) -> Result<Duration, Stop> {
        self.time(times, Self::enqueue)
    }

    fn all_to_all_v(&mut self, times: u32) -> Result<Duration, Stop> {
        self.time(times, |this, pair| {
            let (memories, stream, (began, ended)) = (&this.memories, &this.stream, &this.events[pair]);
            stream.record(began)?;
            let input = (memories.input.all(), &this.sent[..]);
            let output = (memories.output.all(), &this.received[..]);
            this.gpu.all_to_all_v(input, output, DataType::U8, stream)?;
            Ok(stream.record(ended)?)
        })
    }

    /// Copies into the memory of peers are measured by `gpu-moe`, whose ranks are one process.
    fn put(&mut self, _: u32) -> Result<Option<Duration>, Stop> {
        Ok(None)
    }

    fn check(&mut self) -> Result<u64, Stop> {
        let (memories, stream) = (&self.memories, &self.stream);
        let tokens = self.job.routing().tokens();
        let received = Self::dispatch(&mut self.of, (memories, tokens, stream))?;
        let rows = received.received_rows(stream)?;
        if self.job.part == Part::Dispatch {
            let row_bytes = self.job.row_bytes();
            let mut bytes = vec![0; received.rows()?.len()];
            copy_out(stream, &memories.host, received.rows()?, &mut bytes)?;
            return Ok(self.job.wrong_rows(&rows, |row| &bytes[row * row_bytes..][..row_bytes]));
        }
        let hidden = self.job.layer.shape.hidden() as usize;
        let mut outputs = vec![bf16::NAN; memories.outputs.len() / size_of::<bf16>()];
        for place in self.job.places(&rows) {
            let into = outputs[place.row * hidden..][..hidden].iter_mut();
            into.zip(self.job.output(&place))
                .for_each(|(into, element)| *into = element);
        }
        copy_in(stream, &memories.host, memories.outputs.all(), as_bytes(&outputs))?;
        stream.fill(memories.combined.all(), 0xff)?;
        let combine = received.combine_send(memories.outputs.all(), stream)?;
        combine.receive(memories.combined.all(), stream)?;
        let mut combined = vec![bf16::ZERO; tokens * hidden];
        let from = memories.combined.span(..combined.len() * size_of::<bf16>())?;
        copy_out(stream, &memories.host, from, as_bytes_mut(&mut combined))?;
        self.gpu.check()?;
        Ok(self.job.wrong_elements(&combined))
    }
}
