//! Port events: the loopback interface of a network namespace, in which the test runs itself again,
//! goes down, loses the device's address, and recovers.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;

use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_verbs_sys::*;

/// Set in the process inside the namespace.
const INSIDE: &str = "DOORBELL_TEST_PORT_INSIDE";

#[test]
fn port_events() {
    if std::env::var_os(INSIDE).is_some() {
        return inside();
    }
    let unshare = |command: &mut Command| command.status().is_ok_and(|status| status.success());
    if !unshare(Command::new("unshare").args(["-rn", "true"])) {
        println!("skipped: this machine does not permit network namespaces");
        return;
    }
    let test = std::env::current_exe().unwrap();
    let passed = unshare(
        Command::new("unshare")
            .arg("-rn")
            .arg(test)
            .arg("--nocapture")
            .env(INSIDE, "1"),
    );
    assert!(passed, "the test in the namespace failed");
}

fn ioctl(request: libc::Ioctl, fill: impl FnOnce(&mut libc::ifreq)) {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    // SAFETY: all-zero is an ifreq.
    let mut ifreq: libc::ifreq = unsafe { MaybeUninit::zeroed().assume_init() };
    ifreq.ifr_name[0] = b'l' as _;
    ifreq.ifr_name[1] = b'o' as _;
    fill(&mut ifreq);
    // SAFETY: the request reads and writes an ifreq, which is live.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), request, &raw mut ifreq) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

fn set_up(up: bool) {
    let flags = if up { libc::IFF_UP | libc::IFF_RUNNING } else { 0 };
    ioctl(libc::SIOCSIFFLAGS, |ifreq| {
        ifreq.ifr_ifru.ifru_flags = flags as _;
    });
}

fn set_mtu(mtu: i32) {
    ioctl(libc::SIOCSIFMTU, |ifreq| {
        ifreq.ifr_ifru.ifru_mtu = mtu;
    });
}

/// Adds or removes an address of the loopback interface, by rtnetlink(7).
fn set_address(address: Ipv4Addr, there: bool) {
    const REQUEST: libc::c_int = libc::NLM_F_REQUEST | libc::NLM_F_ACK;
    let (kind, flags) = if there {
        (libc::RTM_NEWADDR, REQUEST | libc::NLM_F_CREATE)
    } else {
        (libc::RTM_DELADDR, REQUEST)
    };
    let mut message = Vec::new();
    // nlmsghdr: length, type, flags, sequence number, port.
    message.extend(32_u32.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend((flags as u16).to_ne_bytes());
    message.extend([0; 8]);
    // ifaddrmsg: family, prefix, flags, scope, index of the namespace's first interface.
    message.extend([libc::AF_INET as u8, 32, 0, 0]);
    message.extend(1_u32.to_ne_bytes());
    // rtattr: length, type, value.
    message.extend(8_u16.to_ne_bytes());
    message.extend(libc::IFA_LOCAL.to_ne_bytes());
    message.extend(address.octets());
    // SAFETY: plain calls on a descriptor made here, with live buffers of the lengths given.
    let (length, reply) = unsafe {
        let socket = libc::socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE);
        let socket = OwnedFd::from_raw_fd(socket);
        let sent = libc::send(socket.as_raw_fd(), message.as_ptr().cast(), message.len(), 0);
        assert_eq!(sent, 32);
        let mut reply = [0_u8; 64];
        let length = libc::recv(socket.as_raw_fd(), reply.as_mut_ptr().cast(), reply.len(), 0);
        (length, reply)
    };
    // nlmsgerr: 0 on success.
    assert!(length >= 20 && reply[16..20] == [0; 4], "{reply:?}");
}

fn next_event(context: *mut ibv_context) -> ibv_event_type {
    let mut event = MaybeUninit::<ibv_async_event>::uninit();
    // SAFETY: live; filled on success.
    unsafe {
        assert_eq!((api().get_async_event)(context, event.as_mut_ptr()), 0);
        (api().ack_async_event)(event.as_mut_ptr());
        let event = event.assume_init();
        assert_eq!(event.element.port_num, 1);
        event.event_type
    }
}

fn port_state(context: *mut ibv_context) -> ibv_port_state {
    port(context).state
}

fn port(context: *mut ibv_context) -> ibv_port_attr {
    let mut port = MaybeUninit::<ibv_port_attr>::uninit();
    // SAFETY: live; filled on success.
    unsafe {
        assert_eq!(inline::query_port(api(), context, 1, port.as_mut_ptr()), 0);
        port.assume_init()
    }
}

fn gids(context: *mut ibv_context) -> (isize, [u8; 16]) {
    const INDEX: u32 = 3;
    let mut gid = MaybeUninit::<ibv_gid>::uninit();
    let mut entries = [const { MaybeUninit::<ibv_gid_entry>::uninit() }; 4];
    let entry = entries[0].as_mut_ptr();
    let size = size_of::<ibv_gid_entry>();
    // SAFETY: live, with room for all; filled on success.
    unsafe {
        let count = api().query_gid_table.unwrap()(context, entry, entries.len(), 0, size);
        let found = api().query_gid_ex.unwrap()(context, 1, INDEX, entry, 0, size);
        assert_eq!(found, if count == 4 { 0 } else { libc::ENODATA });
        // The namespace's only interface.
        assert!(count == 0 || (*entry).ndev_ifindex == 1);
        assert_eq!((api().query_gid)(context, 1, INDEX as i32, gid.as_mut_ptr()), 0);
        (count, gid.assume_init().raw)
    }
}

fn inside() {
    let address = Ipv4Addr::new(10, 1, 1, 1);
    set_up(true);
    set_address(address, true);
    let mut config = DeviceConfig::new("soft0");
    config.address = Some(IpAddr::V4(address));
    configure(vec![config]).unwrap();
    // SAFETY: the list has one device; what it points to stays.
    let open = || unsafe {
        let list = (api().get_device_list)(std::ptr::null_mut());
        assert_eq!(CStr::from_ptr((api().get_device_name)(*list)), c"soft0");
        let context = (api().open_device)(*list);
        (api().free_device_list)(list);
        assert!(!context.is_null());
        context
    };
    // Every context gets every event.
    let (one, two) = (open(), open());
    let events = |expected: ibv_event_type| {
        assert_eq!((next_event(one), next_event(two)), (expected, expected));
    };
    assert_eq!(port_state(one), IBV_PORT_ACTIVE);
    let (count, gid) = gids(one);
    assert_eq!((count, &gid[12..]), (4, &address.octets()[..]));
    // Busy-polling and asleep.
    for _ in 0..3 {
        set_up(false);
        events(IBV_EVENT_PORT_ERR);
        assert_eq!(port_state(two), IBV_PORT_DOWN);
        std::thread::sleep(std::time::Duration::from_millis(30));
        set_up(true);
        events(IBV_EVENT_PORT_ACTIVE);
        assert_eq!(port_state(two), IBV_PORT_ACTIVE);
    }
    // As on rxe, no event: the next query has it.
    for (netdev, expected) in [(1500, IBV_MTU_1024), (4200, IBV_MTU_4096), (600, IBV_MTU_512)] {
        set_mtu(netdev);
        let since = std::time::Instant::now();
        while port(one).active_mtu != expected {
            assert!(since.elapsed().as_secs() < 20, "MTU {netdev}: {}", port(one).active_mtu);
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
    set_address(address, false);
    events(IBV_EVENT_GID_CHANGE);
    assert_eq!(gids(one), (0, [0; 16]));
    assert_eq!(port_state(one), IBV_PORT_ACTIVE);
    set_address(address, true);
    events(IBV_EVENT_GID_CHANGE);
    assert_eq!(gids(one), (4, gid));
    // SAFETY: live, and closed once.
    unsafe {
        assert_eq!((api().close_device)(one), 0);
        set_up(false);
        assert_eq!(next_event(two), IBV_EVENT_PORT_ERR);
        assert_eq!((api().close_device)(two), 0);
    }
    let three = open();
    assert_eq!(port_state(three), IBV_PORT_DOWN);
    // SAFETY: as above.
    assert_eq!(unsafe { (api().close_device)(three) }, 0);
}
