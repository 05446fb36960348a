//! The initiator of direct requests: its peers' tables and segments, the checks, and the copies.

use std::os::fd::OwnedFd;
use std::ptr;

use doorbell_roce_proto::direct::{DirectMemory, DirectPath};
use doorbell_roce_proto::memory::{AtomicOp, RemoteRight, Sge};
use doorbell_roce_proto::qp::LinkId;
use doorbell_roce_proto::work::{Operation, Payload};

use super::entry::Access;
use super::grant::{Grant, Grants, Remote, Target, target};
use super::process::{PeerProcess, range};
use super::tables::{DirectRights, PeerTables};
use crate::capacity;
use crate::links::shm::{OutgoingRings, slot_of};
use crate::links::shm_ring::segment::SegmentId;
use crate::links::shm_ring::{MappedSegment, MappedSegments};
use crate::memory::{Fault, Location, Table, copy};

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
    /// If its memory that is no segment may be accessed.
    process: Option<PeerProcess>,
}

impl DirectPeers {
    /// Whether no request can be direct.
    pub(crate) fn is_empty(&self) -> bool {
        self.peers.is_empty()
    }

    #[inline]
    fn get_mut(&mut self, link: LinkId) -> Option<(&mut Grants, &mut Peer)> {
        let peer = self.peers.get_mut(slot_of(link))?.as_mut();
        Some((&mut self.grants, peer.filter(|peer| peer.link == link)?))
    }

    /// A peer's tables have arrived: requests to it may be direct from now on. With its PID, from
    /// the kernel, also those for memory that is no segment.
    pub(crate) fn add(&mut self, link: LinkId, pid: Option<i32>, tables: OwnedFd) {
        let slot = slot_of(link);
        if self.peers.len() <= slot {
            self.peers.resize_with(slot + 1, || None);
        }
        match PeerTables::attach(tables) {
            Ok(tables) => {
                let process = pid.zip(tables.probe());
                self.grants.clear();
                self.peers[slot] = Some(Peer {
                    link,
                    process: process.and_then(|(pid, probe)| PeerProcess::attach(pid, probe)),
                    tables,
                    segments: MappedSegments::default(),
                });
            }
            Err(error) => {
                tracing::warn!("no direct operations with another process, whose tables cannot be used: {error}")
            }
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
            qpn: path.target,
            key: rkey.0,
        };
        access.begin(word);
        let to_peer = right == RemoteRight::Write;
        // No closures: they are not inlined.
        let done = match (self.locate(path, &remote), *operation) {
            (None, _) => false,
            (Some(Target::Mapped(at)), Operation::Atomic { op, .. }) => self.atomic(path, op, payload, at),
            (Some(Target::Mapped(at)), _) => len == 0 || self.copy(path, payload, at, to_peer).is_ok(),
            // A target that polls copies in a fraction of a system call's time; waking one that
            // sleeps takes longer.
            (Some(Target::Process(process, addr)), _) => {
                self.rings.is_peer_asleep(path.link)
                    && self
                        .copy_by_process(path, payload, (process, addr), to_peer)
                        .unwrap_or(false)
            }
        };
        Access::end(word);
        done
    }
}

/// A range of length 0, which is granted wherever it is (IBTA vol 1, 9.4.3).
#[cold]
fn locate_empty(tables: &PeerTables, path: &DirectPath, me: LinkId, right: RemoteRight) -> Option<Target> {
    let (_, qp) = target(tables, path, me)?;
    DirectRights::from(qp.access)
        .grants(right)
        .then_some(Target::Mapped(ptr::null_mut()))
}

impl Initiator<'_> {
    /// Whether all local elements may be accessed, and are memory of the CPU's.
    #[inline]
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

    /// Checks what the responder checks (IBTA vol 1, 9.7.4); returns where the bytes are, valid
    /// until the access ends.
    #[inline(always)]
    fn locate(&mut self, path: &DirectPath, remote: &Remote) -> Option<Target> {
        let (grants, peer) = self.peers.get_mut(path.link)?;
        if remote.len == 0 {
            return locate_empty(&peer.tables, path, self.me, remote.right);
        }
        let make = || Grant::new(&peer.tables, &peer.segments, peer.process, (path, self.me), remote.rkey);
        grants.get((path, remote.rkey), &peer.tables, make)?.locate(remote)
    }

    /// Copies between the local elements, which were checked, and the peer's bytes. A fault
    /// declines: on the ring it is an error of the side whose memory it is.
    #[inline(always)]
    fn copy(&self, path: &DirectPath, payload: Payload<'_>, at: *mut u8, to_peer: bool) -> Result<(), Fault> {
        match payload {
            // SAFETY: `at` has as many writable bytes, by `locate`; `bytes` are the caller's.
            Payload::Inline(bytes) => unsafe { copy::to_peer_visible(bytes, at) },
            Payload::Gather(sges) => self.copy_elements(path, sges, at, to_peer),
        }
    }

    fn copy_elements(&self, path: &DirectPath, sges: &[Sge], mut at: *mut u8, to_peer: bool) -> Result<(), Fault> {
        for sge in sges.iter().filter(|sge| sge.len > 0) {
            let len = sge.len as usize;
            if let Some(local) = self.local(path, sge, !to_peer) {
                let (from, to) = if to_peer { (local, at) } else { (at, local) };
                // SAFETY: `len` bytes of a region, with the right, by `local`; as many of the
                // peer's from `at` on, by `locate`. Two mappings of the same bytes may overlap.
                unsafe { copy::between(from, to, len)? };
            }
            at = at.wrapping_add(len);
        }
        Ok(())
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
        // SAFETY: eight bytes of a region with LOCAL_WRITE, by `local`. An atomic must not be
        // performed again where its result cannot be stored.
        let store = |result: u64| unsafe { copy::to_peer_visible(&result.to_ne_bytes(), local) };
        if store(0).is_err() {
            return false;
        }
        // SAFETY: eight bytes of the peer's, mapped to be written, by `locate`; aligned as checked.
        let Ok(original) = (unsafe { copy::atomic(word, op) }) else {
            return false;
        };
        // Of memory that was unmapped since then, no thread sees what it lacks.
        let _ = store(original);
        true
    }
}
