//! Slices of the crate `cudarc`, lent to adapters.

use core::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, DevicePtrMut};
use doorbell_cuda::{Context, DevicePtr, Event, Stream};

use crate::memory::GpuMemory;

/// A `CudaSlice` that is lent as [`GpuMemory`]; [`end`](Self::end) gives it back.
///
/// ```no_run
/// use cudarc::driver::{CudaContext, CudaSlice};
/// use doorbell_gpudirect::{SliceLoan, cuda, register};
/// use doorbell_verbs::{CompletionQueue, Local, Opaque, ProtectionDomain, QueuePair, Remote, WriteAccess};
///
/// /// Writes what work of cudarc leaves in `slice` to a peer, and returns the slice.
/// fn write(pd: &ProtectionDomain, qp: &mut QueuePair, cq: &mut CompletionQueue, slice: CudaSlice<f32>, to: Remote<WriteAccess>) -> Result<CudaSlice<f32>, Box<dyn std::error::Error>> {
///     let context = cuda::Context::from_cudarc(cuda::Driver::load()?, slice.context())?;
///     let stream = cuda::Stream::new(&context)?;
///     let (loan, memory) = SliceLoan::new(slice, &stream)?;
///     let (buffer, region) = register(pd, &memory, Local)?.into_parts();
///     region.push(.., &stream)?.wait()?;
///     qp.write(buffer, to)?;
///     let buffer = loop {
///         if let Some(mut done) = cq.poll()?.next() {
///             done.check()?;
///             break done.take::<Opaque<Local>>();
///         }
///     };
///     drop((buffer, region, memory));
///     Ok(loan.end().map_err(|_| "a buffer is still lent")?)
/// }
/// ```
pub struct SliceLoan<T: Lendable> {
    slice: Arc<CudaSlice<T>>,
    context: Context,
}

/// Numbers, of which any bytes that a peer writes are one.
pub trait Lendable: sealed::Sealed + 'static {}

mod sealed {
    pub trait Sealed {}
}

macro_rules! lendable {
    ($($number:ty),*) => { $(
        impl sealed::Sealed for $number {}
        impl Lendable for $number {}
    )* };
}
lendable!(u8, u16, u32, u64, u128, usize, i8, i16, i32, i64, i128, isize, f32, f64);

impl<T: Lendable> SliceLoan<T> {
    /// Takes `slice`, for a `stream` of its [context](doorbell_cuda::Context::from_cudarc), whose
    /// later work comes after all that cudarc has enqueued with it. The memory is registered,
    /// copied and used in launches as any other.
    ///
    /// # Errors
    /// [`OtherContext`](doorbell_cuda::Error::OtherContext);
    /// [`Captured`](doorbell_cuda::Error::Captured) while the slice's stream is captured;
    /// [`Empty`](doorbell_cuda::Error::Empty); or the driver's error. The slice is then dropped.
    #[expect(unsafe_code, reason = "the driver does not know who keeps the memory")]
    pub fn new(mut slice: CudaSlice<T>, stream: &Stream) -> Result<(Self, GpuMemory), doorbell_cuda::Error> {
        let (context, theirs) = (stream.context(), Arc::clone(slice.stream()));
        let len = slice.num_bytes();
        // Its stream waits for its uses in other streams of cudarc.
        let (address, used) = slice.device_ptr_mut(&theirs);
        drop(used);
        stream.wait(&Event::after_cudarc(context, &theirs)?)?;
        let slice = Arc::new(slice);
        // SAFETY: memory of `context`, or the event above would have been refused, and the owner
        // keeps it. cudarc has no access before the owner, and with it all use, is gone.
        let memory = unsafe { GpuMemory::wrap(context, DevicePtr(address), len, slice.clone())? };
        let context = context.clone();
        Ok((Self { slice, context }, memory))
    }

    /// Gives the slice back when nothing uses the memory any longer.
    ///
    /// # Errors
    /// The loan, while there is a handle, a buffer, a region, or work in a stream that uses it.
    pub fn end(self) -> Result<CudaSlice<T>, Self> {
        self.context.reap();
        let Self { slice, context } = self;
        Arc::try_unwrap(slice).map_err(|slice| Self { slice, context })
    }
}

impl<T: Lendable> fmt::Debug for SliceLoan<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SliceLoan")
            .field("elements", &self.slice.len())
            .finish_non_exhaustive()
    }
}
