//! The TCP connection between the two ends of a test.
//!
//! A thread reads it all the time, so that a peer that fails, or is gone, is noticed in the middle of a measurement: hot loops look at one
//! flag ([`Control::attention`]) and only ask what happened when it is up.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};

use super::{Message, frame};
use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

/// How long the other side may take over an answer that it has at hand.
pub(crate) const ANSWER: Duration = Duration::from_secs(30);
/// How long a connection attempt may take, refusals while the server starts included.
const CONNECT: Duration = Duration::from_secs(3);
/// How long a client waits between attempts.
const RETRY: Duration = Duration::from_millis(50);
/// How long a silent connection may hold the server up before it says `DOORBELL`.
const PREAMBLE: Duration = Duration::from_secs(5);
/// How often a wait looks for Ctrl-C.
const LOOK: Duration = Duration::from_millis(50);
/// What is said of a connection that ended.
const CLOSED: &str = "it closed the connection, or its process ended";
/// Messages that may have arrived and not been looked at; a peer that sends more has to wait.
const BACKLOG: usize = 16;

/// The connection to the other end.
#[derive(Debug)]
pub(crate) struct Control {
    stream: TcpStream,
    peer: SocketAddr,
    incoming: Mutex<Receiver<Result<Message, String>>>,
    attention: Arc<AtomicBool>,
    interrupt: Interrupt,
}

impl Control {
    fn new(stream: TcpStream, interrupt: &Interrupt) -> io::Result<Control> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(ANSWER))?;
        let keepalive = TcpKeepalive::new()
            .with_time(Duration::from_secs(5))
            .with_interval(Duration::from_secs(2))
            .with_retries(3);
        SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
        let peer = stream.peer_addr()?;
        greet(&stream, peer)?;
        let attention = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = sync_channel(BACKLOG);
        let mut reader = stream.try_clone()?;
        let raise = Arc::clone(&attention);
        thread::Builder::new().name("control".into()).spawn(move || {
            loop {
                let (got, last) = match frame::read(&mut reader) {
                    Ok(Some(message)) => (Ok(message), false),
                    Ok(None) => (Err(CLOSED.to_owned()), true),
                    Err(e) => (Err(one_line(&e.to_string())), true),
                };
                let listening = sender.send(got).is_ok();
                raise.store(true, Ordering::Release);
                if last || !listening {
                    return;
                }
            }
        })?;
        Ok(Control {
            stream,
            peer,
            incoming: Mutex::new(receiver),
            attention,
            interrupt: interrupt.clone(),
        })
    }

    /// Where the other end is.
    pub(crate) fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Whether it is on this machine, as far as addresses tell.
    pub(crate) fn is_here(&self) -> bool {
        let ours = self.stream.local_addr().ok();
        ours.is_some_and(|ours| ours.ip() == self.peer.ip())
    }

    /// Sends a message.
    ///
    /// # Errors
    /// [`Failure::Test`] that names the peer: what it said before it went, if it said something.
    pub(crate) fn send(&self, message: &Message) -> Result<(), Failure> {
        frame::write(&mut &self.stream, message).map_err(|e| {
            match self.receive(Some(Duration::from_secs(1)), "a reason") {
                Err(known @ Failure::Test(_)) => known,
                _ => self.lost(&one_line(&e.to_string())),
            }
        })
    }

    /// Tells the other end why this one gives up, as far as it can still hear it.
    pub(crate) fn send_failure(&self, failure: &Failure) {
        let reason = match failure {
            Failure::Interrupted => "it was interrupted".to_owned(),
            other => other.to_string(),
        };
        // There is nobody else to tell.
        let _ = frame::write(&mut &self.stream, &Message::Failed(reason));
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Waits for the next message; `None` waits as long as the peer lives.
    ///
    /// # Errors
    /// [`Failure::Interrupted`]; else [`Failure::Test`] that names the peer: it failed, is gone, or did not answer in time.
    pub(crate) fn receive(&self, within: Option<Duration>, awaited: &str) -> Result<Message, Failure> {
        let deadline = within.map(|within| Instant::now() + within);
        let incoming = self.incoming.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match incoming.recv_timeout(LOOK) {
                Ok(got) => return self.judge(got),
                Err(RecvTimeoutError::Disconnected) => return Err(self.lost(CLOSED)),
                Err(RecvTimeoutError::Timeout) if self.interrupt.requested() => return Err(Failure::Interrupted),
                Err(RecvTimeoutError::Timeout) if deadline.is_some_and(|deadline| Instant::now() >= deadline) => {
                    return Err(self.lost(&format!("it did not send {awaited} in time")));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Whether something may have happened that [`Control::look`] can tell: one relaxed load or two, for hot loops.
    #[inline]
    pub(crate) fn attention(&self) -> bool {
        self.attention.load(Ordering::Relaxed) || self.interrupt.requested()
    }

    /// What happened: a message that has arrived, or nothing. Several may have: ask until there is nothing.
    ///
    /// # Errors
    /// As [`Control::receive`].
    pub(crate) fn look(&self) -> Result<Option<Message>, Failure> {
        if self.interrupt.requested() {
            return Err(Failure::Interrupted);
        }
        self.attention.store(false, Ordering::Relaxed);
        let incoming = self.incoming.lock().unwrap_or_else(PoisonError::into_inner);
        match incoming.try_recv() {
            Ok(got) => self.judge(got).map(Some),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(self.lost(CLOSED)),
        }
    }

    fn judge(&self, got: Result<Message, String>) -> Result<Message, Failure> {
        match got {
            Ok(Message::Failed(reason)) => Err(Failure::test(format!("peer {}: {}", self.peer, one_line(&reason)))),
            Ok(message) => Ok(message),
            Err(reason) => Err(self.lost(&reason)),
        }
    }

    /// The failure for a message that does not belong here.
    pub(crate) fn unexpected(&self, got: &Message, awaited: &str) -> Failure {
        Failure::test(format!(
            "peer {} sent '{}' where '{awaited}' belongs: are both ends the same doorbell?",
            self.peer,
            got.name()
        ))
    }

    fn lost(&self, reason: &str) -> Failure {
        Failure::Lost {
            control: self.peer,
            reason: reason.to_owned(),
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // Ends the reader's wait; fails only where the connection is gone already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Exchanges the preambles.
fn greet(stream: &TcpStream, peer: SocketAddr) -> io::Result<()> {
    stream.set_read_timeout(Some(PREAMBLE))?;
    (&mut &*stream).write_all(&frame::PREAMBLE)?;
    let mut theirs = [0; frame::PREAMBLE.len()];
    let greeted = (&mut &*stream)
        .read_exact(&mut theirs)
        .map(|()| theirs == frame::PREAMBLE);
    if !matches!(greeted, Ok(true)) {
        let said = if greeted.is_ok() {
            "speaks another language"
        } else {
            "does not answer"
        };
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("peer {peer} {said}: is it a doorbell of the same version, waiting with --server?"),
        ));
    }
    stream.set_read_timeout(None)
}

/// Connects to a server, trying again for a moment while it starts.
///
/// # Errors
/// [`Failure::Usage`] when the name cannot be resolved; [`Failure::Test`] when nobody answers there.
pub(crate) fn connect(host: &str, port: u16, interrupt: &Interrupt) -> Result<Control, Failure> {
    let addresses: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .map_err(|e| Failure::usage(format!("cannot find the peer '{}': {e}", one_line(host))))?
        .collect();
    let deadline = Instant::now() + CONNECT;
    loop {
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for address in &addresses {
            let left = deadline
                .saturating_duration_since(Instant::now())
                .max(Duration::from_millis(1));
            match TcpStream::connect_timeout(address, left) {
                Ok(stream) => {
                    return Control::new(stream, interrupt).map_err(|e| Failure::test(one_line(&e.to_string())));
                }
                Err(e) => last = e,
            }
        }
        if interrupt.requested() {
            return Err(Failure::Interrupted);
        }
        if last.kind() != io::ErrorKind::ConnectionRefused || Instant::now() >= deadline {
            return Err(Failure::test(format!(
                "cannot reach peer {} port {port}: {last}: start the same test there with --server, and --bind its address",
                one_line(host)
            )));
        }
        thread::sleep(RETRY);
    }
}

/// Where a server waits.
#[derive(Debug)]
pub(crate) struct Listener {
    listener: TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// Listens; port 0 takes any free one.
    ///
    /// # Errors
    /// [`Failure::Test`] when the address is in use or is not this machine's.
    pub(crate) fn bind(address: IpAddr, port: u16) -> Result<Listener, Failure> {
        let explain = |e: io::Error| {
            let advice = match e.kind() {
                io::ErrorKind::AddrInUse => ": another server may be running; choose another --port",
                io::ErrorKind::AddrNotAvailable => ": --bind needs an address of this machine",
                io::ErrorKind::PermissionDenied => ": ports below 1024 need privileges; choose another --port",
                _ => "",
            };
            Failure::test(format!(
                "cannot listen on {}: {}{advice}",
                SocketAddr::new(address, port),
                one_line(&e.to_string())
            ))
        };
        let listener = TcpListener::bind((address, port)).map_err(explain)?;
        listener.set_nonblocking(true).map_err(explain)?;
        let address = listener.local_addr().map_err(explain)?;
        Ok(Listener { listener, address })
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for a client. Whoever connects and is none is turned away, with a line about it, and the wait goes on.
    ///
    /// # Errors
    /// [`Failure::Interrupted`]; [`Failure::Test`] when nobody came in time or the socket failed.
    pub(crate) fn accept(&self, within: Option<Duration>, interrupt: &Interrupt) -> Result<Control, Failure> {
        let deadline = within.map(|within| Instant::now() + within);
        loop {
            if interrupt.requested() {
                return Err(Failure::Interrupted);
            }
            match self.listener.accept() {
                Ok((stream, peer)) => match stream
                    .set_nonblocking(false)
                    .and_then(|()| Control::new(stream, interrupt))
                {
                    Ok(control) => return Ok(control),
                    Err(e) => eprintln!("doorbell: turned {peer} away: {}", one_line(&e.to_string())),
                },
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                        return Err(Failure::test(format!("nobody connected to {} in time", self.address)));
                    }
                    thread::sleep(Duration::from_millis(10));
                }
                Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted) => {}
                Err(e) => {
                    return Err(Failure::test(format!(
                        "cannot accept on {}: {}",
                        self.address,
                        one_line(&e.to_string())
                    )));
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "control_tests.rs"]
mod tests;
