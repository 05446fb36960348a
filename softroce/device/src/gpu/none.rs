//! In place of `cuda.rs` in builds without CUDA: no memory is ever resolved, so that nothing here
//! is called with any.

use std::convert::Infallible;
use std::ptr::NonNull;

use super::ahead::Put;
use super::copies::Move;
use super::{Found, Handle};

/// Why a range cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("this device was built without CUDA")]
pub(crate) struct NoMemory;

/// Why copies fail.
pub(crate) type Trouble = Infallible;

/// GPU memory, of which there is none.
#[derive(Clone, Debug)]
pub(crate) struct Memory;

#[derive(Debug)]
pub(crate) struct Mark;

#[derive(Debug)]
pub(crate) struct Pinned;

impl Pinned {
    pub(crate) fn new(_: &Memory, _: usize) -> Result<Self, Trouble> {
        Ok(Self)
    }

    pub(crate) fn start(&self) -> *mut u8 {
        NonNull::dangling().as_ptr()
    }

    pub(crate) fn fetch(&self, _: (&Memory, usize), _: usize) -> Result<(), Trouble> {
        Ok(())
    }

    pub(crate) fn store(&self, _: &[Put]) -> Result<(), Trouble> {
        Ok(())
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Pin;

impl Pin {
    /// # Safety
    /// Nothing is done.
    pub(crate) unsafe fn new(_: &Memory, _: usize, _: usize) -> Result<Self, Trouble> {
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
    pub(crate) fn is_short(&self, _: usize) -> bool {
        false
    }
}

/// How small copies of a device are done.
pub(crate) struct Short;

pub(crate) fn make_short(_: &Memory) -> Short {
    Short
}

#[derive(Debug, Default)]
pub(crate) struct Engine;

pub(crate) fn is_possible() -> bool {
    false
}

pub(crate) fn find(_: u64, _: usize) -> Result<Found, NoMemory> {
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

    pub(crate) fn share(&self) -> Result<Option<Handle>, Trouble> {
        Ok(None)
    }

    pub(crate) fn import(_: &Handle, _: usize, _: Option<usize>) -> Result<Option<Self>, Trouble> {
        Ok(None)
    }

    /// # Safety
    /// Nothing is read.
    pub(crate) unsafe fn read(&self, _: usize, _: *mut u8, _: usize) -> Result<(), Trouble> {
        Ok(())
    }

    /// # Safety
    /// Nothing is written.
    pub(crate) unsafe fn write(&self, _: usize, _: *const u8, _: usize) -> Result<(), Trouble> {
        Ok(())
    }
}

impl Engine {
    pub(crate) fn ring(&mut self, _: &Memory) -> Result<NonNull<u8>, Trouble> {
        Ok(NonNull::dangling())
    }

    pub(crate) fn ring_start(&self) -> Option<*mut u8> {
        None
    }

    pub(crate) fn copy(&mut self, _: (&Memory, usize), _: (&Memory, usize), _: usize) -> Result<(), Trouble> {
        Ok(())
    }

    pub(crate) fn copy_up(&mut self, _: (&Memory, usize), _: usize, _: usize) -> Result<(), Trouble> {
        Ok(())
    }

    pub(crate) fn copy_down(&mut self, _: (&Memory, usize), _: usize, _: usize) -> Result<(), Trouble> {
        Ok(())
    }

    pub(crate) fn copy_out(&mut self, _: (&Memory, usize), _: (&Pin, usize), _: usize) -> Result<(), Trouble> {
        Ok(())
    }

    pub(crate) fn mark(&mut self, _: &mut Vec<Mark>) -> Result<(), Trouble> {
        Ok(())
    }

    pub(crate) fn has_short(&self, _: &Memory) -> bool {
        true
    }

    pub(crate) fn add_short(&mut self, _: Short) {}

    pub(crate) fn are_short(&self, _: &[Move]) -> bool {
        false
    }

    pub(crate) fn copy_short(&mut self, _: &[Move], _: &mut Vec<Mark>) -> Result<(), Trouble> {
        Ok(())
    }

    pub(crate) fn take_back(&mut self, _: &[Mark]) -> Option<usize> {
        None
    }

    pub(crate) fn is_done(&mut self, _: &Mark) -> Result<bool, Trouble> {
        Ok(true)
    }

    pub(crate) fn recycle(&mut self, _: Mark) {}
}
