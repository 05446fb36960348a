//! A peer's memory as its owner has advertised it.

use core::marker::PhantomData;

use doorbell_verbs_sys as sys;

use super::rights::{GrantsAtomic, KeyAccess};
use crate::types::RKey;

/// A range of a peer's memory (`remote_addr`, `rkey`), with its key's rights as a type: only a
/// `Remote<K>` with `K: GrantsWrite` can be written to (IBTA vol 1, 10.6.3 and 9.3.3).
///
/// Made by [`Buffer::remote`](crate::Buffer::remote) where the memory is, and sent to the peer as
/// [bytes](Self::to_bytes) out of band. A wrong one does no harm: the owner's device checks every
/// access, and the request completes with a remote access error.
#[derive(Clone, Copy, PartialEq, Eq)]
#[doc(alias("remote_addr", "rkey"))]
pub struct Remote<K: KeyAccess> {
    addr: u64,
    len: u64,
    rkey: RKey,
    key: PhantomData<K>,
}

const REMOTE_BYTES: usize = 24;

/// The error of decoding a [`Remote`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseRemoteError {
    /// It is not as long as a [`Remote`] is: the peer has sent something else.
    #[error("{len} bytes where a key to the peer's memory has {REMOTE_BYTES}")]
    Length {
        /// The number of bytes.
        len: usize,
    },
    /// The key lacks a right.
    #[error(
        "the peer's key grants {}, and Remote<{name}> needs {}: have the peer register its memory with these rights", rights(*.granted), rights(*.required)
    )]
    Rights {
        /// The rights it grants (`ibv_access_flags`).
        granted: u8,
        /// The rights that the type requires (`ibv_access_flags`).
        required: u8,
        /// The name of the required rights.
        name: &'static str,
    },
    /// The range goes beyond the address space.
    #[error("a range of {len} bytes at {addr:#x} goes beyond the address space")]
    Range {
        /// Its address.
        addr: u64,
        /// Its length.
        len: u64,
    },
}

fn rights(access: u8) -> String {
    let names: Vec<_> = [
        (sys::IBV_ACCESS_REMOTE_READ, "READ"),
        (sys::IBV_ACCESS_REMOTE_WRITE, "WRITE"),
        (sys::IBV_ACCESS_REMOTE_ATOMIC, "atomics"),
    ]
    .into_iter()
    .filter(|(bit, _)| u32::from(access) & bit != 0)
    .map(|(_, name)| name)
    .collect();
    match names.as_slice() {
        [] => "nothing".to_owned(),
        names => names.join(", "),
    }
}

impl<K: KeyAccess> Remote<K> {
    /// From its three numbers. Safe, because the owner's device checks them.
    #[must_use]
    pub const fn from_raw(addr: u64, rkey: u32, len: u64) -> Self {
        Self {
            addr,
            len,
            rkey: RKey(rkey),
            key: PhantomData,
        }
    }

    /// The address in the owner's memory.
    #[inline]
    #[must_use]
    #[doc(alias = "remote_addr")]
    pub const fn addr(&self) -> u64 {
        self.addr
    }

    /// Its length in bytes.
    #[inline]
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "an empty one is of no use")]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// The rkey.
    #[inline]
    #[must_use]
    pub const fn rkey(&self) -> RKey {
        self.rkey
    }

    /// The `len` bytes at `offset`, or `None` if they are out of range.
    #[inline]
    #[must_use]
    pub fn slice(&self, offset: u64, len: u64) -> Option<Self> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then(|| Self {
            addr: self.addr.wrapping_add(offset),
            len,
            ..*self
        })
    }

    /// Splits it in two, the first of `mid` bytes.
    ///
    /// # Panics
    /// If `mid` is beyond its end.
    #[must_use]
    pub fn split_at(self, mid: u64) -> (Self, Self) {
        assert!(
            mid <= self.len,
            "split_at({mid}) of a remote range of {} bytes",
            self.len
        );
        let second = Self {
            addr: self.addr.wrapping_add(mid),
            len: self.len - mid,
            ..self
        };
        (Self { len: mid, ..self }, second)
    }

    /// Splits it into ranges of `len` bytes; the last may be shorter.
    ///
    /// # Panics
    /// If `len` is 0.
    pub fn chunks(self, len: u64) -> RemoteChunks<K> {
        assert!(len > 0, "chunks of 0 bytes");
        RemoteChunks { rest: self, chunk: len }
    }

    /// Serialises it for the peer: address, length, rkey (each big-endian), rights, three zeros.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; REMOTE_BYTES] {
        let mut bytes = [0; REMOTE_BYTES];
        bytes[0..8].copy_from_slice(&self.addr.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.len.to_be_bytes());
        bytes[16..20].copy_from_slice(&self.rkey.0.to_be_bytes());
        bytes[20] = K::ACCESS as u8;
        bytes
    }

    /// Decodes the result of [`to_bytes`](Self::to_bytes), if it has at least these rights.
    ///
    /// # Errors
    /// When it has another length, grants less than `K`, or its range is invalid.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, ParseRemoteError> {
        let len = bytes.len();
        let bytes: &[u8; REMOTE_BYTES] = bytes.try_into().map_err(|_| ParseRemoteError::Length { len })?;
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_be_bytes(word)
        };
        let (addr, len) = (word(0), word(8));
        let rkey = u32::from_be_bytes([bytes[16], bytes[17], bytes[18], bytes[19]]);
        let (granted, required) = (bytes[20], K::ACCESS as u8);
        if granted & required != required {
            return Err(ParseRemoteError::Rights {
                granted,
                required,
                name: K::NAME,
            });
        }
        if addr.checked_add(len).is_none() {
            return Err(ParseRemoteError::Range { addr, len });
        }
        Ok(Self::from_raw(addr, rkey, len))
    }
}

impl<K: GrantsAtomic> Remote<K> {
    /// The word at `offset`; `None` if out of range or not aligned to 8 bytes (IBTA vol 1, 9.4.5).
    #[inline]
    #[must_use]
    pub fn word(&self, offset: u64) -> Option<RemoteWord> {
        let word = self.slice(offset, 8)?;
        word.addr.is_multiple_of(8).then_some(RemoteWord {
            addr: word.addr,
            rkey: word.rkey,
        })
    }
}

impl<K: KeyAccess> core::fmt::Debug for Remote<K> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(
            f,
            "Remote<{}>({:#x}, {} bytes, rkey {})",
            K::NAME,
            self.addr,
            self.len,
            self.rkey
        )
    }
}

/// An aligned 8-byte word of a peer's memory, for atomic operations (IBTA vol 1, 9.4.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteWord {
    pub(crate) addr: u64,
    pub(crate) rkey: RKey,
}

/// Iterator over the ranges of [`Remote::chunks`].
#[derive(Debug, Clone)]
pub struct RemoteChunks<K: KeyAccess> {
    rest: Remote<K>,
    chunk: u64,
}

impl<K: KeyAccess> Iterator for RemoteChunks<K> {
    type Item = Remote<K>;

    fn next(&mut self) -> Option<Remote<K>> {
        let len = self.chunk.min(self.rest.len);
        if len == 0 {
            return None;
        }
        let chunk = Remote { len, ..self.rest };
        self.rest.addr = self.rest.addr.wrapping_add(len);
        self.rest.len -= len;
        Some(chunk)
    }
}
