//! Replaces `cuda.rs` in builds without CUDA: no memory is resolved, so nothing is called with any.

use std::convert::Infallible;
use std::ptr::NonNull;

use super::copies::CopyOp;
use super::udp_staging::{StagedWrite, UdpPinned};
use super::{Handle, Located};

#[derive(Debug, thiserror::Error)]
#[error("this device was built without CUDA")]
pub(crate) struct NoMemory;

pub(crate) type DriverError = Infallible;

pub(crate) fn separate_contexts() {}

#[derive(Clone, Debug)]
pub(crate) struct Memory;

#[derive(Debug)]
pub(crate) struct Mark;

#[derive(Debug)]
pub(crate) struct Pinned;

impl Pinned {
    pub(crate) fn new(_: &Memory, _: usize) -> Result<Self, DriverError> {
        Ok(Self)
    }

    pub(crate) fn start(&self) -> *mut u8 {
        NonNull::dangling().as_ptr()
    }

    pub(crate) fn fetch(&self, _: (&Memory, usize), _: usize) -> Result<(), DriverError> {
        Ok(())
    }

    pub(crate) fn store(&self, _: &[StagedWrite]) -> Result<(), DriverError> {
        Ok(())
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Pin;

impl Pin {
    /// # Safety
    /// Nothing is done.
    pub(crate) unsafe fn new(_: &Memory, _: usize, _: usize) -> Result<Self, DriverError> {
        Ok(Self)
    }

    pub(crate) fn start(&self) -> usize {
        0
    }

    pub(crate) fn len(&self) -> usize {
        0
    }

    pub(crate) fn is(&self, _: &Self) -> bool {
        false
    }

    pub(crate) fn release(self) {}
}

impl Mark {
    pub(crate) fn is_small(&self, _: usize) -> bool {
        false
    }
}

#[derive(Default)]
pub(crate) struct PreparedDevice {
    pub(crate) udp: Option<UdpPinned>,
}

impl PreparedDevice {
    pub(crate) fn new(_: &Memory) -> Self {
        Self::default()
    }
}

pub(crate) struct FreesDeferred;

impl FreesDeferred {
    pub(crate) fn on_this_thread() -> Self {
        Self
    }
}

#[derive(Debug, Default)]
pub(super) struct SmallCopyDevices;

impl SmallCopyDevices {
    pub(super) fn cancel(&mut self, _: &[Mark]) -> Option<usize> {
        None
    }
}

#[derive(Debug, Default)]
pub(crate) struct Engine {
    pub(super) small: SmallCopyDevices,
}

pub(crate) fn is_possible() -> bool {
    false
}

pub(crate) fn find(_: u64, _: usize) -> Result<Located, NoMemory> {
    Err(NoMemory)
}

impl Memory {
    pub(crate) fn len(&self) -> usize {
        0
    }

    pub(crate) fn is(&self, _: &Self) -> bool {
        false
    }

    pub(crate) fn is_same_allocation(&self, _: &Self) -> bool {
        false
    }

    pub(crate) fn device(&self) -> usize {
        0
    }

    pub(crate) fn share(&self) -> Result<Option<Handle>, DriverError> {
        Ok(None)
    }

    pub(crate) fn import(_: &Handle, _: usize, _: Option<usize>) -> Result<Option<Self>, DriverError> {
        Ok(None)
    }

    /// # Safety
    /// Nothing is read.
    pub(crate) unsafe fn read(&self, _: usize, _: *mut u8, _: usize) -> Result<(), DriverError> {
        Ok(())
    }

    /// # Safety
    /// Nothing is written.
    pub(crate) unsafe fn write(&self, _: usize, _: *const u8, _: usize) -> Result<(), DriverError> {
        Ok(())
    }
}

impl Engine {
    pub(crate) fn is_prepared(&self, _: &Memory) -> bool {
        true
    }

    pub(crate) fn add(&mut self, _: PreparedDevice) {}

    pub(crate) fn ring(&mut self, _: &Memory) -> Result<NonNull<u8>, DriverError> {
        Ok(NonNull::dangling())
    }

    pub(crate) fn ring_start(&self) -> Option<*mut u8> {
        None
    }

    pub(crate) fn copy(&mut self, _: (&Memory, usize), _: (&Memory, usize), _: usize) -> Result<(), DriverError> {
        Ok(())
    }

    pub(crate) fn copy_up(&mut self, _: (&Memory, usize), _: usize, _: usize) -> Result<(), DriverError> {
        Ok(())
    }

    pub(crate) fn copy_down(&mut self, _: (&Memory, usize), _: usize, _: usize) -> Result<(), DriverError> {
        Ok(())
    }

    pub(crate) fn copy_out(&mut self, _: (&Memory, usize), _: (&Pin, usize), _: usize) -> Result<(), DriverError> {
        Ok(())
    }

    pub(crate) fn mark(&mut self, _: &mut Vec<Mark>) -> Result<(), DriverError> {
        Ok(())
    }

    pub(crate) fn are_small(&self, _: &[CopyOp]) -> bool {
        false
    }

    pub(crate) fn copy_small(&mut self, _: &[CopyOp], _: &mut Vec<Mark>) -> Result<(), DriverError> {
        Ok(())
    }

    pub(crate) fn is_done(&mut self, _: &Mark) -> Result<bool, DriverError> {
        Ok(true)
    }

    pub(crate) fn recycle(&mut self, _: Mark) {}
}
