//! Fast path of the checks: what a peer's entries permit an initiator, kept for later requests.
//!
//! A [`Grant`] is all that is checked of a queue pair and a key without regard to the request:
//! connection, protection domain, rights and mapping. Each request checks that both entries are
//! still the publications that it was made of, and then its own range and right. No other code
//! makes these checks: the first request makes the grant that it uses.

use doorbell_roce_proto::RKey;
use doorbell_roce_proto::direct::{DirectPath, DirectTarget};
use doorbell_roce_proto::memory::RemoteRight;
use doorbell_roce_proto::qp::LinkId;

use super::entry::Publication;
use super::process::PeerProcess;
use super::tables::{DirectRights, PeerTables, Place};
use crate::links::shm_ring::segment::SegmentId;
use crate::links::shm_ring::{MappedSegments, SegmentAccess};

/// Longer messages to memory that is no segment take the ring: two copies at memory speed, at both
/// ends at once, take a third of the time of the kernel's one.
const LONGEST_BY_PROCESS: usize = 16 << 10;

/// The peer's bytes of a request.
pub(super) struct Remote {
    pub(super) addr: u64,
    pub(super) rkey: RKey,
    pub(super) len: usize,
    pub(super) right: RemoteRight,
}

/// Where bytes of the peer's are.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    /// In this process's mapping of a segment.
    Mapped(*mut u8),
    /// At an address in the peer's process.
    Process(PeerProcess, u64),
}

#[derive(Debug)]
pub(super) struct Grant {
    path: DirectPath,
    rkey: RKey,
    qp: Publication,
    region: Publication,
    rights: DirectRights,
    iova: u64,
    len: u64,
    /// The region's first byte.
    start: Target,
}

// SAFETY: the pointer is into a mapping of the process, not of a thread, that lasts until after
// `Grants::clear`; it is used for raw copies and atomics alone, under the lock of its owner.
unsafe impl Send for Grant {}

/// The queue pair of a path, if it receives from the initiator `me`.
pub(super) fn target(tables: &PeerTables, path: &DirectPath, me: LinkId) -> Option<(Publication, DirectTarget)> {
    let (publication, qp) = tables.qp(path.target)?;
    let connected = qp.initiator == path.initiator && qp.link == me && qp.first_psn == path.first_psn;
    connected.then_some((publication, qp))
}

impl Grant {
    pub(super) fn new(
        tables: &PeerTables,
        segments: &MappedSegments,
        process: Option<PeerProcess>,
        (path, me): (&DirectPath, LinkId),
        rkey: RKey,
    ) -> Option<Self> {
        let (qp_publication, qp) = target(tables, path, me)?;
        let (region_publication, region) = tables.region(rkey)?;
        if region.pd != qp.pd {
            return None;
        }
        let (start, permitted) = match region.place {
            Place::Segment(id, offset) => mapped(segments, id, offset, region.len)?,
            Place::Process(addr) => {
                addr.checked_add(region.len)?;
                (Target::Process(process?, addr), DirectRights::new(true, true, false))
            }
        };
        Some(Self {
            path: *path,
            rkey,
            qp: qp_publication,
            region: region_publication,
            rights: DirectRights::from(qp.access).and(region.rights).and(permitted),
            iova: region.iova,
            len: region.len,
            start,
        })
    }

    fn is_of(&self, path: &DirectPath, rkey: RKey) -> bool {
        self.path == *path && self.rkey == rkey
    }

    /// Within the access that names both.
    #[inline]
    fn is_current(&self, tables: &PeerTables) -> bool {
        tables.are_current((self.path.target, self.qp), (self.rkey, self.region))
    }

    /// Where the bytes of a request are, if it may access them.
    #[inline(always)]
    pub(super) fn locate(&self, remote: &Remote) -> Option<Target> {
        let aligned = remote.right != RemoteRight::Atomic || remote.addr.is_multiple_of(8);
        let offset = remote.addr.checked_sub(self.iova)?;
        let inside = offset.checked_add(remote.len as u64)? <= self.len;
        if !(aligned && inside && self.rights.grants(remote.right)) {
            return None;
        }
        match self.start {
            // SAFETY: `self.len` bytes are mapped there, by `mapped`, and `offset` is at most that,
            // as `inside` holds.
            Target::Mapped(start) => Some(Target::Mapped(unsafe { start.add(offset as usize) })),
            // No overflow: the region ends below 2^64.
            Target::Process(process, start) => {
                (remote.len <= LONGEST_BY_PROCESS).then_some(Target::Process(process, start + offset))
            }
        }
    }
}

/// The first byte of a region, all of which is mapped, and what the mapping permits.
fn mapped(segments: &MappedSegments, id: SegmentId, offset: u64, len: u64) -> Option<(Target, DirectRights)> {
    let len = usize::try_from(len).ok()?;
    let find = |access| segments.find(id, offset, len, access).map(Target::Mapped);
    let writable = find(SegmentAccess::Write).map(|start| (start, DirectRights::new(true, true, true)));
    writable.or_else(|| Some((find(SegmentAccess::Read)?, DirectRights::new(true, false, false))))
}

/// Powers of two. Numbers of queue pairs and keys are random: among many places few have the same.
const KEPT: usize = 64;
const PLACES: usize = 4096;

/// The grants of recent requests. A grant points into the peers' mappings: [`clear`](Self::clear)
/// comes before any of them goes.
#[derive(Debug)]
pub(super) struct Grants {
    kept: Box<[Option<Grant>; KEPT]>,
    /// Which of them may be that of a queue pair and key with this place.
    places: Box<[u8; PLACES]>,
    /// The one to replace next.
    next: u8,
}

impl Default for Grants {
    fn default() -> Self {
        Self {
            kept: Box::new([const { None }; KEPT]),
            places: Box::new([0; PLACES]),
            next: 0,
        }
    }
}

impl Grants {
    /// Also where a peer's mappings are added: they may permit more.
    pub(super) fn clear(&mut self) {
        self.kept.fill_with(|| None);
    }

    /// The grant of a path and a key: that of an earlier request if it is current, or a new one.
    /// Called within the access that names both.
    #[inline(always)]
    pub(super) fn get(
        &mut self,
        (path, rkey): (&DirectPath, RKey),
        tables: &PeerTables,
        make: impl FnOnce() -> Option<Grant>,
    ) -> Option<&Grant> {
        // Keys differ in their upper half, the position.
        let place = &mut self.places[(path.initiator.get() ^ rkey.0 >> 16) as usize % PLACES];
        let kept = self.kept[usize::from(*place) % KEPT]
            .as_ref()
            .is_some_and(|grant| grant.is_of(path, rkey) && grant.is_current(tables));
        if !kept {
            *place = self.next;
            self.next = (self.next + 1) % KEPT as u8;
            refresh(&mut self.kept[usize::from(*place) % KEPT], make);
        }
        self.kept[usize::from(*place) % KEPT].as_ref()
    }
}

#[cold]
fn refresh(place: &mut Option<Grant>, make: impl FnOnce() -> Option<Grant>) {
    *place = make();
}

#[cfg(all(test, not(doorbell_loom)))]
mod tests {
    use std::os::fd::AsFd;

    use doorbell_roce_proto::memory::PdId;
    use doorbell_roce_proto::qp::RemoteAccess;
    use doorbell_roce_proto::{Psn, Qpn};
    use nix::fcntl::{FcntlArg, SealFlag, fcntl};
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use nix::unistd::ftruncate;

    use super::*;
    use crate::direct::{Published, PublishedRegion};
    use crate::links::shm_ring::MappedSegment;
    use crate::links::shm_ring::segment::SegmentId;

    const LEN: u64 = 8192;
    const KEY: RKey = RKey(0x0007_1234);
    const ME: LinkId = LinkId(3);
    const PATH: DirectPath = DirectPath {
        link: LinkId(9),
        target: Qpn::new(5),
        initiator: Qpn::new(6),
        pd: PdId(1),
        first_psn: Psn::new(7),
    };

    fn publish_region(published: &Published, offset: u64) {
        let region = PublishedRegion {
            pd: PdId(2),
            rights: DirectRights::new(true, true, true),
            iova: 0x1000,
            len: LEN - offset,
            place: Place::Segment(SegmentId(1), offset),
        };
        published.publish_region(KEY.0, &region);
    }

    fn publish_qp(published: &Published) {
        let target = DirectTarget {
            pd: PdId(2),
            link: ME,
            initiator: PATH.initiator,
            access: RemoteAccess {
                read: true,
                write: true,
                atomic: false,
                ..RemoteAccess::default()
            },
            first_psn: PATH.first_psn,
        };
        published.publish_qp(PATH.target, &target);
    }

    /// The offset in `memory` that a request is granted.
    fn granted(
        grants: &mut Grants,
        (tables, segments): (&PeerTables, &MappedSegments),
        (path, right): (&DirectPath, RemoteRight),
        (addr, len): (u64, usize),
    ) -> Option<usize> {
        let make = || Grant::new(tables, segments, None, (path, ME), KEY);
        let rkey = KEY;
        let remote = Remote { addr, rkey, len, right };
        let Target::Mapped(at) = grants.get((path, KEY), tables, make)?.locate(&remote)? else {
            return None;
        };
        let start = segments.find(SegmentId(1), 0, LEN as usize, SegmentAccess::Read)?;
        Some(at.addr() - start.addr())
    }

    #[test]
    fn a_grant_is_of_one_path_two_publications_and_a_mapping() {
        use RemoteRight::{Atomic, Read, Write};
        let published = Published::create(false).unwrap();
        let tables = PeerTables::attach(published.fd().try_clone_to_owned().unwrap()).unwrap();
        let file = memfd_create(c"segment", MFdFlags::MFD_ALLOW_SEALING).unwrap();
        ftruncate(&file, LEN as libc::off_t).unwrap();
        fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).unwrap();
        let map = |access| {
            let file = file.as_fd().try_clone_to_owned().unwrap();
            MappedSegment::new(SegmentId(1), file, access).unwrap()
        };
        let (mut grants, mut segments) = (Grants::default(), MappedSegments::default());
        let word = (0x1000 + LEN - 8, 8);
        publish_region(&published, 0);
        publish_qp(&published);
        segments.insert(map(SegmentAccess::Read)).unwrap();
        let mut request = |segments: &MappedSegments, path: &DirectPath, right, range| {
            granted(&mut grants, (&tables, segments), (path, right), range)
        };
        let end = LEN as usize - 8;
        assert_eq!(request(&segments, &PATH, Read, word), Some(end));
        assert_eq!(request(&segments, &PATH, Write, word), None, "not mapped to be written");

        let other = DirectPath {
            first_psn: Psn::new(8),
            ..PATH
        };
        assert_eq!(request(&segments, &other, Read, word), None, "another connection");
        assert_eq!(request(&segments, &PATH, Read, word), Some(end));

        grants.clear();
        segments.insert(map(SegmentAccess::Write)).unwrap();
        let mut request =
            |path: &DirectPath, right, range| granted(&mut grants, (&tables, &segments), (path, right), range);
        assert_eq!(request(&PATH, Write, word), Some(end));
        assert_eq!(request(&PATH, Atomic, word), None, "the queue pair does not permit it");
        assert_eq!(request(&PATH, Write, (word.0 + 1, 8)), None, "beyond the end");
        assert_eq!(request(&PATH, Write, (0xfff, 8)), None, "before the beginning");

        assert!(published.withdraw_region(KEY.0));
        assert_eq!(request(&PATH, Write, word), None);
        publish_region(&published, 4096);
        assert_eq!(request(&PATH, Write, (0x1000, 8)), Some(4096), "the new publication");
        assert!(published.withdraw_qp(PATH.target));
        assert_eq!(request(&PATH, Write, (0x1000, 8)), None);
    }
}
