//! Clonable buffers: read-only ([`Frozen`]) and write-only ([`Scratch`]) ones.

use std::sync::Arc;

use super::buffer::Buffer;
use super::range::Range;
use super::rights::{Local, PeerRead, Readable};

/// The kind of a read-only buffer, which may be cloned (see [`Buffer::freeze`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frozen;

/// The kind of a write-only buffer, the target of many requests at once: [`Buffer::scratch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scratch;

impl Buffer<Local> {
    /// Makes it read-only and clonable, to be the source of many requests at once.
    #[must_use]
    pub fn freeze(self) -> Buffer<Frozen> {
        self.into_kind()
    }

    /// Makes it write-only and clonable, the target of many receives or reads at once whose
    /// messages are discarded: it stays in the processor's caches.
    #[must_use]
    pub fn scratch(mut self) -> Buffer<Scratch> {
        self.header_mut().set_kind::<Scratch>();
        // SAFETY: owned, in no list, now of this tag: this process accesses its bytes no more.
        unsafe { Buffer::from_range(self.into_range()) }
    }
}

impl Clone for Buffer<Scratch> {
    /// It allocates: make as many as will be in flight, and reuse those that completions return.
    fn clone(&self) -> Self {
        let header = self.header();
        let range = Range::allocate::<Scratch>(Arc::clone(&header.region), header.sge.addr, self.len());
        // SAFETY: just made with this tag. Only devices touch scratch bytes, whose value is never
        // used: the kind is no `Host`, so this process has no reference to them and no copy.
        unsafe { Self::from_range(range) }
    }
}

impl Buffer<PeerRead> {
    /// Makes it read-only and clonable, as the source of many requests. Keys to it stay valid.
    #[must_use]
    pub fn freeze(self) -> Buffer<Frozen> {
        self.into_kind()
    }
}

impl<K: Readable> Buffer<K> {
    fn into_kind(mut self) -> Buffer<Frozen> {
        self.header_mut().set_kind::<Frozen>();
        // SAFETY: owned, in no list, now of this tag. Peers write neither: `&[u8]` stays right.
        unsafe { Buffer::from_range(self.into_range()) }
    }
}

impl Clone for Buffer<Frozen> {
    /// It allocates: make as many as will be in flight, and reuse those that completions return.
    fn clone(&self) -> Self {
        let header = self.header();
        let range = Range::allocate::<Frozen>(Arc::clone(&header.region), header.sge.addr, self.len());
        // SAFETY: just made with this tag. Frozen bytes are only read: two handles do no harm.
        unsafe { Self::from_range(range) }
    }
}
