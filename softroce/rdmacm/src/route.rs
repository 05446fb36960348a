//! Binding and routing of identifiers. Under RoCE the path follows from the addresses: resolution
//! is immediate, yet reported by an event.

use core::ffi::c_int;
use std::net::{IpAddr, SocketAddr};
use std::ptr;
use std::sync::Arc;

use doorbell_roce_proto::wire::HOP_LIMIT;
use doorbell_verbs_sys::rdmacm::{
    RDMA_CM_EVENT_ADDR_ERROR, RDMA_CM_EVENT_ADDR_RESOLVED, RDMA_CM_EVENT_ROUTE_RESOLVED, ibv_sa_path_rec, rdma_cm_id,
};
use libc::sockaddr;

use crate::address::{self, is_any, unspecified};
use crate::channel::EventInfo;
use crate::devices::{OpenDevice, device_for_peer, with_address};
use crate::errno::{self, Errno};
use crate::id::{PKEY, Phase, Shared, State, complete, shared};
use crate::ports::{Claim, PortBinding};

/// Selector value "exactly" (IBTA vol 1, 15.2.5.16).
const EXACTLY: u8 = 2;
/// The code of 40 Gb/s (`IBV_RATE_40_GBPS`).
const RATE: u8 = 7;
/// The Linux kernel's value for RoCE: 4.096 µs · 2^16.
const PACKET_LIFE_TIME: u8 = 16;

/// rdma_bind_addr(3): `EADDRNOTAVAIL` for an address not of this host, `ENODEV` for one without a
/// soft device, unless it is a wildcard; for a bound port `EADDRINUSE`, or `EADDRNOTAVAIL` if one
/// of the two addresses is a wildcard.
///
/// # Safety
/// `id` is null or live and ours; `address` is null, or an address of the family that it names.
pub unsafe extern "C" fn rdma_bind_addr(id: *mut rdma_cm_id, address: *mut sockaddr) -> c_int {
    // SAFETY: the same contract.
    errno::result(unsafe { bind_addr(id, address) })
}

pub(crate) unsafe fn bind_addr(id: *mut rdma_cm_id, address: *const sockaddr) -> Result<(), Errno> {
    // SAFETY: by contract.
    let (shared, address) = unsafe { (shared(id)?, address::read(address)?) };
    let address = address.ok_or(libc::EINVAL)?;
    bind(&shared, &mut shared.state(), address)
}

/// Binds the identifier, in a call on it.
pub(crate) fn bind(shared: &Shared, state: &mut State, address: SocketAddr) -> Result<(), Errno> {
    if state.phase != Phase::Idle {
        return Err(libc::EINVAL);
    }
    let opened = with_address(address.ip())?;
    let claimed = opened.map_or_else(|| unspecified(address.ip()), OpenDevice::ip);
    let claim = Claim {
        ip: claimed,
        shared: state.options.reuse,
        afonly: state.options.afonly(address.ip()),
    };
    let binding = PortBinding::new(shared.space, address.port(), claim)?;
    let port = binding.port();
    state.binding = Some(binding);
    shared.set_local(state, SocketAddr::new(address.ip(), port));
    if let Some(opened) = opened {
        shared.set_device(state, opened);
    }
    state.phase = Phase::Bound;
    Ok(())
}

/// rdma_resolve_addr(3): RDMA_CM_EVENT_ADDR_RESOLVED, or RDMA_CM_EVENT_ADDR_ERROR with the routing
/// table's error, or `ENODEV` if the route's interface has no soft device. The timeout is not used.
///
/// # Safety
/// `id` is null or live and ours; the addresses are null, or of the families that they name.
pub unsafe extern "C" fn rdma_resolve_addr(
    id: *mut rdma_cm_id,
    source: *mut sockaddr,
    destination: *mut sockaddr,
    _timeout_ms: c_int,
) -> c_int {
    // SAFETY: the same contract.
    errno::result(unsafe { resolve_addr(id, source, destination) })
}

pub(crate) unsafe fn resolve_addr(
    id: *mut rdma_cm_id,
    source: *const sockaddr,
    destination: *const sockaddr,
) -> Result<(), Errno> {
    // SAFETY: by contract.
    let (shared, source, peer) = unsafe { (shared(id)?, address::read(source)?, address::read(destination)?) };
    let peer = peer.ok_or(libc::EINVAL)?;
    if source.is_some_and(|source| source.is_ipv4() != peer.is_ipv4()) {
        return Err(libc::EINVAL);
    }
    let info = {
        let mut state = shared.state();
        if state.phase == Phase::Idle {
            let anywhere = || SocketAddr::new(unspecified(peer.ip()), 0);
            bind(&shared, &mut state, source.unwrap_or_else(anywhere))?;
        }
        if state.phase != Phase::Bound {
            return Err(libc::EINVAL);
        }
        match resolve_device(&shared, &mut state, peer) {
            Ok(()) => EventInfo::plain(RDMA_CM_EVENT_ADDR_RESOLVED, 0),
            Err(value) => EventInfo::plain(RDMA_CM_EVENT_ADDR_ERROR, -value),
        }
    };
    shared.notify(info);
    // SAFETY: by contract, and in a call on it.
    unsafe { complete(id) }
}

/// Selects the device that routes to the peer, unless it is already bound to one.
fn resolve_device(shared: &Arc<Shared>, state: &mut State, peer: SocketAddr) -> Result<(), Errno> {
    let opened = match state.opened {
        Some(opened) => opened,
        None => device_for_peer(peer.ip())?,
    };
    // A wildcard means this host, but loopback beside a loopback device can be another process's.
    let other = [peer.ip(), opened.ip()].iter().all(IpAddr::is_loopback) && peer.is_ipv4() == opened.ip().is_ipv4();
    let peer = match is_any(peer.ip()) && !other {
        true => SocketAddr::new(opened.ip(), peer.port()),
        false => peer,
    };
    address::route_from(opened.ip(), peer.ip())?;
    let port = state.binding.as_ref().map_or(0, PortBinding::port);
    shared.set_device(state, opened);
    shared.set_local(state, SocketAddr::new(opened.ip(), port));
    shared.set_peer(state, peer);
    state.phase = Phase::AddressResolved;
    Ok(())
}

/// rdma_resolve_route(3): RDMA_CM_EVENT_ROUTE_RESOLVED; the path is stored in the identifier.
///
/// # Safety
/// `id` is null or live and ours.
pub unsafe extern "C" fn rdma_resolve_route(id: *mut rdma_cm_id, _timeout_ms: c_int) -> c_int {
    // SAFETY: the same contract.
    errno::result(unsafe { resolve_route(id) })
}

pub(crate) unsafe fn resolve_route(id: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: by contract.
    let shared = unsafe { shared(id) }?;
    {
        let mut state = shared.state();
        let Some(opened) = state.opened.filter(|_| state.phase == Phase::AddressResolved) else {
            return Err(libc::EINVAL);
        };
        state.phase = Phase::RouteResolved;
        // SAFETY: in a call on it; the union of GIDs was filled with the addresses.
        unsafe {
            let ends = (*id).route.addr.addr.ibaddr;
            let path = ibv_sa_path_rec {
                dgid: ends.dgid,
                sgid: ends.sgid,
                dlid: 0,
                slid: 0,
                raw_traffic: 0,
                flow_label: 0,
                hop_limit: HOP_LIMIT,
                traffic_class: state.options.traffic_class,
                reversible: 1,
                numb_path: 1,
                pkey: PKEY.to_be(),
                sl: 0,
                mtu_selector: EXACTLY,
                mtu: opened.device.mtu() as u8,
                rate_selector: EXACTLY,
                rate: RATE,
                packet_life_time_selector: EXACTLY,
                packet_life_time: PACKET_LIFE_TIME,
                preference: 0,
            };
            (*id).route.path_rec = Box::into_raw(Box::new(path));
            (*id).route.num_paths = 1;
        }
    }
    shared.notify(EventInfo::plain(RDMA_CM_EVENT_ROUTE_RESOLVED, 0));
    // SAFETY: by contract, and in a call on it.
    unsafe { complete(id) }
}

/// # Safety
/// `id` is live and ours, and in a call on it.
pub(crate) unsafe fn free_path(id: *mut rdma_cm_id) {
    // SAFETY: by contract; it came from a Box, above.
    unsafe {
        let path = ptr::replace(&raw mut (*id).route.path_rec, ptr::null_mut());
        if !path.is_null() {
            drop(Box::from_raw(path));
        }
    }
}

/// rdma_get_src_port(3): in network order; 0 if none.
///
/// # Safety
/// `id` is live and ours.
pub unsafe extern "C" fn rdma_get_src_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: by contract.
    unsafe { port_of(id, |state| state.local) }
}

/// rdma_get_dst_port(3): in network order; 0 if none.
///
/// # Safety
/// `id` is live and ours.
pub unsafe extern "C" fn rdma_get_dst_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: by contract.
    unsafe { port_of(id, |state| state.peer) }
}

unsafe fn port_of(id: *mut rdma_cm_id, which: fn(&State) -> Option<SocketAddr>) -> u16 {
    // SAFETY: by contract.
    let found = unsafe { shared(id) }.ok().and_then(|shared| which(&shared.state()));
    found.map_or(0, |address| address.port()).to_be()
}
