//! The mesh I/O thread: sleeps in poll(2) until input, queued output or a timer.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use doorbell_rendezvous::{Deadline, FrameMac};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::socket::{setsockopt, sockopt};

use super::frame::{Frame, Inbound};
use super::state::{PeerState, Shared, State};
use crate::bootstrap::keep_alive;

/// Time that a closing mesh tries to send goodbye to peers that do not read.
const GOODBYE_TIMEOUT: Duration = Duration::from_millis(500);
const READ_CHUNK: usize = 64 << 10;
/// Reads from one peer before the next peer is served (round-robin).
const READS_PER_PEER: usize = 16;
/// TCP_USER_TIMEOUT: how long data may stay unacknowledged, in ms.
const USER_TIMEOUT_MS: u32 = 40_000;
const CLOSED: &str = "its connection closed";

/// Describes how a connection ended, alike on all peers: whether it was closed or reset depends on
/// what the process had not read.
fn describe_end(error: &io::Error) -> String {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset};
    match error.kind() {
        BrokenPipe | ConnectionAborted | ConnectionReset => CLOSED.to_owned(),
        _ => error.to_string(),
    }
}

#[derive(Debug)]
struct PeerStream {
    stream: TcpStream,
    inbound: Inbound,
}

#[derive(Debug)]
pub(super) struct IoThread {
    shared: Arc<Shared>,
    /// By mesh rank.
    links: Vec<Option<PeerStream>>,
    chunk: Vec<u8>,
}

impl IoThread {
    pub(super) fn new(shared: Arc<Shared>, streams: Vec<Option<(TcpStream, FrameMac)>>) -> io::Result<Self> {
        let link = |(stream, mac): (TcpStream, FrameMac)| -> io::Result<PeerStream> {
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            keep_alive(&stream)?;
            setsockopt(&stream, sockopt::TcpUserTimeout, &USER_TIMEOUT_MS)?;
            Ok(PeerStream {
                stream,
                inbound: Inbound::new(mac),
            })
        };
        let links = streams
            .into_iter()
            .map(|stream| stream.map(link).transpose())
            .collect::<io::Result<_>>()?;
        Ok(Self {
            shared,
            links,
            chunk: vec![0; READ_CHUNK],
        })
    }

    pub(super) fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        loop {
            let (peers_with_output, due) = {
                let state = shared.lock();
                if state.closing {
                    break;
                }
                (self.peers_with_output(&state), state.due())
            };
            let ready = self.wait(&peers_with_output, due);
            let mut state = shared.lock();
            for (peer, ready) in ready.into_iter().enumerate() {
                if ready {
                    drop(state);
                    let end = self.read_peer(peer);
                    state = shared.lock();
                    self.process_frames(&mut state, peer, end);
                }
                self.flush_peer(&mut state, peer);
            }
            state.tick();
            drop(state);
            shared.changed.notify_all();
        }
        self.shutdown();
    }

    fn peers_with_output(&self, state: &State) -> Vec<bool> {
        state.peers.iter().map(|peer| !peer.out.is_empty()).collect()
    }

    fn wait(&self, peers_with_output: &[bool], due: Option<Instant>) -> Vec<bool> {
        let mut ready = vec![false; self.links.len()];
        let mut fds = vec![PollFd::new(self.shared.wakeup.as_fd(), PollFlags::POLLIN)];
        let mut peers = Vec::new();
        for (peer, link) in self.links.iter().enumerate() {
            if let Some(link) = link {
                let out = if peers_with_output[peer] {
                    PollFlags::POLLOUT
                } else {
                    PollFlags::empty()
                };
                fds.push(PollFd::new(link.stream.as_fd(), PollFlags::POLLIN | out));
                peers.push(peer);
            }
        }
        match poll(&mut fds, Deadline::from(due).poll_timeout()) {
            Ok(_) => {}
            Err(Errno::EINTR) => return ready,
            Err(e) => {
                // The kernel is short of memory: retry slowly.
                tracing::warn!("control mesh: poll: {e}");
                std::thread::sleep(Duration::from_millis(10));
                return vec![true; self.links.len()];
            }
        }
        let has_events = |fd: &PollFd<'_>, what: PollFlags| fd.revents().is_some_and(|events| events.intersects(what));
        let ends = PollFlags::POLLIN | PollFlags::POLLHUP | PollFlags::POLLERR;
        for (fd, peer) in fds[1..].iter().zip(peers) {
            ready[peer] = has_events(fd, ends);
        }
        if has_events(&fds[0], PollFlags::POLLIN) {
            // The count of the eventfd carries no information.
            let _ = self.shared.wakeup.read();
        }
        ready
    }

    fn read_peer(&mut self, peer: usize) -> Option<String> {
        let link = self.links[peer].as_mut()?;
        for _ in 0..READS_PER_PEER {
            match link.stream.read(&mut self.chunk) {
                Ok(0) => return Some(CLOSED.to_owned()),
                Ok(n) => link.inbound.extend(&self.chunk[..n]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return None,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Some(describe_end(&e)),
            }
        }
        None
    }

    fn process_frames(&mut self, state: &mut State, peer: usize, mut end: Option<String>) {
        let Some(link) = self.links[peer].as_mut() else {
            return;
        };
        loop {
            match link.inbound.next() {
                Ok(None) => break,
                Ok(Some(frame)) => {
                    if let Err(why) = state.receive(peer as u32, frame) {
                        end = Some(why.to_owned());
                        break;
                    }
                }
                Err(why) => {
                    end = Some(why.to_owned());
                    break;
                }
            }
        }
        if let Some(how) = end {
            self.links[peer] = None;
            state.connection_lost(peer as u32, &how);
        }
    }

    fn flush_peer(&mut self, state: &mut State, peer: usize) {
        let Some(link) = self.links[peer].as_mut() else {
            return;
        };
        let out = &mut state.peers[peer].out;
        let mut written = 0;
        let end = loop {
            if written == out.len() {
                break None;
            }
            match link.stream.write(&out[written..]) {
                Ok(n) => written += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break None,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => break Some(describe_end(&e)),
            }
        };
        out.drain(..written);
        if out.is_empty() {
            *out = Vec::new();
        }
        // The reading side takes the end, after the peer's last frames.
        if let Some(how) = end {
            out.clear();
            let read_end = self.read_peer(peer);
            self.process_frames(state, peer, read_end.or(Some(how)));
        }
    }

    fn shutdown(mut self) {
        let shared = Arc::clone(&self.shared);
        let deadline = Deadline::after(GOODBYE_TIMEOUT);
        let mut state = shared.lock();
        for peer in 0..self.links.len() {
            if state.peers[peer].state == PeerState::Connected {
                state.send(peer as u32, &Frame::Goodbye);
            }
        }
        loop {
            for peer in 0..self.links.len() {
                self.flush_peer(&mut state, peer);
            }
            let peers_with_output = self.peers_with_output(&state);
            let left = (0..self.links.len()).any(|peer| peers_with_output[peer] && self.links[peer].is_some());
            if !left || deadline.has_passed() {
                break;
            }
            drop(state);
            let mut fds = Vec::new();
            for (link, _) in self
                .links
                .iter()
                .zip(&peers_with_output)
                .filter(|(_, peers_with_output)| **peers_with_output)
            {
                fds.extend(
                    link.as_ref()
                        .map(|link| PollFd::new(link.stream.as_fd(), PollFlags::POLLOUT)),
                );
            }
            // Write what can be written until the deadline, whatever poll(2) returns.
            let _ = poll(&mut fds, deadline.poll_timeout());
            state = shared.lock();
        }
        for link in self.links.iter().flatten() {
            // The peer reads the goodbye before the end of the stream.
            let _ = link.stream.shutdown(Shutdown::Write);
        }
    }
}
