//! Waiting with a deadline.

use std::io;
use std::os::fd::AsFd;

pub(crate) use doorbell_rendezvous::{Deadline, readable};
use nix::fcntl::{FcntlArg, OFlag, fcntl};

pub(crate) fn set_nonblocking(fd: impl AsFd) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(&fd, FcntlArg::F_GETFL)?);
    fcntl(&fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}
