//! Attributes of a device and its one port.

use core::ffi::{c_char, c_int};
use std::mem::{MaybeUninit, offset_of};
use std::ptr;

use doorbell_softroce::{capacity, clock};
use doorbell_verbs_sys::{
    _compat_ibv_port_attr, IBV_ATOMIC_HCA, IBV_DEVICE_CURR_QP_STATE_MOD, IBV_DEVICE_MEM_WINDOW,
    IBV_DEVICE_MEM_WINDOW_TYPE_2B, IBV_DEVICE_PORT_ACTIVE_EVENT, IBV_DEVICE_RC_RNR_NAK_GEN, IBV_DEVICE_SRQ_RESIZE,
    IBV_DEVICE_SYS_IMAGE_GUID, IBV_DEVICE_XRC, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2, IBV_LINK_LAYER_ETHERNET,
    IBV_ODP_SUPPORT, IBV_ODP_SUPPORT_ATOMIC, IBV_ODP_SUPPORT_IMPLICIT, IBV_ODP_SUPPORT_READ, IBV_ODP_SUPPORT_RECV,
    IBV_ODP_SUPPORT_SEND, IBV_ODP_SUPPORT_SRQ_RECV, IBV_ODP_SUPPORT_WRITE, IBV_PORT_ACTIVE, IBV_PORT_DOWN,
    IBV_PORT_IP_BASED_GIDS, IBV_VALUES_MASK_RAW_CLOCK, SOFT_VENDOR_ID, ibv_context, ibv_device_attr,
    ibv_device_attr_ex, ibv_gid, ibv_gid_entry, ibv_odp_caps, ibv_odp_transport_caps, ibv_port_attr,
    ibv_query_device_ex_input, ibv_values_ex,
};

use crate::context::Context;
use crate::errno;
use crate::gids::{GID_TABLE_LEN, gid_table};
use crate::placement::{IBV_DEVICE_ATOMIC_WRITE, IBV_DEVICE_FLUSH_GLOBAL};

pub(crate) const PORT: u8 = 1;

/// Of [`SOFT_VENDOR_ID`]'s parts this is the only one, in its first version.
const VENDOR_PART_ID: u32 = 1;
const HARDWARE_VERSION: u32 = 1;

/// The only partition: the default one, with full membership (IBTA vol 1, 10.9.1).
const DEFAULT_PKEY: u16 = 0xffff;

const WIDTH_4X: u8 = 2;
/// 10 Gb/s per lane: with 4X a port of 40 Gb/s, the order of magnitude of loopback.
const SPEED_QDR: u8 = 4;
/// `LinkUp` and `Disabled` of the physical states (IBTA vol 1, 14.2.5.6).
const PHYSICAL_LINK_UP: u8 = 5;
const PHYSICAL_DISABLED: u8 = 3;
/// `IBV_QPF_GRH_REQUIRED`: address vectors need a GID, as always under RoCE.
const GRH_REQUIRED: u8 = 1;

pub(crate) unsafe extern "C" fn query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    // SAFETY: `context` is live by contract.
    let attributes = device_attributes(unsafe { Context::from_ptr(context) });
    // SAFETY: writable by contract (man page).
    unsafe { attr.write(attributes) };
    0
}

/// Of all that each transport has, as the CPU faults the pages in.
const ON_DEMAND: ibv_odp_caps = {
    let messages = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_SRQ_RECV;
    ibv_odp_caps {
        general_caps: (IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT) as u64,
        per_transport_caps: ibv_odp_transport_caps {
            rc_odp_caps: messages | IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_READ | IBV_ODP_SUPPORT_ATOMIC,
            uc_odp_caps: messages | IBV_ODP_SUPPORT_WRITE,
            ud_odp_caps: messages,
        },
    }
};

/// Fills as much of the struct as the caller's version has.
pub(crate) unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    attr_size: usize,
) -> c_int {
    // SAFETY: live by contract, or null.
    let extended_input = unsafe { input.as_ref() }.is_some_and(|input| input.comp_mask != 0);
    if extended_input || attr_size < offset_of!(ibv_device_attr_ex, odp_caps) {
        return libc::EINVAL;
    }
    // SAFETY: all-zero is a valid ibv_device_attr_ex: integers only. What a soft device lacks stays
    // zero: raw packets' segmentation, hashing and pacing, and tag matching.
    let mut attributes: ibv_device_attr_ex = unsafe { MaybeUninit::zeroed().assume_init() };
    // SAFETY: `context` is live by contract.
    attributes.orig_attr = device_attributes(unsafe { Context::from_ptr(context) });
    attributes.odp_caps = ON_DEMAND;
    attributes.xrc_odp_caps = ON_DEMAND.per_transport_caps.rc_odp_caps;
    attributes.completion_timestamp_mask = u64::MAX;
    attributes.hca_core_clock = clock::TICK_KHZ;
    attributes.max_dm_size = capacity::DEVICE_MEMORY as u64;
    attributes.cq_mod_caps.max_cq_count = u16::MAX;
    attributes.cq_mod_caps.max_cq_period = u16::MAX;
    attributes.device_cap_flags_ex =
        u64::from(attributes.orig_attr.device_cap_flags) | IBV_DEVICE_FLUSH_GLOBAL | IBV_DEVICE_ATOMIC_WRITE;
    attributes.phys_port_cnt_ex = u32::from(attributes.orig_attr.phys_port_cnt);
    // SAFETY: the caller's struct has `attr_size` bytes.
    unsafe {
        attr.cast::<u8>().write_bytes(0, attr_size);
        copy_prefix(&attributes, attr, attr_size);
    };
    0
}

/// The device's clock, in ticks, in `tv_nsec` as other devices do.
pub(crate) unsafe extern "C" fn query_rt_values(_context: *mut ibv_context, values: *mut ibv_values_ex) -> c_int {
    // SAFETY: live by contract.
    let values = unsafe { &mut *values };
    if values.comp_mask & !IBV_VALUES_MASK_RAW_CLOCK != 0 {
        return libc::EINVAL;
    }
    if values.comp_mask & IBV_VALUES_MASK_RAW_CLOCK != 0 {
        values.raw_clock.tv_sec = 0;
        // Below 2^63 for 292 years after boot.
        values.raw_clock.tv_nsec = clock::ticks() as i64;
    }
    0
}

fn device_attributes(context: &Context) -> ibv_device_attr {
    let guid = context.file.soft.guid().to_be();
    let mut fw_ver = [0; 64];
    for (to, from) in fw_ver.iter_mut().zip(env!("CARGO_PKG_VERSION").bytes()) {
        *to = from as c_char;
    }
    ibv_device_attr {
        fw_ver,
        node_guid: guid,
        sys_image_guid: guid,
        max_mr_size: u64::MAX,
        // Any page size: regions are ranges of bytes.
        page_size_cap: 0xffff_f000,
        vendor_id: SOFT_VENDOR_ID,
        vendor_part_id: VENDOR_PART_ID,
        hw_ver: HARDWARE_VERSION,
        max_qp: capacity::QPS as c_int,
        max_qp_wr: capacity::WORK_REQUESTS as c_int,
        // Not MEM_MGT_EXTENSIONS, which includes fast registration.
        device_cap_flags: IBV_DEVICE_CURR_QP_STATE_MOD
            | IBV_DEVICE_PORT_ACTIVE_EVENT
            | IBV_DEVICE_SYS_IMAGE_GUID
            | IBV_DEVICE_RC_RNR_NAK_GEN
            | IBV_DEVICE_SRQ_RESIZE
            | IBV_DEVICE_MEM_WINDOW
            | IBV_DEVICE_XRC
            | IBV_DEVICE_MEM_WINDOW_TYPE_2B,
        max_sge: capacity::SGES as c_int,
        max_sge_rd: capacity::SGES as c_int,
        max_cq: capacity::CQS as c_int,
        max_cqe: capacity::CQ_ENTRIES as c_int,
        max_mr: capacity::REGIONS as c_int,
        max_pd: capacity::PDS as c_int,
        max_qp_rd_atom: c_int::from(capacity::RD_ATOMIC),
        max_ee_rd_atom: 0,
        max_res_rd_atom: capacity::QPS as c_int * c_int::from(capacity::RD_ATOMIC),
        max_qp_init_rd_atom: c_int::from(capacity::RD_ATOMIC),
        max_ee_init_rd_atom: 0,
        atomic_cap: IBV_ATOMIC_HCA,
        max_ee: 0,
        max_rdd: 0,
        max_mw: capacity::WINDOWS as c_int,
        max_raw_ipv6_qp: 0,
        max_raw_ethy_qp: 0,
        max_mcast_grp: capacity::MULTICAST_GROUPS as c_int,
        max_mcast_qp_attach: capacity::MULTICAST_QPS as c_int,
        max_total_mcast_qp_attach: (capacity::MULTICAST_GROUPS * capacity::MULTICAST_QPS) as c_int,
        max_ah: c_int::MAX,
        max_fmr: 0,
        max_map_per_fmr: 0,
        max_srq: capacity::SRQS as c_int,
        max_srq_wr: capacity::WORK_REQUESTS as c_int,
        max_srq_sge: capacity::SGES as c_int,
        max_pkeys: 1,
        // Under 8 µs on most machines; 4.096 µs · 2^15 is rxe's code, for threads to be woken.
        local_ca_ack_delay: 15,
        phys_port_cnt: 1,
    }
}

fn port_attributes(context: &Context) -> ibv_port_attr {
    // SAFETY: all-zero is an ibv_port_attr: it has integers only.
    let mut attr: ibv_port_attr = unsafe { MaybeUninit::zeroed().assume_init() };
    let mtu = context.device.mtu() as u32;
    (attr.state, attr.phys_state) = if context.device.port().active {
        (IBV_PORT_ACTIVE, PHYSICAL_LINK_UP)
    } else {
        (IBV_PORT_DOWN, PHYSICAL_DISABLED)
    };
    attr.max_mtu = mtu;
    attr.active_mtu = mtu;
    attr.gid_tbl_len = GID_TABLE_LEN as c_int;
    attr.port_cap_flags = IBV_PORT_IP_BASED_GIDS;
    attr.max_msg_sz = capacity::MESSAGE;
    attr.pkey_tbl_len = 1;
    attr.max_vl_num = 1;
    attr.active_width = WIDTH_4X;
    attr.active_speed = SPEED_QDR;
    attr.link_layer = IBV_LINK_LAYER_ETHERNET as u8;
    attr.flags = GRH_REQUIRED;
    attr
}

/// Fills as much of the struct as the caller's version has.
pub(crate) unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    len: usize,
) -> c_int {
    if port != PORT {
        return libc::EINVAL;
    }
    // SAFETY: `context` is live by contract.
    let attributes = port_attributes(unsafe { Context::from_ptr(context) });
    // SAFETY: the caller's struct has `len` bytes.
    unsafe { copy_prefix(&attributes, attr, len) };
    0
}

/// The exported ibv_query_port, for programs whose struct ends at `flags`.
pub(crate) unsafe extern "C" fn query_port_compat(
    context: *mut ibv_context,
    port: u8,
    attr: *mut _compat_ibv_port_attr,
) -> c_int {
    // SAFETY: as for `query_port`; the old struct ends where `port_cap_flags2` begins now.
    unsafe { query_port(context, port, attr.cast(), offset_of!(ibv_port_attr, port_cap_flags2)) }
}

pub(crate) unsafe extern "C" fn query_gid(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    let Some(index) = u32::try_from(index)
        .ok()
        .filter(|&index| port == PORT && index < GID_TABLE_LEN)
    else {
        return errno::minus_one(libc::EINVAL);
    };
    // SAFETY: `context` is live by contract.
    let entry = gid_entries(unsafe { Context::from_ptr(context) }).nth(index as usize);
    let found = entry.map_or(ibv_gid { raw: [0; 16] }, |entry| entry.gid);
    // SAFETY: writable by contract (man page).
    unsafe { gid.write(found) };
    0
}

/// The entries of the GID table; none while the device's interface lacks its address.
fn gid_entries(context: &Context) -> impl Iterator<Item = ibv_gid_entry> {
    let (device, port) = (&context.device, context.device.port());
    let table = port.addressed.then(|| gid_table(device.info().address.ip()));
    let entries = table.into_iter().flatten().enumerate();
    entries.map(move |(index, (gid, version))| ibv_gid_entry {
        gid: ibv_gid { raw: gid.0 },
        gid_index: index as u32,
        port_num: u32::from(PORT),
        gid_type: match version {
            1 => IBV_GID_TYPE_ROCE_V1,
            _ => IBV_GID_TYPE_ROCE_V2,
        },
        ndev_ifindex: port.interface,
    })
}

/// Copies as much of a struct as the caller's version of it, `size` bytes long, has.
///
/// # Safety
/// `to` has space for `size` bytes, and does not overlap `from`.
unsafe fn copy_prefix<T>(from: &T, to: *mut T, size: usize) {
    let len = size.min(size_of::<T>());
    // SAFETY: space for `len` bytes by contract; `from` has as many, and padding is copied untyped.
    unsafe { ptr::from_ref(from).cast::<u8>().copy_to_nonoverlapping(to.cast(), len) };
}

pub(crate) unsafe extern "C" fn query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
    entry_size: usize,
) -> c_int {
    if port != u32::from(PORT) || flags != 0 || index >= GID_TABLE_LEN {
        return libc::EINVAL;
    }
    // SAFETY: `context` is live by contract.
    let Some(found) = gid_entries(unsafe { Context::from_ptr(context) }).nth(index as usize) else {
        return libc::ENODATA;
    };
    // SAFETY: `entry` has `entry_size` bytes.
    unsafe { copy_prefix(&found, entry, entry_size) };
    0
}

/// ibv_query_gid_table(3): the number of entries, or a negative errno value: `EINVAL` when there is
/// not space for all.
pub(crate) unsafe extern "C" fn query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    max_entries: usize,
    flags: u32,
    entry_size: usize,
) -> isize {
    // SAFETY: `context` is live by contract.
    let found: Vec<_> = gid_entries(unsafe { Context::from_ptr(context) }).collect();
    if flags != 0 || max_entries < found.len().max(1) {
        return -(libc::EINVAL as isize);
    }
    for (index, entry) in found.iter().enumerate() {
        // SAFETY: there is space for `max_entries` entries of `entry_size` bytes.
        unsafe { copy_prefix(entry, entries.byte_add(index * entry_size), entry_size) };
    }
    found.len() as isize
}

pub(crate) unsafe extern "C" fn query_pkey(
    _context: *mut ibv_context,
    port: u8,
    index: c_int,
    pkey: *mut u16,
) -> c_int {
    if port != PORT || index != 0 {
        return errno::minus_one(libc::EINVAL);
    }
    // SAFETY: writable by contract (man page).
    unsafe { pkey.write(DEFAULT_PKEY.to_be()) };
    0
}

/// ibv_get_pkey_index(3): `pkey` is big-endian.
pub(crate) unsafe extern "C" fn get_pkey_index(_context: *mut ibv_context, port: u8, pkey: u16) -> c_int {
    if port == PORT && u16::from_be(pkey) == DEFAULT_PKEY {
        0
    } else {
        errno::minus_one(libc::EINVAL)
    }
}
