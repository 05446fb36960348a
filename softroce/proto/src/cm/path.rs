//! The path in a REQ: 44 bytes (IBTA vol 1, 12.7). Under RoCEv2, two GIDs and no LIDs.

use super::mad::MESSAGE_LEN;
use super::message::{be16, be32, put};
use crate::Gid;

/// The permissive LID (IBTA vol 1, 4.1.3), used where there are no LIDs.
pub(super) const PERMISSIVE_LID: u16 = 0xffff;

/// A path from the point of view of the REQ's sender.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PathRecord {
    pub(super) local_lid: u16,
    pub(super) remote_lid: u16,
    pub(super) local_gid: Gid,
    pub(super) remote_gid: Gid,
    /// 20 bits.
    pub(super) flow_label: u32,
    /// Rate code, 6 bits.
    pub(super) rate: u8,
    pub(super) traffic_class: u8,
    pub(super) hop_limit: u8,
    /// 4 bits.
    pub(super) service_level: u8,
    pub(super) subnet_local: bool,
    /// 5 bits.
    pub(super) ack_timeout: u8,
}

impl PathRecord {
    pub(super) fn read(from: &[u8; MESSAGE_LEN], at: usize) -> Self {
        let label = be32(from, at + 36);
        Self {
            local_lid: be16(from, at),
            remote_lid: be16(from, at + 2),
            local_gid: gid(from, at + 4),
            remote_gid: gid(from, at + 20),
            flow_label: label >> 12,
            rate: (label & 0x3f) as u8,
            traffic_class: from[at + 40],
            hop_limit: from[at + 41],
            service_level: from[at + 42] >> 4,
            subnet_local: from[at + 42] & 8 != 0,
            ack_timeout: from[at + 43] >> 3,
        }
    }

    pub(super) fn write(&self, to: &mut [u8; MESSAGE_LEN], at: usize) {
        put(to, at, self.local_lid.to_be_bytes());
        put(to, at + 2, self.remote_lid.to_be_bytes());
        put(to, at + 4, self.local_gid.0);
        put(to, at + 20, self.remote_gid.0);
        let label = self.flow_label << 12 | u32::from(self.rate & 0x3f);
        put(to, at + 36, label.to_be_bytes());
        to[at + 40] = self.traffic_class;
        to[at + 41] = self.hop_limit;
        to[at + 42] = self.service_level << 4 | u8::from(self.subnet_local) << 3;
        to[at + 43] = self.ack_timeout << 3;
    }
}

fn gid(from: &[u8; MESSAGE_LEN], at: usize) -> Gid {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&from[at..at + 16]);
    Gid(bytes)
}
