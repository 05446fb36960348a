//! Refused calls and their errors.

use std::net::{IpAddr, SocketAddr};
use std::ptr;

use doorbell_softroce_rdmacm::*;
use doorbell_verbs_sys::rdmacm::*;
use doorbell_verbs_sys::*;

use crate::common::*;

#[test]
fn addresses() {
    let id = Id::new(ptr::null_mut(), RDMA_PS_TCP);
    let bind = |to: &str| {
        let to: SocketAddr = to.parse().unwrap();
        // SAFETY: live.
        unsafe { rdma_bind_addr(id.0, at(&sys(to))) }
    };
    // RFC 5737: reserved for documentation.
    fails(bind("192.0.2.1:7471"), libc::EADDRNOTAVAIL);
    // An address of this host, but not of a soft device of this process.
    if let Some(other) = global_address() {
        fails(bind(&SocketAddr::new(other, 7471).to_string()), libc::ENODEV);
    }
    // SAFETY: live.
    unsafe {
        fails(rdma_bind_addr(id.0, ptr::null_mut()), libc::EINVAL);
        fails(rdma_bind_addr(ptr::null_mut(), at(&sys(fresh(1)))), libc::EINVAL);
    }
    let address = fresh(1);
    bind(&address.to_string());
    fails(bind(&fresh(1).to_string()), libc::EINVAL);
    let other = Id::new(ptr::null_mut(), RDMA_PS_TCP);
    // SAFETY: live.
    fails(unsafe { rdma_bind_addr(other.0, at(&sys(address))) }, libc::EADDRINUSE);
    id.destroy();
    // SAFETY: live.
    ok(unsafe { rdma_bind_addr(other.0, at(&sys(address))) });
    other.destroy();
}

/// An address of an interface of this host other than loopback, if it has one.
fn global_address() -> Option<IpAddr> {
    let found = nix::ifaddrs::getifaddrs()
        .unwrap()
        .filter_map(|interface| interface.address);
    let mut global = found.filter_map(|address| Some(IpAddr::V4(address.as_sockaddr_in()?.ip())));
    global.find(|ip| !ip.is_loopback())
}

#[test]
fn no_route() {
    let id = Id::new(ptr::null_mut(), RDMA_PS_TCP);
    let (own, unassigned) = (sys(fresh(1)), sys("192.0.2.1:7471".parse().unwrap()));
    // SAFETY: live.
    unsafe {
        fails(
            rdma_resolve_addr(id.0, at(&unassigned), at(&unassigned), 1000),
            libc::EADDRNOTAVAIL,
        );
        // From loopback to a global address.
        assert_eq!(rdma_resolve_addr(id.0, at(&own), at(&unassigned), 1000), -1);
        assert_eq!((*id.get().event).event, RDMA_CM_EVENT_ADDR_ERROR);
        assert_eq!((*id.get().event).status, -errno());
        ok(rdma_resolve_addr(id.0, ptr::null_mut(), at(&sys(fresh(2))), 1000));
    }
    id.destroy();
}

#[test]
fn calls_in_the_wrong_phase() {
    let id = Id::new(ptr::null_mut(), RDMA_PS_TCP);
    // SAFETY: all is live, or null.
    unsafe {
        fails(rdma_resolve_route(id.0, 1000), libc::EINVAL);
        fails(rdma_connect(id.0, &mut param(b"")), libc::EINVAL);
        fails(rdma_accept(id.0, &mut param(b"")), libc::EINVAL);
        fails(rdma_reject(id.0, ptr::null(), 0), libc::EINVAL);
        fails(rdma_disconnect(id.0), libc::EINVAL);
        fails(rdma_establish(id.0), libc::EINVAL);
        fails(rdma_notify(id.0, IBV_EVENT_COMM_EST), libc::EINVAL);
        fails(rdma_create_qp(id.0, ptr::null_mut(), &mut qp_init()), libc::EINVAL);
        fails(rdma_listen(ptr::null_mut(), 1), libc::EINVAL);
        ok(rdma_resolve_addr(id.0, ptr::null_mut(), at(&sys(fresh(1))), 1000));
        ok(rdma_resolve_route(id.0, 1000));
        let mut greedy = param(b"");
        greedy.initiator_depth = 200;
        fails(rdma_connect(id.0, &mut greedy), libc::EINVAL);
        fails(rdma_connect(id.0, &mut param(&[0; 57])), libc::EINVAL);
        fails(rdma_listen(id.0, 1), libc::EINVAL);
    }
    id.destroy();
}

#[test]
fn options() {
    let id = Id::new(ptr::null_mut(), RDMA_PS_TCP);
    let set = |level: u32, option: u32, value: &mut [u8]| {
        // SAFETY: live; so many bytes are there.
        unsafe {
            rdma_set_option(
                id.0,
                level as i32,
                option as i32,
                value.as_mut_ptr().cast(),
                value.len(),
            )
        }
    };
    ok(set(RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &mut [8]));
    ok(set(RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &mut [14]));
    ok(set(RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &mut [1, 0, 0, 0]));
    ok(set(RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &mut [1, 0, 0, 0]));
    fails(set(RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &mut [32]), libc::EINVAL);
    fails(set(RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &mut [1, 0]), libc::EINVAL);
    fails(set(RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &mut [1]), libc::EINVAL);
    fails(set(RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, &mut [0; 64]), libc::ENOSYS);
    fails(set(9, 9, &mut [1]), libc::ENOSYS);
    id.destroy();
}

#[test]
fn unsupported_features() {
    let mut id = ptr::null_mut();
    // SAFETY: `id` may be written; nothing is touched.
    unsafe {
        let created = rdma_create_id(ptr::null_mut(), &mut id, ptr::null_mut(), RDMA_PS_IPOIB);
        fails(created, libc::EPROTONOSUPPORT);
        fails(rdma_get_cm_event(ptr::null_mut(), &mut ptr::null_mut()), libc::EINVAL);
        fails(rdma_ack_cm_event(ptr::null_mut()), libc::EINVAL);
        fails(rdma_destroy_id(ptr::null_mut()), libc::EINVAL);
    }
    fails(rsocket(libc::AF_INET, libc::SOCK_STREAM, 0), libc::EOPNOTSUPP);
    assert_eq!(rsend(0, ptr::null(), 0, 0), -1);
    assert_eq!(riowrite(0, ptr::null(), 0, 0, 0), usize::MAX);
}

#[test]
fn devices_are_listed_open() {
    devices();
    let mut count = 0;
    // SAFETY: the list ends with a null pointer, and is freed once.
    unsafe {
        let list = rdma_get_devices(&mut count);
        assert_eq!(count, 2);
        assert!(!(*list).is_null() && (*list.add(2)).is_null());
        rdma_free_devices(list);
    }
}

#[test]
fn events_have_names() {
    let name = |event| {
        // SAFETY: a static string.
        unsafe { std::ffi::CStr::from_ptr(rdma_event_str(event)) }
            .to_str()
            .unwrap()
    };
    assert_eq!(name(RDMA_CM_EVENT_ESTABLISHED), "RDMA_CM_EVENT_ESTABLISHED");
    assert_eq!(name(RDMA_CM_EVENT_TIMEWAIT_EXIT), "RDMA_CM_EVENT_TIMEWAIT_EXIT");
    assert_eq!(name(16), "UNKNOWN EVENT");
    assert_eq!(name(u32::MAX), "UNKNOWN EVENT");
}
