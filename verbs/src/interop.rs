//! Conversions to and from the types of the crate `ibverbs` (feature `ibverbs`).
//!
//! Version 0.9 of that crate exposes only endpoints, remote keys and unopened devices: queue pairs
//! of both connect, and both open one device. Other pointers of [`raw`](crate::raw) can be cast.
//!
//! With this feature a program links libibverbs, and does not start without it.

use crate::context::Context;
use crate::memory::{KeyAccess, Remote};
use crate::port::{GidEntry, GidType};
use crate::qp::Endpoint;
use crate::types::{Gid, Lid, Mtu, Psn, Qpn};

impl From<::ibverbs::Gid> for Gid {
    fn from(gid: ::ibverbs::Gid) -> Self {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&gid.subnet_prefix().to_be_bytes());
        bytes[8..].copy_from_slice(&gid.interface_id().to_be_bytes());
        Self(bytes)
    }
}

impl From<Gid> for ::ibverbs::Gid {
    fn from(gid: Gid) -> Self {
        ibverbs_sys::ibv_gid { raw: gid.0 }.into()
    }
}

impl From<&::ibverbs::GidEntry> for GidEntry {
    fn from(entry: &::ibverbs::GidEntry) -> Self {
        Self {
            index: entry.gid_index,
            gid: entry.gid.into(),
            kind: GidType::from_sys(entry.gid_type),
            interface: entry.ndev_ifindex,
        }
    }
}

impl Endpoint {
    /// The endpoint of a queue pair of the crate `ibverbs`, to connect one of ours to.
    ///
    /// It sends from PSN 0 and expects `set_rq_psn`, by default 0: build ours with
    /// [`psn`](crate::QueuePairBuilder::psn) of [`Psn::truncated(0)`](Psn::truncated). `mtu` is its
    /// port's unless `set_path_mtu` was called, `rd_atomic` 1 unless `set_max_dest_rd_atomic` was.
    ///
    /// `None` if its queue pair number is invalid.
    #[must_use]
    pub fn from_ibverbs(peer: ::ibverbs::QueuePairEndpoint, mtu: Mtu, rd_atomic: u8) -> Option<Self> {
        Some(Self {
            gid: peer.gid.map(Gid::from).unwrap_or_default(),
            lid: Lid(peer.lid),
            qpn: Qpn::new(peer.num)?,
            psn: Psn::truncated(0),
            mtu,
            max_dest_rd_atomic: rd_atomic,
        })
    }

    /// The reverse, for that crate's `handshake`: see [`from_ibverbs`](Self::from_ibverbs).
    #[must_use]
    pub fn to_ibverbs(&self) -> ::ibverbs::QueuePairEndpoint {
        ::ibverbs::QueuePairEndpoint {
            num: self.qpn.get(),
            lid: self.lid.0,
            gid: (!self.gid.is_zero()).then(|| self.gid.into()),
        }
    }
}

impl<K: KeyAccess> Remote<K> {
    /// `len` bytes at `addr` of memory registered by the crate `ibverbs`, which grants all rights.
    #[must_use]
    pub fn from_ibverbs(key: ::ibverbs::RemoteKey, addr: u64, len: u64) -> Self {
        Self::from_raw(addr, key.key, len)
    }
}

impl Context {
    /// The context's device, to be opened by the crate `ibverbs` too; `None` if it is not of the
    /// libibverbs that crate is linked with, such as the soft device.
    #[must_use]
    pub fn as_ibverbs(&self) -> Option<::ibverbs::Device<'_>> {
        let ours = self.inner().api.open_device as *const ();
        if ours != ibverbs_sys::ibv_open_device as *const () {
            return None;
        }
        // SAFETY: the context is live, and its device was set when it was opened and is constant.
        // It lives as long, and the reference no longer than `self`. The types differ only in name.
        Some(::ibverbs::Device::from(unsafe {
            &*(&raw const (*self.as_raw()).device).cast()
        }))
    }
}
