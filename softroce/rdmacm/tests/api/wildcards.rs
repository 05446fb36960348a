//! Wildcard addresses: the unspecified ones, and those of loopback that no device has.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::Command;
use std::{env, fs, ptr};

use doorbell_softroce_rdmacm::*;
use doorbell_verbs_sys::rdmacm::*;

use crate::common::*;

fn local_of(id: Id) -> SocketAddr {
    // SAFETY: the union has the address that was set.
    unsafe { address((&raw const id.get().route.addr.anon_1.src_storage).cast()) }
}

fn peer_of(id: Id) -> SocketAddr {
    // SAFETY: as above.
    unsafe { address((&raw const id.get().route.addr.anon_2.dst_storage).cast()) }
}

/// Takes a request from the listener, and rejects it.
fn expect_request(channel: *mut rdma_event_channel, listener: Id) {
    let event = event(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
    // SAFETY: just taken; its identifier is ours.
    unsafe {
        assert_eq!((*event).listen_id, listener.0);
        let request = Id((*event).id);
        ok(rdma_ack_cm_event(event));
        ok(rdma_reject(request.0, ptr::null(), 0));
        request.destroy();
    }
}

fn connect(client: Id) {
    client.create_qp();
    // SAFETY: live.
    ok(unsafe { rdma_connect(client.0, &mut param(b"")) });
}

#[test]
fn loopback_without_a_device_listens_on_all() {
    let (server, client) = (channel(), channel());
    for loopback in [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()] {
        let at = SocketAddr::new(loopback, fresh(1).port());
        let listener = Id::new(server, RDMA_PS_TCP);
        // SAFETY: live.
        unsafe { ok(rdma_bind_addr(listener.0, self::at(&sys(at)))) };
        assert!(listener.get().verbs.is_null(), "no device yet");
        assert_eq!(local_of(listener), at);
        // SAFETY: live.
        ok(unsafe { rdma_listen(listener.0, 1) });
        for last in [1, 2] {
            let id = resolved(client, RDMA_PS_TCP, SocketAddr::new(own_address(last), at.port()));
            connect(id);
            expect_request(server, listener);
            expect_event(client, RDMA_CM_EVENT_REJECTED);
            id.destroy();
        }
        listener.destroy();
    }
}

#[test]
fn loopback_and_the_unspecified_address_resolve_to_a_device() {
    let (server, client) = (channel(), channel());
    // No device has an address of the family, as none has a loopback address where an interface's
    // address is configured.
    for ip in [Ipv6Addr::LOCALHOST, Ipv6Addr::UNSPECIFIED] {
        let to = SocketAddr::new(ip.into(), fresh(1).port());
        let listener = Id::listening(server, RDMA_PS_TCP, SocketAddr::new(own_address(1), to.port()));
        let id = resolved(client, RDMA_PS_TCP, to);
        assert_eq!(local_of(id).ip(), own_address(1));
        assert_eq!(peer_of(id), SocketAddr::new(own_address(1), to.port()));
        connect(id);
        expect_request(server, listener);
        expect_event(client, RDMA_CM_EVENT_REJECTED);
        id.destroy();
        listener.destroy();
    }
}

fn set(id: Id, option: u32, mut value: i32) -> i32 {
    let (level, option) = (RDMA_OPTION_ID as i32, option as i32);
    // SAFETY: live; the option has the length of an int.
    unsafe { rdma_set_option(id.0, level, option, (&raw mut value).cast(), size_of_val(&value)) }
}

fn bind(id: Id, afonly: Option<i32>, to: SocketAddr) -> i32 {
    if let Some(afonly) = afonly {
        ok(set(id, RDMA_OPTION_ID_AFONLY, afonly));
    }
    // SAFETY: live.
    unsafe { rdma_bind_addr(id.0, at(&sys(to))) }
}

/// Until it listens, what an identifier permits others changes for them, too.
#[test]
fn options_of_a_bound_identifier_count_from_then_on() {
    let port = fresh(1).port();
    let v4 = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port);
    let v6 = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port);
    let [first, second, third] = [0; 3].map(|_| Id::new(ptr::null_mut(), RDMA_PS_TCP));
    ok(bind(first, Some(0), v4));
    fails(bind(second, Some(1), v6), libc::EADDRNOTAVAIL);
    ok(set(first, RDMA_OPTION_ID_AFONLY, 1));
    ok(bind(second, Some(1), v6));
    ok(set(third, RDMA_OPTION_ID_REUSEADDR, 1));
    fails(bind(third, None, v4), libc::EADDRNOTAVAIL);
    for id in [first, second] {
        ok(set(id, RDMA_OPTION_ID_REUSEADDR, 1));
        fails(set(id, RDMA_OPTION_ID_REUSEADDR, 0), libc::EINVAL);
    }
    ok(bind(third, None, v4));
    third.destroy();
    // SAFETY: live.
    ok(unsafe { rdma_listen(first.0, 1) });
    fails(set(first, RDMA_OPTION_ID_AFONLY, 0), libc::EINVAL);
    fails(set(first, RDMA_OPTION_ID_REUSEADDR, 1), libc::EINVAL);
    first.destroy();
    second.destroy();
}

#[test]
fn a_family_without_a_device_can_be_listened_on() {
    let id = Id::new(ptr::null_mut(), RDMA_PS_TCP);
    let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), fresh(1).port());
    ok(bind(id, Some(1), any));
    // SAFETY: live.
    ok(unsafe { rdma_listen(id.0, 1) });
    id.destroy();
}

#[test]
fn families_share_a_port_if_both_are_used_without_the_other() {
    let (none, both, only) = (None, Some(0), Some(1));
    // An IPv4 address means IPv4 only, unless the option says otherwise.
    for (v4, v6, shared) in [
        (only, only, true),
        (none, only, true),
        (none, none, false),
        (both, only, false),
    ] {
        let port = fresh(1).port();
        let [first, second] = [0; 2].map(|_| Id::new(ptr::null_mut(), RDMA_PS_TCP));
        ok(bind(first, v4, SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port)));
        let bound = bind(second, v6, SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port));
        match shared {
            true => ok(bound),
            // Linux's value where one of two addresses is a wildcard.
            false => fails(bound, libc::EADDRNOTAVAIL),
        }
        first.destroy();
        second.destroy();
    }
}

/// In a network namespace, in which the test runs itself again.
#[test]
fn an_ipv6_wildcard_is_of_its_family_alone_where_the_system_says_so() {
    const SETTING: &str = "/proc/sys/net/ipv6/bindv6only";
    if fs::read_to_string(SETTING).is_ok_and(|text| text.trim() == "1") {
        let port = fresh(1).port();
        let [first, second] = [0; 2].map(|_| Id::new(ptr::null_mut(), RDMA_PS_TCP));
        ok(bind(first, None, SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port)));
        ok(bind(second, None, SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port)));
        first.destroy();
        second.destroy();
        return;
    }
    let prepare = format!("ip link set lo up && echo 1 > {SETTING}");
    let inside = |script: &str| {
        let mut command = Command::new("unshare");
        command
            .args(["-rn", "sh", "-c", script])
            .arg(env::current_exe().unwrap());
        command.status().is_ok_and(|status| status.success())
    };
    if !inside(&prepare) {
        println!("skipped: this machine does not permit network namespaces, or has no ip(8)");
        return;
    }
    let name = "an_ipv6_wildcard_is_of_its_family_alone_where_the_system_says_so";
    let run = format!("{prepare} && exec \"$0\" wildcards::{name} --exact --nocapture");
    assert!(inside(&run), "the test in the namespace failed");
}
