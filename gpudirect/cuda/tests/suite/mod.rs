//! Tests of any driver: the CPU stand-in (`standin`), and NVIDIA's if there is one (`gpu`).

mod copies;
mod graphs;
mod kernels;
mod machine;
mod sharing;
mod small;
mod streams;

use std::error::Error;

use doorbell_cuda::{Context, DeviceMemory, Driver, HostMemory, Kernel, Launch, Memory, Module, Stream};

pub(crate) enum Verdict {
    Passed,
    Skipped(String),
}

pub(crate) type Outcome = Result<Verdict, Box<dyn Error>>;

/// A test case: it asserts on results, and returns an error if it could not run.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) run: fn(Driver) -> Outcome,
}

macro_rules! cases {
    ($($module:ident: $($case:ident),*;)*) => {
        pub(crate) const CASES: &[Case] = &[$($(Case { name: concat!(stringify!($module), "::", stringify!($case)), run: $module::$case },)*)*];
    };
}

cases! {
    machine: devices, peers, threads_keep_their_context, ordering;
    small: every_length, many, cancelled, refused_and_dropped;
    copies: round_trip, fills, ranges_are_checked, peer_to_peer, batches, registered, bytes_and_words;
    streams: events, times, words, dropped_in_flight, slices_wait, slices_are_of_the_last_handle, borrowed, threads;
    kernels: run, refused;
    graphs: replayed, forked, aborted, nested, keeps_its_memory, captured_elsewhere, ordered;
    sharing: by_descriptor, not_memory, foreign, pointers, dma_bufs, nothing_is_left;
}

/// Two kernels: `add_one(words, count)` adds 1 to each 32-bit word, `spin(nanoseconds)` busy-waits.
pub(crate) const PTX: &str = include_str!("kernels.ptx");

pub(crate) struct Setting {
    pub(crate) context: Context,
    pub(crate) stream: Stream,
}

impl Setting {
    pub(crate) fn new(driver: Driver) -> Result<Self, Box<dyn Error>> {
        let context = driver.device(0)?.context()?;
        let stream = Stream::new(&context)?;
        Ok(Self { context, stream })
    }

    pub(crate) fn device(&self, bytes: &[u8]) -> Result<DeviceMemory, Box<dyn Error>> {
        let memory = DeviceMemory::alloc(&self.context, bytes.len())?;
        let host = self.host(bytes)?;
        self.stream.copy(memory.all(), host.all())?;
        Ok(memory)
    }

    pub(crate) fn host(&self, bytes: &[u8]) -> Result<HostMemory, Box<dyn Error>> {
        let memory = HostMemory::alloc(&self.context, bytes.len())?;
        memory.copy_in(0, bytes)?;
        Ok(memory)
    }

    pub(crate) fn read(&self, memory: &impl Memory) -> Result<Vec<u8>, Box<dyn Error>> {
        let mut host = HostMemory::alloc(&self.context, memory.len())?;
        self.stream.copy(host.all(), memory.all())?;
        Ok(host.bytes_mut()?.to_vec())
    }

    pub(crate) fn kernel(&self, name: &str) -> Result<Kernel, Box<dyn Error>> {
        Ok(Module::from_ptx(&self.context, PTX)?.kernel(name)?)
    }

    pub(crate) fn keep_busy(&self, milliseconds: u64) -> Result<(), Box<dyn Error>> {
        let spin = self.kernel("spin")?;
        // SAFETY: its only argument is a count of nanoseconds.
        unsafe { spin.launch(&self.stream, Launch::linear(1, 1), &[&(milliseconds * 1_000_000)], &[])? };
        Ok(())
    }

    /// Synchronizes, and asserts that no free is pending.
    pub(crate) fn finish(self) -> Outcome {
        self.stream.synchronize()?;
        assert_eq!(self.context.reap(), 0, "something still waits for work that is done");
        Ok(Verdict::Passed)
    }
}

pub(crate) fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len)
        .map(|at| ((at * 31 + at / 251 + seed * 17) % 256) as u8)
        .collect()
}

pub(crate) fn add_one(
    stream: &Stream,
    kernel: &Kernel,
    memory: &DeviceMemory,
    count: u32,
) -> Result<(), doorbell_cuda::Error> {
    assert!(count as usize * 4 <= memory.len());
    let launch = Launch::linear(count.div_ceil(256), 256);
    // SAFETY: the kernel takes an address and a count of words within the memory.
    unsafe { kernel.launch(stream, launch, &[&memory.device_ptr(), &count], &[memory.all()]) }
}
