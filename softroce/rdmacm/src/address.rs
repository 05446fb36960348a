//! Socket addresses between C and Rust, and routing table lookups.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};

use libc::{sockaddr, sockaddr_storage};
use nix::sys::socket::{SockaddrLike, SockaddrStorage};

use crate::errno::{self, Errno};

/// # Errors
/// `EAFNOSUPPORT` for another family than IPv4 and IPv6.
///
/// # Safety
/// `address` is null, or points to an address as long as its family requires.
pub(crate) unsafe fn read(address: *const sockaddr) -> Result<Option<SocketAddr>, Errno> {
    if address.is_null() {
        return Ok(None);
    }
    // SAFETY: by contract; without a length it is read by its family.
    let storage = unsafe { SockaddrStorage::from_raw(address, None) }.ok_or(libc::EAFNOSUPPORT)?;
    let v4 = storage.as_sockaddr_in().map(|v4| SocketAddrV4::from(*v4).into());
    let found = v4.or_else(|| storage.as_sockaddr_in6().map(|v6| SocketAddrV6::from(*v6).into()));
    found.map(Some).ok_or(libc::EAFNOSUPPORT)
}

pub(crate) fn to_storage(address: SocketAddr) -> sockaddr_storage {
    let from = SockaddrStorage::from(address);
    // SAFETY: all-zero is a valid sockaddr_storage: integers only.
    let mut storage: sockaddr_storage = unsafe { core::mem::zeroed() };
    // SAFETY: `len` bytes are readable, and a sockaddr_storage has space for any address.
    unsafe {
        from.as_ptr()
            .cast::<u8>()
            .copy_to_nonoverlapping((&raw mut storage).cast(), from.len() as usize);
    }
    storage
}

pub(crate) fn unspecified(like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// Whether Linux's connection manager takes it for a wildcard (`cma_any_addr`).
pub(crate) fn is_any(address: IpAddr) -> bool {
    address.is_unspecified() || address.is_loopback()
}

pub(crate) fn is_local(address: IpAddr) -> bool {
    UdpSocket::bind((address, 0)).is_ok()
}

/// The source address that the host's routing table selects for `peer`. Nothing is sent.
///
/// # Errors
/// Those of connect(2) on a datagram socket, such as `ENETUNREACH`.
pub(crate) fn route_to(peer: IpAddr) -> Result<IpAddr, Errno> {
    let source = || -> io::Result<IpAddr> {
        let socket = UdpSocket::bind((unspecified(peer), 0))?;
        // Any port but 0, which connect(2) refuses for IPv6.
        socket.connect((peer, 1))?;
        Ok(socket.local_addr()?.ip())
    };
    source().map_err(|error| errno::of(&error))
}

/// Whether packets from the local address `from` can be routed to `peer`.
///
/// # Errors
/// Those of bind(2) or connect(2) on a datagram socket; `EINVAL` from loopback to elsewhere.
pub(crate) fn route_from(from: IpAddr, peer: IpAddr) -> Result<(), Errno> {
    if from.is_ipv4() != peer.is_ipv4() {
        return Err(libc::EAFNOSUPPORT);
    }
    let socket = UdpSocket::bind((from, 0)).and_then(|socket| socket.connect((peer, 1)));
    socket.map_err(|error| errno::of(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_addresses_round_trip() {
        for text in ["10.9.0.1:7471", "[fd09::1]:18515", "0.0.0.0:0"] {
            let address: SocketAddr = text.parse().unwrap();
            let storage = to_storage(address);
            // SAFETY: a sockaddr_storage has space for any address.
            let read = unsafe { read((&raw const storage).cast()) };
            assert_eq!(read, Ok(Some(address)));
        }
        // SAFETY: all-zero is a valid sockaddr_storage.
        let mut other: sockaddr_storage = unsafe { core::mem::zeroed() };
        other.ss_family = libc::AF_UNIX as libc::sa_family_t;
        // SAFETY: as above.
        assert_eq!(unsafe { read((&raw const other).cast()) }, Err(libc::EAFNOSUPPORT));
        // SAFETY: null is allowed.
        assert_eq!(unsafe { read(core::ptr::null()) }, Ok(None));
    }

    #[test]
    fn route_to_loopback_is_loopback() {
        let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
        assert_eq!(route_to(loopback), Ok(loopback));
        assert!(is_local(loopback));
        // RFC 5737: reserved for documentation.
        assert!(!is_local("192.0.2.1".parse().unwrap()));
    }
}
