//! The control connection: the client writes a message, the server replies with its own.

use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use doorbell_verbs::cm::Connection;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};

use super::message::{
    BwReport, DONE, LARGEST_CACHE_LINE, LARGEST_PAGE, MTU, Malformed, SharedParameters, VERSION, check_version,
    format_mtu, our_version, parse_mtu, parse_power,
};
use super::qp_channel::{ChannelError, QpChannel};
use super::qp_info::QpInfo;
use crate::exchange::tcp::set_keepalive;
use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

/// Time limit for a reply that the peer can send at once: enough for a C tool to register much
/// memory, or to compute a peak.
pub(crate) const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a wait checks for Ctrl-C.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// For the peer's closing message, or for it to close the connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
const CLOSED_REASON: &str = "it closed the connection, or its process ended";

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    Client,
    Server,
}

/// The two ends write alternately. Every message has the deadline [`REPLY_TIMEOUT`], except where
/// the peer may be measuring: there a TCP keepalive notices when its machine is gone. Ctrl-C ends
/// any wait.
#[derive(Debug)]
pub(crate) struct ControlConnection {
    transport: ControlTransport,
    peer: SocketAddr,
    role: Role,
    interrupt: Interrupt,
    cm_connections: Vec<Connection>,
}

#[derive(Debug)]
enum ControlTransport {
    Tcp(TcpStream),
    /// A queue pair connected by the connection manager. In a cell, as a [`PeerMonitor`] polls it
    /// while others borrow the control connection.
    QueuePair(Box<RefCell<QpChannel>>),
}

impl ControlConnection {
    /// # Errors
    /// [`Failure::Lost`] when the connection is gone already.
    pub(crate) fn new(
        stream: TcpStream,
        peer: SocketAddr,
        role: Role,
        interrupt: &Interrupt,
    ) -> Result<ControlConnection, Failure> {
        let prepared = stream
            .set_nonblocking(false)
            .and_then(|()| stream.set_nodelay(true))
            .and_then(|()| stream.set_read_timeout(Some(POLL_INTERVAL)))
            .and_then(|()| stream.set_write_timeout(Some(REPLY_TIMEOUT)))
            .and_then(|()| set_keepalive(&stream));
        let control = ControlConnection {
            transport: ControlTransport::Tcp(stream),
            peer,
            role,
            interrupt: interrupt.clone(),
            cm_connections: Vec::new(),
        };
        match prepared {
            Ok(()) => Ok(control),
            Err(e) => Err(control.lost(one_line(&e.to_string()))),
        }
    }

    pub(crate) fn over(channel: QpChannel, peer: SocketAddr, role: Role, interrupt: &Interrupt) -> ControlConnection {
        ControlConnection {
            transport: ControlTransport::QueuePair(Box::new(RefCell::new(channel))),
            peer,
            role,
            interrupt: interrupt.clone(),
            cm_connections: Vec::new(),
        }
    }

    pub(crate) fn keep_connected(&mut self, connections: Vec<Connection>) {
        self.cm_connections = connections;
    }

    pub(crate) fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Exchanges versions, page sizes, cache lines and MTUs. Returns the parameters both ends use.
    ///
    /// # Errors
    /// [`Failure::Test`] when the peer has another version, or is no perftest; as
    /// [`ControlConnection::barrier`] otherwise.
    pub(crate) fn exchange_parameters(&mut self, ours: SharedParameters) -> Result<SharedParameters, Failure> {
        let version: [u8; VERSION] = self.exchange(our_version(), "its version")?;
        check_version(&version)
            .map_err(|reason| Failure::test(format!("peer {}: {}", self.peer, one_line(&reason))))?;
        let page = self.exchange(ours.page.to_be_bytes(), "its page size")?;
        let page =
            parse_power(page, LARGEST_PAGE, Malformed("its page size is invalid")).map_err(|e| self.malformed(e))?;
        let channel = self.exchange(ours.cache_line.to_be_bytes(), "its cache line")?;
        let cache_line = parse_power(channel, LARGEST_CACHE_LINE, Malformed("its cache line is invalid"))
            .map_err(|e| self.malformed(e))?;
        let mtu: [u8; MTU] = self.exchange(format_mtu(ours.mtu), "its MTU")?;
        let mtu = parse_mtu(mtu).map_err(|e| self.malformed(e))?;
        Ok(ours.merge(SharedParameters { page, cache_line, mtu }))
    }

    /// Exchanges the QP information of all queue pairs, one by one. Returns the peer's.
    pub(crate) fn exchange_qp_infos(&mut self, ours: &[QpInfo]) -> Result<Vec<QpInfo>, Failure> {
        ours.iter()
            .map(|qp_info| self.exchange_qp_info(qp_info, Some(REPLY_TIMEOUT), "its QP information"))
            .collect()
    }

    /// Barrier before and after queue pairs are connected by the connection manager (`-R`): each
    /// end sends a message of the length of a QP information, with no content.
    pub(crate) fn cm_barrier(&mut self) -> Result<(), Failure> {
        self.exchange([0; QpInfo::STRUCT], "that it is ready to connect")
            .map(drop)
    }

    /// Barrier: both ends send a QP information that they have sent before.
    ///
    /// # Errors
    /// [`Failure::Lost`] when the peer is gone or sends nothing in time; [`Failure::Test`] when it
    /// sends something else; [`Failure::Interrupted`].
    pub(crate) fn barrier(&mut self, ours: &QpInfo) -> Result<(), Failure> {
        self.exchange_qp_info(ours, Some(REPLY_TIMEOUT), "that it is ready")
            .map(drop)
    }

    /// As [`ControlConnection::barrier`], without a deadline, as the peer may still be measuring.
    pub(crate) fn barrier_after_test(&mut self, ours: &QpInfo) -> Result<(), Failure> {
        self.exchange_qp_info(ours, None, "that it is done").map(drop)
    }

    /// Exchanges reports. The content is meaningless where the peer has none.
    pub(crate) fn exchange_report(&mut self, ours: &BwReport) -> Result<BwReport, Failure> {
        let mut theirs = [[0; 8]; 5];
        for (ours, theirs) in ours.to_words().into_iter().zip(&mut theirs) {
            *theirs = self.exchange_within(ours, None, "its results")?;
        }
        Ok(BwReport::from_words(theirs))
    }

    /// The peer may already be gone. Over a queue pair there is no closing message: each end
    /// disconnects.
    pub(crate) fn close(mut self) {
        if matches!(self.transport, ControlTransport::Tcp(_)) && self.write(&DONE).is_ok() {
            let mut theirs = [0; DONE.len()];
            // Its content, and whether it arrives, makes no difference any more.
            let _ = self.read(&mut theirs, Some(CLOSE_TIMEOUT), "the closing message");
        }
    }

    /// Waits up to [`CLOSE_TIMEOUT`] for the peer, which may still be measuring: shuts down this
    /// end's half of the connection, and waits until the peer closes.
    ///
    /// A queue pair cannot be closed by halves, so a byte is sent in place of the shutdown; only
    /// Doorbell expects it.
    pub(crate) fn linger(&mut self) {
        // The peer's close, the timeout and Ctrl-C all end the wait.
        let _ = match &mut self.transport {
            ControlTransport::Tcp(stream) => stream.shutdown(Shutdown::Write).map_err(drop),
            ControlTransport::QueuePair(channel) => channel
                .get_mut()
                .send(&[0], CLOSE_TIMEOUT, &self.interrupt)
                .map_err(drop),
        };
        let _ = self.read(&mut [0], Some(CLOSE_TIMEOUT), "the closing message");
    }

    pub(crate) fn monitor(&self) -> PeerMonitor<'_> {
        PeerMonitor {
            control: self,
            iterations: 0,
            next: Instant::now() + POLL_INTERVAL,
        }
    }

    fn exchange_qp_info(&mut self, ours: &QpInfo, within: Option<Duration>, awaited: &str) -> Result<QpInfo, Failure> {
        if matches!(self.transport, ControlTransport::QueuePair(_)) {
            let mut theirs = [0; QpInfo::STRUCT];
            self.exchange_bytes(&ours.to_struct(), &mut theirs, within, awaited)?;
            return QpInfo::from_struct(&theirs).map_err(|e| self.malformed(e));
        }
        let mut theirs = vec![0; QpInfo::len(ours.gid.is_some())];
        self.exchange_bytes(&ours.format(), &mut theirs, within, awaited)?;
        QpInfo::parse(&theirs).map_err(|e| self.malformed(e))
    }

    fn exchange<const N: usize>(&mut self, ours: [u8; N], awaited: &str) -> Result<[u8; N], Failure> {
        self.exchange_within(ours, Some(REPLY_TIMEOUT), awaited)
    }

    fn exchange_within<const N: usize>(
        &mut self,
        ours: [u8; N],
        within: Option<Duration>,
        awaited: &str,
    ) -> Result<[u8; N], Failure> {
        let mut theirs = [0; N];
        self.exchange_bytes(&ours, &mut theirs, within, awaited)?;
        Ok(theirs)
    }

    fn exchange_bytes(
        &mut self,
        ours: &[u8],
        theirs: &mut [u8],
        within: Option<Duration>,
        awaited: &str,
    ) -> Result<(), Failure> {
        match self.role {
            Role::Client => {
                self.write(ours)?;
                self.read(theirs, within, awaited)
            }
            Role::Server => {
                self.read(theirs, within, awaited)?;
                self.write(ours)
            }
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        match &mut self.transport {
            ControlTransport::Tcp(stream) => stream.write_all(bytes).map_err(|e| self.lost(reason(&e))),
            ControlTransport::QueuePair(channel) => channel
                .get_mut()
                .send(bytes, REPLY_TIMEOUT, &self.interrupt)
                .map_err(|error| self.channel_error(error, "it does not read what it is sent")),
        }
    }

    fn read(&mut self, into: &mut [u8], within: Option<Duration>, awaited: &str) -> Result<(), Failure> {
        let stream = match &mut self.transport {
            ControlTransport::Tcp(stream) => stream,
            ControlTransport::QueuePair(channel) => {
                return channel
                    .get_mut()
                    .receive(into, within, &self.interrupt)
                    .map_err(|error| self.channel_error(error, &format!("it did not send {awaited} in time")));
            }
        };
        let deadline = within.map(|within| Instant::now() + within);
        let mut filled = 0;
        while filled < into.len() {
            if self.interrupt.requested() {
                return Err(Failure::Interrupted);
            }
            match stream.read(&mut into[filled..]) {
                Ok(0) => return Err(self.lost(CLOSED_REASON)),
                Ok(read) => filled += read,
                Err(e)
                    if matches!(
                        e.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) =>
                {
                    if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                        return Err(self.lost(format!("it did not send {awaited} in time")));
                    }
                }
                Err(e) => return Err(self.lost(reason(&e))),
            }
        }
        Ok(())
    }

    #[cold]
    fn channel_error(&self, error: ChannelError, late: &str) -> Failure {
        match error {
            ChannelError::Lost(reason) => self.lost(reason),
            ChannelError::TimedOut => self.lost(late),
            ChannelError::Interrupted => Failure::Interrupted,
        }
    }

    #[cold]
    fn malformed(&self, malformed: Malformed) -> Failure {
        Failure::test(format!(
            "peer {}: {malformed}: is it the same tool with the same options?",
            self.peer
        ))
    }

    /// The failure for a peer that is gone.
    #[cold]
    pub(crate) fn lost(&self, reason: impl Into<String>) -> Failure {
        Failure::Lost {
            control: self.peer,
            reason: reason.into(),
        }
    }
}

impl Drop for ControlConnection {
    fn drop(&mut self) {
        // The shutdown fails only where the connection is gone already. CM connections first, so
        // that the peer is not informed earlier that this end is gone.
        self.cm_connections.clear();
        if let ControlTransport::Tcp(stream) = &self.transport {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn reason(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted => CLOSED_REASON.to_owned(),
        ErrorKind::WouldBlock => "it does not read what it is sent".to_owned(),
        _ => one_line(&error.to_string()),
    }
}

/// A loop reads the clock once in so many iterations, and polls the connection when it is time.
const CHECK_INTERVAL: u32 = 512;

#[derive(Debug)]
pub(crate) struct PeerMonitor<'a> {
    control: &'a ControlConnection,
    iterations: u32,
    next: Instant,
}

impl PeerMonitor<'_> {
    /// Returns whether the peer has sent its next message, which means that it is done.
    ///
    /// # Errors
    /// [`Failure::Lost`] when the peer is gone; [`Failure::Interrupted`].
    #[inline]
    pub(crate) fn poll(&mut self) -> Result<bool, Failure> {
        self.iterations = self.iterations.wrapping_add(1);
        if self.iterations.is_multiple_of(CHECK_INTERVAL) {
            self.check()
        } else {
            Ok(false)
        }
    }

    #[cold]
    fn check(&mut self) -> Result<bool, Failure> {
        if self.control.interrupt.requested() {
            return Err(Failure::Interrupted);
        }
        let now = Instant::now();
        if now < self.next {
            return Ok(false);
        }
        self.next = now + POLL_INTERVAL;
        self.poll_now()
    }

    pub(crate) fn poll_now(&self) -> Result<bool, Failure> {
        let control = self.control;
        if control.interrupt.requested() {
            return Err(Failure::Interrupted);
        }
        let stream = match &control.transport {
            ControlTransport::Tcp(stream) => stream,
            ControlTransport::QueuePair(channel) => {
                return channel
                    .borrow_mut()
                    .has_received()
                    .map_err(|error| control.channel_error(error, CLOSED_REASON));
            }
        };
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        match recv(stream.as_raw_fd(), &mut [0], flags) {
            Ok(0) => Err(control.lost(CLOSED_REASON)),
            Ok(_) => Ok(true),
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(false),
            Err(errno) => Err(control.lost(reason(&errno.into()))),
        }
    }
}

#[cfg(test)]
#[path = "control_connection_tests.rs"]
mod tests;
