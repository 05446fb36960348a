//! The control connection (TCP) between the two ends of a test.
//!
//! A thread reads it, so that a peer that fails is noticed during a measurement: hot loops check
//! one flag ([`Control::attention`]) and call [`Control::poll`] only when it is set.
//!
//! No model: the flags are reasons to read what a channel or the process knows.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use doorbell_rendezvous::{Deadline, Limited};

use super::handshake::{ExpectedTest, Handshake};
use super::message::PREAMBLE;
use super::{Message, tcp};
use crate::failure::{Failure, one_line, refused};
use crate::interrupt::Interrupt;
use crate::plan::Plan;

/// Time limit for a reply that the peer can send at once.
pub(crate) const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for the preamble of a server.
const PREAMBLE_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a wait checks for Ctrl-C.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
const CLOSED_REASON: &str = "it closed the connection, or its process ended";
/// Messages received and not yet read; further ones wait in the socket.
const BACKLOG: usize = 16;

#[derive(Debug)]
pub(crate) struct Control {
    stream: TcpStream,
    peer: SocketAddr,
    incoming: Mutex<Receiver<Result<Message, String>>>,
    attention: Arc<AtomicBool>,
    interrupt: Interrupt,
}

impl Control {
    /// After what each side sends first. A test that lasts over `limit_s` fails.
    fn new(stream: TcpStream, limit_s: Option<f64>, interrupt: &Interrupt) -> io::Result<Control> {
        tcp::set_keepalive(&stream)?;
        let peer = stream.peer_addr()?;
        let attention = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = sync_channel(BACKLOG);
        let reader = stream.try_clone()?;
        let deadline = limit_s.map_or(Deadline::NEVER, |limit| Deadline::after(Duration::from_secs_f64(limit)));
        let raise = Arc::clone(&attention);
        thread::Builder::new().name("control".into()).spawn(move || {
            loop {
                let (received, last) = match Message::read(&mut Limited::new(&reader, deadline)) {
                    Ok(message) => (Ok(message), false),
                    Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => (Err(CLOSED_REASON.to_owned()), true),
                    Err(e) if e.kind() == io::ErrorKind::TimedOut && deadline.has_passed() => {
                        let limit_s = limit_s.unwrap_or_default();
                        let reason = format!("its test has taken the server's --client-time of {limit_s} s");
                        (Ok(Message::Failed(reason)), true)
                    }
                    Err(e) => (Err(one_line(&e.to_string())), true),
                };
                let listening = sender.send(received).is_ok();
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

    pub(crate) fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// This end's address of the connection.
    pub(crate) fn local(&self) -> io::Result<SocketAddr> {
        self.stream.local_addr()
    }

    pub(crate) fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }

    /// Whether the peer is on this machine, judging by the addresses.
    pub(crate) fn is_local(&self) -> bool {
        self.local().is_ok_and(|ours| ours.ip() == self.peer.ip())
    }

    /// # Errors
    /// [`Failure::Test`] that names the peer, with the failure it reported before it closed, if it
    /// did.
    pub(crate) fn send(&self, message: &Message) -> Result<(), Failure> {
        self.write(message)
            .map_err(|e| match self.receive(Some(Duration::from_secs(1)), "a reason") {
                Err(known @ Failure::Test(_)) => known,
                _ => self.lost(&one_line(&e.to_string())),
            })
    }

    fn write(&self, message: &Message) -> io::Result<()> {
        message.write(&mut Limited::new(&self.stream, Deadline::after(REPLY_TIMEOUT)))
    }

    pub(crate) fn send_failure(&self, failure: &Failure) {
        let reason = match failure {
            Failure::Interrupted => "it was interrupted".to_owned(),
            other => other.to_string(),
        };
        // A failed report cannot be reported.
        let _ = self.write(&Message::Failed(reason));
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Waits for the next message; without a time limit as long as the peer lives.
    ///
    /// # Errors
    /// [`Failure::Interrupted`]; else [`Failure::Test`] that names the peer: it failed, is gone, or
    /// did not answer in time.
    pub(crate) fn receive(&self, within: Option<Duration>, awaited: &str) -> Result<Message, Failure> {
        let deadline = within.map(|within| Instant::now() + within);
        let incoming = self.incoming.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match incoming.recv_timeout(POLL_INTERVAL) {
                Ok(received) => return self.check(received),
                Err(RecvTimeoutError::Disconnected) => return Err(self.lost(CLOSED_REASON)),
                Err(RecvTimeoutError::Timeout) if self.interrupt.requested() => return Err(Failure::Interrupted),
                Err(RecvTimeoutError::Timeout) if deadline.is_some_and(|deadline| Instant::now() >= deadline) => {
                    return Err(self.lost(&format!("it did not send {awaited} in time")));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Whether there may be something for [`Control::poll`]: one or two relaxed loads, for hot
    /// loops.
    #[inline]
    pub(crate) fn attention(&self) -> bool {
        self.attention.load(Ordering::Relaxed) || self.interrupt.requested()
    }

    /// A message that has arrived, if any. Call it until it returns none.
    pub(crate) fn poll(&self) -> Result<Option<Message>, Failure> {
        if self.interrupt.requested() {
            return Err(Failure::Interrupted);
        }
        self.attention.store(false, Ordering::Relaxed);
        let incoming = self.incoming.lock().unwrap_or_else(PoisonError::into_inner);
        match incoming.try_recv() {
            Ok(received) => self.check(received).map(Some),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(self.lost(CLOSED_REASON)),
        }
    }

    fn check(&self, received: Result<Message, String>) -> Result<Message, Failure> {
        match received {
            Ok(Message::Failed(reason)) => Err(Failure::test(format!("peer {}: {}", self.peer, one_line(&reason)))),
            Ok(message) => Ok(message),
            Err(reason) => Err(self.lost(&reason)),
        }
    }

    pub(crate) fn unexpected(&self, received: &Message, awaited: &str) -> Failure {
        Failure::test(format!(
            "peer {} sent '{}' where '{awaited}' belongs: are both ends the same doorbell?",
            self.peer,
            received.name()
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
        // Ends the reader thread; fails only where the connection is gone already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

fn exchange_preambles(stream: &TcpStream, peer: SocketAddr) -> io::Result<()> {
    let mut stream = Limited::new(stream, Deadline::after(PREAMBLE_TIMEOUT));
    stream.write_all(PREAMBLE)?;
    let mut theirs = [0; PREAMBLE.len()];
    let greeted = stream.read_exact(&mut theirs).map(|()| theirs == *PREAMBLE);
    if !matches!(greeted, Ok(true)) {
        let said = if greeted.is_ok() {
            "does not speak the doorbell protocol"
        } else {
            "does not answer"
        };
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("peer {peer} {said}: is it a doorbell of the same version, waiting with --server?"),
        ));
    }
    Ok(())
}

/// # Errors
/// [`Failure::Usage`] when the name cannot be resolved; [`Failure::Test`] when no server answers
/// there.
pub(crate) fn connect(host: &str, port: u16, interrupt: &Interrupt) -> Result<Control, Failure> {
    let addresses: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .map_err(|e| Failure::usage(format!("cannot resolve the peer '{}': {e}", one_line(host))))?
        .collect();
    let (stream, _) = tcp::connect(&addresses, None, interrupt, |last| {
        format!(
            "cannot reach peer {} port {port}: {last}: start the same test there with --server, and --bind its address",
            one_line(host)
        )
    })?;
    stream
        .peer_addr()
        .and_then(|peer| exchange_preambles(&stream, peer))
        .and_then(|()| Control::new(stream, None, interrupt))
        .map_err(refused)
}

#[derive(Debug)]
pub(crate) struct Listener(tcp::Acceptor<Handshake>);

impl Listener {
    /// As [`tcp::Acceptor::bind`].
    pub(crate) fn bind(address: IpAddr, port: u16) -> Result<Listener, Failure> {
        let address = SocketAddr::new(address, port);
        tcp::Acceptor::bind(address, "--port", "--bind needs an address of this machine").map(Listener)
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.0.address()
    }

    /// Waits for a client with the expected test, and returns its plan as well. Others are refused
    /// with a line on stderr.
    ///
    /// # Errors
    /// [`Failure::Interrupted`]; [`Failure::Test`] when no client connected in time or the socket
    /// failed.
    pub(crate) fn accept(
        &mut self,
        within: Option<Duration>,
        expected: &ExpectedTest<'_>,
        interrupt: &Interrupt,
    ) -> Result<(Control, Plan), Failure> {
        let deadline = within.map(|within| Instant::now() + within);
        let limit_s = expected.limits.map(|limits| limits.client_time);
        loop {
            let advance = |stream: &TcpStream, handshake: &mut Handshake| handshake.advance(stream, expected);
            let (stream, peer, plan) = self.0.accept(deadline, interrupt, advance)?;
            match Control::new(stream, limit_s, interrupt) {
                Ok(control) => return Ok((control, plan)),
                Err(e) => eprintln!("doorbell: refused {peer}: {}", one_line(&e.to_string())),
            }
        }
    }
}

#[cfg(test)]
#[path = "control_tests.rs"]
mod tests;
