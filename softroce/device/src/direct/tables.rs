//! The published tables of a process: a memfd with an entry for each key index and queue pair.
//!
//! Entries of objects that take the ring only are withdrawn or were never published.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use doorbell_roce_proto::direct::DirectTarget;
use doorbell_roce_proto::memory::{PdId, RemoteRight};
use doorbell_roce_proto::qp::{LinkId, RemoteAccess};
use doorbell_roce_proto::{Psn, Qpn, RKey};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::ProtFlags;
use nix::unistd::ftruncate;

use super::entry::{self, EntryWords, Publication};
use super::process::Probe;
use crate::links::shm_ring::segment::SegmentId;
use crate::mapping::SharedMapping;
use crate::memory::Rights;

/// One for each index of a key.
const REGIONS: usize = 1 << 16;
/// Queue pairs whose numbers are equal modulo this have one entry: the first gets it.
const QPS: usize = 1 << 15;

/// A cache line: it is read for each request.
#[repr(C, align(64))]
struct Entry<const N: usize> {
    guard: AtomicU64,
    words: [AtomicU64; N],
}

impl<const N: usize> EntryWords for Entry<N> {
    type Word = AtomicU64;

    fn guard(&self) -> &AtomicU64 {
        &self.guard
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        &self.words[index]
    }
}

/// No segment has this number.
const NO_SEGMENT: u32 = 0;
const REGION_WORDS: usize = 5;
/// The name of the only probe.
const PROBE: u32 = 1;
const PROBE_WORDS: usize = 2;
const QP_WORDS: usize = 3;

#[repr(C)]
struct Layout {
    /// Published before the descriptor is given away, or never.
    probe: Entry<PROBE_WORDS>,
    regions: [Entry<REGION_WORDS>; REGIONS],
    qps: [Entry<QP_WORDS>; QPS],
}

const LEN: NonZeroUsize = NonZeroUsize::new(size_of::<Layout>()).unwrap();

/// A region that peers may access directly.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PublishedRegion {
    pub(crate) pd: PdId,
    pub(crate) rights: DirectRights,
    pub(crate) iova: u64,
    pub(crate) len: u64,
    pub(crate) place: Place,
}

/// Where the first byte of a region is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// In a segment that peers get.
    Segment(SegmentId, u64),
    /// In the owner's address space alone.
    Process(u64),
}

/// Remote access rights, as bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct DirectRights(u32);

impl DirectRights {
    pub(crate) fn new(read: bool, write: bool, atomic: bool) -> Self {
        Self(u32::from(read) | u32::from(write) << 1 | u32::from(atomic) << 2)
    }

    pub(crate) fn of(rights: Rights) -> Self {
        Self::new(rights.remote_read, rights.remote_write, rights.remote_atomic)
    }

    pub(crate) fn any(self) -> bool {
        self.0 != 0
    }

    pub(super) fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub(super) fn grants(self, right: RemoteRight) -> bool {
        let bit = match right {
            RemoteRight::Read => 1,
            RemoteRight::Write => 2,
            RemoteRight::Atomic => 4,
        };
        self.0 & bit != 0
    }
}

impl From<RemoteAccess> for DirectRights {
    fn from(access: RemoteAccess) -> Self {
        Self::new(access.read, access.write, access.atomic)
    }
}

/// The tables of this process.
#[derive(Debug)]
pub(crate) struct Published {
    fd: OwnedFd,
    map: Mapping,
    by_process: bool,
}

impl Published {
    /// With `by_process`, peers may access memory that is no segment.
    pub(crate) fn create(by_process: bool) -> io::Result<Self> {
        let fd = memfd_create(c"doorbell-tables", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
        ftruncate(&fd, LEN.get() as libc::off_t)?;
        let map = Mapping::of(&fd, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)?;
        // Only this mapping can be written from here on; before Linux 5.1 peers could write, too.
        let _ = fcntl(
            &fd,
            FcntlArg::F_ADD_SEALS(SealFlag::from_bits_retain(libc::F_SEAL_FUTURE_WRITE)),
        );
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&fd, FcntlArg::F_ADD_SEALS(seals))?;
        if by_process {
            let Probe { addr, value } = Probe::own()?;
            entry::publish(&map.layout().probe, PROBE, [addr, value]);
        }
        Ok(Self { fd, map, by_process })
    }

    /// Whether memory that is no segment may be accessed directly, here and at peers.
    pub(crate) fn by_process(&self) -> bool {
        self.by_process
    }

    /// The descriptor for peers.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn region(&self, key: u32) -> &Entry<REGION_WORDS> {
        &self.map.layout().regions[(key >> 16) as usize]
    }

    fn qp(&self, qpn: Qpn) -> &Entry<QP_WORDS> {
        &self.map.layout().qps[qpn.get() as usize % QPS]
    }

    /// Its entry is withdrawn.
    pub(crate) fn publish_region(&self, key: u32, region: &PublishedRegion) {
        let (segment, at) = match region.place {
            Place::Segment(SegmentId(id), offset) => (id, offset),
            Place::Process(addr) => (NO_SEGMENT, addr),
        };
        let words = [
            u64::from(region.pd.0) << 32 | u64::from(region.rights.0),
            region.iova,
            region.len,
            u64::from(segment),
            at,
        ];
        entry::publish(self.region(key), key, words);
    }

    /// Whether it was published: accesses may be in progress then.
    pub(crate) fn withdraw_region(&self, key: u32) -> bool {
        let entry = self.region(key);
        let was = entry::published(entry) == key;
        if was {
            entry::withdraw(entry);
        }
        was
    }

    /// Does nothing if another queue pair has the entry; its own is withdrawn.
    pub(crate) fn publish_qp(&self, qpn: Qpn, qp: &DirectTarget) {
        let entry = self.qp(qpn);
        if entry::published(entry) == 0 {
            let rights = DirectRights::from(qp.access);
            let words = [
                u64::from(qp.pd.0) << 32 | u64::from(qp.link.0),
                u64::from(qp.initiator.get()) << 32 | u64::from(rights.0),
                u64::from(qp.first_psn.get()),
            ];
            entry::publish(entry, qpn.get(), words);
        }
    }

    /// As [`withdraw_region`](Self::withdraw_region).
    pub(crate) fn withdraw_qp(&self, qpn: Qpn) -> bool {
        let entry = self.qp(qpn);
        let was = entry::published(entry) == qpn.get();
        if was {
            entry::withdraw(entry);
        }
        was
    }
}

/// The tables of another process, which may write anything there at any time.
#[derive(Debug)]
pub(super) struct PeerTables(Mapping);

impl PeerTables {
    /// Maps the tables of a descriptor from a peer. `InvalidData` when they are none.
    pub(super) fn attach(fd: OwnedFd) -> io::Result<Self> {
        let file = File::from(fd);
        let seals = fcntl(&file, FcntlArg::F_GET_SEALS).map_or(SealFlag::empty(), SealFlag::from_bits_retain);
        // A file that cannot shrink raises no SIGBUS here.
        if !seals.contains(SealFlag::F_SEAL_SHRINK) || file.metadata()?.len() != LEN.get() as u64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Self(Mapping::of(&file, ProtFlags::PROT_READ)?))
    }

    pub(super) fn probe(&self) -> Option<Probe> {
        let (_, [addr, value]) = entry::read(&self.0.layout().probe, PROBE)?;
        Some(Probe { addr, value })
    }

    fn region_entry(&self, key: RKey) -> &Entry<REGION_WORDS> {
        &self.0.layout().regions[(key.0 >> 16) as usize]
    }

    fn qp_entry(&self, qpn: Qpn) -> &Entry<QP_WORDS> {
        &self.0.layout().qps[qpn.get() as usize % QPS]
    }

    /// Whether both publications, of these objects, are current.
    pub(super) fn are_current(&self, qp: (Qpn, Publication), region: (RKey, Publication)) -> bool {
        qp.1.is_current(self.qp_entry(qp.0)) && region.1.is_current(self.region_entry(region.0))
    }

    pub(super) fn region(&self, key: RKey) -> Option<(Publication, PublishedRegion)> {
        let (publication, words) = entry::read(self.region_entry(key), key.0)?;
        let [grant, iova, len, segment, at] = words;
        let region = PublishedRegion {
            pd: PdId((grant >> 32) as u32),
            rights: DirectRights(grant as u32),
            iova,
            len,
            place: match segment as u32 {
                NO_SEGMENT => Place::Process(at),
                id => Place::Segment(SegmentId(id), at),
            },
        };
        Some((publication, region))
    }

    pub(super) fn qp(&self, qpn: Qpn) -> Option<(Publication, DirectTarget)> {
        let (publication, [owner, peer, psn]) = entry::read(self.qp_entry(qpn), qpn.get())?;
        let rights = DirectRights(peer as u32);
        let target = DirectTarget {
            pd: PdId((owner >> 32) as u32),
            link: LinkId(owner as u32),
            initiator: Qpn::new((peer >> 32) as u32),
            access: RemoteAccess {
                read: rights.grants(RemoteRight::Read),
                write: rights.grants(RemoteRight::Write),
                atomic: rights.grants(RemoteRight::Atomic),
                ..RemoteAccess::default()
            },
            first_psn: Psn::new(psn as u32),
        };
        Some((publication, target))
    }
}

#[derive(Debug)]
struct Mapping(SharedMapping);

impl Mapping {
    /// The file has a [`Layout`]'s length, and is sealed against shrinking before it is used.
    fn of(file: &impl AsFd, rights: ProtFlags) -> io::Result<Self> {
        Ok(Self(SharedMapping::new(file, LEN, rights)?))
    }

    fn layout(&self) -> &Layout {
        // SAFETY: mapped, readable, page-aligned, as long as Layout and lives as long as `self`.
        // Layout is atomics, for which every bit pattern is a value, and which others may change at
        // any time; a mapping without the right to write is only loaded from.
        unsafe { self.0.start().cast().as_ref() }
    }
}

#[cfg(all(test, not(doorbell_loom)))]
mod tests {
    use super::*;

    fn region(key: u32) -> PublishedRegion {
        PublishedRegion {
            pd: PdId(key),
            rights: DirectRights::new(true, false, true),
            iova: 0x1000,
            len: 4096,
            place: Place::Segment(SegmentId(9), 64),
        }
    }

    fn target(pd: u32) -> DirectTarget {
        DirectTarget {
            pd: PdId(pd),
            link: LinkId(u32::MAX),
            initiator: Qpn::new(0x12_3456),
            access: RemoteAccess {
                write: true,
                ..RemoteAccess::default()
            },
            first_psn: Psn::new(0xff_ffff),
        }
    }

    fn attached(published: &Published) -> PeerTables {
        PeerTables::attach(published.fd().try_clone_to_owned().unwrap()).unwrap()
    }

    #[test]
    fn a_peer_reads_what_is_published_until_it_is_withdrawn() {
        let published = Published::create(false).unwrap();
        let peer = attached(&published);
        let qp = target(3);
        let (key, qpn) = (0xffff_1234, Qpn::new(0xab_cdef));
        published.publish_region(key, &region(key));
        published.publish_qp(qpn, &qp);
        let (first, found) = peer.region(RKey(key)).unwrap();
        assert_eq!(found, region(key));
        assert_eq!(peer.region(RKey(key ^ 1)), None, "another tag");
        let (current, found) = peer.qp(qpn).unwrap();
        assert_eq!(found, qp);
        assert_eq!(peer.qp(Qpn::new(0x00_cdef)), None, "the same entry");
        let are_current = |region| peer.are_current((qpn, current), (RKey(key), region));
        assert!(are_current(first));
        let rights = region(key).rights;
        assert!(rights.grants(RemoteRight::Read) && !rights.grants(RemoteRight::Write));

        assert!(published.withdraw_region(key) && published.withdraw_qp(qpn));
        assert!(!published.withdraw_region(key) && !published.withdraw_qp(qpn));
        assert_eq!((peer.region(RKey(key)), peer.qp(qpn)), (None, None));
        let next = PublishedRegion {
            place: Place::Process(1 << 40),
            ..region(key + 1)
        };
        published.publish_region(key + 1, &next);
        let found = peer.region(RKey(key + 1)).map(|(_, found)| found);
        assert_eq!((peer.region(RKey(key)), found), (None, Some(next)));

        published.withdraw_region(key + 1);
        published.publish_region(key, &region(key));
        published.publish_qp(qpn, &qp);
        let ((again, _), (qp_again, _)) = (peer.region(RKey(key)).unwrap(), peer.qp(qpn).unwrap());
        assert!(!are_current(again), "the queue pair was published again");
        assert!(peer.are_current((qpn, qp_again), (RKey(key), again)));
        assert!(!peer.are_current((qpn, qp_again), (RKey(key), first)));
    }

    #[test]
    fn the_first_queue_pair_of_an_entry_keeps_it() {
        let published = Published::create(false).unwrap();
        let peer = attached(&published);
        let (first, second) = (Qpn::new(5), Qpn::new(5 + QPS as u32));
        published.publish_qp(first, &target(1));
        published.publish_qp(second, &target(2));
        assert!(peer.qp(first).is_some() && peer.qp(second).is_none());
        assert!(!published.withdraw_qp(second));
        assert!(peer.qp(first).is_some());
    }

    #[test]
    fn peers_cannot_write_and_other_files_are_no_tables() {
        let published = Published::create(false).unwrap();
        let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        assert!(Mapping::of(&published.fd(), rights).is_err());
        let other = memfd_create(c"other", MFdFlags::MFD_ALLOW_SEALING).unwrap();
        ftruncate(&other, LEN.get() as libc::off_t).unwrap();
        assert!(PeerTables::attach(other).is_err(), "not sealed");
    }
}
