//! Mailboxes of ranks on the same host, mapped into this process: a store replaces the WRITE.
//!
//! A peer of the same host opens a rank's shared memory as `/proc/PID/fd/FD` (proc(5)), which the
//! kernel allows to processes of the same user. A secret at its beginning proves that it is not
//! another container's process with the same id. Where any of this fails, queue pairs are used.
//!
//! A mapping outlives its process: stores into the mailbox of a rank that is gone have no effect.
//! The file's length is sealed, so accesses cannot pass its end.

use core::num::NonZeroUsize;
use core::ptr::NonNull;
use std::fs::{self, OpenOptions};
use std::path::PathBuf;
use std::process;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::stat::fstat;
use nix::unistd::geteuid;

use crate::bootstrap::Nonce;
use crate::memory::Segment;

/// Bytes reserved for the secret at the beginning of a segment, on a cache line of its own.
pub(super) const SECRET: usize = 64;
pub(super) const OFFER: usize = 64;

/// The address of a segment of mailboxes. All zeros if it is not to be mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Offer {
    boot: [u8; 16],
    process: u32,
    descriptor: u32,
    start: u64,
    len: u64,
    secret: [u8; 16],
}

/// The kernel's boot id: random, and the same for all processes and containers (random(4)).
pub(crate) fn boot_id() -> Option<[u8; 16]> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    Some(u128::from_str_radix(&digits, 16).ok()?.to_be_bytes())
}

impl Offer {
    /// Writes the secret to the beginning; `None` where this host lacks a feature.
    pub(super) fn of(segment: &Segment) -> Option<Self> {
        let secret = *Nonce::random().ok()?.bytes();
        let offer = Self {
            boot: boot_id()?,
            process: process::id(),
            descriptor: segment.descriptor()?.cast_unsigned(),
            start: segment.start().addr() as u64,
            len: segment.len() as u64,
            secret,
        };
        // SAFETY: the segment is longer, and its beginning is reserved for this; no peer has its
        // address yet.
        unsafe { segment.start().cast::<[u8; 16]>().write(secret) };
        Some(offer)
    }

    pub(super) fn to_bytes(self) -> [u8; OFFER] {
        let mut bytes = [0; OFFER];
        bytes[..16].copy_from_slice(&self.boot);
        bytes[16..20].copy_from_slice(&self.process.to_be_bytes());
        bytes[20..24].copy_from_slice(&self.descriptor.to_be_bytes());
        bytes[24..32].copy_from_slice(&self.start.to_be_bytes());
        bytes[32..40].copy_from_slice(&self.len.to_be_bytes());
        bytes[40..56].copy_from_slice(&self.secret);
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8; OFFER]) -> Option<Self> {
        let (boot, rest) = bytes.split_first_chunk()?;
        let (process, rest) = rest.split_first_chunk()?;
        let (descriptor, rest) = rest.split_first_chunk()?;
        let (start, rest) = rest.split_first_chunk()?;
        let (len, rest) = rest.split_first_chunk()?;
        let (secret, _) = rest.split_first_chunk()?;
        (*boot != [0; 16]).then_some(Self {
            boot: *boot,
            process: u32::from_be_bytes(*process),
            descriptor: u32::from_be_bytes(*descriptor),
            start: u64::from_be_bytes(*start),
            len: u64::from_be_bytes(*len),
            secret: *secret,
        })
    }
}

#[derive(Debug)]
pub(super) struct MappedSegment {
    start: NonNull<u8>,
    len: NonZeroUsize,
    offer: Offer,
}

// SAFETY: it owns a mapping, and gives no references into it.
unsafe impl Send for MappedSegment {}
// SAFETY: as above.
unsafe impl Sync for MappedSegment {}

impl MappedSegment {
    pub(super) fn open(offer: Offer) -> Option<Self> {
        (boot_id()? == offer.boot).then_some(())?;
        let path = PathBuf::from(format!("/proc/{}/fd/{}", offer.process, offer.descriptor));
        // Opening other kinds of files may have side effects, and files with a path are not ours.
        let name = fs::read_link(&path).ok()?;
        (name.to_str()?.starts_with("/memfd:doorbell") && fs::metadata(&path).ok()?.is_file()).then_some(())?;
        let file = OpenOptions::new().read(true).write(true).open(path).ok()?;
        let seals = SealFlag::from_bits_truncate(fcntl(&file, FcntlArg::F_GET_SEALS).ok()?);
        seals.contains(SealFlag::F_SEAL_SHRINK).then_some(())?;
        let len = NonZeroUsize::new(usize::try_from(offer.len).ok()?)?;
        let status = fstat(&file).ok()?;
        // The kernel lets root open any user's file: a peer must not offer another user's.
        (status.st_uid == geteuid().as_raw()).then_some(())?;
        (len.get() > SECRET && status.st_size.cast_unsigned() >= offer.len).then_some(())?;
        // SAFETY: a new mapping at an address that the kernel chooses: nothing is replaced.
        let start = unsafe {
            mmap(
                None,
                len,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_SHARED,
                &file,
                0,
            )
        }
        .ok()?;
        let mapped = Self {
            start: start.cast(),
            len,
            offer,
        };
        // SAFETY: mapped with this length, and the file cannot shrink.
        let secret = unsafe { mapped.start.cast::<[u8; 16]>().read_volatile() };
        (secret == offer.secret).then_some(mapped)
    }

    /// Translates a peer's address; `None` if outside the segment, or not aligned to cache lines.
    pub(super) fn translate(&self, addr: u64, len: usize) -> Option<NonNull<u8>> {
        let offset = usize::try_from(addr.checked_sub(self.offer.start)?).ok()?;
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.len.get());
        // SAFETY: within the mapping.
        (fits && offset.is_multiple_of(64)).then(|| unsafe { self.start.add(offset) })
    }
}

impl Drop for MappedSegment {
    fn drop(&mut self) {
        // SAFETY: mapped by `open` with this length, and unmapped once; links that store there hold
        // a reference.
        let _ = unsafe { munmap(self.start.cast(), self.len.get()) };
    }
}

#[cfg(test)]
#[path = "mapped_segment_tests.rs"]
mod tests;
