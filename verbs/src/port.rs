//! Port attributes and GID table entries, typed (ibv_query_port(3), ibv_query_gid_ex(3)).

use core::fmt;

use doorbell_verbs_sys as sys;

use crate::types::{Gid, Lid, Mtu};

/// A port's logical state (IBTA vol 1, 14.2.5.6).
#[doc(alias = "ibv_port_state")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PortState {
    /// The link is down.
    #[doc(alias = "IBV_PORT_DOWN")]
    Down,
    /// The link is up, the subnet manager has not configured the port.
    #[doc(alias = "IBV_PORT_INIT")]
    Init,
    /// Configured, not yet carrying data.
    #[doc(alias = "IBV_PORT_ARMED")]
    Armed,
    /// Carrying data.
    #[doc(alias = "IBV_PORT_ACTIVE")]
    Active,
    /// Active, with the link briefly down.
    #[doc(alias = "IBV_PORT_ACTIVE_DEFER")]
    ActiveDefer,
    /// A value that the standard does not define.
    Unknown(u32),
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Down => f.write_str("down"),
            Self::Init => f.write_str("initialising"),
            Self::Armed => f.write_str("armed"),
            Self::Active => f.write_str("active"),
            Self::ActiveDefer => f.write_str("active (deferred)"),
            Self::Unknown(state) => write!(f, "in unknown state {state}"),
        }
    }
}

impl PortState {
    fn from_sys(state: sys::ibv_port_state) -> Self {
        match state {
            sys::IBV_PORT_DOWN => Self::Down,
            sys::IBV_PORT_INIT => Self::Init,
            sys::IBV_PORT_ARMED => Self::Armed,
            sys::IBV_PORT_ACTIVE => Self::Active,
            sys::IBV_PORT_ACTIVE_DEFER => Self::ActiveDefer,
            other => Self::Unknown(other),
        }
    }
}

/// The link layer (ibv_query_port(3)).
#[doc(alias = "link_layer")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LinkLayer {
    /// InfiniBand: ports have LIDs, and a GRH is needed only between subnets.
    #[doc(alias = "IBV_LINK_LAYER_INFINIBAND")]
    InfiniBand,
    /// Ethernet, that is RoCE: ports are addressed by GID, and every packet has a GRH or IP header.
    #[doc(alias = "IBV_LINK_LAYER_ETHERNET")]
    Ethernet,
    /// Not reported by the device; treated as InfiniBand (verbs.h).
    #[doc(alias = "IBV_LINK_LAYER_UNSPECIFIED")]
    Unspecified,
}

/// The attributes of a port (ibv_query_port(3)).
#[doc(alias("ibv_port_attr", "ibv_query_port"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PortAttr {
    /// Its logical state.
    pub state: PortState,
    /// The largest MTU that it supports.
    pub max_mtu: Mtu,
    /// The MTU in force: no path MTU may be larger.
    pub active_mtu: Mtu,
    /// Its local identifier; 0 on RoCE.
    pub lid: Lid,
    /// The link layer.
    pub link_layer: LinkLayer,
    /// The maximum message length in bytes.
    #[doc(alias = "max_msg_sz")]
    pub max_message_bytes: u32,
    /// The length of the GID table.
    #[doc(alias = "gid_tbl_len")]
    pub gid_table_len: u32,
    /// Link rate in bits per second; `None` for a code that the standard does not define.
    #[doc(alias("active_speed", "active_width"))]
    pub bits_per_s: Option<u64>,
}

impl PortAttr {
    pub(crate) fn from_sys(attr: &sys::ibv_port_attr) -> Self {
        Self {
            state: PortState::from_sys(attr.state),
            max_mtu: Mtu::from_code(attr.max_mtu).unwrap_or(Mtu::B256),
            active_mtu: Mtu::from_code(attr.active_mtu).unwrap_or(Mtu::B256),
            lid: Lid(attr.lid),
            link_layer: match u32::from(attr.link_layer) {
                sys::IBV_LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
                sys::IBV_LINK_LAYER_INFINIBAND => LinkLayer::InfiniBand,
                _ => LinkLayer::Unspecified,
            },
            max_message_bytes: attr.max_msg_sz,
            gid_table_len: u32::try_from(attr.gid_tbl_len).unwrap_or(0),
            bits_per_s: bits_per_s(attr.active_width, attr.active_speed),
        }
    }
}

/// Nominal link rate, from the two codes of PortInfo (IBTA vol 1, 14.2.5.6).
fn bits_per_s(width: u8, speed: u8) -> Option<u64> {
    let lanes: u64 = match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => return None,
    };
    let lane_mbit_per_s: u64 = match speed {
        1 => 2_500,
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        _ => return None,
    };
    Some(lanes * lane_mbit_per_s * 1_000_000)
}

/// The type of a GID (ibv_query_gid_ex(3)).
#[doc(alias = "ibv_gid_type")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GidType {
    /// InfiniBand, or a provider that does not distinguish.
    #[doc(alias = "IBV_GID_TYPE_IB")]
    InfiniBand,
    /// RoCE version 1: Ethernet frames with a GRH, not routable.
    #[doc(alias = "IBV_GID_TYPE_ROCE_V1")]
    RoceV1,
    /// RoCE version 2: UDP over IP.
    #[doc(alias = "IBV_GID_TYPE_ROCE_V2")]
    RoceV2,
    /// Not reported by the library.
    Unknown,
}

impl GidType {
    pub(crate) fn from_sys(kind: u32) -> Self {
        match kind {
            sys::IBV_GID_TYPE_IB => Self::InfiniBand,
            sys::IBV_GID_TYPE_ROCE_V1 => Self::RoceV1,
            sys::IBV_GID_TYPE_ROCE_V2 => Self::RoceV2,
            _ => Self::Unknown,
        }
    }
}

/// One entry of a port's GID table (ibv_query_gid_ex(3)).
#[doc(alias("ibv_gid_entry", "ibv_query_gid_ex"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct GidEntry {
    /// Its index, for [`gid_index`](crate::QueuePairBuilder::gid_index).
    #[doc(alias("gid_index", "sgid_index"))]
    pub index: u32,
    /// The GID.
    pub gid: Gid,
    /// Its type.
    pub kind: GidType,
    /// The index of its network interface, as in if_indextoname(3); 0 where it is unknown.
    #[doc(alias = "ndev_ifindex")]
    pub interface: u32,
}

impl GidEntry {
    /// Rank as the default GID: RoCEv2 before others, IPv4 before routable IPv6 before link-local.
    pub(crate) fn preference(&self) -> u32 {
        let kind = match self.kind {
            GidType::RoceV2 => 30,
            GidType::InfiniBand | GidType::Unknown => 20,
            GidType::RoceV1 => 10,
        };
        let scope = match (self.gid.to_ip().is_ipv4(), self.gid.is_link_local()) {
            (true, _) => 2,
            (false, false) => 1,
            (false, true) => 0,
        };
        kind + scope
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_width_times_speed() {
        assert_eq!(bits_per_s(2, 128), Some(400_000_000_000));
        assert_eq!(bits_per_s(1, 1), Some(2_500_000_000));
        assert_eq!(bits_per_s(2, 3), None);
        assert_eq!(bits_per_s(3, 1), None);
    }

    #[test]
    fn a_routable_ipv4_roce_v2_gid_is_preferred() {
        let entry = |kind, gid: [u8; 16]| GidEntry {
            index: 0,
            gid: Gid(gid),
            kind,
            interface: 0,
        };
        let mut v4 = [0; 16];
        v4[10..].copy_from_slice(&[0xff, 0xff, 10, 9, 0, 1]);
        let mut link_local = [0; 16];
        (link_local[0], link_local[1]) = (0xfe, 0x80);
        let best = entry(GidType::RoceV2, v4);
        assert!(best.preference() > entry(GidType::RoceV2, link_local).preference());
        assert!(best.preference() > entry(GidType::RoceV1, v4).preference());
        assert!(entry(GidType::RoceV2, link_local).preference() > entry(GidType::RoceV1, v4).preference());
    }
}
