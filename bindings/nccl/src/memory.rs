//! Memory of `ncclMemAlloc`: of the thread's current device, and such as ranks can share.

use std::collections::BTreeMap;
use std::ptr;
use std::sync::{Mutex, PoisonError};

use doorbell_cuda::DeviceMemory;

use crate::abi::{Opaque, Status};
use crate::communicator::current_device;
use crate::failure::Failure;

static ALLOCATED: Mutex<BTreeMap<usize, DeviceMemory>> = Mutex::new(BTreeMap::new());

pub(crate) fn allocate(bytes: usize) -> Result<Opaque, Failure> {
    if bytes == 0 {
        return Err(Failure::invalid_argument("size is 0"));
    }
    let memory = DeviceMemory::alloc(&current_device()?.context()?, bytes)?;
    let address = memory.device_ptr().0 as usize;
    let mut allocated = ALLOCATED.lock().unwrap_or_else(PoisonError::into_inner);
    allocated.insert(address, memory);
    Ok(ptr::without_provenance_mut(address))
}

pub(crate) fn free(pointer: Opaque) -> Result<Status, Failure> {
    if pointer.is_null() {
        return Ok(Status::Success);
    }
    let mut allocated = ALLOCATED.lock().unwrap_or_else(PoisonError::into_inner);
    match allocated.remove(&pointer.addr()) {
        Some(_) => Ok(Status::Success),
        None => Err(Failure::invalid_argument("ncclMemAlloc has not allocated this memory")),
    }
}
