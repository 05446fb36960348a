//! Connecting over TCP: the sides exchange their [`Endpoint`]s, and other data, such as keys.
//!
//! ```no_run
//! use core::time::Duration;
//! use doorbell_verbs::exchange::Exchange;
//! use doorbell_verbs::{PreparedQueuePair, Remote, WriteAccess};
//!
//! # fn example(prepared: PreparedQueuePair, inbox: Remote<WriteAccess>) -> Result<(), Box<dyn std::error::Error>> {
//! let mut exchange = Exchange::connect("server:18516", Duration::from_secs(10))?;    // the peer: Listener::bind, and accept
//! let (mut qp, peer_data) = exchange.pair(prepared, &inbox.to_bytes())?;
//! let their_inbox: Remote<WriteAccess> = Remote::from_bytes(&peer_data)?;
//! # Ok(())
//! # }
//! ```
//!
//! An RC queue pair with all that it needs is a [`Connection`].
//!
//! When [`pair`](Exchange::pair) returns, both queue pairs are connected, of any transport, with or
//! without a shared receive queue; [`datagrams`](Exchange::datagrams) is for those that send
//! datagrams. Both can be called again, in the same order on both sides; dropping the exchange
//! closes the TCP connection. All of it blocks: tasks leave it to a thread for blocking calls. A
//! destroyed queue pair acknowledges nothing, so the peer's last request may fail if this side
//! drops its own early: [`finish`](Exchange::finish) lets both end together.
//!
//! # The format, version 1
//!
//! Both sides send the same, without waiting. For each queue pair, with integers big-endian:
//!
//! | bytes | field |
//! |---|---|
//! | 8 | `44 42 45 4c 4c 58 43 48` ("DBELLXCH") |
//! | 2 | the version, 1 |
//! | 2 | *n*, the length of the data: at most 4096 |
//! | 32 | the endpoint: [`Endpoint::to_bytes`], or [`UdEndpoint::to_bytes`] |
//! | *n* | the data |
//!
//! then, when the local queue pair is connected, or ready for datagrams:
//!
//! | bytes | field |
//! |---|---|
//! | 1 | `01`: connected; or `00`: failed, and the TCP connection ends |
//!
//! and in the end, by [`finish`](Exchange::finish), one byte `02`.
//!
//! Versions are not negotiated, and hosts not authenticated: listen only on trusted networks.

mod connection;
mod frame;

use core::time::Duration;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd as _;

use doorbell_rendezvous::{Deadline, Limited, readable, set_keepalive};
use frame::EndpointBytes;

pub use connection::Connection;

use crate::error::{CompletionQueueError, EventError, QueuePairError};
use crate::qp::{
    Backend, Connected, Endpoint, ParseEndpointError, PostError, PreparedQueuePair, QueuePair, UdEndpoint,
};
use crate::wr::status::CompletionError;

const FAILED: u8 = 0;
const CONNECTED: u8 = 1;
const DONE: u8 = 2;

/// A peer whose host is gone has left after 5 s + 3 · 2 s.
const KEEPALIVE_IDLE_S: u32 = 5;
const KEEPALIVE_INTERVAL_S: u32 = 2;
const KEEPALIVE_PROBES: u32 = 3;

/// Maximum length of the data that accompanies an endpoint, in bytes.
pub const MAX_DATA: usize = 4096;

/// An exchange failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExchangeError {
    /// No TCP connection could be opened.
    #[error("{address}: {error}; is the other end running, and listening there?")]
    Connect {
        /// The destination.
        address: String,
        /// The system's error.
        error: io::Error,
    },
    /// The address cannot be listened on.
    #[error("listening on {address}: {error}; is it an address of this machine, and the port free?")]
    Listen {
        /// The address.
        address: String,
        /// The system's error.
        error: io::Error,
    },
    /// The TCP connection broke.
    #[error("the TCP connection to {peer}: {error}")]
    Broken {
        /// The peer's address.
        peer: SocketAddr,
        /// The system's error.
        error: io::Error,
    },
    /// The peer closed the connection before it was done.
    #[error("the peer {peer} closed the connection before it was done; its own message says why")]
    Closed {
        /// The peer's address.
        peer: SocketAddr,
    },
    /// The peer has left, and with it what was to come.
    #[error("the peer {peer} has left, and sends nothing more")]
    Left {
        /// The peer's address.
        peer: SocketAddr,
    },
    /// The timeout expired.
    #[error("{peer}: no answer in the time given; is the other end running?")]
    TimedOut {
        /// The peer's address, or the listener's own.
        peer: String,
    },
    /// The peer uses another protocol.
    #[error("the peer {peer} does not speak this protocol: it is another program, or the port is wrong")]
    UnknownProtocol {
        /// The peer's address.
        peer: SocketAddr,
    },
    /// The peer uses another version.
    #[error(
        "the peer {peer} speaks version {theirs} of the exchange, this side version {ours}: run the same release on both ends"
    )]
    Version {
        /// The peer's address.
        peer: SocketAddr,
        /// Its version.
        theirs: u16,
        /// The local version.
        ours: u16,
    },
    /// The peer announces too much data.
    #[error("the peer {peer} announces {len} bytes of data, of which at most {MAX_DATA} are allowed")]
    PeerDataTooLong {
        /// The peer's address.
        peer: SocketAddr,
        /// How many bytes it announces.
        len: usize,
    },
    /// The data to send is too long.
    #[error("{len} bytes of data, of which at most {MAX_DATA} fit: send the rest when connected")]
    DataTooLong {
        /// How many bytes were given.
        len: usize,
    },
    /// The peer's endpoint is invalid.
    #[error("from {peer}: {error}")]
    Endpoint {
        /// The peer's address.
        peer: SocketAddr,
        /// The error in it.
        error: ParseEndpointError,
    },
    /// The queue pair could not be made or connected.
    #[error(transparent)]
    Transition(#[from] QueuePairError),
    /// The completion queue of a [`Connection`] could not be made or polled.
    #[error(transparent)]
    Queue(#[from] CompletionQueueError),
    /// Nor its channel.
    #[error(transparent)]
    Event(#[from] EventError),
    /// A receive of a [`Connection`] could not be posted.
    #[error(transparent)]
    Post(#[from] PostError),
    /// A request of a [`Connection`] has failed.
    #[error(transparent)]
    Request(#[from] CompletionError),
}

/// Waits for peers.
#[derive(Debug)]
pub struct Listener {
    listener: TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// Listens on `address`; port 0 is any free port.
    ///
    /// # Errors
    /// When the address is in use, or not of this host.
    pub fn bind(address: impl ToSocketAddrs + core::fmt::Debug) -> Result<Self, ExchangeError> {
        let bound = TcpListener::bind(&address).and_then(|listener| {
            // A peer that disconnects between poll(2) and accept(2) must not make accept block.
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

    /// Waits up to `timeout` for a peer; each [`pair`](Exchange::pair) may take as long again.
    ///
    /// # Errors
    /// When no peer connects in time, or the system refuses.
    pub fn accept(&self, timeout: Duration) -> Result<Exchange, ExchangeError> {
        let deadline = Deadline::after(timeout);
        let failed = |error| ExchangeError::Listen {
            address: self.address.to_string(),
            error,
        };
        match doorbell_rendezvous::accept(&self.listener, deadline).map_err(failed)? {
            Some((stream, peer)) => Exchange::new(stream, peer, timeout).map_err(failed),
            None => Err(ExchangeError::TimedOut {
                peer: self.address.to_string(),
            }),
        }
    }

    /// The peers as they connect, without end; each [`pair`](Exchange::pair) may take `timeout`.
    pub fn incoming(&self, timeout: Duration) -> impl Iterator<Item = Result<Exchange, ExchangeError>> + '_ {
        core::iter::repeat_with(move || {
            let exchange = self.accept(Duration::MAX)?;
            Ok(Exchange { timeout, ..exchange })
        })
    }
}

/// A TCP connection to a peer, by which queue pairs are connected.
#[derive(Debug)]
pub struct Exchange {
    stream: TcpStream,
    peer: SocketAddr,
    timeout: Duration,
}

impl Exchange {
    /// Connects to a peer, retrying until it listens; [`pair`](Self::pair) may take as long again.
    ///
    /// # Errors
    /// When the name has no address, or no peer listens in time.
    pub fn connect(to: impl ToSocketAddrs + core::fmt::Debug, timeout: Duration) -> Result<Self, ExchangeError> {
        let deadline = Deadline::after(timeout);
        let failed = |error| ExchangeError::Connect {
            address: format!("{to:?}"),
            error,
        };
        let addresses: Vec<_> = to.to_socket_addrs().map_err(failed)?.collect();
        let (stream, peer) = doorbell_rendezvous::connect(&addresses, None, deadline, || true).map_err(failed)?;
        Self::new(stream, peer, timeout).map_err(failed)
    }

    /// Over a connection that exists already, whose keepalive is set; each [`pair`](Self::pair) may
    /// take `timeout`.
    ///
    /// # Errors
    /// When the system does not know the peer's address: it is gone.
    pub fn over(stream: TcpStream, timeout: Duration) -> Result<Self, ExchangeError> {
        let failed = |error| ExchangeError::Connect {
            address: "the peer of a TCP connection".to_owned(),
            error,
        };
        let peer = stream.peer_addr().map_err(failed)?;
        Self::new(stream, peer, timeout).map_err(failed)
    }

    /// The end of the stream is how either side detects that the other is gone, also if that waits
    /// without a limit; without keepalive there is none if the peer's host is gone.
    fn new(stream: TcpStream, peer: SocketAddr, timeout: Duration) -> io::Result<Self> {
        set_keepalive(&stream, KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES)?;
        Ok(Self { stream, peer, timeout })
    }

    /// The TCP connection, for a use of one's own: its end says that the peer's process is gone.
    #[must_use]
    pub fn into_stream(self) -> TcpStream {
        self.stream
    }

    /// The peer's address.
    #[must_use]
    pub fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    /// Connects `qp` to the peer's, which is then connected too, and exchanges `data`.
    ///
    /// # Errors
    /// When the peer is gone, too slow, or another program; when there is too much data, or the
    /// queue pair cannot be connected. The exchange is then unusable.
    pub fn pair<T: Connected, B: Backend>(
        &mut self,
        qp: PreparedQueuePair<T, B>,
        data: &[u8],
    ) -> Result<(QueuePair<T, B>, Vec<u8>), ExchangeError> {
        let own = qp.endpoint().to_bytes();
        self.meet(&own, data, Endpoint::from_bytes, |peer| qp.connect(&peer))
    }

    /// Exchanges the addresses of queue pairs for datagrams, and `data`. Post receives first: the
    /// peer may send as soon as it has the address. Returns the peer's address, for an
    /// [address handle](crate::ProtectionDomain::address_handle), and its data.
    ///
    /// # Errors
    /// As of [`pair`](Self::pair); also when the peer calls that instead.
    pub fn datagrams(&mut self, own: &UdEndpoint, data: &[u8]) -> Result<(UdEndpoint, Vec<u8>), ExchangeError> {
        self.meet(&own.to_bytes(), data, UdEndpoint::from_bytes, Ok)
    }

    /// Exchanges endpoints and data, and waits until both sides have connected.
    fn meet<E, Q>(
        &mut self,
        own: &EndpointBytes,
        data: &[u8],
        parse: fn(&EndpointBytes) -> Result<E, ParseEndpointError>,
        connect: impl FnOnce(E) -> Result<Q, QueuePairError>,
    ) -> Result<(Q, Vec<u8>), ExchangeError> {
        let deadline = Deadline::after(self.timeout);
        let (theirs, peer_data) = self.exchange_endpoints(own, data, deadline)?;
        let peer = self.peer;
        let theirs = parse(&theirs).map_err(|error| ExchangeError::Endpoint { peer, error })?;
        let connected = connect(theirs);
        let status = if connected.is_ok() { CONNECTED } else { FAILED };
        self.write(&[status], deadline)?;
        let connected = connected?;
        self.read_status(CONNECTED, deadline)?;
        Ok((connected, peer_data))
    }

    /// Whether the peer has no further use of the queue pairs: it has called
    /// [`finish`](Self::finish), dropped its exchange or exited, or its host has not answered
    /// keepalive probes for 11 s. For a server, which learns it by no completion. Does not wait.
    #[must_use]
    pub fn peer_has_left(&self) -> bool {
        let mut next = [0];
        // The end of the stream is no byte; a byte that is not the end begins the peer's next pair.
        self.has_input() && !matches!(self.stream.peek(&mut next), Ok(1) if next != [DONE])
    }

    /// Whether the next read does not wait: for bytes, the end of the stream or an error.
    fn has_input(&self) -> bool {
        matches!(readable(self.stream.as_fd(), Deadline::after(Duration::ZERO)), Ok(true))
    }

    /// Waits until both sides are done with all queue pairs, up to the exchange's `timeout`.
    ///
    /// # Errors
    /// When the peer is gone, or not done in time.
    pub fn finish(mut self) -> Result<(), ExchangeError> {
        let deadline = Deadline::after(self.timeout);
        self.write(&[DONE], deadline)?;
        self.read_status(DONE, deadline)
    }

    fn read_status(&mut self, expected: u8, deadline: Deadline) -> Result<(), ExchangeError> {
        let mut status = [0];
        self.read(&mut status, deadline)?;
        match status {
            [byte] if byte == expected => Ok(()),
            [FAILED] => Err(ExchangeError::Closed { peer: self.peer }),
            _ => Err(ExchangeError::UnknownProtocol { peer: self.peer }),
        }
    }

    fn exchange_endpoints(
        &mut self,
        endpoint: &EndpointBytes,
        data: &[u8],
        deadline: Deadline,
    ) -> Result<(EndpointBytes, Vec<u8>), ExchangeError> {
        let frame = frame::write(endpoint, data).ok_or(ExchangeError::DataTooLong { len: data.len() })?;
        self.write(&frame, deadline)?;
        let mut header = [0; frame::HEADER_LEN];
        self.read(&mut header[..frame::PREFIX_LEN], deadline)?;
        // The prefix identifies another protocol or version, whose peer may never send the rest.
        let len = frame::length(&header).map_err(|bad| self.frame_error(bad))?;
        self.read(&mut header[frame::PREFIX_LEN..], deadline)?;
        let mut peer_data = vec![0; len];
        self.read(&mut peer_data, deadline)?;
        Ok((frame::endpoint(&header), peer_data))
    }

    fn frame_error(&self, bad: frame::FrameError) -> ExchangeError {
        let peer = self.peer;
        match bad {
            frame::FrameError::Magic => ExchangeError::UnknownProtocol { peer },
            frame::FrameError::Version(theirs) => ExchangeError::Version {
                peer,
                theirs,
                ours: frame::VERSION,
            },
            frame::FrameError::Length(len) => ExchangeError::PeerDataTooLong { peer, len },
        }
    }

    fn read(&mut self, bytes: &mut [u8], deadline: Deadline) -> Result<(), ExchangeError> {
        let read = Limited::new(&self.stream, deadline).read_exact(bytes);
        read.map_err(|error| self.io_error(error))
    }

    fn write(&mut self, bytes: &[u8], deadline: Deadline) -> Result<(), ExchangeError> {
        let written = Limited::new(&self.stream, deadline).write_all(bytes);
        written.map_err(|error| self.io_error(error))
    }

    fn io_error(&self, error: io::Error) -> ExchangeError {
        let peer = self.peer;
        match error.kind() {
            io::ErrorKind::TimedOut => ExchangeError::TimedOut { peer: peer.to_string() },
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                ExchangeError::Closed { peer }
            }
            _ => ExchangeError::Broken { peer, error },
        }
    }
}

#[cfg(test)]
mod tests;
