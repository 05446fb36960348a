//! Reading and writing up to a deadline.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use nix::errno::Errno;
use nix::poll::PollFlags;
use nix::sys::socket::{MsgFlags, recv, send};

use super::deadline::{Deadline, ready};

/// A connected socket, of TCP or Unix, whose reads and writes end at a deadline: with
/// [`TimedOut`](io::ErrorKind::TimedOut), and however few bytes come at a time. Whether the socket
/// is blocking does not matter.
#[derive(Debug, Clone, Copy)]
pub struct Limited<'a> {
    socket: BorrowedFd<'a>,
    deadline: Deadline,
}

impl<'a> Limited<'a> {
    /// `socket`, up to the deadline.
    pub fn new(socket: &'a impl AsFd, deadline: Deadline) -> Self {
        Self {
            socket: socket.as_fd(),
            deadline,
        }
    }

    fn call(self, events: PollFlags, mut call: impl FnMut(RawFd) -> nix::Result<usize>) -> io::Result<usize> {
        loop {
            if self.deadline.has_passed() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match call(self.socket.as_raw_fd()) {
                Err(Errno::EAGAIN) => {
                    ready(self.socket, events, self.deadline)?;
                }
                Err(Errno::EINTR) => {}
                done => return Ok(done?),
            }
        }
    }
}

impl Read for Limited<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.call(PollFlags::POLLIN, |socket| recv(socket, buffer, MsgFlags::MSG_DONTWAIT))
    }
}

impl Write for Limited<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        self.call(PollFlags::POLLOUT, |socket| send(socket, bytes, flags))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What happened to a peer, in words.
#[must_use]
pub fn describe(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "it hung up".to_owned(),
        io::ErrorKind::TimedOut => "it did not answer in time".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_peer_that_sends_bytes_one_by_one_extends_no_deadline() {
        let (here, mut there) = UnixStream::pair().unwrap();
        let drip = thread::spawn(move || {
            while there.write_all(b"x").is_ok() {
                thread::sleep(Duration::from_millis(1));
            }
        });
        let mut limited = Limited::new(&here, Deadline::after(Duration::from_millis(50)));
        let error = limited.read_exact(&mut vec![0; 1 << 20]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(here);
        drip.join().unwrap();
    }

    #[test]
    fn a_peer_that_does_not_read_ends_a_write_at_the_deadline() {
        let (here, _there) = UnixStream::pair().unwrap();
        let mut limited = Limited::new(&here, Deadline::after(Duration::from_millis(20)));
        let error = limited.write_all(&vec![0; 16 << 20]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
