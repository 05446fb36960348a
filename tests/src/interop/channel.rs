//! The control connection beside the connection under test: exchanges attributes and synchronizes.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::Role;

const TIMEOUT: Duration = Duration::from_secs(60);

/// A TCP connection to the peer.
#[derive(Debug)]
pub struct Channel {
    pub(crate) stream: TcpStream,
    barriers: u32,
}

impl Channel {
    /// Accepts a connection, or connects, retrying for a minute until the peer listens.
    pub fn open(role: Role) -> Result<Self> {
        let stream = match role {
            Role::Listen(address) => TcpListener::bind(address)
                .and_then(|listener| listener.accept())
                .map(|(stream, _)| stream),
            Role::Connect(address) => {
                let deadline = Instant::now() + TIMEOUT;
                loop {
                    match TcpStream::connect(address) {
                        Err(_) if Instant::now() < deadline => sleep(Duration::from_millis(50)),
                        result => break result,
                    }
                }
            }
        };
        let stream = stream.with_context(|| format!("no connection for {role:?}"))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        Ok(Self { stream, barriers: 0 })
    }

    /// Sends `bytes` to the peer and receives as many; fails when the peer is gone.
    pub fn exchange<const N: usize>(&mut self, bytes: [u8; N]) -> Result<[u8; N]> {
        let mut theirs = [0; N];
        let result = self
            .stream
            .write_all(&bytes)
            .and_then(|()| self.stream.read_exact(&mut theirs));
        result.context("the peer is gone; its own message says why")?;
        Ok(theirs)
    }

    /// Waits until the peer reaches the same barrier; fails when it is gone, or at another one.
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
