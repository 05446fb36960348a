//! The connection beside the one under test: what the ends must know of each other, and barriers.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::Role;

/// How long to wait for the other end, and for each of its messages.
const PATIENCE: Duration = Duration::from_secs(60);

/// A TCP connection to the other end.
#[derive(Debug)]
pub struct Channel {
    stream: TcpStream,
    barriers: u32,
}

impl Channel {
    /// Waits for the other end, or goes to it, trying until it is there.
    ///
    /// # Errors
    /// When there is no connection within a minute.
    pub fn open(role: Role) -> Result<Self> {
        let stream = match role {
            Role::Listen(at) => TcpListener::bind(at)
                .and_then(|listener| listener.accept())
                .map(|(stream, _)| stream),
            Role::Connect(to) => {
                let deadline = Instant::now() + PATIENCE;
                loop {
                    match TcpStream::connect(to) {
                        Err(_) if Instant::now() < deadline => sleep(Duration::from_millis(50)),
                        result => break result,
                    }
                }
            }
        };
        let stream = stream.with_context(|| format!("no connection for {role:?}"))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self { stream, barriers: 0 })
    }

    /// Gives the other end `bytes` and gets as many from it.
    ///
    /// # Errors
    /// When the other end is gone.
    pub fn exchange<const N: usize>(&mut self, bytes: [u8; N]) -> Result<[u8; N]> {
        let mut theirs = [0; N];
        let result = self
            .stream
            .write_all(&bytes)
            .and_then(|()| self.stream.read_exact(&mut theirs));
        result.context("the other end is gone; its own message says why")?;
        Ok(theirs)
    }

    /// Waits until the other end is here too.
    ///
    /// # Errors
    /// When it is gone, or somewhere else.
    pub fn barrier(&mut self) -> Result<()> {
        self.barriers += 1;
        let theirs = u32::from_be_bytes(self.exchange(self.barriers.to_be_bytes())?);
        ensure!(
            theirs == self.barriers,
            "out of step: barrier {} here, {theirs} there",
            self.barriers
        );
        Ok(())
    }
}
