//! Entry points of `tests/fuzz`: an initiator and the tables of a hostile peer. Not a part of the
//! API.

use std::io;
use std::os::fd::OwnedFd;

use doorbell_roce_proto::direct::{DirectPath, DirectTarget};
use doorbell_roce_proto::memory::{PdId, RemoteRight};
use doorbell_roce_proto::qp::{LinkId, RemoteAccess};
use doorbell_roce_proto::{Psn, Qpn, RKey};

use super::grant::{Grant, Grants, Remote, Target};
use super::tables::{DirectRights, PeerTables, Place, Published, PublishedRegion};
use crate::links::shm_ring::segment::SegmentId;
use crate::links::shm_ring::{MappedSegment, MappedSegments, SegmentAccess};

const SEGMENT: SegmentId = SegmentId(1);
const ME: LinkId = LinkId(3);
const INITIATOR: Qpn = Qpn::new(6);
const PSN: Psn = Psn::new(7);

/// A region as the peer publishes it.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    /// The protection domain.
    pub pd: u32,
    /// READ, WRITE and atomics.
    pub rights: [bool; 3],
    /// The first address.
    pub iova: u64,
    /// Bytes.
    pub len: u64,
    /// The segment: 1 is the one that is mapped, 0 none.
    pub segment: u32,
    /// Its offset there.
    pub at: u64,
}

/// What the initiator does to a peer's memory.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// The target's queue pair.
    pub qpn: u32,
    /// The key.
    pub rkey: u32,
    /// The first address.
    pub addr: u64,
    /// Bytes, not 0.
    pub len: usize,
    /// READ, WRITE or atomic.
    pub right: RemoteRight,
}

/// The tables of a peer, and an initiator that has mapped them and one segment of `len` bytes.
pub struct Tables {
    published: Published,
    tables: PeerTables,
    segments: MappedSegments,
    len: usize,
    grants: Grants,
}

impl Tables {
    /// Maps the tables, and a segment of `len` bytes.
    ///
    /// # Errors
    /// When there is no memory or descriptor left, or the file is no segment.
    pub fn create(segment: OwnedFd, len: usize) -> io::Result<Self> {
        let published = Published::create(false)?;
        let mut segments = MappedSegments::default();
        let mapped = MappedSegment::new(SEGMENT, segment, SegmentAccess::Write).map_err(io::Error::other)?;
        segments.insert(mapped).map_err(io::Error::other)?;
        Ok(Self {
            tables: PeerTables::attach(published.fd().try_clone_to_owned()?)?,
            published,
            segments,
            len,
            grants: Grants::default(),
        })
    }

    /// The peer publishes or withdraws a region; key 0 names none.
    pub fn set_region(&self, key: u32, region: Option<Region>) {
        match region {
            Some(region) if key != 0 => {
                let [read, write, atomic] = region.rights;
                let place = match region.segment {
                    0 => Place::Process(region.at),
                    id => Place::Segment(SegmentId(id), region.at),
                };
                let rights = DirectRights::new(read, write, atomic);
                let Region { iova, len, .. } = region;
                let pd = PdId(region.pd);
                self.published.publish_region(
                    key,
                    &PublishedRegion {
                        pd,
                        rights,
                        iova,
                        len,
                        place,
                    },
                );
            }
            _ => drop(self.published.withdraw_region(key)),
        }
    }

    /// The peer publishes or withdraws a queue pair, with READ, WRITE and atomics permitted or not.
    pub fn set_qp(&self, qpn: u32, qp: Option<(u32, [bool; 3])>) {
        let qpn = Qpn::new(qpn);
        let Some((pd, [read, write, atomic])) = qp else {
            self.published.withdraw_qp(qpn);
            return;
        };
        let target = DirectTarget {
            pd: PdId(pd),
            link: ME,
            initiator: INITIATOR,
            access: RemoteAccess {
                read,
                write,
                atomic,
                ..RemoteAccess::default()
            },
            first_psn: PSN,
        };
        self.published.publish_qp(qpn, &target);
    }

    /// Whether the initiator would carry out a request.
    ///
    /// # Panics
    /// When it would access bytes outside the mapped segment.
    pub fn request(&mut self, request: &Request) -> bool {
        let path = DirectPath {
            link: LinkId(9),
            target: Qpn::new(request.qpn),
            initiator: INITIATOR,
            pd: PdId(1),
            first_psn: PSN,
        };
        let Request { addr, len, right, .. } = *request;
        let rkey = RKey(request.rkey);
        let Self {
            tables,
            segments,
            grants,
            ..
        } = self;
        let make = || Grant::new(tables, segments, None, (&path, ME), rkey);
        let remote = Remote { addr, rkey, len, right };
        let granted = grants.get((&path, rkey), tables, make);
        let Some(Target::Mapped(at)) = granted.and_then(|grant| grant.locate(&remote)) else {
            return false;
        };
        let start = self.segments.find(SEGMENT, 0, self.len, SegmentAccess::Read);
        let offset = at.addr().wrapping_sub(start.expect("it is mapped").addr());
        let end = offset.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.len),
            "{len} bytes from {offset} of {}",
            self.len
        );
        true
    }
}
