//! GPU memory from `cuMemAlloc`, as of `cudaMalloc` and PyTorch, shared by IPC handle.

use std::env;
use std::ffi::c_int;
use std::sync::Arc;

use anyhow::{Result, ensure};
use doorbell_cuda::{Context, DevicePtr, Foreign};
use libloading::os::unix::Library;

struct Allocated {
    context: Context,
    library: Library,
    address: u64,
}

impl Drop for Allocated {
    fn drop(&mut self) {
        type Free = unsafe extern "C" fn(u64) -> c_int;
        if self.context.make_current().is_err() {
            return;
        }
        // SAFETY: the function has this type.
        if let Ok(free) = unsafe { self.library.get::<Free>(b"cuMemFree_v2") } {
            // SAFETY: allocated once by `alloc`, and nothing uses it.
            unsafe { free(self.address) };
        }
    }
}

/// `len` bytes at offset `skew` of an allocation. The context becomes current for this thread.
pub fn alloc(context: &Context, len: usize, skew: usize) -> Result<Foreign> {
    type Alloc = unsafe extern "C" fn(*mut u64, usize) -> c_int;
    context.make_current()?;
    let name = env::var_os("DOORBELL_CUDA_LIBRARY").unwrap_or_else(|| "libcuda.so.1".into());
    // SAFETY: the driver, which is already loaded.
    let library = unsafe { Library::new(name)? };
    let mut address = 0;
    // SAFETY: the function has this type; the address is a local.
    let status = unsafe { library.get::<Alloc>(b"cuMemAlloc_v2")?(&raw mut address, len + skew) };
    ensure!(status == 0, "cuMemAlloc of {len} bytes: {status}");
    let owner = Arc::new(Allocated {
        context: context.clone(),
        library,
        address,
    });
    // SAFETY: the owner keeps this many bytes.
    Ok(unsafe { Foreign::wrap(context, DevicePtr(address + skew as u64), len, owner)? })
}
