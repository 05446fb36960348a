//! Sockets over RDMA, rsocket(7): unsupported. Every function fails with `EOPNOTSUPP`, so that a
//! program linked against librdmacm starts, and fails only when it uses them.

use core::ffi::{c_int, c_long, c_void};

use libc::{fd_set, iovec, msghdr, nfds_t, off_t, pollfd, sockaddr, socklen_t, timeval};

use crate::errno;

macro_rules! refused {
    ($( fn $name:ident($($argument:ident: $ty:ty),*) -> $result:ty; )*) => { $(
        #[doc = concat!("`", stringify!($name), "` of rsocket(7): `EOPNOTSUPP`.")]
        pub extern "C" fn $name($($argument: $ty),*) -> $result {
            errno::set(libc::EOPNOTSUPP);
            // −1 also for the unsigned result of one of them, as its man page says.
            -1_i64 as $result
        }
    )* };
}

refused! {
    fn rsocket(_domain: c_int, _kind: c_int, _protocol: c_int) -> c_int;
    fn rbind(_socket: c_int, _address: *const sockaddr, _len: socklen_t) -> c_int;
    fn rlisten(_socket: c_int, _backlog: c_int) -> c_int;
    fn raccept(_socket: c_int, _address: *mut sockaddr, _len: *mut socklen_t) -> c_int;
    fn rconnect(_socket: c_int, _address: *const sockaddr, _len: socklen_t) -> c_int;
    fn rshutdown(_socket: c_int, _how: c_int) -> c_int;
    fn rclose(_socket: c_int) -> c_int;
    fn rrecv(_socket: c_int, _buffer: *mut c_void, _len: usize, _flags: c_int) -> isize;
    fn rrecvfrom(_socket: c_int, _buffer: *mut c_void, _len: usize, _flags: c_int, _from: *mut sockaddr, _from_len: *mut socklen_t) -> isize;
    fn rrecvmsg(_socket: c_int, _message: *mut msghdr, _flags: c_int) -> isize;
    fn rsend(_socket: c_int, _buffer: *const c_void, _len: usize, _flags: c_int) -> isize;
    fn rsendto(_socket: c_int, _buffer: *const c_void, _len: usize, _flags: c_int, _to: *const sockaddr, _to_len: socklen_t) -> isize;
    fn rsendmsg(_socket: c_int, _message: *const msghdr, _flags: c_int) -> isize;
    fn rread(_socket: c_int, _buffer: *mut c_void, _len: usize) -> isize;
    fn rreadv(_socket: c_int, _parts: *const iovec, _count: c_int) -> isize;
    fn rwrite(_socket: c_int, _buffer: *const c_void, _len: usize) -> isize;
    fn rwritev(_socket: c_int, _parts: *const iovec, _count: c_int) -> isize;
    fn rpoll(_fds: *mut pollfd, _count: nfds_t, _timeout: c_int) -> c_int;
    fn rselect(_count: c_int, _read: *mut fd_set, _write: *mut fd_set, _except: *mut fd_set, _timeout: *mut timeval) -> c_int;
    fn rgetpeername(_socket: c_int, _address: *mut sockaddr, _len: *mut socklen_t) -> c_int;
    fn rgetsockname(_socket: c_int, _address: *mut sockaddr, _len: *mut socklen_t) -> c_int;
    fn rsetsockopt(_socket: c_int, _level: c_int, _option: c_int, _value: *const c_void, _len: socklen_t) -> c_int;
    fn rgetsockopt(_socket: c_int, _level: c_int, _option: c_int, _value: *mut c_void, _len: *mut socklen_t) -> c_int;
    fn rfcntl(_socket: c_int, _command: c_int, _argument: c_long) -> c_int;
    fn riomap(_socket: c_int, _buffer: *mut c_void, _len: usize, _protection: c_int, _flags: c_int, _offset: off_t) -> off_t;
    fn riounmap(_socket: c_int, _buffer: *mut c_void, _len: usize) -> c_int;
    fn riowrite(_socket: c_int, _buffer: *const c_void, _len: usize, _offset: off_t, _flags: c_int) -> usize;
}
