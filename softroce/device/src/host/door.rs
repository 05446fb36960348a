//! A door of a group: a name that one process holds at a time, while it does what members must not do at once. It opens by itself when that process dies.
//!
//! There are two. Who joins waits for another member's answer inside, a millisecond or twenty; who listens for a service is in and out in microseconds, and does not queue behind those: the
//! peer that was told to ask it may be as quick.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::geteuid;

use super::fork::Unforked;
use super::socket;

/// Held until it is dropped.
#[derive(Debug)]
pub(super) struct Door {
    _name: Unforked<OwnedFd>,
}

/// Why it cannot be entered.
#[derive(Debug)]
pub(super) enum Shut {
    /// Whoever is inside does not come out.
    Busy,
    /// A process of another user is inside.
    OtherUser(u32),
    Io(io::Error),
}

/// How long to wait before another look, where nothing tells when there is something to see.
const LOOK: Duration = Duration::from_micros(200);

impl Door {
    /// Waits until it is free, and no longer than `patience` for any one process that is inside: of many that come at once each takes its time on a busy machine.
    pub(super) fn enter(name: &str, patience: Duration) -> Result<Self, Shut> {
        let mut deadline = Instant::now() + patience;
        loop {
            match socket::listen(name) {
                Ok(name) => return Ok(Self { _name: name }),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => return Err(Shut::Io(error)),
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Shut::Busy);
            }
            match socket::connect_to(name) {
                Ok(inside) => {
                    let uid = socket::credentials(&inside).map_err(Shut::Io)?.uid;
                    if uid != geteuid().as_raw() {
                        return Err(Shut::OtherUser(uid));
                    }
                    // Nobody accepts it: it hangs up when the holder lets go of the name.
                    let mut hangup = [PollFd::new(inside.as_fd(), PollFlags::POLLIN)];
                    if poll(&mut hangup, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX))
                        .is_ok_and(|hung| hung > 0)
                    {
                        deadline = Instant::now() + patience;
                    }
                }
                // Free by now, or not listened at yet; or too many wait.
                Err(_) => thread::sleep(LOOK),
            }
        }
    }
}
