//! Multicast groups of a link: for each one a socket that is bound to the group's address, so that
//! the kernel selects its datagrams, and that every process which receives from the group has.
//!
//! The kernel copies a datagram to all sockets of a group on an interface, also to those of the
//! sending host (`IP_MULTICAST_LOOP`, the default): other devices and processes on the interface,
//! and the sending process itself, receive it like those of other hosts.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use doorbell_roce_proto::Endpoint;
use doorbell_roce_proto::wire::HOP_LIMIT;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, bind, setsockopt, socket, sockopt};

use super::interface::index_of;
use super::socket::Socket;
use super::sys::set_option;
use crate::host::CloseOnFork;
use crate::sync::{AtomicUsize, Mutex, Ordering};

/// Of linux/in6.h, absent from libc.
const IPV6_MULTICAST_ALL: libc::c_int = 29;

/// The sockets of the groups that a link receives from.
#[derive(Clone)]
pub struct MulticastSockets(Arc<Inner>);

struct Inner {
    /// The link's address, which selects the interface.
    local: IpAddr,
    /// Readable while one of the sockets is. Events carry the descriptor's number.
    epoll: Epoll,
    sockets: Mutex<Vec<Arc<Socket>>>,
    /// Their number, for the receiving thread.
    count: AtomicUsize,
}

impl MulticastSockets {
    /// For the link of `socket`, whose multicast packets go to the interface of its address.
    pub(super) fn new(socket: &Socket) -> io::Result<Self> {
        let local = socket.local().ip();
        select_interface(socket, local);
        Ok(Self(Arc::new(Inner {
            local,
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            sockets: Mutex::new(Vec::new()),
            count: AtomicUsize::new(0),
        })))
    }

    /// Receives from a group, with the UDP port of the device. Without effect if it does already.
    ///
    /// # Errors
    /// `InvalidInput` for the other family; `AddrInUse` when a program without SO_REUSEADDR has the
    /// port; or what the kernel refuses.
    pub(crate) fn join(&self, group: SocketAddr) -> io::Result<()> {
        let inner = &*self.0;
        let mut sockets = inner.sockets.lock();
        if sockets.iter().any(|socket| socket.local().ip() == group.ip()) {
            return Ok(());
        }
        let socket = Arc::new(open(group, inner.local)?);
        let event = EpollEvent::new(EpollFlags::EPOLLIN, socket.as_raw_fd() as u64);
        inner.epoll.add(socket.as_fd(), event)?;
        sockets.push(socket);
        inner.count.store(sockets.len(), Ordering::Release);
        Ok(())
    }

    /// Leaves the groups in which `endpoint` has no queue pair any more.
    pub(crate) fn keep_joined(&self, endpoint: &Endpoint) {
        self.keep(|group| endpoint.has_multicast_group(group));
    }

    fn keep(&self, joined: impl Fn(IpAddr) -> bool) {
        let mut sockets = self.0.sockets.lock();
        sockets.retain(|socket| {
            let stays = joined(socket.local().ip());
            if !stays {
                // A receiving thread may hold the socket for longer.
                let _ = self.0.epoll.delete(socket.as_fd());
            }
            stays
        });
        self.0.count.store(sockets.len(), Ordering::Release);
    }

    /// A socket with a datagram, in turn; a system call if there are groups.
    pub(super) fn readable(&self) -> Option<Arc<Socket>> {
        if self.0.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut events = [EpollEvent::empty()];
        if self.0.epoll.wait(&mut events, EpollTimeout::ZERO) != Ok(1) {
            return None;
        }
        let sockets = self.0.sockets.lock();
        let found = sockets
            .iter()
            .find(|socket| socket.as_raw_fd() as u64 == events[0].data());
        found.cloned()
    }
}

impl AsFd for MulticastSockets {
    /// Readable while a socket is.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.epoll.0.as_fd()
    }
}

/// A socket that is a member of the group on the interface of `local`, and of nothing else.
fn open(group: SocketAddr, local: IpAddr) -> io::Result<Socket> {
    match (group.ip(), local) {
        (IpAddr::V4(ip), IpAddr::V4(local)) => {
            let socket = Socket::new(CloseOnFork::create(|| bind_shared(AddressFamily::Inet, group))?)?;
            socket.join_multicast_v4(&ip, &local)?;
            set_option(socket.as_fd(), libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, 0)?;
            Ok(socket)
        }
        (IpAddr::V6(ip), IpAddr::V6(_)) => {
            let interface = index_of(local);
            let group = SocketAddrV6::new(ip, group.port(), 0, interface).into();
            let socket = Socket::new(CloseOnFork::create(|| bind_shared(AddressFamily::Inet6, group))?)?;
            socket.join_multicast_v6(&ip, interface)?;
            set_option(socket.as_fd(), libc::IPPROTO_IPV6, IPV6_MULTICAST_ALL, 0)?;
            Ok(socket)
        }
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// Other processes and devices bind to the same group.
fn bind_shared(family: AddressFamily, group: SocketAddr) -> io::Result<UdpSocket> {
    let fd: OwnedFd = socket(family, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&fd, sockopt::ReuseAddr, &true)?;
    bind(fd.as_raw_fd(), &SockaddrStorage::from(group))?;
    Ok(fd.into())
}

/// Where the kernel refuses, as without an interface, it refuses multicast packets, too.
fn select_interface(socket: &Socket, local: IpAddr) {
    let (level, options) = match local {
        IpAddr::V4(ip) => (
            libc::IPPROTO_IP,
            [
                (libc::IP_MULTICAST_IF, i32::from_ne_bytes(ip.octets())),
                (libc::IP_MULTICAST_TTL, HOP_LIMIT.into()),
            ],
        ),
        IpAddr::V6(_) => (
            libc::IPPROTO_IPV6,
            [
                (libc::IPV6_MULTICAST_IF, index_of(local) as i32),
                (libc::IPV6_MULTICAST_HOPS, HOP_LIMIT.into()),
            ],
        ),
    };
    for (name, value) in options {
        let _ = set_option(socket.as_fd(), level, name, value);
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::links::udp::{Link, RxBatch};

    fn group(last: u8) -> SocketAddr {
        let pid = std::process::id();
        (Ipv4Addr::new(239, 1 + (pid >> 8) as u8 % 250, pid as u8, last), 4791).into()
    }

    fn received(link: &mut Link, batch: &mut RxBatch) -> Vec<(SocketAddr, Vec<u8>)> {
        let mut all = Vec::new();
        while link.rx.receive(batch).unwrap() != 0 {
            all.extend(
                batch
                    .datagrams()
                    .map(|datagram| (datagram.dst, datagram.bytes.to_vec())),
            );
        }
        all
    }

    #[test]
    fn datagrams_of_every_joined_group_beside_those_of_the_link() {
        let mut link = Link::udp("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut batch = RxBatch::new(link.local);
        let groups = [group(101), group(102), group(103)];
        for group in &groups[..2] {
            link.multicast.join(*group).unwrap();
            link.multicast.join(*group).unwrap();
        }
        // As a sender does that never joined anything.
        let sender = Socket::new(CloseOnFork::create(|| UdpSocket::bind("127.0.0.1:0")).unwrap()).unwrap();
        select_interface(&sender, sender.local().ip());
        let send = |link: &Link| {
            for (to, byte) in groups.iter().chain([&link.local]).zip(1..) {
                sender.send_to(&[byte], to).unwrap();
            }
        };
        send(&link);
        let mut found = received(&mut link, &mut batch);
        found.sort();
        let mut expected = vec![(groups[0], vec![1]), (groups[1], vec![2]), (link.local, vec![4])];
        expected.sort();
        assert_eq!(found, expected);
        link.multicast.keep(|group| group != groups[0].ip());
        send(&link);
        let mut found = received(&mut link, &mut batch);
        found.sort();
        assert_eq!(
            found,
            &expected
                .into_iter()
                .filter(|(to, _)| *to != groups[0])
                .collect::<Vec<_>>()[..]
        );
        assert!(link.multicast.join("[ff0e::1]:4791".parse().unwrap()).is_err());
    }
}
