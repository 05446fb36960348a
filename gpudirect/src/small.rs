//! Small copies by the CPU through a mapping of GPU memory (BAR1), as in GDRCopy: a few stores,
//! while a GPU copy takes microseconds to start. Few machines allow it ([`WindowUnavailable`]): the
//! dma-buf's driver must support mmap.

use core::ffi::c_void;
use core::fmt;
use core::ptr::NonNull;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{Ordering, fence};

use doorbell_cuda::{Attribute, DmaBuf, Error};

use crate::memory::GpuMemory;

/// The maximum bytes for which it pays off: beyond, the copy engines are faster.
pub const MAX_SMALL_COPY: usize = 4096;

/// The device node of the GDRCopy kernel module.
const GDRDRV: &str = "/dev/gdrdrv";

/// A CPU mapping of GPU memory, accessed in bytes or words, in no order.
///
/// Each call synchronizes: kernels launched after a write see it, and a read sees the results of
/// work that was waited for before.
pub struct SmallWindow {
    mapping: Mapping,
    _memory: GpuMemory,
}

struct Mapping {
    start: NonNull<u8>,
    offset: usize,
    mapped: usize,
    len: usize,
    /// Whether accesses must be bracketed by `DMA_BUF_IOCTL_SYNC`.
    synced: bool,
    fd: OwnedFd,
}

// SAFETY: the mapping is owned by this value, and only its methods access the bytes, with volatile
// accesses.
#[expect(unsafe_code, reason = "of a mapping")]
unsafe impl Send for Mapping {}

/// Why GPU memory cannot be mapped: each method with the reason.
#[derive(Debug)]
pub struct WindowUnavailable {
    /// The methods tried, each with the reason it failed.
    pub refused: Vec<(&'static str, String)>,
}

impl fmt::Display for WindowUnavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the processor cannot map this GPU's memory")?;
        for (at, (way, why)) in self.refused.iter().enumerate() {
            write!(f, "{} {way}: {why}", if at == 0 { ":" } else { ";" })?;
        }
        Ok(())
    }
}

impl std::error::Error for WindowUnavailable {}

impl SmallWindow {
    /// Maps all of `memory`.
    ///
    /// # Errors
    /// [`WindowUnavailable`], with each method tried.
    pub fn open(memory: &GpuMemory) -> Result<Self, WindowUnavailable> {
        let by_dma_buf = match Self::map(memory) {
            Ok(window) => return Ok(window),
            Err(why) => why,
        };
        let device = memory.context().device();
        // Set on machines with coherent CPU and GPU memory, such as Grace Hopper.
        let coherent = match device.attribute(Attribute::DirectManagedMemoryAccessFromHost) {
            Ok(0) => {
                format!("{device} has CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST (attribute 101) = 0")
            }
            Ok(_) => "the link is coherent, but memory of this kind is not mapped for the processor".to_owned(),
            Err(error) => error.to_string(),
        };
        let gdrdrv = match Path::new(GDRDRV).try_exists() {
            Ok(true) => format!("{GDRDRV} is there, but not used here"),
            Ok(false) => format!("the kernel has not loaded gdrdrv (no {GDRDRV})"),
            Err(error) => format!("{GDRDRV}: {error}"),
        };
        Err(WindowUnavailable {
            refused: vec![("dma-buf", by_dma_buf), ("coherent link", coherent), ("gdrdrv", gdrdrv)],
        })
    }

    fn map(memory: &GpuMemory) -> Result<Self, String> {
        let exported = memory.all().dma_buf().map_err(|error| error.to_string())?;
        Ok(Self {
            mapping: Mapping::new(exported, memory.len())?,
            _memory: memory.clone(),
        })
    }

    /// Its length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "there is no memory of no bytes")]
    pub fn len(&self) -> usize {
        self.mapping.len
    }

    /// Writes `bytes` at `offset`: kernels launched after this see them.
    ///
    /// # Errors
    /// [`OutOfBounds`](Error::OutOfBounds) if they exceed it.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        self.mapping.write(offset, bytes)
    }

    /// Reads from `offset`.
    ///
    /// # Errors
    /// [`OutOfBounds`](Error::OutOfBounds) if they exceed it.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        self.mapping.read(offset, bytes)
    }
}

impl Mapping {
    #[expect(unsafe_code, reason = "mmap(2)")]
    fn new(exported: DmaBuf, len: usize) -> Result<Self, String> {
        // SAFETY: a new mapping at an address chosen by the kernel; it replaces nothing.
        let start = unsafe {
            libc::mmap(
                core::ptr::null_mut(),
                exported.len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                exported.fd.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            return Err(match error.raw_os_error() {
                // The kernel-internal ENOTSUPP, for which C libraries have no text.
                Some(524) => "mmap(2) of the driver's dma-buf: errno 524 (ENOTSUPP)".to_owned(),
                _ => format!("mmap(2) of the driver's dma-buf: {error}"),
            });
        }
        let Some(start) = NonNull::new(start.cast::<u8>()) else {
            return Err("mmap(2) of the driver's dma-buf gave no address".to_owned());
        };
        let synced =
            sync(&exported.fd, SYNC_READ | SYNC_START).is_ok() && sync(&exported.fd, SYNC_READ | SYNC_END).is_ok();
        Ok(Self {
            start,
            offset: exported.offset,
            mapped: exported.len,
            len,
            synced,
            fd: exported.fd,
        })
    }

    #[expect(unsafe_code, reason = "stores into a mapping")]
    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        let at = self.check(offset, bytes.len())?;
        self.begin(SYNC_WRITE);
        let head = at.align_offset(8).min(bytes.len());
        let (head, rest) = bytes.split_at(head);
        let (words, tail) = rest.as_chunks::<8>();
        let mut to = at;
        // SAFETY: `check` has verified that the bytes lie in the mapping; the words are aligned,
        // behind the head. Volatile, as the GPU may write them concurrently.
        unsafe {
            for byte in head {
                to.write_volatile(*byte);
                to = to.add(1);
            }
            for word in words {
                to.cast::<u64>().write_volatile(u64::from_ne_bytes(*word));
                to = to.add(8);
            }
            for byte in tail {
                to.write_volatile(*byte);
                to = to.add(1);
            }
        }
        flush_stores();
        self.end(SYNC_WRITE);
        Ok(())
    }

    #[expect(unsafe_code, reason = "loads from a mapping")]
    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        let at = self.check(offset, bytes.len())?;
        self.begin(SYNC_READ);
        fence(Ordering::Acquire);
        let head = at.align_offset(8).min(bytes.len());
        let (head, rest) = bytes.split_at_mut(head);
        let (words, tail) = rest.as_chunks_mut::<8>();
        let mut from = at.cast_const();
        // SAFETY: as in `write`.
        unsafe {
            for byte in head {
                *byte = from.read_volatile();
                from = from.add(1);
            }
            for word in words {
                *word = from.cast::<u64>().read_volatile().to_ne_bytes();
                from = from.add(8);
            }
            for byte in tail {
                *byte = from.read_volatile();
                from = from.add(1);
            }
        }
        self.end(SYNC_READ);
        Ok(())
    }

    fn check(&self, offset: usize, len: usize) -> Result<*mut u8, Error> {
        let end = offset.saturating_add(len);
        if end > self.len {
            return Err(Error::OutOfBounds {
                start: offset,
                end,
                len: self.len,
            });
        }
        Ok(self.start.as_ptr().wrapping_add(self.offset + offset))
    }

    fn begin(&self, access: u64) {
        if self.synced {
            // It succeeded at opening; if it fails now, accesses are those of a coherent bus.
            let _ = sync(&self.fd, access | SYNC_START);
        }
    }

    fn end(&self, access: u64) {
        if self.synced {
            let _ = sync(&self.fd, access | SYNC_END);
        }
    }
}

impl Drop for Mapping {
    #[expect(unsafe_code, reason = "munmap(2)")]
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and unmapped once.
        if unsafe { libc::munmap(self.start.as_ptr().cast::<c_void>(), self.mapped) } != 0 {
            tracing::warn!(
                "a window on GPU memory was not unmapped: {}",
                io::Error::last_os_error()
            );
        }
    }
}

debug_fields!(SmallWindow, self, len = self.len());

/// Flushes write-combining buffers.
#[cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "an instruction by its name"))]
fn flush_stores() {
    // SAFETY: every x86-64 CPU has the instruction, which touches no memory of this program.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::x86_64::_mm_sfence();
    }
    #[cfg(not(target_arch = "x86_64"))]
    fence(Ordering::SeqCst);
}

/// `DMA_BUF_SYNC_READ` and its like of linux/dma-buf.h.
const SYNC_READ: u64 = 1;
const SYNC_WRITE: u64 = 2;
const SYNC_START: u64 = 0;
const SYNC_END: u64 = 4;

/// `DMA_BUF_IOCTL_SYNC`: begins or ends a CPU access to a dma-buf.
#[expect(unsafe_code, reason = "ioctl(2)")]
fn sync(fd: &OwnedFd, flags: u64) -> io::Result<()> {
    /// `_IOW('b', 0, struct dma_buf_sync)`, whose struct is one 64-bit number.
    const DMA_BUF_IOCTL_SYNC: libc::Ioctl = 0x4008_6200_u32 as libc::Ioctl;
    // SAFETY: the descriptor is open, and the pointer is to this request's argument.
    let status = unsafe { libc::ioctl(fd.as_raw_fd(), DMA_BUF_IOCTL_SYNC, &raw const flags) };
    if status == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::FromRawFd;

    use doorbell_cuda::DevicePtr;

    use super::*;

    /// A memfd in place of a mappable dma-buf, with the memory at an odd offset.
    #[expect(unsafe_code, reason = "memfd_create(2)")]
    fn mapping(offset: usize, len: usize) -> Mapping {
        // SAFETY: the name is NUL-terminated, and the descriptor has no other owner.
        let fd = unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"window".as_ptr(), libc::MFD_CLOEXEC)) };
        let mapped = 8192;
        // SAFETY: the descriptor is open.
        assert_eq!(unsafe { libc::ftruncate(fd.as_raw_fd(), mapped) }, 0);
        let start = DevicePtr(0);
        let exported = DmaBuf {
            fd,
            offset,
            len: mapped as usize,
            start,
        };
        Mapping::new(exported, len).unwrap()
    }

    #[test]
    fn written_bytes_are_read_back_at_any_offset() {
        let mut window = mapping(3, 5000);
        let mut expected = vec![0; 5000];
        for (offset, len) in [
            (0, 1),
            (1, 7),
            (4, 8),
            (9, 64),
            (13, 1021),
            (4090, 23),
            (4999, 1),
            (70, 0),
        ] {
            let bytes: Vec<u8> = (0..len).map(|at| (at * 7 + offset + 1) as u8).collect();
            window.write(offset, &bytes).unwrap();
            expected[offset..offset + len].copy_from_slice(&bytes);
            let mut found = vec![0; len];
            window.read(offset, &mut found).unwrap();
            assert_eq!(found, bytes);
        }
        let mut all = vec![1; 5000];
        window.read(0, &mut all).unwrap();
        assert!(all == expected);
    }

    #[test]
    fn out_of_bounds_access_is_refused() {
        let mut window = mapping(0, 100);
        assert!(matches!(
            window.write(100, &[1]),
            Err(Error::OutOfBounds { end: 101, .. })
        ));
        assert!(window.read(usize::MAX, &mut [0; 2]).is_err());
        assert!(window.write(96, &[1; 5]).is_err());
        window.write(96, &[1; 4]).unwrap();
    }
}
