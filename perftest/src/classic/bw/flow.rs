//! What each operation does on one lane: staging a request, and taking back what its completion returns.

use doorbell_verbs::{
    Atomic as MayCount, Batch, Buffer, Completion, Connected, Frozen, Local, Memory, Read as MayRead, Reliable, Remote,
    Scratch, Word, Write as MayWrite,
};

use super::super::settings::{Atomic, Settings};
use super::super::station::{Cycle, Lane, Service, Station, frozen, refused, scratch};
use crate::failure::Failure;

/// The sending end's part of an operation, on one lane, at one size.
pub(super) trait Flow<T: Service>: Sized {
    /// For messages of `bytes` on the lane of that index, up to `window` at once.
    ///
    /// # Errors
    /// [`Failure::Test`] when there is too little memory, or the device refuses.
    fn new(settings: &Settings, station: &Station<T>, lane: usize, bytes: u64, window: u32) -> Result<Self, Failure>;

    /// Adds message `index` to a list, or what `inline` has instead of memory. There is a buffer for it: no more than the window are in flight.
    fn stage<'d>(
        &mut self,
        batch: &mut Batch<'_, 'd, T>,
        to: &'d T::To,
        inline: Option<&'d [u8]>,
        index: u64,
        signal: bool,
    );

    /// Takes a completed request's buffer back.
    fn retire(&mut self, done: Completion<'_>);
}

/// Handles to what is sent, as many as may be in flight; none where messages travel inline.
fn sources<T: Service>(
    settings: &Settings,
    station: &Station<T>,
    cycle: &Cycle,
    window: u32,
) -> Result<Vec<Buffer<Frozen>>, Failure> {
    if station.is_inline(cycle.bytes) {
        return Ok(Vec::new());
    }
    frozen(settings, &station.pd, cycle, window as usize)
}

/// RDMA WRITE.
#[derive(Debug)]
pub(super) struct Writes {
    free: Vec<Buffer<Frozen>>,
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
            let request = batch.write_inline(bytes, target);
            if signal {
                request.signalled();
            }
        } else if let Some(buffer) = self.free.pop() {
            let request = batch.write(buffer, target);
            if signal {
                request.signalled();
            }
        }
    }

    #[inline]
    fn retire(&mut self, mut done: Completion<'_>) {
        self.free.extend(done.take::<Frozen>());
    }
}

/// SEND.
#[derive(Debug)]
pub(super) struct Sends {
    free: Vec<Buffer<Frozen>>,
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
        } else if let Some(buffer) = self.free.pop() {
            T::send(batch, to, buffer, signal);
        }
    }

    #[inline]
    fn retire(&mut self, mut done: Completion<'_>) {
        self.free.extend(done.take::<Frozen>());
    }
}

/// RDMA READ.
#[derive(Debug)]
pub(super) struct Reads {
    free: Vec<Buffer<Scratch>>,
    cycle: Cycle,
    source: Remote<MayRead>,
}

impl<T: Service + Reliable> Flow<T> for Reads {
    fn new(settings: &Settings, station: &Station<T>, lane: usize, bytes: u64, window: u32) -> Result<Self, Failure> {
        let cycle = station.cycle(bytes);
        Ok(Reads {
            free: scratch(settings, &station.pd, &cycle, 0, window as usize)?,
            cycle,
            source: station.lanes[lane].remote(&cycle),
        })
    }

    #[inline]
    fn stage<'d>(&mut self, batch: &mut Batch<'_, 'd, T>, _: &'d T::To, _: Option<&'d [u8]>, index: u64, signal: bool) {
        let source = self.source.slice(self.cycle.offset(index), self.cycle.bytes);
        if let (Some(source), Some(buffer)) = (source, self.free.pop()) {
            let request = batch.read(buffer, source);
            if signal {
                request.signalled();
            }
        }
    }

    #[inline]
    fn retire(&mut self, mut done: Completion<'_>) {
        self.free.extend(done.take::<Scratch>());
    }
}

/// Atomics: all of a lane on one word at a time, which moves on as messages do.
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
            .register_chunks(Memory::zeroed(8 * window as usize), 8, Local)
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
                let request = batch.fetch_add(word, target, 1);
                if signal {
                    request.signalled();
                }
            }
            Atomic::CompareSwap => {
                let request = batch.compare_swap(word, target, index, index + 1);
                if signal {
                    request.signalled();
                }
            }
        }
    }

    #[inline]
    fn retire(&mut self, mut done: Completion<'_>) {
        self.free.extend(done.take_word());
    }
}

/// A lane that messages arrive on: what they are received into.
#[derive(Debug)]
pub(super) struct Arrivals {
    /// What is not posted just now.
    free: Vec<Buffer<Scratch>>,
    /// Receives that are posted with one call.
    list: usize,
}

impl Arrivals {
    /// Buffers for messages of `bytes`, as many as may be posted at once.
    ///
    /// # Errors
    /// As [`scratch`].
    pub(super) fn new<T: Service>(
        settings: &Settings,
        station: &Station<T>,
        bytes: u64,
        count: u32,
    ) -> Result<Arrivals, Failure> {
        let free = scratch(settings, &station.pd, &station.cycle(bytes), T::HEADER, count as usize)?;
        Ok(Arrivals {
            free,
            list: settings.recv_post_list.max(1) as usize,
        })
    }

    /// Takes a message's buffer back.
    #[inline]
    pub(super) fn retire(&mut self, mut done: Completion<'_>) {
        self.free.extend(done.take::<Scratch>());
    }

    /// Posts what is free, where there is enough of it for a list.
    ///
    /// # Errors
    /// [`Failure::Test`] when the device refuses.
    #[inline]
    pub(super) fn post<T: Service>(
        &mut self,
        lane: &mut Lane<T>,
        shared: Option<&mut doorbell_verbs::SharedReceiveQueue>,
    ) -> Result<(), Failure> {
        if self.free.len() < self.list {
            return Ok(());
        }
        let whole = self.free.len() / self.list * self.list;
        let result = T::receive(&mut lane.qp, shared, self.free.drain(self.free.len() - whole..));
        result.map_err(|e| lane.refused(&e))
    }
}
