//! The system calls under the UDP link, and all of its `unsafe` (decision 016). Each is a safe
//! function whose structures for the kernel live on the stack of the call: no pointer outlives it.
//! Not `nix::sendmmsg`: it gives every message of a call the same control data, while each run here
//! has a segment size of its own.

use super::tx::UdpDestination;
use doorbell_roce_proto::wire::HOP_LIMIT;
use std::ffi::c_int;
use std::io;
use std::mem::{MaybeUninit, offset_of, size_of, zeroed};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

/// Accepts a zero UDP checksum over IPv6 (linux/udp.h; libc has it for Android alone).
pub(super) const UDP_NO_CHECK6_RX: c_int = 102;

pub(super) const SEND_MESSAGES: usize = 16;

pub(super) const RECEIVE_MESSAGES: usize = 32;

/// A message to send: a datagram, or a run of datagrams that the kernel segments.
pub(super) struct Outgoing<'a> {
    pub(super) dst: UdpDestination,
    pub(super) bytes: &'a [u8],
    /// Segment size in bytes (`UDP_SEGMENT`); `None` sends one datagram.
    pub(super) segment: Option<u16>,
}

/// A datagram, or several of equal size (the last may be shorter) that the kernel coalesced.
#[derive(Clone, Copy, Debug)]
pub(super) struct Incoming {
    pub(super) src: SocketAddr,
    pub(super) len: usize,
    /// The size of each datagram; `len` for a single one.
    pub(super) segment: usize,
    /// IPv4 TOS or IPv6 traffic class, of each of them.
    pub(super) traffic_class: u8,
}

/// An address as the kernel reads and writes it. Every bit pattern is valid for both members.
#[derive(Clone, Copy)]
#[repr(C)]
union Address {
    v4: libc::sockaddr_in,
    v6: libc::sockaddr_in6,
}

impl Address {
    const EMPTY: Self = Self {
        // SAFETY: sockaddr_in6 is integers and arrays of integers: all zeroes is a value.
        v6: unsafe { zeroed() },
    };

    fn new(addr: SocketAddr) -> (Self, libc::socklen_t) {
        let mut encoded = Self::EMPTY;
        match addr {
            SocketAddr::V4(addr) => {
                // SAFETY: as for EMPTY: sockaddr_in is integers only.
                let mut v4: libc::sockaddr_in = unsafe { zeroed() };
                v4.sin_family = libc::AF_INET as libc::sa_family_t;
                v4.sin_port = addr.port().to_be();
                v4.sin_addr.s_addr = u32::from(*addr.ip()).to_be();
                encoded.v4 = v4;
                (encoded, size_of::<libc::sockaddr_in>() as libc::socklen_t)
            }
            SocketAddr::V6(addr) => {
                // SAFETY: as for EMPTY.
                let mut v6: libc::sockaddr_in6 = unsafe { zeroed() };
                v6.sin6_family = libc::AF_INET6 as libc::sa_family_t;
                v6.sin6_port = addr.port().to_be();
                v6.sin6_addr.s6_addr = addr.ip().octets();
                v6.sin6_flowinfo = addr.flowinfo();
                v6.sin6_scope_id = addr.scope_id();
                encoded.v6 = v6;
                (encoded, size_of::<libc::sockaddr_in6>() as libc::socklen_t)
            }
        }
    }

    /// Decodes an address from the kernel; `None` for another family or a short length.
    fn decode(&self, len: libc::socklen_t) -> Option<SocketAddr> {
        let len = len as usize;
        if len < size_of::<libc::sa_family_t>() {
            return None;
        }
        // SAFETY: both members start with the family, every byte is initialised (EMPTY, or by the
        // kernel), and every bit pattern is a valid sockaddr_in.
        let v4 = unsafe { self.v4 };
        match c_int::from(v4.sin_family) {
            libc::AF_INET if len >= size_of::<libc::sockaddr_in>() => Some(SocketAddr::V4(SocketAddrV4::new(
                Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)),
                u16::from_be(v4.sin_port),
            ))),
            libc::AF_INET6 if len >= size_of::<libc::sockaddr_in6>() => {
                // SAFETY: as above: initialised in full, any bit pattern is a valid sockaddr_in6.
                let v6 = unsafe { self.v6 };
                // Without flow label, so that equal senders compare equal.
                Some(SocketAddr::V6(SocketAddrV6::new(
                    Ipv6Addr::from(v6.sin6_addr.s6_addr),
                    u16::from_be(v6.sin6_port),
                    0,
                    v6.sin6_scope_id,
                )))
            }
            _ => None,
        }
    }
}

/// A control message with a value of at most 4 bytes, laid out as in cmsg(3): in an array, one
/// follows another as the kernel expects it.
#[derive(Clone, Copy)]
#[repr(C)]
struct Control {
    header: libc::cmsghdr,
    value: [u8; 4],
    /// `CMSG_SPACE` rounds the value up to 8 bytes.
    pad: [u8; 4],
}

impl Control {
    // SAFETY: integers only, for which all zeroes is a value.
    const EMPTY: Self = unsafe { zeroed() };

    fn new<const N: usize>(level: c_int, kind: c_int, value: [u8; N]) -> Self {
        const { assert!(N <= 4) }
        let mut control = Self::EMPTY;
        // SAFETY: CMSG_LEN only computes.
        control.header.cmsg_len = unsafe { libc::CMSG_LEN(N as u32) } as _;
        control.header.cmsg_level = level;
        control.header.cmsg_type = kind;
        control.value[..N].copy_from_slice(&value);
        control
    }
}

const _: () = {
    // SAFETY: CMSG_LEN and CMSG_SPACE only compute.
    let (data, space) = unsafe { (libc::CMSG_LEN(0) as usize, libc::CMSG_SPACE(4) as usize) };
    assert!(offset_of!(Control, value) == data && size_of::<Control>() == space);
};

/// The control messages of an [`Outgoing`]: segment size, traffic class, hop limit.
type SendControls = [MaybeUninit<Control>; 3];

impl Outgoing<'_> {
    /// Writes what differs from the socket's options to the front of `to`; returns how many.
    fn write_controls(&self, to: &mut SendControls) -> usize {
        let UdpDestination {
            addr,
            traffic_class,
            hop_limit,
        } = self.dst;
        let (level, class, hops) = match addr {
            SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS, libc::IP_TTL),
            SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, libc::IPV6_HOPLIMIT),
        };
        let int = |kind, value: u8| Control::new(level, kind, c_int::from(value).to_ne_bytes());
        let mut count = 0;
        let mut add = |control| {
            to[count].write(control);
            count += 1;
        };
        if let Some(size) = self.segment {
            add(Control::new(libc::SOL_UDP, libc::UDP_SEGMENT, size.to_ne_bytes()));
        }
        if traffic_class != UdpDestination::TRAFFIC_CLASS {
            add(int(class, traffic_class));
        }
        if hop_limit != HOP_LIMIT {
            add(int(hops, hop_limit));
        }
        count
    }
}

/// What a message header points to: written before it, and not moved until the call returns.
struct Parts<C> {
    address: Address,
    vector: libc::iovec,
    control: C,
}

/// Initialised message by message: clearing all would cost more than the call itself.
type StackArray<T, const N: usize> = [MaybeUninit<T>; N];

/// Sends up to [`SEND_MESSAGES`] in one system call, without blocking; returns how many.
///
/// # Errors
/// The error of the first message, if not even that one was sent; see sendmmsg(2).
pub(super) fn send_many<'a>(fd: BorrowedFd<'_>, messages: impl Iterator<Item = Outgoing<'a>>) -> io::Result<usize> {
    let mut parts: StackArray<Parts<SendControls>, SEND_MESSAGES> = [const { MaybeUninit::uninit() }; SEND_MESSAGES];
    let mut headers: StackArray<libc::mmsghdr, SEND_MESSAGES> = [const { MaybeUninit::uninit() }; SEND_MESSAGES];
    let mut count = 0;
    for ((message, part), header) in messages.zip(&mut parts).zip(&mut headers) {
        let (address, address_len) = Address::new(message.dst.addr);
        let part = part.write(Parts {
            address,
            vector: libc::iovec {
                iov_base: message.bytes.as_ptr().cast_mut().cast(),
                iov_len: message.bytes.len(),
            },
            control: [const { MaybeUninit::uninit() }; 3],
        });
        let controls = message.write_controls(&mut part.control);
        header.write(header_of(part, address_len, controls));
        count += 1;
    }
    if count == 0 {
        return Ok(0);
    }
    // SAFETY: the first `count` headers are written and point to an address, a vector and control
    // messages, written too, of the lengths stated, in `parts`, untouched until this function
    // returns; each vector
    // covers a slice borrowed for 'a, which outlives the call, and sendmmsg only reads it.
    let sent = unsafe {
        libc::sendmmsg(
            fd.as_raw_fd(),
            headers.as_mut_ptr().cast(),
            count,
            libc::MSG_DONTWAIT as _,
        )
    };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Receives up to `most` (and [`RECEIVE_MESSAGES`]) messages in one system call, without blocking:
/// message *i* is written to the *i*-th `slot` bytes of `arena`. Returns how many; `received` gets
/// each in order, `None` for one that was truncated or has a sender of another address family.
///
/// # Errors
/// See recvmmsg(2); `WouldBlock` when none is queued.
pub(super) fn receive_many(
    fd: BorrowedFd<'_>,
    arena: &mut [u8],
    slot: usize,
    most: usize,
    mut received: impl FnMut(Option<Incoming>),
) -> io::Result<usize> {
    let mut parts: StackArray<Parts<ReceiveControls>, RECEIVE_MESSAGES> =
        [const { MaybeUninit::uninit() }; RECEIVE_MESSAGES];
    let mut headers: StackArray<libc::mmsghdr, RECEIVE_MESSAGES> = [const { MaybeUninit::uninit() }; RECEIVE_MESSAGES];
    let mut count = 0;
    for ((bytes, part), header) in arena
        .chunks_exact_mut(slot)
        .take(most)
        .zip(&mut parts)
        .zip(&mut headers)
    {
        let part = part.write(Parts {
            address: Address::EMPTY,
            vector: libc::iovec {
                iov_base: bytes.as_mut_ptr().cast(),
                iov_len: bytes.len(),
            },
            control: [Control::EMPTY; 2],
        });
        header.write(header_of(part, size_of::<Address>() as libc::socklen_t, 2));
        count += 1;
    }
    let (fd, flags) = (fd.as_raw_fd(), libc::MSG_DONTWAIT as _);
    // SAFETY: the first `count` headers are written and point to an address, a vector and a control
    // buffer of the lengths stated, in `parts`, untouched until this function returns; the vectors
    // cover disjoint chunks of `arena`, borrowed mutably throughout. A null timeout is allowed.
    let taken = unsafe { libc::recvmmsg(fd, headers.as_mut_ptr().cast(), count, flags, ptr::null_mut()) };
    let taken = usize::try_from(taken).map_err(|_| io::Error::last_os_error())?;
    for (header, part) in headers.iter().zip(&parts).take(taken) {
        // SAFETY: recvmmsg takes at most `count` messages, and the loop above wrote as many; the
        // kernel overwrote them with integers, and addresses in any bit pattern.
        let (header, part) = unsafe { (header.assume_init_ref(), part.assume_init_ref()) };
        let len = header.msg_len as usize;
        let whole = header.msg_hdr.msg_flags & libc::MSG_TRUNC == 0;
        let incoming = part.address.decode(header.msg_hdr.msg_namelen).filter(|_| whole);
        let controls = read_controls(&header.msg_hdr, &part.control);
        received(incoming.map(|src| Incoming {
            src,
            len,
            segment: controls.segment.unwrap_or(len),
            traffic_class: controls.traffic_class,
        }));
    }
    Ok(taken)
}

/// A header that points to `part`, which must not move while the header is used, and to the first
/// `controls` of its control messages.
fn header_of<C>(part: &mut Parts<C>, address_len: libc::socklen_t, controls: usize) -> libc::mmsghdr {
    let part = ptr::from_mut(part);
    // SAFETY: mmsghdr is integers and raw pointers, for which all zeroes is a value.
    let mut header: libc::mmsghdr = unsafe { zeroed() };
    // SAFETY: `part` comes from a reference: its fields are in bounds. Only addresses are taken.
    let (address, vector, control) = unsafe {
        (
            &raw mut (*part).address,
            &raw mut (*part).vector,
            &raw mut (*part).control,
        )
    };
    header.msg_hdr.msg_name = address.cast();
    header.msg_hdr.msg_namelen = address_len;
    header.msg_hdr.msg_iov = vector;
    header.msg_hdr.msg_iovlen = 1;
    if controls > 0 {
        header.msg_hdr.msg_control = control.cast();
        header.msg_hdr.msg_controllen = (controls * size_of::<Control>()) as _;
    }
    header
}

/// The control messages of a received message: `UDP_GRO`, and `IP_TOS` or `IPV6_TCLASS`.
type ReceiveControls = [Control; 2];

/// What they say.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Received {
    /// The segment size; `None` when nothing was coalesced.
    segment: Option<usize>,
    /// 0 when it is not said.
    traffic_class: u8,
}

fn read_controls(header: &libc::msghdr, controls: &ReceiveControls) -> Received {
    // Its type differs between C libraries.
    let len: usize = header.msg_controllen as _;
    let mut received = Received::default();
    for control in &controls[..(len / size_of::<Control>()).min(2)] {
        let int = c_int::from_ne_bytes(control.value);
        match (control.header.cmsg_level, control.header.cmsg_type) {
            (libc::SOL_UDP, libc::UDP_GRO) => received.segment = usize::try_from(int).ok().filter(|&size| size > 0),
            // One byte of data; that of IPv6 is an int of 0 to 255.
            (libc::IPPROTO_IP, libc::IP_TOS) => received.traffic_class = control.value[0],
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => received.traffic_class = int as u8,
            _ => {}
        }
    }
    received
}

pub(super) fn set_option(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    // SAFETY: the kernel reads size_of::<c_int>() bytes from `value`, which outlives the call.
    let result = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            size_of::<c_int>() as libc::socklen_t,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The MTU in bytes of the interface `name`, in the network namespace of the socket `fd`.
pub(super) fn interface_mtu(fd: BorrowedFd<'_>, name: &str) -> io::Result<u32> {
    // SAFETY: ifreq is a name and a union of integers, addresses, a pointer: all zeroes is a value.
    let mut request: libc::ifreq = unsafe { zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as _;
    }
    // SAFETY: SIOCGIFMTU reads the name, which the check above left NUL-terminated, and writes the
    // ifru_mtu member of the ifreq it is given, which lives until the call returns.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::SIOCGIFMTU as _, &raw mut request) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: SIOCGIFMTU succeeded and wrote ifru_mtu; an int takes any bit pattern.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    u32::try_from(mtu).map_err(|_| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn controls(traffic_class: u8, hop_limit: u8, segment: Option<u16>, ip: &str) -> Vec<(c_int, c_int, usize, c_int)> {
        let addr = SocketAddr::new(ip.parse().unwrap(), 4791);
        let message = Outgoing {
            dst: UdpDestination {
                addr,
                traffic_class,
                hop_limit,
            },
            bytes: &[],
            segment,
        };
        let mut to = [const { MaybeUninit::new(Control::EMPTY) }; 3];
        let count = message.write_controls(&mut to);
        let written = to.iter().take(count).map(|control| {
            // SAFETY: each was initialised above.
            let Control { header, value, .. } = unsafe { control.assume_init() };
            let len = header.cmsg_len - offset_of!(Control, value);
            (header.cmsg_level, header.cmsg_type, len, c_int::from_ne_bytes(value))
        });
        written.collect()
    }

    #[test]
    fn control_messages_are_sent_for_other_than_the_defaults_alone() {
        let segment = (libc::SOL_UDP, libc::UDP_SEGMENT, 2, 1500);
        let ip = |kind, value| (libc::IPPROTO_IP, kind, 4, value);
        let ipv6 = |kind, value| (libc::IPPROTO_IPV6, kind, 4, value);
        for address in ["127.0.0.1", "::1"] {
            assert_eq!(controls(0, 64, None, address), []);
            assert_eq!(controls(0, 64, Some(1500), address), [segment]);
        }
        let all = [segment, ip(libc::IP_TOS, 0xb8), ip(libc::IP_TTL, 1)];
        assert_eq!(controls(0xb8, 1, Some(1500), "127.0.0.1"), all);
        let all = [segment, ipv6(libc::IPV6_TCLASS, 0xb8), ipv6(libc::IPV6_HOPLIMIT, 1)];
        assert_eq!(controls(0xb8, 1, Some(1500), "::1"), all);
    }
}
