//! The link over a plain UDP socket, without privilege.
//!
//! The socket stays unconnected with `IP_MTU_DISCOVER` = PROBE: only then does the kernel send IPv4
//! Identification 0 (*i* for segment *i* of a run), which the ICRC covers. Not DO: a forged ICMP
//! "fragmentation needed" could shrink the path MTU. What the host refuses is dropped, with each
//! kind of refusal logged once: the transport retransmits.

use super::files::LinkFiles;
use super::interface::PortWatch;
use super::multicast::MulticastSockets;
use super::rx::{RxBatch, SLOT};
use super::socket::{Socket, TakenOver};
use super::sys::{self, Outgoing, RECEIVE_MESSAGES};
use super::tx::TxBatch;
use super::{Link, Port, Receive, Transmit, interface};
use crate::host::{CloseOnFork, JoinError};
use doorbell_roce_proto::Instant;
use doorbell_roce_proto::wire::HOP_LIMIT;
use nix::errno::Errno;
use nix::sys::socket::{getsockopt, sockopt};
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

#[cfg(test)]
mod tests;

/// The UDP destination port of RoCEv2 (IBTA vol. 1, annex A17).
pub(crate) const ROCE_PORT: u16 = 4791;

/// Requested for each direction; the kernel limits it to `net.core.[rw]mem_max`.
const SOCKET_BUFFER: i32 = 16 << 20;

/// Why a link could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another socket has the address and port.
    #[error(
        "{addr} is in use: another soft device, or the kernel's rxe in this network namespace, holds UDP port {port}; \
         end it, or choose another address or port",
        port = addr.port()
    )]
    AddressInUse {
        /// The requested address.
        addr: SocketAddr,
    },
    /// No interface has the address.
    #[error("{addr} cannot be bound: no interface here has the address {ip}", ip = addr.ip())]
    AddressNotAvailable {
        /// The requested address.
        addr: SocketAddr,
    },
    /// The process is not permitted to use the port, or any socket.
    #[error("{addr} cannot be bound: not permitted to hold UDP port {port} here", port = addr.port())]
    PermissionDenied {
        /// The requested address.
        addr: SocketAddr,
    },
    /// A wildcard, multicast or broadcast address: the ICRC covers the source address.
    #[error("{addr} cannot be bound: a RoCEv2 device has one unicast address, such as 127.0.0.1")]
    NotUnicast {
        /// The requested address.
        addr: SocketAddr,
    },
    /// It cannot be shared with the processes that use it.
    #[error(transparent)]
    NotShared(JoinError),
    /// Any other error.
    #[error("{addr} cannot be bound: {error}")]
    Io {
        /// The requested address.
        addr: SocketAddr,
        /// The cause.
        error: io::Error,
    },
}

impl From<JoinError> for BindError {
    fn from(error: JoinError) -> Self {
        match error {
            JoinError::Port { address, error } => Self::new(address, error),
            other => Self::NotShared(other),
        }
    }
}

impl BindError {
    pub(crate) fn new(addr: SocketAddr, error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::AddrInUse => Self::AddressInUse { addr },
            io::ErrorKind::AddrNotAvailable => Self::AddressNotAvailable { addr },
            io::ErrorKind::PermissionDenied => Self::PermissionDenied { addr },
            _ => Self::Io { addr, error },
        }
    }
}

/// The canonical form of a unicast address.
pub(crate) fn require_unicast(addr: SocketAddr) -> Result<SocketAddr, BindError> {
    let addr = SocketAddr::new(addr.ip().to_canonical(), addr.port());
    let unicast = match addr.ip() {
        IpAddr::V4(ip) => !ip.is_broadcast(),
        IpAddr::V6(_) => true,
    };
    if !unicast || addr.ip().is_unspecified() || addr.ip().is_multicast() {
        return Err(BindError::NotUnicast { addr });
    }
    Ok(addr)
}

pub(super) fn bind(addr: SocketAddr) -> Result<Link, BindError> {
    let addr = require_unicast(addr)?;
    let bound = CloseOnFork::create(|| UdpSocket::bind(addr)).and_then(open);
    bound.map_err(|error| BindError::new(addr, error))
}

pub(super) fn open(socket: CloseOnFork<UdpSocket>) -> io::Result<Link> {
    let socket = Socket::new(socket)?;
    let multicast = MulticastSockets::new(&socket)?;
    let local = socket.local();
    let mtu = interface::mtu_of(&socket, local.ip());
    let receive_buffer = getsockopt(&socket, sockopt::RcvBuf)?;
    let socket = Arc::new(socket);
    let taken_over = TakenOver::default();
    let port = Port::new(PortWatch::new(local.ip()));
    let sending_half = || UdpTx {
        socket: Arc::clone(&socket),
        gso: true,
        refused: Refusals::default(),
    };
    Ok(Link {
        local,
        mtu,
        receive_buffer,
        files: LinkFiles {
            socket: Arc::clone(&socket),
            taken_over: taken_over.clone(),
            multicast: multicast.clone(),
            port: port.notices(),
        },
        port,
        multicast: multicast.clone(),
        tx: Box::new(sending_half()),
        acks: Some(Box::new(sending_half())),
        rx: Box::new(UdpRx {
            socket,
            taken_over,
            multicast,
            next: 0,
            expected: [1; 3],
        }),
    })
}

pub(super) fn set_options(fd: BorrowedFd<'_>, is_ipv4: bool) -> io::Result<()> {
    if is_ipv4 {
        sys::set_option(fd, libc::IPPROTO_IP, libc::IP_TTL, HOP_LIMIT.into())?;
        sys::set_option(fd, libc::IPPROTO_IP, libc::IP_RECVTOS, 1)?;
        sys::set_option(fd, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE)?;
    } else {
        sys::set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS, HOP_LIMIT.into())?;
        sys::set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1)?;
        sys::set_option(
            fd,
            libc::IPPROTO_IPV6,
            libc::IPV6_MTU_DISCOVER,
            libc::IPV6_PMTUDISC_PROBE,
        )?;
        // The kernel's rxe sends no UDP checksum; the ICRC covers more than it would.
        sys::set_option(fd, libc::SOL_UDP, sys::UDP_NO_CHECK6_RX, 1)?;
    }
    // Without GRO (before Linux 5.0) datagrams are received one by one.
    let _ = sys::set_option(fd, libc::SOL_UDP, libc::UDP_GRO, 1);
    for (force, plain) in [
        (libc::SO_RCVBUFFORCE, libc::SO_RCVBUF),
        (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF),
    ] {
        if sys::set_option(fd, libc::SOL_SOCKET, force, SOCKET_BUFFER).is_err() {
            sys::set_option(fd, libc::SOL_SOCKET, plain, SOCKET_BUFFER)?;
        }
    }
    Ok(())
}

struct UdpTx {
    socket: Arc<Socket>,
    gso: bool,
    refused: Refusals,
}

impl Transmit for UdpTx {
    fn transmit(&mut self, batch: &mut TxBatch, _now: Instant) -> io::Result<()> {
        if !self.gso && batch.runs().any(|run| run.packets > 1) {
            batch.separate();
        }
        while !batch.is_empty() {
            match sys::send_many(self.socket.as_fd(), batch.runs().map(outgoing)) {
                Ok(runs) => batch.consume(runs),
                Err(error) => match Errno::from_raw(error.raw_os_error().unwrap_or(0)) {
                    Errno::EAGAIN => return Ok(()),
                    Errno::EINTR => {}
                    Errno::EBADF | Errno::ENOTSOCK | Errno::EFAULT => return Err(error),
                    Errno::EINVAL | Errno::EIO if self.probe_without_gso(batch) => {}
                    errno => self.drop_run(batch, errno),
                },
            }
        }
        Ok(())
    }
}

impl UdpTx {
    /// After the kernel refused the first run: tries its first packet alone. If that succeeds, GSO
    /// was the cause, and the link stops using it. `false` when the packet is refused too.
    fn probe_without_gso(&mut self, batch: &mut TxBatch) -> bool {
        let Some(run) = batch.runs().next().filter(|run| run.packets > 1) else {
            return false;
        };
        // The first of a run has Identification 0 with GSO as without: its ICRC is valid.
        let first = Outgoing {
            dst: run.dst,
            bytes: &run.bytes[..run.segment],
            segment: None,
        };
        if sys::send_many(self.socket.as_fd(), std::iter::once(first)).is_err() {
            return false;
        }
        tracing::warn!("the kernel refuses UDP GSO on this path: sending one datagram at a time, which is slower");
        self.gso = false;
        batch.separate();
        batch.consume(1);
        true
    }

    fn drop_run(&mut self, batch: &mut TxBatch, errno: Errno) {
        if let Some(run) = batch.runs().next()
            && self.refused.is_new(errno)
        {
            let (dst, bytes) = (run.dst.addr, run.segment);
            tracing::warn!(%dst, bytes, "the kernel refuses to send: {}; reported once", errno.desc());
        }
        batch.consume(1);
    }
}

fn outgoing(run: super::RunRef<'_>) -> Outgoing<'_> {
    Outgoing {
        dst: run.dst,
        bytes: run.bytes,
        // At most MAX_PACKET.
        segment: (run.packets > 1).then_some(run.segment as u16),
    }
}

/// The errors already reported, so that a lasting one does not flood the log.
#[derive(Default)]
struct Refusals {
    reported: Vec<Errno>,
}

impl Refusals {
    fn is_new(&mut self, errno: Errno) -> bool {
        let new = !self.reported.contains(&errno);
        if new {
            self.reported.push(errno);
        }
        new
    }
}

struct UdpRx {
    socket: Arc<Socket>,
    taken_over: TakenOver,
    multicast: MulticastSockets,
    /// Which of the three is polled first: round-robin.
    next: usize,
    /// How many messages to request from each: one while the link is idle, as each one that is not
    /// there costs as much as a poll of an empty socket; more while every call returns all.
    expected: [usize; 3],
}

impl Receive for UdpRx {
    fn receive(&mut self, batch: &mut RxBatch) -> io::Result<usize> {
        let first = self.next;
        self.next = (first + 1) % 3;
        for which in [first, self.next, 3 - first - self.next] {
            let expected = &mut self.expected[which];
            let received = match which {
                0 => receive_from(&self.socket, expected, batch)?,
                1 => match self.taken_over.get() {
                    Some(other) => receive_from(other, expected, batch)?,
                    None => 0,
                },
                _ => match self.multicast.readable() {
                    Some(group) => receive_from(&group, expected, batch)?,
                    None => 0,
                },
            };
            if received != 0 {
                return Ok(received);
            }
        }
        Ok(0)
    }
}

fn receive_from(socket: &Socket, expected: &mut usize, batch: &mut RxBatch) -> io::Result<usize> {
    batch.clear();
    batch.local = socket.local();
    // A pending ICMP error is reported instead of a datagram, once each: retry.
    for _ in 0..8 {
        let RxBatch { arena, messages, .. } = batch;
        let push = |message| messages.push(message);
        match sys::receive_many(socket.as_fd(), arena, SLOT, *expected, push) {
            Ok(count) => {
                if count == *expected {
                    *expected = (2 * count).min(RECEIVE_MESSAGES);
                }
                return Ok(count);
            }
            Err(error) => match Errno::from_raw(error.raw_os_error().unwrap_or(0)) {
                Errno::EAGAIN => {
                    *expected = 1;
                    return Ok(0);
                }
                Errno::EBADF | Errno::ENOTSOCK | Errno::EFAULT | Errno::EINVAL => return Err(error),
                _ => {}
            },
        }
    }
    Ok(0)
}
