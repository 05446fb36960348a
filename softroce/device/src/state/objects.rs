//! The verbs objects of a device: their tables and limits.

use std::collections::HashMap;
use std::sync::Arc;

use doorbell_roce_proto::memory::PdId;
use doorbell_roce_proto::qp::QpInit;
use doorbell_roce_proto::work::{CqId, SrqId, XrcDomain};
use doorbell_roce_proto::{Instant, Qpn, SrqInit};

use super::Core;
use crate::capacity;
use crate::cq::CqRing;
use crate::event::{Event, EventOwner, EventQueue};

/// The objects, and who gets their completions and events.
#[derive(Default)]
pub(crate) struct Objects {
    pub(super) cqs: Vec<Option<Arc<CqRing>>>,
    /// Completion queues whose moderated channels are to be notified, and when (ibv_modify_cq(3)).
    pub(super) moderated: Vec<(Instant, Arc<CqRing>)>,
    pub(super) qps: HashMap<Qpn, EventOwner>,
    pub(super) srqs: HashMap<SrqId, EventOwner>,
    /// Of port and device events.
    pub(crate) listeners: Vec<Arc<EventQueue<Event>>>,
    pds: usize,
    next_pd: u32,
    next_xrc_domain: u32,
    /// Bytes allocated.
    device_memory: usize,
}

impl Objects {
    pub(crate) fn add_pd(&mut self) -> Option<PdId> {
        if self.pds == capacity::PDS {
            return None;
        }
        // Identifiers are never reused, so that a stale one matches nothing. There are 2^32.
        self.next_pd = self.next_pd.checked_add(1)?;
        self.pds += 1;
        Some(PdId(self.next_pd))
    }

    /// Identifiers are not reused until all 2^32 were.
    pub(crate) fn next_xrc_domain(&mut self) -> XrcDomain {
        self.next_xrc_domain = self.next_xrc_domain.wrapping_add(1);
        XrcDomain(self.next_xrc_domain)
    }

    pub(crate) fn remove_pd(&mut self) {
        self.pds -= 1;
    }

    /// Allocates device memory, if that much is left.
    pub(crate) fn alloc_device_memory(&mut self, len: usize) -> bool {
        let left = capacity::DEVICE_MEMORY - self.device_memory;
        if len > left {
            return false;
        }
        self.device_memory += len;
        true
    }

    pub(crate) fn free_device_memory(&mut self, len: usize) {
        self.device_memory -= len;
    }

    pub(crate) fn add_cq(&mut self, ring: Arc<CqRing>) -> Option<CqId> {
        if let Some(index) = self.cqs.iter().position(Option::is_none) {
            self.cqs[index] = Some(ring);
            return Some(CqId(index as u32));
        }
        if self.cqs.len() == capacity::CQS {
            return None;
        }
        self.cqs.push(Some(ring));
        Some(CqId(self.cqs.len() as u32 - 1))
    }

    pub(crate) fn remove_cq(&mut self, id: CqId) {
        if let Some(ring) = self.cqs.get_mut(id.0 as usize).and_then(Option::take) {
            self.moderated.retain(|(_, waiting)| !Arc::ptr_eq(waiting, &ring));
        }
    }
}

impl Core {
    pub(crate) fn add_qp(&mut self, init: QpInit, owner: EventOwner) -> Option<Qpn> {
        if self.objects.qps.len() == capacity::QPS {
            return None;
        }
        if self.endpoint.wants_qpn_block() {
            match self.demux.host.claim(self.endpoint.next_qpn_block()) {
                Some(block) => self.endpoint.add_qpn_block(block),
                None if self.endpoint.has_free_qpns() => {}
                None => return None,
            }
        }
        let qpn = self.endpoint.create_qp(init);
        self.objects.qps.insert(qpn, owner);
        Some(qpn)
    }

    /// The port of a peer at this address is known: that of the process that owns its number.
    pub(crate) fn pin_known_port(&mut self, qpn: Qpn) {
        if let Some(set) = self.endpoint.query_qp(qpn).map(|qp| qp.set)
            && set
                .path
                .is_some_and(|path| path.link.is_none() && path.remote == self.demux.address.ip())
            && let Some(owner) = set.dest_qpn.and_then(|peer| self.demux.host.owner_of(peer))
            && let Some(port) = self.demux.host.udp_port(owner)
        {
            self.endpoint.pin_peer_port(qpn, port);
        }
    }

    pub(crate) fn remove_qp(&mut self, qpn: Qpn) {
        self.endpoint.destroy_qp(qpn);
        self.memory.release_windows_of(qpn);
        self.objects.qps.remove(&qpn);
        self.copying.deferred.remove_qp(qpn);
    }

    pub(crate) fn drop_deferred(&mut self, qpn: Qpn) {
        self.copying.deferred.remove_qp(qpn);
    }

    pub(crate) fn add_srq(&mut self, init: SrqInit, owner: EventOwner) -> Option<SrqId> {
        if self.objects.srqs.len() == capacity::SRQS {
            return None;
        }
        let id = self.endpoint.create_srq(init);
        self.objects.srqs.insert(id, owner);
        Some(id)
    }

    pub(crate) fn remove_srq(&mut self, id: SrqId) {
        // Fails while queue pairs use it: each holds a handle.
        if self.endpoint.destroy_srq(id).is_ok() {
            self.objects.srqs.remove(&id);
        }
    }
}
