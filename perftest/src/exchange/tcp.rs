//! TCP between the two ends of a test: the client retries while the server may still be starting,
//! and the server accepts many connections of which one becomes its client.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use doorbell_rendezvous::{Deadline, Limits};

use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

/// How long a client retries while the server refuses.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// How often a wait checks for Ctrl-C.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Bounds of the connections that are not the client yet.
const LIMITS: Limits = Limits {
    pending: 64,
    handshake: Duration::from_secs(5),
};
/// Lines on stderr about refused connections in one second.
const MAX_LINES: u32 = 10;

/// Connects to the first address that answers, from `source` if given.
///
/// # Errors
/// [`Failure::Test`] with `explain` of the last error; [`Failure::Interrupted`].
pub(crate) fn connect(
    addresses: &[SocketAddr],
    source: Option<IpAddr>,
    interrupt: &Interrupt,
    explain: impl FnOnce(&io::Error) -> String,
) -> Result<(TcpStream, SocketAddr), Failure> {
    let deadline = Deadline::after(CONNECT_TIMEOUT);
    let go_on = || !interrupt.requested();
    doorbell_rendezvous::connect(addresses, source, deadline, go_on).map_err(|last| match interrupt.requested() {
        true => Failure::Interrupted,
        false => Failure::test(explain(&last)),
    })
}

/// Detects within some ten seconds that the peer's host is gone.
pub(crate) fn set_keepalive(stream: &TcpStream) -> io::Result<()> {
    doorbell_rendezvous::set_keepalive(stream, 5, 2, 3)
}

/// A server's listening socket, and the connections that are not its client yet, each with its
/// handshake's state `H`.
#[derive(Debug)]
pub(crate) struct Acceptor<H> {
    pub(super) inner: doorbell_rendezvous::Acceptor<H>,
    refusals: Refusals,
}

impl<H: Default> Acceptor<H> {
    /// Listens; port 0 takes any free one. Advice names the command's `port_option`, or is
    /// `not_ours` for an address of another machine.
    ///
    /// # Errors
    /// [`Failure::Test`] when the address is in use or is not this machine's.
    pub(crate) fn bind(address: SocketAddr, port_option: &str, not_ours: &str) -> Result<Self, Failure> {
        let listen = || {
            Ok(Acceptor {
                inner: doorbell_rendezvous::Acceptor::new(TcpListener::bind(address)?, LIMITS)?,
                refusals: Refusals::default(),
            })
        };
        listen().map_err(|e: io::Error| {
            let advice = match e.kind() {
                io::ErrorKind::AddrInUse => format!(": another server may be running; choose another {port_option}"),
                io::ErrorKind::AddrNotAvailable => format!(": {not_ours}"),
                io::ErrorKind::PermissionDenied => {
                    format!(": ports below 1024 need privileges; choose another {port_option}")
                }
                _ => String::new(),
            };
            Failure::test(format!(
                "cannot listen on {address}: {}{advice}",
                one_line(&e.to_string())
            ))
        })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.inner.address()
    }

    /// The first connection that completes its handshake, which `advance` takes as far as it goes,
    /// with its result. The reason to refuse one is a line on stderr.
    ///
    /// # Errors
    /// [`Failure::Interrupted`]; [`Failure::Test`] when no client connected in time or the socket
    /// failed.
    pub(crate) fn accept<T>(
        &mut self,
        deadline: Option<Instant>,
        interrupt: &Interrupt,
        mut advance: impl FnMut(&TcpStream, &mut H) -> Result<Option<T>, String>,
    ) -> Result<(TcpStream, SocketAddr, T), Failure> {
        let (deadline, address) = (Deadline::from(deadline), self.address());
        while !interrupt.requested() {
            let until = deadline.min(Deadline::after(POLL_INTERVAL));
            match self.inner.next(until, None, &mut advance) {
                Ok(Some((peer, Ok((stream, result))))) => return Ok((stream, peer, result)),
                Ok(Some((peer, Err(reason)))) => {
                    let line = format!("doorbell: refused {peer}: {}", one_line(&reason));
                    for line in self.refusals.lines(Instant::now(), line) {
                        eprintln!("{line}");
                    }
                }
                Ok(None) if deadline.has_passed() => {
                    return Err(Failure::test(format!("no client connected to {address} in time")));
                }
                Ok(None) => {}
                Err(e) => {
                    let reason = one_line(&e.to_string());
                    return Err(Failure::test(format!("cannot accept on {address}: {reason}")));
                }
            }
        }
        Err(Failure::Interrupted)
    }
}

/// Limits the lines that refused clients cause.
#[derive(Debug, Default)]
struct Refusals {
    second_began: Option<Instant>,
    in_second: u32,
}

impl Refusals {
    /// What to print of a refusal whose line is `line`.
    fn lines(&mut self, now: Instant, line: String) -> Vec<String> {
        let is_new = |began: Instant| now.duration_since(began) >= Duration::from_secs(1);
        let mut lines = Vec::new();
        if self.second_began.is_none_or(is_new) {
            let unprinted = self.in_second.saturating_sub(MAX_LINES);
            lines.extend((unprinted != 0).then(|| format!("doorbell: refused {unprinted} more connections")));
            (self.second_began, self.in_second) = (Some(now), 0);
        }
        self.in_second += 1;
        lines.extend((self.in_second <= MAX_LINES).then_some(line));
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_refusals_is_a_few_lines_a_second() {
        let mut refusals = Refusals::default();
        let begin = Instant::now();
        let mut at = |milliseconds| refusals.lines(begin + Duration::from_millis(milliseconds), "refused".to_owned());
        let printed: usize = (0..999).map(|time| at(time).len()).sum();
        assert_eq!(printed, MAX_LINES as usize);
        assert_eq!(at(1000), ["doorbell: refused 989 more connections", "refused"]);
        assert_eq!(at(2000), ["refused"]);
    }
}
