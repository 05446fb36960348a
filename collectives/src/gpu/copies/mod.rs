//! The copy-engine executor: long messages are copied by `cuMemcpyAsync` into the peers' memory,
//! and multiprocessors only reduce.
//!
//! A plan is lowered once per kind and size ([`script`]) and replayed: on the caller's stream, on
//! streams for copies to peers, and on one for waits that nothing local depends on. A rank signals
//! a message by copying an all-ones word behind it on the same engine; the receiver waits for it
//! with a stream memory operation, so no kernel waits for anything.

mod plan;
mod script;
mod tasks;

use std::sync::Arc;

use doorbell_cuda::collective::CollectiveKernels;
use doorbell_cuda::reduce::{Operator, Source};
use doorbell_cuda::{Context, Event, Memory, Span, Stream, WaitCondition};

use super::error::GpuError;
use super::peers::{Mapped, Peers, WORDS};
use super::types;
use crate::algorithm::Algorithm;
use crate::plan::{BlockForm, Collective};
use crate::types::{DataType, Rank};
use script::{CALLER, FlagWord, Location, Script, ScriptParams, StreamOp};

const CACHED_SCRIPTS: usize = 64;
const WORD: usize = 4;
/// Reductions of at least this many bytes are done in two parts.
const TWO_PARTS: u64 = 32 << 20;

#[derive(Clone, Copy)]
pub(super) struct Operation<'a> {
    pub(super) collective: Collective,
    pub(super) algorithm: Algorithm,
    pub(super) root: Rank,
    pub(super) data: DataType,
    pub(super) count: u64,
    pub(super) operator: Operator,
    pub(super) input: Option<Span<'a>>,
    pub(super) output: Option<Span<'a>>,
    pub(super) in_place: bool,
    /// The ranks' registered memory that holds the outputs, and the offset in it.
    pub(super) registered: Option<(&'a Mapped, usize)>,
    pub(super) slice: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct ScriptKey {
    collective: Collective,
    algorithm: Algorithm,
    root: Rank,
    params: ScriptParams,
}

/// The parts of the reduction of a one-slice all-reduce and of the messages next to it: each costs
/// a copy and a flag word, some 5 µs of link time, and hides the previous part's reduction. More
/// than two gain nothing, nor do two if nothing is sent after the reduction: copies wait for
/// concurrent reads by multiprocessors.
fn tail_parts(operation: &Operation<'_>, ranks: usize) -> u32 {
    let bytes = operation.count.saturating_mul(operation.data.bytes() as u64);
    let is_one = operation.collective == Collective::AllReduce && operation.slice >= bytes;
    if is_one && bytes / ranks as u64 >= TWO_PARTS {
        2
    } else {
        1
    }
}

struct CachedScript {
    key: ScriptKey,
    script: Script,
    events: Vec<Event>,
}

pub(super) struct Copies {
    peers: Arc<Peers>,
    copiers: u8,
    streams: Vec<Stream>,
    kernels: Arc<CollectiveKernels>,
    /// In LRU order, the most recent last.
    cached: Vec<CachedScript>,
}

impl Copies {
    pub(super) fn new(kernels: &Arc<CollectiveKernels>, peers: Arc<Peers>, copiers: u8) -> Result<Self, GpuError> {
        let context = peers.context().clone();
        // One of them for the waits that come last.
        let streams = (0..=copiers).map(|_| Stream::new(&context)).collect::<Result<_, _>>()?;
        Ok(Self {
            peers,
            copiers,
            streams,
            kernels: Arc::clone(kernels),
            cached: Vec::new(),
        })
    }

    fn context(&self) -> &Context {
        self.peers.context()
    }

    pub(super) fn streams(&self) -> &[Stream] {
        &self.streams
    }

    /// Without `has_streams`, all on the caller's: a script's order completes on one stream, too.
    pub(super) fn run(
        &mut self,
        operation: &Operation<'_>,
        stream: &Stream,
        has_streams: bool,
    ) -> Result<(), GpuError> {
        self.prepare(operation)?;
        let Some(cached) = self.cached.last() else {
            return Ok(());
        };
        for (at, op) in &cached.script.ops {
            let on = match *at {
                _ if !has_streams && matches!(op, StreamOp::Record(_) | StreamOp::Wait(_)) => continue,
                other if has_streams && other != CALLER => &self.streams[usize::from(other) - 1],
                _ => stream,
            };
            self.op(operation, &cached.events, op, on)?;
        }
        Ok(())
    }

    /// Returns the operation's script from the cache, or builds it, and marks it most recent.
    pub(super) fn prepare(&mut self, operation: &Operation<'_>) -> Result<(), GpuError> {
        let areas = self.peers.areas();
        let key = ScriptKey {
            collective: operation.collective,
            algorithm: operation.algorithm,
            root: operation.root,
            params: ScriptParams {
                data: operation.data,
                count: operation.count,
                direct: operation.registered.is_some(),
                in_place: operation.in_place,
                staging: areas.staging.len() as u64,
                slice: operation.slice,
                copiers: self.copiers,
                tail_parts: tail_parts(operation, self.peers.ranks()),
            },
        };
        if let Some(known) = self.cached.iter().rposition(|cached| cached.key == key) {
            self.cached[known..].rotate_left(1);
            return Ok(());
        }
        let order: Vec<_> = (0..self.peers.ranks() as u32).map(Rank).collect();
        let schedule = match key.collective {
            // All ranks signal all ranks, whatever the algorithm: a barrier has no other content.
            Collective::Barrier => Algorithm::RecursiveDoubling.schedule(key.collective, &order, key.root)?,
            _ => key.algorithm.schedule(key.collective, &order, key.root)?,
        };
        let script = Script::new(&*schedule, self.peers.rank(), key.params).map_err(|e| GpuError::Misuse {
            collective: key.collective,
            what: e.to_string(),
        })?;
        let events = (0..script.events)
            .map(|_| Event::new(self.context()))
            .collect::<Result<_, _>>()?;
        if self.cached.len() >= CACHED_SCRIPTS {
            self.cached.remove(0);
        }
        self.cached.push(CachedScript { key, script, events });
        Ok(())
    }

    fn op(&self, operation: &Operation<'_>, events: &[Event], op: &StreamOp, stream: &Stream) -> Result<(), GpuError> {
        match op {
            StreamOp::Signal(word) => {
                let ones = self.word(self.peers.rank(), 0)?;
                stream.copy(self.word(word.peer, self.index(*word, self.peers.rank()))?, ones)?;
            }
            StreamOp::Await(word) => {
                let word = self.word(self.peers.rank(), self.index(*word, word.peer))?;
                stream.wait_value32(word, WaitCondition::AnyBit(1))?;
                stream.write_value32(word, 0)?;
            }
            StreamOp::Copy { from, into, bytes } => {
                let bytes = *bytes as usize;
                stream.copy(self.span(operation, *into, bytes)?, self.span(operation, *from, bytes)?)?;
            }
            StreamOp::Reduce {
                sources,
                into,
                elements,
            } => {
                let span = |at: Location, form: BlockForm| {
                    let unit = match form {
                        BlockForm::Element => operation.data.bytes(),
                        BlockForm::Partial => operation.data.accumulator().bytes(),
                    };
                    self.span(operation, at, *elements as usize * unit)
                };
                let source = |(at, form): &(Location, BlockForm)| {
                    let span = span(*at, *form)?;
                    Ok(match form {
                        BlockForm::Element => Source::elements(span),
                        BlockForm::Partial => Source::partials(span),
                    })
                };
                let sources = sources.iter().map(source).collect::<Result<Vec<_>, GpuError>>()?;
                let into = (types::form(into.1), span(into.0, into.1)?);
                self.kernels.reducer().reduce(
                    stream,
                    types::data(operation.data),
                    operation.operator,
                    &sources,
                    into,
                )?;
            }
            StreamOp::Record(event) => stream.record(&events[*event as usize])?,
            StreamOp::Wait(event) => stream.wait(&events[*event as usize])?,
        }
        Ok(())
    }

    fn index(&self, word: FlagWord, writer: Rank) -> usize {
        let kind = usize::from(word.is_credit) * self.peers.ranks();
        1 + (kind + writer.index()) * WORDS + word.index as usize
    }

    /// A word of a rank's arena. The first is all ones, the source of signal copies.
    fn word(&self, rank: Rank, index: usize) -> Result<Span<'_>, GpuError> {
        let start = self.peers.areas().words.start + WORD * index;
        Ok(self.peers.arenas().of(rank).span(start..start + WORD)?)
    }

    fn span<'a>(&'a self, operation: &Operation<'a>, at: Location, bytes: usize) -> Result<Span<'a>, GpuError> {
        let own = |span: Option<Span<'a>>, offset: u64| match span {
            Some(span) => Ok(span.span(offset as usize..offset as usize + bytes)?),
            None => Err(GpuError::Misuse {
                collective: operation.collective,
                what: "there is no such memory on this rank".to_owned(),
            }),
        };
        let staging = |rank: Rank, offset: u64| {
            let start = self.peers.areas().staging.start + offset as usize;
            Ok(self.peers.arenas().of(rank).span(start..start + bytes)?)
        };
        match at {
            Location::Input(offset) => own(operation.input, offset),
            Location::Output(offset) => own(operation.output, offset),
            Location::Staging(offset) => staging(self.peers.rank(), offset),
            Location::TheirStaging(rank, offset) => staging(rank, offset),
            Location::TheirOutput(rank, offset) => {
                let theirs = operation.registered.and_then(|(mapped, start)| {
                    let start = start + offset as usize;
                    mapped.of(rank).span(start..start + bytes).ok()
                });
                own(theirs, 0)
            }
        }
    }
}
