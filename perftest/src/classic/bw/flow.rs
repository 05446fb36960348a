//! What each operation does on one queue pair: staging a work request, and reclaiming its buffer on
//! completion.

use doorbell_verbs::{
    Atomic as MayCount, Batch, Buffer, Completion, Connected, Frozen, Kind, Local, Read as MayRead, Reliable, Remote,
    Scratch, Word, Write as MayWrite,
};

use super::super::settings::{Atomic, Settings};
use super::super::station::{Cycle, Lane, Service, Station, allocate, frozen, refused, scratch, slots};
use crate::failure::Failure;
use crate::run::gpu::{Content, Pool};

/// The requester's part of an operation, on one queue pair and for one message size.
pub(super) trait Flow<T: Service>: Sized {
    /// For messages of `bytes` on the queue pair with this index, up to `window` in flight.
    ///
    /// # Errors
    /// [`Failure::Test`] when there is too little memory, or the device refuses.
    fn new(settings: &Settings, station: &Station<T>, lane: usize, bytes: u64, window: u32) -> Result<Self, Failure>;

    /// Adds message `index` to a post list, with the payload `inline` if that is given. A buffer is
    /// always free, since at most `window` messages are in flight.
    fn stage<'d>(
        &mut self,
        batch: &mut Batch<'_, 'd, T>,
        to: &'d T::To,
        inline: Option<&'d [u8]>,
        index: u64,
        signal: bool,
    );

    /// Reclaims the buffer of a completed request.
    fn retire(&mut self, done: Completion<'_>);

    /// The first error of the GPU, once, where messages lie in its memory.
    fn failed(&mut self) -> Option<Failure> {
        None
    }
}

/// Buffers that no request uses: in host memory, or in a GPU's.
#[derive(Debug)]
enum Idle<K: Kind> {
    Host(Vec<Buffer<K>>),
    Gpu(Pool),
}

impl<K: Kind> Idle<K> {
    fn failed(&mut self) -> Option<Failure> {
        match self {
            Idle::Host(_) => None,
            Idle::Gpu(pool) => pool.failed(),
        }
    }
}

impl Idle<Frozen> {
    /// Reclaims a buffer that was sent.
    #[inline]
    fn sent(&mut self, mut done: Completion<'_>) {
        match self {
            Idle::Host(free) => free.extend(done.take::<Frozen>()),
            Idle::Gpu(pool) => done.take().into_iter().for_each(|buffer| pool.give(buffer)),
        }
    }
}

impl Idle<Scratch> {
    /// Reclaims a buffer that was received or read into.
    #[inline]
    fn filled(&mut self, mut done: Completion<'_>) {
        match self {
            Idle::Host(free) => free.extend(done.take::<Scratch>()),
            Idle::Gpu(pool) => done.take().into_iter().for_each(|buffer| pool.give_filled(buffer)),
        }
    }
}

/// Buffers to send from, as many as may be in flight; none where messages are sent inline.
fn sources<T: Service>(
    settings: &Settings,
    station: &Station<T>,
    cycle: &Cycle,
    window: u32,
) -> Result<Idle<Frozen>, Failure> {
    if let Some(gpu) = &station.gpu {
        return slots(gpu, &station.pd, cycle.bytes, window).map(Idle::Gpu);
    }
    if station.is_inline(cycle.bytes) {
        return Ok(Idle::Host(Vec::new()));
    }
    frozen(settings, &station.pd, cycle, window as usize).map(Idle::Host)
}

#[derive(Debug)]
pub(super) struct Writes {
    free: Idle<Frozen>,
    cycle: Cycle,
    target: Remote<MayWrite>,
}

impl<T: Service + Connected> Flow<T> for Writes {
    fn new(settings: &Settings, station: &Station<T>, lane: usize, bytes: u64, window: u32) -> Result<Self, Failure> {
        let cycle = station.cycle(bytes);
        Ok(Writes {
            free: sources(settings, station, &cycle, window)?,
            cycle,
            target: station.lanes[lane].remote(&cycle),
        })
    }

    #[inline]
    fn stage<'d>(
        &mut self,
        batch: &mut Batch<'_, 'd, T>,
        _: &'d T::To,
        inline: Option<&'d [u8]>,
        index: u64,
        signal: bool,
    ) {
        let Some(target) = self.target.slice(self.cycle.offset(index), self.cycle.bytes) else {
            return;
        };
        if let Some(bytes) = inline {
            batch.write_inline(bytes, target).signalled_if(signal);
            return;
        }
        match &mut self.free {
            Idle::Host(free) => {
                if let Some(buffer) = free.pop() {
                    batch.write(buffer, target).signalled_if(signal);
                }
            }
            Idle::Gpu(pool) => {
                if let Some(buffer) = pool.take(Content::Any) {
                    batch.write(buffer, target).signalled_if(signal);
                }
            }
        }
    }

    #[inline]
    fn retire(&mut self, done: Completion<'_>) {
        self.free.sent(done);
    }

    fn failed(&mut self) -> Option<Failure> {
        self.free.failed()
    }
}

#[derive(Debug)]
pub(super) struct Sends {
    free: Idle<Frozen>,
}

impl<T: Service> Flow<T> for Sends {
    fn new(settings: &Settings, station: &Station<T>, _: usize, bytes: u64, window: u32) -> Result<Self, Failure> {
        let free = sources(settings, station, &station.cycle(bytes), window)?;
        Ok(Sends { free })
    }

    #[inline]
    fn stage<'d>(
        &mut self,
        batch: &mut Batch<'_, 'd, T>,
        to: &'d T::To,
        inline: Option<&'d [u8]>,
        _: u64,
        signal: bool,
    ) {
        if let Some(bytes) = inline {
            T::send_inline(batch, to, bytes, signal);
            return;
        }
        match &mut self.free {
            Idle::Host(free) => {
                if let Some(buffer) = free.pop() {
                    T::send(batch, to, buffer, signal);
                }
            }
            Idle::Gpu(pool) => {
                if let Some(buffer) = pool.take(Content::Any) {
                    T::send(batch, to, buffer, signal);
                }
            }
        }
    }

    #[inline]
    fn retire(&mut self, done: Completion<'_>) {
        self.free.sent(done);
    }

    fn failed(&mut self) -> Option<Failure> {
        self.free.failed()
    }
}

#[derive(Debug)]
pub(super) struct Reads {
    free: Idle<Scratch>,
    cycle: Cycle,
    source: Remote<MayRead>,
}

impl<T: Service + Reliable> Flow<T> for Reads {
    fn new(settings: &Settings, station: &Station<T>, lane: usize, bytes: u64, window: u32) -> Result<Self, Failure> {
        let cycle = station.cycle(bytes);
        Ok(Reads {
            free: match &station.gpu {
                Some(gpu) => Idle::Gpu(slots(gpu, &station.pd, bytes, window)?),
                None => Idle::Host(scratch(settings, &station.pd, &cycle, 0, window as usize)?),
            },
            cycle,
            source: station.lanes[lane].remote(&cycle),
        })
    }

    #[inline]
    fn stage<'d>(&mut self, batch: &mut Batch<'_, 'd, T>, _: &'d T::To, _: Option<&'d [u8]>, index: u64, signal: bool) {
        let Some(source) = self.source.slice(self.cycle.offset(index), self.cycle.bytes) else {
            return;
        };
        match &mut self.free {
            Idle::Host(free) => {
                if let Some(buffer) = free.pop() {
                    batch.read(buffer, source).signalled_if(signal);
                }
            }
            Idle::Gpu(pool) => {
                if let Some(buffer) = pool.take(Content::Nothing) {
                    batch.read(buffer, source).signalled_if(signal);
                }
            }
        }
    }

    #[inline]
    fn retire(&mut self, done: Completion<'_>) {
        self.free.filled(done);
    }

    fn failed(&mut self) -> Option<Failure> {
        self.free.failed()
    }
}

/// Atomics: all requests of a queue pair in flight target one word after the other, as the cycle
/// buffer goes.
#[derive(Debug)]
pub(super) struct Counts {
    free: Vec<Word>,
    operation: Atomic,
    cycle: Cycle,
    target: Remote<MayCount>,
}

impl<T: Service + Reliable> Flow<T> for Counts {
    fn new(settings: &Settings, station: &Station<T>, lane: usize, bytes: u64, window: u32) -> Result<Self, Failure> {
        let cycle = station.cycle(bytes);
        let target: Remote<MayCount> = station.lanes[lane].remote(&cycle);
        if target.word(0).is_none() {
            return Err(Failure::test(format!(
                "{}: the address it told is not aligned to 8 bytes",
                station.lanes[lane]
            )));
        }
        let words = station
            .pd
            .register_chunks(allocate(settings, 8 * window as usize)?, 8, Local)
            .map_err(refused)?;
        Ok(Counts {
            free: words.filter_map(|buffer| buffer.into_word().ok()).collect(),
            operation: settings.atomic,
            cycle,
            target,
        })
    }

    #[inline]
    fn stage<'d>(&mut self, batch: &mut Batch<'_, 'd, T>, _: &'d T::To, _: Option<&'d [u8]>, index: u64, signal: bool) {
        let (Some(target), Some(word)) = (self.target.word(self.cycle.offset(index)), self.free.pop()) else {
            return;
        };
        match self.operation {
            Atomic::FetchAdd => {
                batch.fetch_add(word, target, 1).signalled_if(signal);
            }
            Atomic::CompareSwap => {
                batch.compare_swap(word, target, index, index + 1).signalled_if(signal);
            }
        }
    }

    #[inline]
    fn retire(&mut self, mut done: Completion<'_>) {
        self.free.extend(done.take_word());
    }
}

/// The responder's receives on one queue pair or on the shared receive queue.
#[derive(Debug)]
pub(super) struct Arrivals {
    /// Buffers that are not posted.
    free: Idle<Scratch>,
    /// Receives posted with one call.
    list: usize,
}

impl Arrivals {
    /// Buffers for `count` messages of `bytes`.
    ///
    /// # Errors
    /// As [`scratch`].
    pub(super) fn new<T: Service>(
        settings: &Settings,
        station: &Station<T>,
        bytes: u64,
        count: u32,
    ) -> Result<Arrivals, Failure> {
        let free = match &station.gpu {
            Some(gpu) => Idle::Gpu(slots(gpu, &station.pd, bytes + T::HEADER, count)?),
            None => Idle::Host(scratch(
                settings,
                &station.pd,
                &station.cycle(bytes),
                T::HEADER,
                count as usize,
            )?),
        };
        Ok(Arrivals {
            free,
            list: settings.recv_post_list.max(1) as usize,
        })
    }

    /// Reclaims the buffer of a received message.
    #[inline]
    pub(super) fn retire(&mut self, done: Completion<'_>) {
        self.free.filled(done);
    }

    /// The first error of the GPU, once, where messages are received into its memory.
    pub(super) fn failed(&mut self) -> Option<Failure> {
        self.free.failed()
    }

    /// Posts the free buffers in whole lists.
    ///
    /// # Errors
    /// [`Failure::Test`] when the device refuses.
    #[inline]
    pub(super) fn post<T: Service>(
        &mut self,
        lane: &mut Lane<T>,
        shared: Option<&mut doorbell_verbs::SharedReceiveQueue>,
    ) -> Result<(), Failure> {
        let free = match &self.free {
            Idle::Host(free) => free.len(),
            Idle::Gpu(pool) => pool.len(),
        };
        if free < self.list {
            return Ok(());
        }
        let whole = free / self.list * self.list;
        let result = match &mut self.free {
            Idle::Host(buffers) => T::receive(&mut lane.qp, shared, buffers.drain(free - whole..)),
            Idle::Gpu(pool) => {
                let buffers = std::iter::from_fn(|| pool.take(Content::Nothing));
                T::receive(&mut lane.qp, shared, buffers.take(whole))
            }
        };
        result.map_err(|e| lane.refused(&e))
    }
}
