//! Multicast groups: the UD queue pairs attached to each, and delivery to all of them (IBTA vol 1,
//! 10.5). A group is an IP address, its GID the MGID (annex A17.4.5.2).

use core::net::IpAddr;
use std::collections::BTreeMap;

use super::{Datagram, Endpoint};
use crate::ident::Verdict;
use crate::memory::Memory;
use crate::wire::{Extension, IpFields, Packet, Transport};
use crate::{Instant, Qpn};

/// The destination of every multicast packet (IBTA vol 1, 9.6.1.3).
pub const MULTICAST_QPN: Qpn = Qpn::new(0x00ff_ffff);

/// Why a queue pair could not be attached; nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AttachError {
    /// No such queue pair, or not of UD.
    NotDatagram,
    /// The address is not multicast.
    NotMulticast,
    /// No more groups, or queue pairs in this one.
    Exhausted,
}

#[derive(Clone, Copy, Debug)]
struct Attachment {
    qpn: Qpn,
    /// The address from which its own packets are not delivered to it.
    blocks_self_from: Option<IpAddr>,
}

#[derive(Debug, Default)]
pub(super) struct MulticastGroups(BTreeMap<IpAddr, Vec<Attachment>>);

impl MulticastGroups {
    fn attachment(&self, group: IpAddr, index: usize) -> Option<Attachment> {
        self.0.get(&group)?.get(index).copied()
    }

    /// Detaches a queue pair from the groups that are `left`.
    pub(super) fn detach(&mut self, qpn: Qpn, left: impl Fn(IpAddr) -> bool) {
        self.0.retain(|group, attached| {
            attached.retain(|attachment| attachment.qpn != qpn || !left(*group));
            !attached.is_empty()
        });
    }
}

impl Endpoint {
    /// Maximum number of multicast groups with queue pairs attached.
    pub const MAX_MULTICAST_GROUPS: usize = 256;
    /// Maximum number of queue pairs attached to one group: a packet is copied to each.
    pub const MAX_MULTICAST_QPS: usize = 64;

    /// Attaches a queue pair to a group (ibv_attach_mcast(3)). Without effect if it is attached.
    /// `blocks_self_from`, the queue pair's address, excludes its own packets.
    ///
    /// # Errors
    /// See [`AttachError`].
    pub fn attach_multicast(
        &mut self,
        group: IpAddr,
        qpn: Qpn,
        blocks_self_from: Option<IpAddr>,
    ) -> Result<(), AttachError> {
        let group = group.to_canonical();
        if !group.is_multicast() {
            return Err(AttachError::NotMulticast);
        }
        if self
            .qps
            .find_mut(qpn)
            .is_none_or(|(_, qp)| qp.transport() != Transport::Ud)
        {
            return Err(AttachError::NotDatagram);
        }
        let groups = &mut self.multicast.0;
        if !groups.contains_key(&group) && groups.len() == Self::MAX_MULTICAST_GROUPS {
            return Err(AttachError::Exhausted);
        }
        let attached = groups.entry(group).or_default();
        if attached.iter().any(|attachment| attachment.qpn == qpn) {
            return Ok(());
        }
        if attached.len() == Self::MAX_MULTICAST_QPS {
            return Err(AttachError::Exhausted);
        }
        attached.push(Attachment { qpn, blocks_self_from });
        Ok(())
    }

    /// Detaches a queue pair (ibv_detach_mcast(3)); false when it is not attached.
    pub fn detach_multicast(&mut self, group: IpAddr, qpn: Qpn) -> bool {
        let attached = self.attached_to(group).any(|attached| attached == qpn);
        if attached {
            self.multicast.detach(qpn, |other| other == group.to_canonical());
        }
        attached
    }

    /// Whether a queue pair is attached to the group: the link is to receive its packets.
    pub fn has_multicast_group(&self, group: IpAddr) -> bool {
        self.multicast.0.contains_key(&group.to_canonical())
    }

    /// Whether a queue pair is attached to a group.
    pub fn is_attached(&self, qpn: Qpn) -> bool {
        let mut attached = self.multicast.0.values().flatten();
        attached.any(|attachment| attachment.qpn == qpn)
    }

    /// The queue pairs attached to a group.
    pub fn attached_to(&self, group: IpAddr) -> impl Iterator<Item = Qpn> {
        let attached = self.multicast.0.get(&group.to_canonical());
        attached.into_iter().flatten().map(|attachment| attachment.qpn)
    }

    /// Delivers a packet to the queue pairs of its group, each of which checks it as any other.
    pub(super) fn handle_multicast<M: Memory>(
        &mut self,
        now: Instant,
        datagram: &Datagram<'_>,
        packet: Packet<'_>,
        memory: &mut M,
    ) {
        let group = datagram.dst.to_canonical();
        let (Extension::Deth(deth) | Extension::DethImm(deth, _)) = packet.extension else {
            self.out.counters.malformed += 1;
            return;
        };
        if packet.bth.dest_qp != MULTICAST_QPN || !self.has_multicast_group(group) {
            self.out.counters.no_qp += 1;
            return;
        }
        if self.idents.check(now, datagram) != Verdict::Valid {
            self.out.counters.icrc_errors += 1;
            return;
        }
        let packet = packet.into();
        let ip = IpFields {
            dst: group,
            ..datagram.ip()
        };
        for at in 0.. {
            let Some(attachment) = self.multicast.attachment(group, at) else {
                return;
            };
            let own = attachment.qpn == deth.src_qp && attachment.blocks_self_from == Some(datagram.src);
            if !own && let Some((index, qp)) = self.qps.find_mut(attachment.qpn).filter(|(_, qp)| qp.receives()) {
                qp.handle(now, &packet, ip, memory, &mut self.out);
                self.reschedule(index);
            }
        }
    }
}
