//! Which interface an address belongs to, and how large its frames are.

use super::sys;
use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use std::net::{IpAddr, UdpSocket};
use std::os::fd::AsFd;

/// What is assumed when no interface claims an address, as an Ethernet has it.
const DEFAULT_MTU: u32 = 1500;

/// The MTU in bytes of the interface that has the address `ip`, in the network namespace of `socket`.
pub(super) fn mtu_of(socket: &UdpSocket, ip: IpAddr) -> u32 {
    let Some(name) = name_of(ip) else {
        return DEFAULT_MTU;
    };
    sys::interface_mtu(socket.as_fd(), &name).unwrap_or(DEFAULT_MTU)
}

/// The interface with the address itself; failing that, one whose subnet holds it, as `lo` holds all of 127/8.
fn name_of(ip: IpAddr) -> Option<String> {
    let mut in_subnet = None;
    for interface in getifaddrs().ok()? {
        let Some(own) = interface.address.as_ref().and_then(ip_of) else {
            continue;
        };
        if own == ip {
            return Some(interface.interface_name);
        }
        if in_subnet.is_none() && shares_subnet(&interface, own, ip) {
            in_subnet = Some(interface.interface_name);
        }
    }
    in_subnet
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
