//! The bootstrap: ranks exchange memory keys and endpoints before they are connected.

use core::time::Duration;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Instant;

/// An all-to-all exchange of messages; every rank calls it equally often, in the same order.
pub trait Exchange {
    /// This rank, from 0.
    fn rank(&self) -> u32;

    /// The number of ranks.
    fn ranks(&self) -> u32;

    /// Sends `outgoing[r]` to each rank r and returns the message received from each.
    ///
    /// # Errors
    /// If a rank does not respond.
    fn all_to_all(&mut self, outgoing: Vec<Vec<u8>>) -> io::Result<Vec<Vec<u8>>>;
}

/// Ranks that are threads of one process.
#[derive(Debug)]
pub struct ThreadExchange {
    rank: u32,
    to: Vec<Sender<(u32, Vec<u8>)>>,
    from: Receiver<(u32, Vec<u8>)>,
    early: Vec<std::collections::VecDeque<Vec<u8>>>,
    timeout: Duration,
}

impl ThreadExchange {
    /// One exchange per rank; each wait is limited by `timeout`.
    #[must_use]
    pub fn new(ranks: u32, timeout: Duration) -> Vec<Self> {
        let (to, from): (Vec<_>, Vec<_>) = (0..ranks).map(|_| channel()).unzip();
        let end = |(rank, from)| Self {
            rank,
            to: to.clone(),
            from,
            early: vec![std::collections::VecDeque::new(); ranks as usize],
            timeout,
        };
        (0..).zip(from).map(end).collect()
    }
}

impl Exchange for ThreadExchange {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn ranks(&self) -> u32 {
        self.to.len() as u32
    }

    fn all_to_all(&mut self, outgoing: Vec<Vec<u8>>) -> io::Result<Vec<Vec<u8>>> {
        let gone = || io::Error::new(io::ErrorKind::BrokenPipe, "a rank has gone");
        for (to, message) in self.to.iter().zip(outgoing) {
            to.send((self.rank, message)).map_err(|_| gone())?;
        }
        while self.early.iter().any(|queue| queue.is_empty()) {
            let (rank, message) = self.from.recv_timeout(self.timeout).map_err(|error| match error {
                RecvTimeoutError::Timeout => io::Error::new(io::ErrorKind::TimedOut, "a rank does not answer"),
                RecvTimeoutError::Disconnected => gone(),
            })?;
            if let Some(queue) = self.early.get_mut(rank as usize) {
                queue.push_back(message);
            }
        }
        Ok(self.early.iter_mut().filter_map(|queue| queue.pop_front()).collect())
    }
}

/// Ranks that are processes, connected over TCP through rank 0. There is no authentication: any
/// peer that reaches the port can be a rank, so listen only on a trusted network.
#[derive(Debug)]
pub struct TcpExchange {
    rank: u32,
    ranks: u32,
    /// On rank 0: a connection to each other rank. On others: the connection to rank 0.
    connections: Vec<TcpStream>,
}

const MAX_MESSAGE: u32 = 64 << 10;
/// The magic number of a hello, before the rank and the number of ranks.
const HELLO: [u8; 8] = *b"DBELLSYM";

impl TcpExchange {
    /// Rank 0, which the others [`join`](Self::join).
    ///
    /// # Errors
    /// If they do not connect in time, or disagree on the number of ranks.
    pub fn host(listener: &TcpListener, ranks: u32, timeout: Duration) -> io::Result<Self> {
        let until = Instant::now() + timeout;
        listener.set_nonblocking(true)?;
        let mut connections: Vec<Option<TcpStream>> = (1..ranks).map(|_| None).collect();
        while connections.iter().any(Option::is_none) {
            match listener.accept() {
                Ok((stream, _)) => {
                    // A connection without a valid hello is dropped.
                    if let Ok((rank, stream)) = accept_rank(stream, ranks, timeout)
                        && let Some(place) = rank.checked_sub(1).and_then(|at| connections.get_mut(at as usize))
                    {
                        place.get_or_insert(stream);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if Instant::now() >= until {
                        let here = connections.iter().flatten().count() + 1;
                        let text = format!("{here} of {ranks} ranks have come: are all of them started?");
                        return Err(io::Error::new(io::ErrorKind::TimedOut, text));
                    }
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Self {
            rank: 0,
            ranks,
            connections: connections.into_iter().flatten().collect(),
        })
    }

    /// A rank other than 0; retries until rank 0 listens at the address.
    ///
    /// # Errors
    /// If it does not respond in time.
    pub fn join(address: impl ToSocketAddrs, rank: u32, ranks: u32, timeout: Duration) -> io::Result<Self> {
        let until = Instant::now() + timeout;
        let addresses: Vec<SocketAddr> = address.to_socket_addrs()?.collect();
        let mut stream = loop {
            match TcpStream::connect(addresses.as_slice()) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() >= until => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        prepare(&stream, timeout)?;
        stream.write_all(&HELLO)?;
        stream.write_all(&rank.to_be_bytes())?;
        stream.write_all(&ranks.to_be_bytes())?;
        Ok(Self {
            rank,
            ranks,
            connections: vec![stream],
        })
    }
}

fn prepare(stream: &TcpStream, timeout: Duration) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))
}

fn accept_rank(mut stream: TcpStream, ranks: u32, timeout: Duration) -> io::Result<(u32, TcpStream)> {
    prepare(&stream, timeout.min(Duration::from_secs(5)))?;
    let mut hello = [0; 16];
    stream.read_exact(&mut hello)?;
    let number = |at: usize| u32::from_be_bytes([hello[at], hello[at + 1], hello[at + 2], hello[at + 3]]);
    if hello[..8] != HELLO || number(12) != ranks {
        return Err(io::ErrorKind::InvalidData.into());
    }
    prepare(&stream, timeout)?;
    Ok((number(8), stream))
}

fn send(stream: &mut TcpStream, message: &[u8]) -> io::Result<()> {
    let len = u32::try_from(message.len()).ok().filter(|len| *len <= MAX_MESSAGE);
    let len = len.ok_or(io::ErrorKind::InvalidInput)?;
    let mut whole = len.to_be_bytes().to_vec();
    whole.extend_from_slice(message);
    stream.write_all(&whole)
}

fn receive(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut len = [0; 4];
    stream.read_exact(&mut len)?;
    let len = u32::from_be_bytes(len);
    if len > MAX_MESSAGE {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a message longer than any rank sends",
        ));
    }
    let mut message = vec![0; len as usize];
    stream.read_exact(&mut message)?;
    Ok(message)
}

impl Exchange for TcpExchange {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn all_to_all(&mut self, outgoing: Vec<Vec<u8>>) -> io::Result<Vec<Vec<u8>>> {
        if self.rank != 0 {
            let [link] = self.connections.as_mut_slice() else {
                return Err(io::ErrorKind::NotConnected.into());
            };
            for message in &outgoing {
                send(link, message)?;
            }
            return (0..self.ranks).map(|_| receive(link)).collect();
        }
        // By sender, then by receiver.
        let mut all = vec![outgoing];
        for link in &mut self.connections {
            all.push((0..self.ranks).map(|_| receive(link)).collect::<io::Result<_>>()?);
        }
        for (rank, link) in (1..).zip(&mut self.connections) {
            for from in &all {
                send(link, from.get(rank).map_or(&[][..], Vec::as_slice))?;
            }
        }
        Ok(all
            .into_iter()
            .map(|from| from.into_iter().next().unwrap_or_default())
            .collect())
    }
}
