//! Connecting with the help of a TCP connection: each side tells the other its [`Endpoint`], and whatever else it wants to, such as keys to its memory.
//!
//! ```no_run
//! use core::time::Duration;
//! use doorbell_verbs::exchange::Exchange;
//! use doorbell_verbs::{PreparedQueuePair, Remote, Write};
//!
//! # fn example(prepared: PreparedQueuePair, inbox: Remote<Write>) -> Result<(), Box<dyn std::error::Error>> {
//! let mut exchange = Exchange::connect("server:18516", Duration::from_secs(10))?;    // the other end: Listener::bind, and accept
//! let (mut qp, said) = exchange.pair(prepared, &inbox.to_bytes())?;
//! let their_inbox: Remote<Write> = Remote::from_bytes(said.as_slice().try_into()?)?;
//! # Ok(())
//! # }
//! ```
//!
//! When [`pair`](Exchange::pair) returns, both queue pairs are connected, and either side may send. It can be called again, for more queue pairs, in the same
//! order on both sides; the TCP connection is closed when the exchange is dropped. A queue pair that is gone acknowledges nothing, so the peer's last request
//! may fail if this side drops its own as soon as it has the data: [`finish`](Exchange::finish) lets both end together.
//!
//! # The format, version 1
//!
//! Both sides send the same, and neither waits for the other before it does. For each queue pair, numbers being big-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 8 | `44 42 45 4c 4c 58 43 48` ("DBELLXCH") |
//! | 2 | the version, 1 |
//! | 2 | *n*, the length of what else is said: at most 4096 |
//! | 32 | the endpoint: [`Endpoint::to_bytes`] |
//! | *n* | what else is said |
//!
//! then, when the own queue pair is connected:
//!
//! | bytes | what |
//! |---|---|
//! | 1 | `01`: connected; or `00`: failed, and the TCP connection ends |
//!
//! and in the end, by [`finish`](Exchange::finish), one byte `02`.
//!
//! A version with another layout has another number; there is no negotiation. There is no authentication either: whoever reaches the port can connect, so listen
//! where only friends can.

mod frame;

use core::time::Duration;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::thread;

use crate::error::QueuePairError;
use crate::qp::{BadEndpoint, Endpoint, PreparedQueuePair, QueuePair};
use crate::wait::{Deadline, readable};

/// What a side says when its queue pair could not be connected.
const FAILED: u8 = 0;
/// What a side says when its queue pair is connected.
const CONNECTED: u8 = 1;
/// What a side says when it is done.
const DONE: u8 = 2;

/// The most bytes that can be said besides the endpoint.
pub const MAX_DATA: usize = 4096;

/// An exchange that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExchangeError {
    /// No TCP connection.
    #[error("{address}: {error}; is the other end running, and listening there?")]
    Connect {
        /// Where to.
        address: String,
        /// What the system said.
        #[source]
        error: io::Error,
    },
    /// The address to listen on cannot be had.
    #[error("listening on {address}: {error}; is it an address of this machine, and the port free?")]
    Listen {
        /// The address.
        address: String,
        /// What the system said.
        #[source]
        error: io::Error,
    },
    /// The TCP connection broke.
    #[error("the TCP connection to {peer}: {error}")]
    Broken {
        /// The peer's address.
        peer: SocketAddr,
        /// What the system said.
        #[source]
        error: io::Error,
    },
    /// The peer closed the connection before it was done.
    #[error("the peer {peer} closed the connection before it was done; its own message says why")]
    Closed {
        /// The peer's address.
        peer: SocketAddr,
    },
    /// The time given is up.
    #[error("{peer}: no answer in the time given; is the other end running?")]
    TimedOut {
        /// The peer's address, or the listener's own.
        peer: String,
    },
    /// The peer speaks something else.
    #[error("the peer {peer} does not speak this protocol: it is another program, or the port is wrong")]
    NotOurs {
        /// The peer's address.
        peer: SocketAddr,
    },
    /// The peer speaks another version.
    #[error(
        "the peer {peer} speaks version {theirs} of the exchange, this side version {ours}: run the same release on both ends"
    )]
    Version {
        /// The peer's address.
        peer: SocketAddr,
        /// Its version.
        theirs: u16,
        /// The version here.
        ours: u16,
    },
    /// The peer announces more than may be said.
    #[error("the peer {peer} announces {len} bytes of data, of which at most {MAX_DATA} are allowed")]
    TooMuch {
        /// The peer's address.
        peer: SocketAddr,
        /// How many bytes it announces.
        len: usize,
    },
    /// More was to be said than may be.
    #[error("{len} bytes of data, of which at most {MAX_DATA} fit: send the rest when connected")]
    DataTooLong {
        /// How many bytes were given.
        len: usize,
    },
    /// The peer's endpoint is none.
    #[error("from {peer}: {error}")]
    Endpoint {
        /// The peer's address.
        peer: SocketAddr,
        /// What is wrong with it.
        #[source]
        error: BadEndpoint,
    },
    /// The queue pair could not be connected.
    #[error(transparent)]
    Transition(#[from] QueuePairError),
}

/// Waits for peers.
#[derive(Debug)]
pub struct Listener {
    listener: TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// Listens on `address`; port 0 is any that is free.
    ///
    /// # Errors
    /// When the address is in use, or not this machine's.
    pub fn bind(address: impl ToSocketAddrs + core::fmt::Debug) -> Result<Self, ExchangeError> {
        let bound = TcpListener::bind(&address).and_then(|listener| {
            // A peer that has gone again between poll(2) and accept(2) must not block it.
            listener.set_nonblocking(true)?;
            let address = listener.local_addr()?;
            Ok(Self { listener, address })
        });
        bound.map_err(|error| ExchangeError::Listen {
            address: format!("{address:?}"),
            error,
        })
    }

    /// The address it listens on.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Waits for a peer, as long as `timeout`; each [`pair`](Exchange::pair) may then take as long again.
    ///
    /// # Errors
    /// When there is none, or the system refuses.
    pub fn accept(&self, timeout: Duration) -> Result<Exchange, ExchangeError> {
        let deadline = Deadline::after(timeout);
        let failed = |error| ExchangeError::Listen {
            address: self.address.to_string(),
            error,
        };
        loop {
            match self.listener.accept() {
                Ok((stream, peer)) => return Exchange::new(stream, peer, timeout),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if is_passing(&error) => continue,
                Err(error) => return Err(failed(error)),
            }
            if !readable(self.listener.as_fd(), deadline).map_err(failed)? {
                return Err(ExchangeError::TimedOut {
                    peer: self.address.to_string(),
                });
            }
        }
    }
}

/// Whether a failed accept(2) or connect(2) says nothing of the next one.
fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
    )
}

/// A TCP connection to a peer, by which queue pairs are connected.
#[derive(Debug)]
pub struct Exchange {
    stream: TcpStream,
    peer: SocketAddr,
    timeout: Duration,
}

/// How long to wait before the next attempt, while nobody listens yet.
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(20);

impl Exchange {
    /// Goes to a listening peer, and tries until it is there, as long as `timeout`; each [`pair`](Self::pair) may then take as long again.
    ///
    /// # Errors
    /// When the name has no address, or nobody is there in time.
    pub fn connect(to: impl ToSocketAddrs + core::fmt::Debug, timeout: Duration) -> Result<Self, ExchangeError> {
        let deadline = Deadline::after(timeout);
        let failed = |error| ExchangeError::Connect {
            address: format!("{to:?}"),
            error,
        };
        loop {
            let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
            for peer in to.to_socket_addrs().map_err(failed)? {
                // connect_timeout() refuses zero.
                let left = deadline.left().max(Duration::from_millis(1));
                match TcpStream::connect_timeout(&peer, left) {
                    // On loopback the system may give a caller the very port it calls, which answers then: nobody else is there yet.
                    Ok(stream) if stream.local_addr().is_ok_and(|own| own == peer) => {
                        last = io::ErrorKind::ConnectionRefused.into();
                    }
                    Ok(stream) => return Self::new(stream, peer, timeout),
                    Err(error) => last = error,
                }
            }
            let may_come = last.kind() == io::ErrorKind::ConnectionRefused || is_passing(&last);
            if !may_come || deadline.left() < BETWEEN_ATTEMPTS {
                return Err(failed(last));
            }
            thread::sleep(BETWEEN_ATTEMPTS);
        }
    }

    fn new(stream: TcpStream, peer: SocketAddr, timeout: Duration) -> Result<Self, ExchangeError> {
        let exchange = Self { stream, peer, timeout };
        let set = exchange
            .stream
            .set_nonblocking(false)
            .and_then(|()| exchange.stream.set_nodelay(true));
        set.map_err(|error| exchange.broken(error))?;
        Ok(exchange)
    }

    /// The peer's address.
    #[must_use]
    pub fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    /// Connects `qp` to the peer's, says `data` to the peer, and returns what it said. Both queue pairs are connected then.
    ///
    /// # Errors
    /// When the peer is gone, too slow, or no such program; when there is too much data, or the queue pair cannot be connected. The exchange is of no use
    /// then.
    pub fn pair(&mut self, qp: PreparedQueuePair, data: &[u8]) -> Result<(QueuePair, Vec<u8>), ExchangeError> {
        let deadline = Deadline::after(self.timeout);
        let (endpoint, said) = self.swap(&qp.endpoint(), data, deadline)?;
        let connected = qp.connect(&endpoint);
        let verdict = if connected.is_ok() { CONNECTED } else { FAILED };
        self.write(&[verdict], deadline)?;
        let qp = connected?;
        self.hear(CONNECTED, deadline)?;
        Ok((qp, said))
    }

    /// Tells the peer that this side is done with all queue pairs, and waits until the peer is too, as long as the exchange's `timeout`.
    ///
    /// # Errors
    /// When the peer is gone, or not done in time.
    pub fn finish(mut self) -> Result<(), ExchangeError> {
        let deadline = Deadline::after(self.timeout);
        self.write(&[DONE], deadline)?;
        self.hear(DONE, deadline)
    }

    /// Waits for one byte that the peer says.
    fn hear(&mut self, expected: u8, deadline: Deadline) -> Result<(), ExchangeError> {
        let mut said = [0];
        self.read(&mut said, deadline)?;
        match said {
            [byte] if byte == expected => Ok(()),
            [FAILED] => Err(ExchangeError::Closed { peer: self.peer }),
            _ => Err(ExchangeError::NotOurs { peer: self.peer }),
        }
    }

    /// Tells the peer an endpoint and `data`, and gets the same of it: the first half of [`pair`](Self::pair).
    fn swap(
        &mut self,
        endpoint: &Endpoint,
        data: &[u8],
        deadline: Deadline,
    ) -> Result<(Endpoint, Vec<u8>), ExchangeError> {
        let frame = frame::write(endpoint, data).ok_or(ExchangeError::DataTooLong { len: data.len() })?;
        self.write(&frame, deadline)?;
        let mut head = [0; frame::HEAD];
        self.read(&mut head[..frame::FIXED], deadline)?;
        // A peer of another kind, or version, is told apart by this much; it may never send the rest.
        let len = frame::length(&head).map_err(|bad| self.refuse(bad))?;
        self.read(&mut head[frame::FIXED..], deadline)?;
        let peer = self.peer;
        let theirs = frame::endpoint(&head).map_err(|error| ExchangeError::Endpoint { peer, error })?;
        let mut said = vec![0; len];
        self.read(&mut said, deadline)?;
        Ok((theirs, said))
    }

    fn refuse(&self, bad: frame::Bad) -> ExchangeError {
        let peer = self.peer;
        match bad {
            frame::Bad::Magic => ExchangeError::NotOurs { peer },
            frame::Bad::Version(theirs) => ExchangeError::Version {
                peer,
                theirs,
                ours: frame::VERSION,
            },
            frame::Bad::Length(len) => ExchangeError::TooMuch { peer, len },
        }
    }

    /// Reads all of `bytes` before the deadline: a peer that sends a byte now and then gains no time by it.
    fn read(&mut self, mut bytes: &mut [u8], deadline: Deadline) -> Result<(), ExchangeError> {
        while !bytes.is_empty() {
            self.limit(deadline, TcpStream::set_read_timeout)?;
            match self.stream.read(bytes) {
                Ok(0) => return Err(ExchangeError::Closed { peer: self.peer }),
                Ok(n) => bytes = &mut bytes[n..],
                Err(error) => self.tolerate(error)?,
            }
        }
        Ok(())
    }

    fn write(&mut self, mut bytes: &[u8], deadline: Deadline) -> Result<(), ExchangeError> {
        while !bytes.is_empty() {
            self.limit(deadline, TcpStream::set_write_timeout)?;
            match self.stream.write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(error) => self.tolerate(error)?,
            }
        }
        Ok(())
    }

    /// Lets the next call wait no longer than the deadline allows.
    fn limit(
        &self,
        deadline: Deadline,
        set: fn(&TcpStream, Option<Duration>) -> io::Result<()>,
    ) -> Result<(), ExchangeError> {
        let left = deadline.left();
        if left.is_zero() {
            return Err(ExchangeError::TimedOut {
                peer: self.peer.to_string(),
            });
        }
        // Longer than an hour is not worth the system's trouble with large numbers: the loop comes back.
        set(&self.stream, Some(left.min(Duration::from_secs(3600)))).map_err(|error| self.broken(error))
    }

    /// Time-outs and signals bring the loop back to its deadline.
    fn tolerate(&self, error: io::Error) -> Result<(), ExchangeError> {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted => Ok(()),
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                Err(ExchangeError::Closed { peer: self.peer })
            }
            _ => Err(self.broken(error)),
        }
    }

    fn broken(&self, error: io::Error) -> ExchangeError {
        ExchangeError::Broken { peer: self.peer, error }
    }
}

#[cfg(test)]
mod tests;
