//! The bootstrap: ranks exchange memory keys and endpoints before they are connected.

use core::time::Duration;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};

use doorbell_rendezvous::{
    Connection, Deadline, Hello, HelloListener, Protocol, ReceiveError, Secret, connect, random,
};

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

/// Ranks that are processes, connected over TCP through rank 0. All prove a [`Secret`] to it, and
/// it to them; what they exchange is authenticated, not encrypted.
#[derive(Debug)]
pub struct TcpExchange {
    rank: u32,
    ranks: u32,
    timeout: Duration,
    /// On rank 0: a connection to each other rank. On others: the connection to rank 0.
    connections: Vec<Connection>,
}

/// A hello says the number of ranks; the roles are the ranks. Rank 0 answers with an empty message,
/// or with the reason to reject it.
const PROTOCOL: Protocol = Protocol {
    preamble: b"DBELLSY2",
    max_hello: 4,
    max_message: 64 << 10,
};

impl TcpExchange {
    /// Rank 0, which the others [`join`](Self::join) at `listener`. A connection that does not
    /// prove the secret changes nothing, and a silent one delays no rank.
    ///
    /// # Errors
    /// If they do not connect in time.
    pub fn host(listener: TcpListener, secret: Secret, ranks: u32, timeout: Duration) -> io::Result<Self> {
        let deadline = Deadline::after(timeout);
        let mut listener = HelloListener::new(listener, ranks, &PROTOCOL, secret, None)?;
        let mut connections: Vec<Option<Connection>> = (1..ranks).map(|_| None).collect();
        let mut refused = String::new();
        while connections.iter().any(Option::is_none) {
            match listener.next(deadline, None)? {
                Some((peer, Ok((hello, mut connection)))) => match place(&mut connections, &hello, ranks) {
                    Ok(place) => {
                        // A rank that has gone may come again.
                        *place = connection.send(&[], deadline).is_ok().then_some(connection);
                    }
                    Err(reason) => {
                        refused = format!("; {peer} was refused: {reason}");
                        // Best effort: the peer may be gone.
                        let _ = connection.send(reason.as_bytes(), deadline);
                    }
                },
                Some((peer, Err(reason))) => refused = format!("; {peer} was refused: {reason}"),
                None => {
                    let here = connections.iter().flatten().count() + 1;
                    let text = format!("{here} of {ranks} ranks have come: are all of them started?{refused}");
                    return Err(io::Error::new(io::ErrorKind::TimedOut, text));
                }
            }
        }
        Ok(Self {
            rank: 0,
            ranks,
            timeout,
            connections: connections.into_iter().flatten().collect(),
        })
    }

    /// A rank other than 0; retries until rank 0 listens at the address.
    ///
    /// # Errors
    /// If it does not respond in time, does not prove the secret, or rejects this rank.
    pub fn join(
        address: impl ToSocketAddrs,
        secret: Secret,
        rank: u32,
        ranks: u32,
        timeout: Duration,
    ) -> io::Result<Self> {
        let deadline = Deadline::after(timeout);
        let addresses: Vec<SocketAddr> = address.to_socket_addrs()?.collect();
        let (stream, _) = connect(&addresses, None, deadline, || true)?;
        let hello = Hello {
            client: rank,
            server: 0,
            nonce: random()?,
            payload: ranks.to_le_bytes().to_vec(),
        };
        let greeted = Connection::greet(stream, &PROTOCOL, &secret, &hello, None, deadline);
        let mut connection = greeted.map_err(io_error)?;
        let answer = connection.receive(deadline).map_err(io_error)?;
        if !answer.is_empty() {
            let text = format!("rank 0 rejects rank {rank}: {}", String::from_utf8_lossy(&answer));
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(Self {
            rank,
            ranks,
            timeout,
            connections: vec![connection],
        })
    }

    fn send(link: &mut Connection, message: &[u8], timeout: Duration) -> io::Result<()> {
        link.send(message, Deadline::after(timeout))
    }

    fn receive(link: &mut Connection, timeout: Duration) -> io::Result<Vec<u8>> {
        link.receive(Deadline::after(timeout)).map_err(io_error)
    }
}

fn io_error(error: ReceiveError) -> io::Error {
    match error {
        ReceiveError::Io(error) => error,
        other => io::Error::new(io::ErrorKind::InvalidData, format!("rank 0, or a rank: {other}")),
    }
}

/// Where the connection of a rank belongs, or why it is rejected.
fn place<'a>(
    connections: &'a mut [Option<Connection>],
    hello: &Hello,
    ranks: u32,
) -> Result<&'a mut Option<Connection>, String> {
    if hello.payload != ranks.to_le_bytes() {
        return Err(format!(
            "there are {ranks} ranks, and it was started for another number"
        ));
    }
    let place = hello
        .client
        .checked_sub(1)
        .and_then(|at| connections.get_mut(at as usize));
    match place {
        Some(place) if place.is_none() => Ok(place),
        Some(_) => Err(format!("rank {} has come already", hello.client)),
        None => Err(format!("rank {} of {ranks} cannot join", hello.client)),
    }
}

impl Exchange for TcpExchange {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn all_to_all(&mut self, outgoing: Vec<Vec<u8>>) -> io::Result<Vec<Vec<u8>>> {
        let timeout = self.timeout;
        if self.rank != 0 {
            let [link] = self.connections.as_mut_slice() else {
                return Err(io::ErrorKind::NotConnected.into());
            };
            for message in &outgoing {
                Self::send(link, message, timeout)?;
            }
            return (0..self.ranks).map(|_| Self::receive(link, timeout)).collect();
        }
        // By sender, then by receiver.
        let mut all = vec![outgoing];
        for link in &mut self.connections {
            let messages = (0..self.ranks).map(|_| Self::receive(link, timeout));
            all.push(messages.collect::<io::Result<_>>()?);
        }
        for (rank, link) in (1..).zip(&mut self.connections) {
            for from in &all {
                Self::send(link, from.get(rank).map_or(&[][..], Vec::as_slice), timeout)?;
            }
        }
        Ok(all
            .into_iter()
            .map(|from| from.into_iter().next().unwrap_or_default())
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(30);

    fn secret() -> Secret {
        Secret::derived(&["a heap"])
    }

    /// What rank 0 and the others receive when each sends its rank and the receiver's.
    fn swap(exchange: &mut TcpExchange) -> Vec<Vec<u8>> {
        let (rank, ranks) = (exchange.rank() as u8, exchange.ranks() as u8);
        let outgoing = (0..ranks).map(|to| vec![rank, to]).collect();
        exchange.all_to_all(outgoing).unwrap()
    }

    #[test]
    fn ranks_that_prove_the_secret_exchange_and_others_take_no_part() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let join = move |secret, rank, ranks| TcpExchange::join(address, secret, rank, ranks, TIMEOUT);
        let host = thread::spawn(move || {
            let mut exchange = TcpExchange::host(listener, secret(), 3, TIMEOUT).unwrap();
            swap(&mut exchange)
        });
        let _silent = std::net::TcpStream::connect(address).unwrap();
        for (secret, rank, ranks, why) in [
            (Secret::derived(&["a guess"]), 1, 3, "does not prove the group's secret"),
            (secret(), 1, 4, "there are 3 ranks"),
            (secret(), 0, 3, "rank 0 of 3 cannot join"),
            (secret(), 3, 3, "rank 3 of 3 cannot join"),
        ] {
            let said = join(secret, rank, ranks).unwrap_err().to_string();
            assert!(said.contains(why), "{said}");
        }
        let first = join(secret(), 1, 3).unwrap();
        let said = join(secret(), 1, 3).unwrap_err().to_string();
        assert!(said.contains("rank 1 has come already"), "{said}");
        let ranks = [first, join(secret(), 2, 3).unwrap()];
        let swapping = ranks.map(|mut exchange| thread::spawn(move || swap(&mut exchange)));
        let received = [host].into_iter().chain(swapping).map(|rank| rank.join().unwrap());
        for (rank, received) in (0..).zip(received) {
            assert_eq!(received, [[0, rank], [1, rank], [2, rank]]);
        }
    }
}
