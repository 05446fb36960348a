//! Protection domains, memory, and memory regions.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::rc::Rc;

use doorbell_verbs_sys::*;

use super::{Device, Errno, Object};

/// Every access right but MW_BIND.
pub(in crate::conformance) const ALL_RIGHTS: u32 =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

#[derive(Clone)]
pub(in crate::conformance) struct Pd(Rc<Object<ibv_pd>>, Device);

impl Device {
    pub(in crate::conformance) fn pd(&self) -> Result<Pd, Errno> {
        // SAFETY: the context is live.
        let pd = unsafe { (self.api().alloc_pd)(self.raw()) };
        Ok(Pd(
            Rc::new(Object::new(self, "protection domain", pd, self.api().dealloc_pd)?),
            self.clone(),
        ))
    }
}

/// Zeroed, aligned to 8 bytes. Accessed by its pointer only, as devices write it at any time.
#[derive(Clone)]
pub(in crate::conformance) struct Memory(Rc<Words>);

struct Words(*mut [u64]);

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: from a Box in `Memory::new`. The regions hold the memory until they are
        // deregistered, so nothing writes it any more.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

impl Memory {
    pub(in crate::conformance) fn new(len: usize) -> Self {
        Self(Rc::new(Words(Box::into_raw(
            vec![0_u64; len.div_ceil(8)].into_boxed_slice(),
        ))))
    }

    pub(in crate::conformance) fn len(&self) -> usize {
        self.0.0.len() * 8
    }

    pub(super) fn as_void_ptr(&self) -> *mut c_void {
        self.ptr().cast()
    }

    fn ptr(&self) -> *mut u8 {
        self.0.0.cast()
    }

    pub(in crate::conformance) fn addr(&self) -> u64 {
        self.ptr().expose_provenance() as u64
    }

    pub(in crate::conformance) fn bytes(&self, range: Range<usize>) -> Vec<u8> {
        assert!(range.end <= self.len());
        // SAFETY: in the memory; volatile, as the device writes it.
        range
            .map(|index| unsafe { self.ptr().add(index).read_volatile() })
            .collect()
    }

    pub(in crate::conformance) fn fill(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len());
        for (index, &byte) in bytes.iter().enumerate() {
            // SAFETY: in the memory.
            unsafe { self.ptr().add(at + index).write_volatile(byte) };
        }
    }

    /// A word in host byte order, as of atomics; `at` is in bytes.
    pub(in crate::conformance) fn word(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.bytes(at..at + 8).try_into().expect("8 bytes"))
    }

    pub(in crate::conformance) fn set_word(&self, at: usize, value: u64) {
        self.fill(at, &value.to_ne_bytes());
    }
}

/// A memory region. Offsets are from its start.
pub(in crate::conformance) struct Mr {
    object: Object<ibv_mr>,
    pub(in crate::conformance) memory: Memory,
    addr: u64,
    pd: Pd,
}

impl Pd {
    pub(in crate::conformance) fn device(&self) -> &Device {
        &self.1
    }

    pub(in crate::conformance) fn raw(&self) -> *mut ibv_pd {
        self.0.get()
    }

    pub(in crate::conformance) fn dealloc(&self) -> Errno {
        self.0.destroy()
    }

    pub(in crate::conformance) fn register_part(
        &self,
        memory: &Memory,
        range: Range<usize>,
        rights: u32,
    ) -> Result<Mr, Errno> {
        assert!(range.end <= memory.len());
        let addr = memory.addr() + range.start as u64;
        let ptr = memory.ptr().wrapping_add(range.start).cast();
        // SAFETY: the PD is live, and the range is in memory that the region holds.
        let mr = unsafe { (self.device().api().reg_mr)(self.raw(), ptr, range.len(), rights as c_int) };
        self.adopt_mr(mr, memory, addr)
    }

    /// `memory` starts at `addr` for peers.
    pub(super) fn adopt_mr(&self, mr: *mut ibv_mr, memory: &Memory, addr: u64) -> Result<Mr, Errno> {
        let device = self.device();
        Ok(Mr {
            object: Object::new(device, "memory region", mr, device.api().dereg_mr)?,
            memory: memory.clone(),
            addr,
            pd: self.clone(),
        })
    }

    pub(in crate::conformance) fn register(&self, len: usize, rights: u32) -> Result<Mr, Errno> {
        self.register_part(&Memory::new(len), 0..len, rights)
    }

    /// The errno of registering an unmapped address.
    pub(in crate::conformance) fn register_nothing(&self, rights: u32) -> Errno {
        let device = self.device();
        // Never mapped: the kernel keeps the first page free.
        let unmapped = std::ptr::without_provenance_mut(16);
        // SAFETY: the PD is live; a resulting region would never be used.
        let mr = unsafe { (device.api().reg_mr)(self.raw(), unmapped, 64, rights as c_int) };
        match Object::new(device, "memory region", mr, device.api().dereg_mr) {
            Ok(_) => Errno(0),
            Err(error) => error,
        }
    }
}

impl Mr {
    pub(in crate::conformance) fn raw(&self) -> *mut ibv_mr {
        self.object.get()
    }

    pub(in crate::conformance) fn lkey(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.object.get()).lkey }
    }

    pub(in crate::conformance) fn rkey(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.object.get()).rkey }
    }

    pub(in crate::conformance) fn length(&self) -> usize {
        // SAFETY: live.
        unsafe { (*self.object.get()).length }
    }

    pub(in crate::conformance) fn at(&self, offset: usize) -> u64 {
        self.addr + offset as u64
    }

    pub(in crate::conformance) fn sge(&self, offset: usize, len: usize) -> ibv_sge {
        ibv_sge {
            addr: self.at(offset),
            length: len as u32,
            lkey: self.lkey(),
        }
    }

    /// Applies the changes of ibv_rereg_mr(3).
    pub(super) fn changed(&mut self, flags: u32, pd: &Pd, memory: &Memory) {
        if flags & IBV_REREG_MR_CHANGE_PD != 0 {
            self.pd = pd.clone();
        }
        if flags & IBV_REREG_MR_CHANGE_TRANSLATION != 0 {
            self.memory = memory.clone();
            self.addr = memory.addr();
        }
    }

    pub(in crate::conformance) fn deregister(&self) -> Errno {
        self.object.destroy()
    }
}
