//! Abstract Unix sockets of records (unix(7), `SOCK_SEQPACKET`): names that are released with their
//! holder, hang-up detection, and passing of descriptors.

use std::io::{self, IoSlice};
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, accept4, bind, connect, getsockopt, listen as listen_on,
    socket, sockopt,
};

use super::fork::CloseOnFork;

/// The most descriptors of one message in the kernel (`SCM_MAX_FD`).
const MAX_FDS: usize = 253;

/// Backlog of a listening socket; the kernel allows `net.core.somaxconn` at most.
const BACKLOG: i32 = 4096;

/// An aligned buffer for the control data of a message with the most descriptors.
#[repr(C)]
union Control {
    _align: libc::cmsghdr,
    bytes: [u8; 1040],
}

const _: () = {
    // SAFETY: CMSG_SPACE computes a number from a number.
    let space = unsafe { libc::CMSG_SPACE((MAX_FDS * size_of::<RawFd>()) as u32) };
    assert!(space as usize <= size_of::<Control>());
};

/// The process at the other end when it connected or listened (`SO_PEERCRED`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Credentials {
    pub(super) uid: u32,
    /// In this process's PID namespace; 0 where it has none there.
    pub(super) pid: i32,
}

fn address(name: &str) -> io::Result<UnixAddr> {
    Ok(UnixAddr::new_abstract(name.as_bytes())?)
}

fn open() -> io::Result<CloseOnFork<OwnedFd>> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    CloseOnFork::create(|| Ok(socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?))
}

/// Holds a name and listens at it. `AddrInUse` when another socket holds it.
pub(super) fn listen(name: &str) -> io::Result<CloseOnFork<OwnedFd>> {
    let fd = open()?;
    bind(fd.as_fd().as_raw_fd(), &address(name)?)?;
    listen_on(&fd.as_fd(), Backlog::new(BACKLOG).unwrap_or(Backlog::MAXALLOWABLE))?;
    Ok(fd)
}

/// Never waits: `ConnectionRefused` without a listener, `WouldBlock` when its backlog is full.
pub(super) fn connect_to(name: &str) -> io::Result<CloseOnFork<OwnedFd>> {
    let fd = open()?;
    connect(fd.as_fd().as_raw_fd(), &address(name)?)?;
    Ok(fd)
}

/// The next pending connection; `WouldBlock` when there is none.
pub(super) fn accept(listener: BorrowedFd<'_>) -> io::Result<CloseOnFork<OwnedFd>> {
    CloseOnFork::create(|| {
        let fd = accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK)?;
        // SAFETY: accept4 gave a new descriptor, which has no other owner.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    })
}

pub(super) fn credentials(fd: &impl AsFd) -> io::Result<Credentials> {
    let peer = getsockopt(&fd.as_fd(), sockopt::PeerCredentials)?;
    Ok(Credentials {
        uid: peer.uid(),
        pid: peer.pid(),
    })
}

/// Sends one record made of `parts`: whole or not at all, without waiting or SIGPIPE.
pub(super) fn send(fd: BorrowedFd<'_>, parts: &[IoSlice<'_>], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    if fds.len() > MAX_FDS {
        return Err(Errno::EINVAL.into());
    }
    let mut control = Control { bytes: [0; 1040] };
    // SAFETY: msghdr is integers and pointers, for which all zeroes is a value.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    // IoSlice is an iovec in memory (its documentation promises so).
    message.msg_iov = parts.as_ptr().cast_mut().cast();
    message.msg_iovlen = parts.len() as _;
    if !fds.is_empty() {
        let len = size_of_val(fds) as u32;
        message.msg_control = (&raw mut control).cast();
        // SAFETY: the control buffer is aligned for a header (a union with one) and has
        // CMSG_SPACE(len) bytes, as MAX_FDS bounds `len`: the first header is not null, its data
        // has room for every descriptor. BorrowedFd is documented as repr(transparent).
        unsafe {
            message.msg_controllen = libc::CMSG_SPACE(len) as _;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(len) as _;
            libc::CMSG_DATA(header).copy_from_nonoverlapping(fds.as_ptr().cast(), len as usize);
        }
    }
    loop {
        // SAFETY: `message` refers to `parts`, what they refer to, and `control`, all of which
        // outlive the call, with their true lengths; the kernel only reads them.
        let sent = unsafe {
            libc::sendmsg(
                fd.as_raw_fd(),
                &raw const message,
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        match Errno::result(sent) {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Receives one record without waiting: its bytes into `buffer`, truncated to that, and its
/// descriptors. 0 bytes are a hang-up, as empty records are never sent.
pub(super) fn receive(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut part = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    let mut control = Control { bytes: [0; 1040] };
    // SAFETY: as in `send`.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = size_of::<Control>() as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    let count = loop {
        // SAFETY: `message` refers, with true lengths, to what is borrowed or our own for the call.
        match Errno::result(unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, flags) }) {
            Ok(count) => break count as usize,
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    };
    let mut fds = Vec::new();
    // SAFETY: the kernel has filled `control` with well-formed headers up to `msg_controllen`: the
    // macros stay inside. The data of an SCM_RIGHTS header is descriptors just made for us, so each
    // is ours alone; it need not be aligned.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let data = libc::CMSG_DATA(header).cast::<RawFd>();
                let len = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                for index in 0..len / size_of::<RawFd>() {
                    fds.push(OwnedFd::from_raw_fd(data.add(index).read_unaligned()));
                }
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    Ok((count, fds))
}
