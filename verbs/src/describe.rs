//! Printable descriptions of devices, ports and buffers.

use core::ffi::c_int;
use core::fmt;

use doorbell_verbs_sys::{self as sys, inline};

use crate::context::Context;
use crate::error::{DeviceError, check};
use crate::port::{GidEntry, PortAttr};
use crate::qp::RemoteRights;
use crate::types::RKey;

/// All attributes of a device and its ports; [`Display`](fmt::Display) prints one item a line.
#[doc(alias("ibv_device_attr", "ibv_devinfo"))]
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceDescription {
    /// Its name.
    pub name: String,
    /// The firmware version, as the device formats it.
    #[doc(alias = "fw_ver")]
    pub firmware: String,
    /// Its globally unique identifier, in host byte order.
    pub node_guid: u64,
    /// The GUID of the system that it is part of.
    #[doc(alias = "sys_image_guid")]
    pub system_image_guid: u64,
    /// The vendor's IEEE OUI.
    pub vendor_id: u32,
    /// The vendor's part number.
    pub vendor_part_id: u32,
    /// The hardware version.
    #[doc(alias = "hw_ver")]
    pub hardware_version: u32,
    /// The scope of its atomics.
    pub atomics: AtomicSupport,
    /// The supported page sizes in bytes, smallest first.
    #[doc(alias = "page_size_cap")]
    pub page_sizes: Vec<u64>,
    /// Its capabilities, by the names of `enum ibv_device_cap_flags`.
    #[doc(alias("ibv_device_cap_flags", "device_cap_flags"))]
    pub capabilities: Vec<&'static str>,
    /// Its limits, by the names of `struct ibv_device_attr`.
    pub limits: Vec<(&'static str, u64)>,
    /// Its ports.
    pub ports: Vec<PortDescription>,
}

/// All attributes of a port.
#[doc(alias = "ibv_port_attr")]
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PortDescription {
    /// Its number, from 1.
    pub number: u8,
    /// The attributes that connecting needs.
    pub attr: PortAttr,
    /// The others, by the names of `struct ibv_port_attr`.
    pub values: Vec<(&'static str, u32)>,
    /// Its P_Keys, by index; without the empty entries.
    #[doc(alias = "ibv_query_pkey")]
    pub pkeys: Vec<(u16, u16)>,
    /// Its GIDs; without the empty entries.
    #[doc(alias = "ibv_query_gid")]
    pub gids: Vec<GidEntry>,
}

/// The scope of a device's atomics (IBTA vol 1, 10.8.3.3).
#[doc(alias = "ibv_atomic_cap")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AtomicSupport {
    /// No atomics.
    #[doc(alias = "IBV_ATOMIC_NONE")]
    None,
    /// Atomic among the device's own operations, not with the CPU's (`IBV_ATOMIC_HCA`).
    #[doc(alias = "IBV_ATOMIC_HCA")]
    Device,
    /// Atomic with the CPU's too (`IBV_ATOMIC_GLOB`).
    #[doc(alias = "IBV_ATOMIC_GLOB")]
    Global,
    /// A value that the standard does not define.
    Unknown(u32),
}

const CAPABILITIES: &[(sys::ibv_device_cap_flags, &str)] = &[
    (sys::IBV_DEVICE_RESIZE_MAX_WR, "RESIZE_MAX_WR"),
    (sys::IBV_DEVICE_BAD_PKEY_CNTR, "BAD_PKEY_CNTR"),
    (sys::IBV_DEVICE_BAD_QKEY_CNTR, "BAD_QKEY_CNTR"),
    (sys::IBV_DEVICE_RAW_MULTI, "RAW_MULTI"),
    (sys::IBV_DEVICE_AUTO_PATH_MIG, "AUTO_PATH_MIG"),
    (sys::IBV_DEVICE_CHANGE_PHY_PORT, "CHANGE_PHY_PORT"),
    (sys::IBV_DEVICE_UD_AV_PORT_ENFORCE, "UD_AV_PORT_ENFORCE"),
    (sys::IBV_DEVICE_CURR_QP_STATE_MOD, "CURR_QP_STATE_MOD"),
    (sys::IBV_DEVICE_SHUTDOWN_PORT, "SHUTDOWN_PORT"),
    (sys::IBV_DEVICE_INIT_TYPE, "INIT_TYPE"),
    (sys::IBV_DEVICE_PORT_ACTIVE_EVENT, "PORT_ACTIVE_EVENT"),
    (sys::IBV_DEVICE_SYS_IMAGE_GUID, "SYS_IMAGE_GUID"),
    (sys::IBV_DEVICE_RC_RNR_NAK_GEN, "RC_RNR_NAK_GEN"),
    (sys::IBV_DEVICE_SRQ_RESIZE, "SRQ_RESIZE"),
    (sys::IBV_DEVICE_N_NOTIFY_CQ, "N_NOTIFY_CQ"),
    (sys::IBV_DEVICE_MEM_WINDOW, "MEM_WINDOW"),
    (sys::IBV_DEVICE_UD_IP_CSUM, "UD_IP_CSUM"),
    (sys::IBV_DEVICE_XRC, "XRC"),
    (sys::IBV_DEVICE_MEM_MGT_EXTENSIONS, "MEM_MGT_EXTENSIONS"),
    (sys::IBV_DEVICE_MEM_WINDOW_TYPE_2A, "MEM_WINDOW_TYPE_2A"),
    (sys::IBV_DEVICE_MEM_WINDOW_TYPE_2B, "MEM_WINDOW_TYPE_2B"),
    (sys::IBV_DEVICE_RC_IP_CSUM, "RC_IP_CSUM"),
    (sys::IBV_DEVICE_RAW_IP_CSUM, "RAW_IP_CSUM"),
    (sys::IBV_DEVICE_MANAGED_FLOW_STEERING, "MANAGED_FLOW_STEERING"),
];

/// A count of `struct ibv_device_attr`, where they are signed; negative ones are invalid.
fn count(value: c_int) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

impl Context {
    /// Queries all attributes of the device, to print or to compare between machines.
    ///
    /// # Errors
    /// When a query fails.
    #[doc(alias("ibv_query_device", "ibv_query_port", "ibv_query_pkey"))]
    pub fn describe(&self) -> Result<DeviceDescription, DeviceError> {
        let context = self.inner();
        // SAFETY: all-zero is a valid value of this struct of integers.
        let mut attr: sys::ibv_device_attr = unsafe { core::mem::zeroed() };
        // SAFETY: the context is live and `attr` may be written.
        check(unsafe { (context.api.query_device)(context.raw, &mut attr) }).map_err(|error| DeviceError::Query {
            verb: "ibv_query_device",
            object: context.name.clone(),
            error,
        })?;
        let ports: Result<_, _> = (1..=context.attr.ports)
            .map(|number| self.describe_port(number))
            .collect();
        Ok(DeviceDescription::from_sys(self.name(), &attr, ports?))
    }

    fn describe_port(&self, number: u8) -> Result<PortDescription, DeviceError> {
        let context = self.inner();
        // SAFETY: all-zero is a valid value of this struct of integers.
        let mut raw: sys::ibv_port_attr = unsafe { core::mem::zeroed() };
        let query = |verb: &'static str| {
            move |error| DeviceError::Query {
                verb,
                object: format!("{} port {number}", context.name),
                error,
            }
        };
        // SAFETY: the context is live and was made by this Api; `raw` may be written.
        check(unsafe { inline::query_port(context.api, context.raw, number, &mut raw) })
            .map_err(query("ibv_query_port"))?;
        let mut pkeys = Vec::new();
        for index in 0..raw.pkey_tbl_len {
            let mut pkey = 0;
            // SAFETY: the context is live and `pkey` may be written.
            check(unsafe { (context.api.query_pkey)(context.raw, number, index.into(), &mut pkey) })
                .map_err(query("ibv_query_pkey"))?;
            if pkey != 0 {
                pkeys.push((index, u16::from_be(pkey)));
            }
        }
        Ok(PortDescription {
            number,
            attr: PortAttr::from_sys(&raw),
            values: vec![
                ("port_cap_flags", raw.port_cap_flags),
                ("port_cap_flags2", raw.port_cap_flags2.into()),
                ("bad_pkey_cntr", raw.bad_pkey_cntr),
                ("qkey_viol_cntr", raw.qkey_viol_cntr),
                ("pkey_tbl_len", raw.pkey_tbl_len.into()),
                ("sm_lid", raw.sm_lid.into()),
                ("lmc", raw.lmc.into()),
                ("max_vl_num", raw.max_vl_num.into()),
                ("sm_sl", raw.sm_sl.into()),
                ("subnet_timeout", raw.subnet_timeout.into()),
                ("init_type_reply", raw.init_type_reply.into()),
                ("active_width", raw.active_width.into()),
                ("active_speed", raw.active_speed.into()),
                ("phys_state", raw.phys_state.into()),
                ("flags", raw.flags.into()),
            ],
            pkeys,
            gids: self.gids(number)?,
        })
    }
}

impl DeviceDescription {
    fn from_sys(name: &str, attr: &sys::ibv_device_attr, ports: Vec<PortDescription>) -> Self {
        let firmware: Vec<u8> = attr
            .fw_ver
            .iter()
            .map(|&byte| u8::from_ne_bytes(byte.to_ne_bytes()))
            .take_while(|&byte| byte != 0)
            .collect();
        Self {
            name: name.to_owned(),
            firmware: String::from_utf8_lossy(&firmware).into_owned(),
            node_guid: u64::from_be(attr.node_guid),
            system_image_guid: u64::from_be(attr.sys_image_guid),
            vendor_id: attr.vendor_id,
            vendor_part_id: attr.vendor_part_id,
            hardware_version: attr.hw_ver,
            atomics: match attr.atomic_cap {
                sys::IBV_ATOMIC_NONE => AtomicSupport::None,
                sys::IBV_ATOMIC_HCA => AtomicSupport::Device,
                sys::IBV_ATOMIC_GLOB => AtomicSupport::Global,
                other => AtomicSupport::Unknown(other),
            },
            page_sizes: (0..u64::BITS)
                .map(|bit| 1 << bit)
                .filter(|size| attr.page_size_cap & size != 0)
                .collect(),
            capabilities: CAPABILITIES
                .iter()
                .filter(|(bit, _)| attr.device_cap_flags & bit != 0)
                .map(|&(_, name)| name)
                .collect(),
            limits: vec![
                ("max_mr_size", attr.max_mr_size),
                ("max_qp", count(attr.max_qp)),
                ("max_qp_wr", count(attr.max_qp_wr)),
                ("max_sge", count(attr.max_sge)),
                ("max_sge_rd", count(attr.max_sge_rd)),
                ("max_cq", count(attr.max_cq)),
                ("max_cqe", count(attr.max_cqe)),
                ("max_mr", count(attr.max_mr)),
                ("max_pd", count(attr.max_pd)),
                ("max_qp_rd_atom", count(attr.max_qp_rd_atom)),
                ("max_res_rd_atom", count(attr.max_res_rd_atom)),
                ("max_qp_init_rd_atom", count(attr.max_qp_init_rd_atom)),
                ("max_mw", count(attr.max_mw)),
                ("max_ah", count(attr.max_ah)),
                ("max_srq", count(attr.max_srq)),
                ("max_srq_wr", count(attr.max_srq_wr)),
                ("max_srq_sge", count(attr.max_srq_sge)),
                ("max_mcast_grp", count(attr.max_mcast_grp)),
                ("max_mcast_qp_attach", count(attr.max_mcast_qp_attach)),
                ("max_total_mcast_qp_attach", count(attr.max_total_mcast_qp_attach)),
                ("max_pkeys", attr.max_pkeys.into()),
                ("local_ca_ack_delay", attr.local_ca_ack_delay.into()),
            ],
            ports,
        }
    }
}

impl fmt::Display for DeviceDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.name)?;
        writeln!(f, "  fw_ver {}", self.firmware)?;
        writeln!(f, "  node_guid {:016x}", self.node_guid)?;
        writeln!(f, "  sys_image_guid {:016x}", self.system_image_guid)?;
        writeln!(f, "  vendor_id {:#08x}", self.vendor_id)?;
        writeln!(f, "  vendor_part_id {}", self.vendor_part_id)?;
        writeln!(f, "  hw_ver {:#x}", self.hardware_version)?;
        writeln!(f, "  atomic_cap {:?}", self.atomics)?;
        writeln!(f, "  page sizes {}", PageSizes(&self.page_sizes))?;
        writeln!(f, "  device_cap_flags {}", self.capabilities.join(" "))?;
        for (name, value) in &self.limits {
            writeln!(f, "  {name} {value}")?;
        }
        self.ports.iter().try_for_each(|port| port.fmt(f))
    }
}

/// Page sizes: a range if they are consecutive powers of two, otherwise each.
struct PageSizes<'a>(&'a [u64]);

impl fmt::Display for PageSizes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => f.write_str("unknown"),
            [one] => write!(f, "{one}"),
            [first, .., last] if last.trailing_zeros() - first.trailing_zeros() + 1 == self.0.len() as u32 => {
                write!(f, "{first} to {last}, every power of two")
            }
            [first, rest @ ..] => {
                write!(f, "{first}")?;
                rest.iter().try_for_each(|size| write!(f, " {size}"))
            }
        }
    }
}

impl fmt::Display for PortDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let attr = &self.attr;
        writeln!(f, "  port {} {}, {:?}", self.number, attr.state, attr.link_layer)?;
        writeln!(f, "    active_mtu {}, max_mtu {}", attr.active_mtu, attr.max_mtu)?;
        match attr.bits_per_s {
            Some(rate) => writeln!(f, "    rate {} Gb/s", rate as f64 / 1e9)?,
            None => writeln!(f, "    rate unknown")?,
        }
        writeln!(f, "    lid {}", attr.lid)?;
        writeln!(f, "    max_msg_sz {}", attr.max_message_bytes)?;
        for (name, value) in &self.values {
            writeln!(f, "    {name} {value:#x}")?;
        }
        for (index, pkey) in &self.pkeys {
            writeln!(f, "    P_Key {index}: {pkey:#06x}")?;
        }
        for entry in &self.gids {
            writeln!(f, "    GID {}: {}, {:?}", entry.index, entry.gid, entry.kind)?;
        }
        Ok(())
    }
}

/// The attributes of a buffer and its region: see [`Buffer::describe`](crate::Buffer::describe).
#[doc(alias = "ibv_mr")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BufferDescription {
    /// Its address, as the device and peers use it.
    pub addr: u64,
    /// Its length in bytes.
    pub len: usize,
    /// The region's address.
    pub region_addr: u64,
    /// The region's length in bytes.
    pub region_len: usize,
    /// The region's lkey, for local requests.
    pub lkey: u32,
    /// The region's rkey, for the requests of peers; without effect where peers have no rights.
    pub rkey: RKey,
    /// The rights of peers to the region.
    pub rights: RemoteRights,
}

impl fmt::Display for BufferDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            addr,
            len,
            region_addr,
            region_len,
            lkey,
            rkey,
            rights,
        } = self;
        write!(
            f,
            "{len} bytes at {addr:#x}, of a region of {region_len} at {region_addr:#x}, lkey {lkey:#010x}, rkey {rkey}; peers may {rights}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_sizes_are_shown_as_a_range_where_they_are_one() {
        let shown = |sizes: &[u64]| PageSizes(sizes).to_string();
        assert_eq!(shown(&[4096, 8192, 16384]), "4096 to 16384, every power of two");
        assert_eq!(shown(&[4096, 1 << 21]), "4096 2097152");
        assert_eq!(shown(&[4096]), "4096");
        assert_eq!(shown(&[]), "unknown");
    }

    #[test]
    fn limits_that_make_no_sense_are_none() {
        // SAFETY: all-zero is a valid value of this struct of integers.
        let mut attr: sys::ibv_device_attr = unsafe { core::mem::zeroed() };
        attr.max_ah = -1;
        attr.device_cap_flags = sys::IBV_DEVICE_SRQ_RESIZE | sys::IBV_DEVICE_XRC;
        attr.fw_ver = [0x41; 64];
        attr.atomic_cap = 9;
        let description = DeviceDescription::from_sys("one", &attr, Vec::new());
        assert!(description.limits.contains(&("max_ah", 0)));
        assert_eq!(description.capabilities, ["SRQ_RESIZE", "XRC"]);
        assert_eq!(description.firmware.len(), 64, "without a NUL it ends with the field");
        assert_eq!(description.atomics, AtomicSupport::Unknown(9));
    }
}
