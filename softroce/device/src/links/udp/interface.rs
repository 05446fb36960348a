//! The interface of an address: its MTU and its state.

use super::sys;
use doorbell_roce_proto::Mtu;
use nix::errno::Errno;
use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use nix::net::if_::{InterfaceFlags, if_nametoindex};
use nix::sys::socket::{AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket};
use std::net::{IpAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

/// The MTU without a known interface, as of Ethernet.
const DEFAULT_MTU: u32 = 1500;

/// The MTU in bytes of the interface with the address `ip`, in the network namespace of `socket`.
pub(super) fn mtu_of(socket: &UdpSocket, ip: IpAddr) -> u32 {
    let Some(name) = name_of(ip) else {
        return DEFAULT_MTU;
    };
    sys::interface_mtu(socket.as_fd(), &name).unwrap_or(DEFAULT_MTU)
}

/// The index of the interface with the address `ip`; 0 where there is none.
pub(super) fn index_of(ip: IpAddr) -> u32 {
    name_of(ip).map_or(0, |name| if_nametoindex(&*name).unwrap_or(0))
}

/// The interface with the address, or a loopback one whose subnet has it: `lo` has all of 127/8.
fn name_of(ip: IpAddr) -> Option<String> {
    interface_of(getifaddrs().ok()?, ip)
}

fn interface_of(interfaces: impl Iterator<Item = InterfaceAddress>, ip: IpAddr) -> Option<String> {
    let mut in_subnet = None;
    for interface in interfaces {
        let Some(own) = interface.address.as_ref().and_then(ip_of) else {
            continue;
        };
        if own == ip {
            return Some(interface.interface_name);
        }
        let loopback = interface.flags.contains(InterfaceFlags::IFF_LOOPBACK);
        if in_subnet.is_none() && loopback && shares_subnet(&interface, own, ip) {
            in_subnet = Some(interface.interface_name);
        }
    }
    in_subnet
}

/// The state of the port of an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PortState {
    /// The interface is up, with a link.
    pub active: bool,
    /// The interface has the address.
    pub addressed: bool,
    /// The interface's index; 0 where it is unknown.
    pub interface: u32,
    /// The largest path MTU of the interface; `None` where it is unknown.
    pub mtu: Option<Mtu>,
}

impl PortState {
    /// Without a [`PortWatch`].
    pub(crate) const UNKNOWN: Self = Self {
        active: true,
        addressed: true,
        interface: 0,
        mtu: None,
    };
}

/// Watches an address's interface: rtnetlink(7) notifies without privilege, getifaddrs(3) reads the
/// state. Changes that are undone between two reads are not seen.
pub(super) struct PortWatch {
    notices: Arc<OwnedFd>,
    ip: IpAddr,
    interface: String,
}

impl PortWatch {
    /// `None` when no interface has `ip`, or rtnetlink is unavailable.
    pub(super) fn new(ip: IpAddr) -> Option<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let notices = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute).ok()?;
        let groups = libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR;
        bind(notices.as_raw_fd(), &NetlinkAddr::new(0, groups as u32)).ok()?;
        Some(Self {
            notices: Arc::new(notices),
            ip,
            interface: name_of(ip)?,
        })
    }

    /// Readable when [`changed`](Self::changed) is to be called.
    pub(super) fn notices(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.notices)
    }

    /// The state, if there were notifications since the last call. Never blocks.
    pub(super) fn changed(&mut self) -> Option<PortState> {
        let mut notified = false;
        let mut notice = [0_u8; 4096];
        // A notification overflow is a notification, too.
        while let Ok(1..) | Err(Errno::ENOBUFS | Errno::EINTR) =
            recv(self.notices.as_raw_fd(), &mut notice, MsgFlags::MSG_DONTWAIT)
        {
            notified = true;
        }
        if notified { self.state() } else { None }
    }

    /// The state now; `None` when it cannot be read.
    pub(super) fn state(&mut self) -> Option<PortState> {
        let interfaces: Vec<_> = getifaddrs().ok()?.collect();
        let owner = interface_of(interfaces.iter().cloned(), self.ip);
        let addressed = owner.is_some();
        if let Some(owner) = owner {
            self.interface = owner;
        }
        let running = InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING;
        let active = interfaces
            .iter()
            .any(|entry| entry.interface_name == self.interface && entry.flags.contains(running));
        Some(PortState {
            active,
            addressed,
            interface: if_nametoindex(&*self.interface).unwrap_or(0),
            mtu: sys::interface_mtu(self.notices.as_fd(), &self.interface)
                .ok()
                .and_then(Mtu::for_netdev),
        })
    }
}

fn ip_of(address: &nix::sys::socket::SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
    v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
}

fn shares_subnet(interface: &InterfaceAddress, own: IpAddr, ip: IpAddr) -> bool {
    match (own, ip, interface.netmask.as_ref().and_then(ip_of)) {
        (IpAddr::V4(own), IpAddr::V4(ip), Some(IpAddr::V4(mask))) => own & mask == ip & mask,
        (IpAddr::V6(own), IpAddr::V6(ip), Some(IpAddr::V6(mask))) => own & mask == ip & mask,
        _ => false,
    }
}
