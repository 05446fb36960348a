//! Socket addresses of identifiers.

use std::net::{SocketAddr, SocketAddrV4, SocketAddrV6};

use doorbell_verbs_sys::rdmacm::rdma_cm_id;
use nix::libc::sockaddr;
use nix::sys::socket::{SockaddrLike, SockaddrStorage};

/// The local address of an identifier; `None` while it has none.
///
/// # Safety
/// `id` is live, and nothing changes it meanwhile.
pub(super) unsafe fn local(id: *const rdma_cm_id) -> Option<SocketAddr> {
    // SAFETY: live by contract; librdmacm zeroes the whole union before it sets any part of it, so
    // it is a sockaddr of the family it names, or of none.
    unsafe { from_sys((&raw const (*id).route.addr.anon_1).cast()) }
}

/// The peer's address; `None` while it has none.
///
/// # Safety
/// As for [`local`].
pub(super) unsafe fn peer(id: *const rdma_cm_id) -> Option<SocketAddr> {
    // SAFETY: as above.
    unsafe { from_sys((&raw const (*id).route.addr.anon_2).cast()) }
}

/// # Safety
/// `address` points to as many bytes as the family that it names takes.
unsafe fn from_sys(address: *const sockaddr) -> Option<SocketAddr> {
    // SAFETY: by contract; without a length it is read by its family.
    let address = unsafe { SockaddrStorage::from_raw(address, None) }?;
    let v4 = address.as_sockaddr_in().map(|v4| SocketAddrV4::from(*v4).into());
    v4.or_else(|| address.as_sockaddr_in6().map(|v6| SocketAddrV6::from(*v6).into()))
}
