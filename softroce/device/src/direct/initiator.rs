//! The initiator of direct requests: its peers' tables and segments, the checks, and the copies.

use std::os::fd::OwnedFd;
use std::ptr;

use doorbell_roce_proto::RKey;
use doorbell_roce_proto::direct::{DirectMemory, DirectPath};
use doorbell_roce_proto::memory::{AtomicOp, RemoteRight, Sge};
use doorbell_roce_proto::qp::LinkId;
use doorbell_roce_proto::work::{Operation, Payload};

use super::entry::Access;
use super::process::{PeerProcess, range};
use super::tables::{PeerTables, Place};
use crate::capacity;
use crate::memory::{Location, Table, copy};
use crate::shm::{OutgoingRings, slot_of};
use crate::shm_ring::segment::SegmentId;
use crate::shm_ring::{MappedSegment, MappedSegments, SegmentAccess};

/// Longer messages take the ring, so that the device's lock is not held for milliseconds.
const LONGEST: usize = 4 << 20;
/// The same for memory that is no segment: of more bytes, two copies at memory speed through the
/// ring, at both ends at once, take a third of the time of the kernel's one.
const LONGEST_BY_PROCESS: usize = 16 << 10;

/// What the peers of this process have published to it, by member slot.
#[derive(Default)]
pub(crate) struct DirectPeers(Vec<Option<Peer>>);

struct Peer {
    link: LinkId,
    tables: PeerTables,
    segments: MappedSegments,
    /// If its memory that is no segment may be accessed.
    process: Option<PeerProcess>,
}

/// Where the peer's bytes of a request are; valid until the access ends.
#[derive(Clone, Copy)]
enum Target {
    Mapped(*mut u8),
    Process(PeerProcess, u64),
}

impl DirectPeers {
    /// Whether no request can be direct.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn get(&self, link: LinkId) -> Option<&Peer> {
        let peer = self.0.get(slot_of(link))?.as_ref();
        peer.filter(|peer| peer.link == link)
    }

    fn get_mut(&mut self, link: LinkId) -> Option<&mut Peer> {
        let peer = self.0.get_mut(slot_of(link))?.as_mut();
        peer.filter(|peer| peer.link == link)
    }

    /// A peer's tables have arrived: requests to it may be direct from now on. With its PID, from
    /// the kernel, also those for memory that is no segment.
    pub(crate) fn add(&mut self, link: LinkId, pid: Option<i32>, tables: OwnedFd) {
        let slot = slot_of(link);
        if self.0.len() <= slot {
            self.0.resize_with(slot + 1, || None);
        }
        match PeerTables::attach(tables) {
            Ok(tables) => {
                let process = pid.zip(tables.probe());
                self.0[slot] = Some(Peer {
                    link,
                    process: process.and_then(|(pid, probe)| PeerProcess::attach(pid, probe)),
                    tables,
                    segments: MappedSegments::default(),
                });
            }
            Err(error) => tracing::warn!("another process sent invalid tables of its memory: {error}"),
        }
    }

    pub(crate) fn add_segment(&mut self, link: LinkId, segment: MappedSegment) {
        if let Some(peer) = self.get_mut(link)
            && let Err(error) = peer.segments.insert(segment)
        {
            tracing::debug!("{error}");
        }
    }

    pub(crate) fn remove_segment(&mut self, link: LinkId, id: SegmentId) {
        if let Some(peer) = self.get_mut(link) {
            peer.segments.remove(id);
        }
    }

    pub(crate) fn remove(&mut self, link: LinkId) {
        if self.get(link).is_some() {
            self.0[slot_of(link)] = None;
        }
    }
}

/// Executes the requests of this process.
pub(crate) struct Initiator<'a> {
    pub(crate) table: &'a Table,
    pub(crate) peers: &'a DirectPeers,
    pub(crate) rings: &'a OutgoingRings,
    /// The link to this process, as its peers number it.
    pub(crate) me: LinkId,
}

/// The peer's bytes of a request.
struct Remote {
    addr: u64,
    rkey: RKey,
    len: usize,
    right: RemoteRight,
}

impl DirectMemory for Initiator<'_> {
    fn execute(&mut self, path: &DirectPath, operation: &Operation, payload: Payload<'_>) -> bool {
        let Some(peer) = self.peers.get(path.link) else {
            return false;
        };
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
            qpn: path.target,
            key: rkey.0,
        };
        access.begin(word);
        let to_peer = right == RemoteRight::Write;
        let target = self.locate(peer, path, &remote);
        let done = target.is_some_and(|target| match (*operation, target) {
            (Operation::Atomic { op, .. }, Target::Mapped(at)) => self.atomic(path, op, payload, at),
            _ if len == 0 => true,
            (_, Target::Mapped(at)) => {
                self.copy(path, payload, at, to_peer);
                true
            }
            (_, Target::Process(process, addr)) => self
                .copy_by_process(path, payload, (process, addr), to_peer)
                .unwrap_or(false),
        });
        Access::end(word);
        done
    }
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

    /// Checks what the responder checks (IBTA vol 1, 9.7.4); returns where the bytes are.
    fn locate(&self, peer: &Peer, path: &DirectPath, remote: &Remote) -> Option<Target> {
        let qp = peer.tables.qp(path.target)?;
        let connected = qp.initiator == path.initiator && qp.link == self.me && qp.first_psn == path.first_psn;
        let permits = match remote.right {
            RemoteRight::Read => qp.access.read,
            RemoteRight::Write => qp.access.write,
            RemoteRight::Atomic => qp.access.atomic,
        };
        if !connected || !permits {
            return None;
        }
        // A range of length 0 is always granted (IBTA vol 1, 9.4.3).
        if remote.len == 0 {
            return Some(Target::Mapped(ptr::null_mut()));
        }
        if remote.right == RemoteRight::Atomic && !remote.addr.is_multiple_of(8) {
            return None;
        }
        let region = peer.tables.region(remote.rkey)?;
        if region.pd != qp.pd || !region.rights.grants(remote.right) {
            return None;
        }
        let offset = remote.addr.checked_sub(region.iova)?;
        if offset.checked_add(remote.len as u64)? > region.len {
            return None;
        }
        let (id, start) = match region.place {
            Place::Segment(id, start) => (id, start),
            Place::Process(start) => {
                let possible = remote.len <= LONGEST_BY_PROCESS && remote.right != RemoteRight::Atomic;
                let process = peer.process.filter(|_| possible)?;
                return Some(Target::Process(process, start.checked_add(offset)?));
            }
        };
        let access = match remote.right {
            RemoteRight::Read => SegmentAccess::Read,
            RemoteRight::Write | RemoteRight::Atomic => SegmentAccess::Write,
        };
        let at = start.checked_add(offset)?;
        let mapped = peer.segments.find(id, at, remote.len, access);
        mapped.map(Target::Mapped)
    }

    /// Copies between the local elements, which were checked, and the peer's bytes.
    fn copy(&self, path: &DirectPath, payload: Payload<'_>, mut at: *mut u8, to_peer: bool) {
        let sges = match payload {
            Payload::Inline(bytes) => {
                // SAFETY: `at` has as many writable bytes, by `locate`; `bytes` are the caller's.
                return unsafe { copy::to_peer_visible(bytes, at) };
            }
            Payload::Gather(sges) => sges,
        };
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

    /// The same, in one system call. Whether all of it was copied.
    fn copy_by_process(
        &self,
        path: &DirectPath,
        payload: Payload<'_>,
        (process, addr): (PeerProcess, u64),
        to_peer: bool,
    ) -> Option<bool> {
        let mut ranges = [range(ptr::null_mut(), 0); 1 + capacity::SGES as usize];
        let count = match payload {
            Payload::Inline(bytes) if to_peer => {
                ranges[1] = range(bytes.as_ptr().cast_mut(), bytes.len());
                1
            }
            Payload::Gather(sges) => {
                for (to, sge) in ranges[1..].iter_mut().zip(sges).filter(|(_, sge)| sge.len > 0) {
                    *to = range(self.local(path, sge, !to_peer)?, sge.len as usize);
                }
                sges.len()
            }
            Payload::Inline(_) => return None,
        };
        let local = ranges.get_mut(..=count)?;
        // SAFETY: the caller's bytes, for a copy to the peer; or ranges of regions,
        // with the right, by `local`.
        Some(unsafe { process.copy(local, addr, to_peer) })
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
