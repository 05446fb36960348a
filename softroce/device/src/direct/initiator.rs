//! The initiator of direct requests: its peers' tables and segments, the checks, and the copies.

use std::os::fd::OwnedFd;
use std::ptr;

use doorbell_roce_proto::direct::{DirectMemory, DirectPath};
use doorbell_roce_proto::memory::{AtomicOp, RemoteRight, Sge};
use doorbell_roce_proto::qp::LinkId;
use doorbell_roce_proto::work::{Operation, Payload};

use super::entry::Access;
use super::grant::{Grant, Grants, Remote, target};
use super::tables::{DirectRights, PeerTables};
use crate::memory::{Location, Table, copy};
use crate::shm::{OutgoingRings, slot_of};
use crate::shm_ring::segment::SegmentId;
use crate::shm_ring::{MappedSegment, MappedSegments};

/// Longer messages take the ring, so that the device's lock is not held for milliseconds.
const LONGEST: usize = 4 << 20;

/// What the peers of this process have published to it.
#[derive(Default)]
pub(crate) struct DirectPeers {
    grants: Grants,
    /// By member slot.
    peers: Vec<Option<Peer>>,
}

struct Peer {
    link: LinkId,
    tables: PeerTables,
    segments: MappedSegments,
}

impl DirectPeers {
    /// Whether no request can be direct.
    pub(crate) fn is_empty(&self) -> bool {
        self.peers.is_empty()
    }

    fn get_mut(&mut self, link: LinkId) -> Option<(&mut Grants, &mut Peer)> {
        let peer = self.peers.get_mut(slot_of(link))?.as_mut();
        Some((&mut self.grants, peer.filter(|peer| peer.link == link)?))
    }

    /// A peer's tables have arrived: its requests may be direct from now on.
    pub(crate) fn add(&mut self, link: LinkId, tables: OwnedFd) {
        let slot = slot_of(link);
        if self.peers.len() <= slot {
            self.peers.resize_with(slot + 1, || None);
        }
        match PeerTables::attach(tables) {
            Ok(tables) => {
                self.grants.clear();
                self.peers[slot] = Some(Peer {
                    link,
                    tables,
                    segments: MappedSegments::default(),
                });
            }
            Err(error) => tracing::warn!("another process sent invalid tables of its memory: {error}"),
        }
    }

    pub(crate) fn add_segment(&mut self, link: LinkId, segment: MappedSegment) {
        if let Some((grants, peer)) = self.get_mut(link) {
            grants.clear();
            if let Err(error) = peer.segments.insert(segment) {
                tracing::debug!("{error}");
            }
        }
    }

    pub(crate) fn remove_segment(&mut self, link: LinkId, id: SegmentId) {
        if let Some((grants, peer)) = self.get_mut(link) {
            grants.clear();
            peer.segments.remove(id);
        }
    }

    pub(crate) fn remove(&mut self, link: LinkId) {
        if let Some((grants, _)) = self.get_mut(link) {
            grants.clear();
            self.peers[slot_of(link)] = None;
        }
    }
}

/// Executes the requests of this process.
pub(crate) struct Initiator<'a> {
    pub(crate) table: &'a Table,
    pub(crate) peers: &'a mut DirectPeers,
    pub(crate) rings: &'a OutgoingRings,
    /// The link to this process, as its peers number it.
    pub(crate) me: LinkId,
}

impl DirectMemory for Initiator<'_> {
    #[inline(always)]
    fn execute(&mut self, path: &DirectPath, operation: &Operation, payload: Payload<'_>) -> bool {
        let (addr, rkey, right) = match *operation {
            Operation::Write { addr, rkey, .. } => (addr, rkey, RemoteRight::Write),
            Operation::Read { addr, rkey } => (addr, rkey, RemoteRight::Read),
            Operation::Atomic { addr, rkey, .. } => (addr, rkey, RemoteRight::Atomic),
            _ => return false,
        };
        let len = match payload {
            Payload::Inline(bytes) => bytes.len() as u64,
            Payload::Gather(sges) => sges.iter().map(|sge| u64::from(sge.len)).sum(),
        };
        if len > LONGEST as u64 || !self.permits_local(path, payload, right != RemoteRight::Write) {
            return false;
        }
        let Some(word) = self.rings.access_word(path.link) else {
            return false;
        };
        let remote = Remote {
            addr,
            rkey,
            len: len as usize,
            right,
        };
        let access = Access {
            qpn: path.target.get(),
            key: rkey.0,
        };
        access.begin(word);
        // No closures: they are not inlined.
        let done = match (self.locate(path, &remote), *operation) {
            (None, _) => false,
            (Some(at), Operation::Atomic { op, .. }) => self.atomic(path, op, payload, at),
            (Some(at), _) => {
                if len > 0 {
                    self.copy(path, payload, at, right == RemoteRight::Write);
                }
                true
            }
        };
        Access::end(word);
        done
    }
}

/// A range of length 0, which is granted wherever it is (IBTA vol 1, 9.4.3).
#[cold]
fn locate_empty(tables: &PeerTables, path: &DirectPath, me: LinkId, right: RemoteRight) -> Option<*mut u8> {
    let (_, qp) = target(tables, path, me)?;
    DirectRights::from(qp.access).grants(right).then(ptr::null_mut)
}

impl Initiator<'_> {
    /// Whether all local elements may be accessed, and are memory of the CPU's.
    fn permits_local(&self, path: &DirectPath, payload: Payload<'_>, write: bool) -> bool {
        match payload {
            Payload::Inline(_) => true,
            Payload::Gather(sges) => sges
                .iter()
                .all(|sge| sge.len == 0 || self.local(path, sge, write).is_some()),
        }
    }

    fn local(&self, path: &DirectPath, sge: &Sge, write: bool) -> Option<*mut u8> {
        let Sge { addr, len, lkey } = *sge;
        match self.table.local(path.pd, lkey, addr, len as usize, write) {
            Ok(Location::Host(at)) => Some(at),
            _ => None,
        }
    }

    /// Checks what the responder checks (IBTA vol 1, 9.7.4); returns where the bytes are mapped.
    /// Valid until the access ends.
    #[inline(always)]
    fn locate(&mut self, path: &DirectPath, remote: &Remote) -> Option<*mut u8> {
        let (grants, Peer { tables, segments, .. }) = self.peers.get_mut(path.link)?;
        if remote.len == 0 {
            return locate_empty(tables, path, self.me, remote.right);
        }
        let make = || Grant::new(tables, segments, (path, self.me), remote.rkey);
        grants.get((path, remote.rkey), tables, make)?.locate(remote)
    }

    /// Copies between the local elements, which were checked, and the peer's bytes.
    #[inline(always)]
    fn copy(&self, path: &DirectPath, payload: Payload<'_>, at: *mut u8, to_peer: bool) {
        match payload {
            // SAFETY: `at` has as many writable bytes, by `locate`; `bytes` are the caller's.
            Payload::Inline(bytes) => unsafe { copy::to_peer_visible(bytes, at) },
            Payload::Gather(sges) => self.copy_elements(path, sges, at, to_peer),
        }
    }

    fn copy_elements(&self, path: &DirectPath, sges: &[Sge], mut at: *mut u8, to_peer: bool) {
        for sge in sges.iter().filter(|sge| sge.len > 0) {
            let len = sge.len as usize;
            if let Some(local) = self.local(path, sge, !to_peer) {
                let (from, to) = if to_peer { (local, at) } else { (at, local) };
                // SAFETY: `len` bytes of a region, with the right, by `local`; as many of the
                // peer's from `at` on, by `locate`. Two mappings of the same bytes may overlap.
                unsafe { copy::between(from, to, len) };
            }
            at = at.wrapping_add(len);
        }
    }

    fn atomic(&self, path: &DirectPath, op: AtomicOp, payload: Payload<'_>, word: *mut u8) -> bool {
        let Payload::Gather([sge]) = payload else {
            return false;
        };
        let Some(local) = self.local(path, sge, true).filter(|_| sge.len == 8) else {
            return false;
        };
        if !word.addr().is_multiple_of(8) {
            return false;
        }
        // SAFETY: eight bytes of the peer's, mapped to be written, by `locate`; aligned as checked.
        let original = unsafe { copy::atomic(word, op) };
        // SAFETY: eight bytes of a region with LOCAL_WRITE, by `local`.
        unsafe { copy::to_peer_visible(&original.to_ne_bytes(), local) };
        true
    }
}
