//! A GPU, real or stand-in, as a [`Device`].

use anyhow::Result;
use doorbell_cuda::reduce::{Reducer, Reduction};
use doorbell_cuda::{Context, DeviceMemory, HostMemory, Memory as _, Stream};

use super::{Device, sweep};

/// A stream of a GPU with its reduction kernels, device memory, and pinned memory of the same size.
pub struct Gpu {
    /// Its stream.
    pub stream: Stream,
    /// The kernels.
    pub reducer: Reducer,
    /// The device memory.
    pub memory: DeviceMemory,
    /// The pinned memory through which it is filled and read.
    pub host: HostMemory,
}

impl Gpu {
    /// With memory for every case of the sweep.
    pub fn new(context: &Context) -> Result<Self> {
        Ok(Self {
            stream: Stream::new(context)?,
            reducer: Reducer::new(context),
            memory: DeviceMemory::alloc(context, sweep::MEMORY)?,
            host: HostMemory::alloc(context, sweep::MEMORY)?,
        })
    }
}

impl Device for Gpu {
    fn address(&self) -> u64 {
        self.memory.device_ptr().0
    }

    fn len(&self) -> usize {
        self.memory.len()
    }

    fn reduce(&mut self, reduction: &Reduction, bytes: &mut [u8]) -> Result<()> {
        let (device, host) = (self.memory.span(..bytes.len())?, self.host.span(..bytes.len())?);
        self.host.copy_in(0, bytes)?;
        self.stream.copy(device, host)?;
        // SAFETY: in these bytes, as the trait requires; nothing else uses the memory.
        unsafe { self.reducer.launch(&self.stream, reduction, &[device])? };
        self.stream.copy(host, device)?;
        self.stream.synchronize()?;
        self.host.copy_out(0, bytes)?;
        Ok(())
    }
}
