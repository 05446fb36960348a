//! The exchange of the stock ping-pongs over TCP: LID, queue pair number, first PSN and GID, in
//! hexadecimal, separated by colons, NUL-terminated; the client first, which ends with `done`.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::QpAddress;
use crate::interop::Role;

const TIMEOUT: Duration = Duration::from_secs(60);
/// `0000:000000:000000:`, 32 digits and the NUL.
const ADDRESS_LEN: usize = 19 + 32 + 1;
const DONE: [u8; 5] = *b"done\0";

/// The TCP connection.
#[derive(Debug)]
pub struct Rendezvous(TcpStream);

impl Rendezvous {
    /// Accepts a connection, or connects, retrying for a minute until the peer listens.
    pub fn open(role: Role) -> Result<Self> {
        let stream = match role {
            Role::Listen(address) => TcpListener::bind(address)?.accept()?.0,
            Role::Connect(address) => {
                let deadline = Instant::now() + TIMEOUT;
                loop {
                    match TcpStream::connect(address) {
                        Err(_) if Instant::now() < deadline => sleep(Duration::from_millis(50)),
                        result => break result?,
                    }
                }
            }
        };
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        Ok(Self(stream))
    }

    /// Sends a queue pair's address; fails when the peer is gone.
    pub fn send_address(&mut self, ours: &QpAddress) -> Result<()> {
        let gid: String = ours.gid.iter().map(|byte| format!("{byte:02x}")).collect();
        let line = format!("0000:{:06x}:{:06x}:{gid}\0", ours.qpn, ours.psn);
        Ok(self.0.write_all(line.as_bytes())?)
    }

    /// Receives a queue pair's address; fails when the peer is gone, or sends something else.
    pub fn receive_address(&mut self) -> Result<QpAddress> {
        let mut line = [0; ADDRESS_LEN];
        self.0.read_exact(&mut line).context("the peer sent too little")?;
        let text = std::str::from_utf8(&line)?.trim_end_matches('\0');
        let parts: Vec<&str> = text.split(':').collect();
        let [_, qpn, psn, gid] = parts[..] else {
            anyhow::bail!("not a pingpong: {text}");
        };
        Ok(QpAddress {
            qpn: u32::from_str_radix(qpn, 16)?,
            psn: u32::from_str_radix(psn, 16)?,
            gid: u128::from_str_radix(gid, 16)?.to_be_bytes(),
        })
    }

    /// Sends the client's `done`; fails when the peer is gone.
    pub fn send_done(&mut self) -> Result<()> {
        Ok(self.0.write_all(&DONE)?)
    }

    /// Receives the client's `done`; fails when it differs, or the client is gone.
    pub fn receive_done(&mut self) -> Result<()> {
        let mut done = [0; DONE.len()];
        self.0.read_exact(&mut done).context("the client did not finish")?;
        ensure!(done == DONE, "the client sent {}", done.escape_ascii());
        Ok(())
    }

    /// Between two of these programs: sends `ours` and receives as many; fails when the peer is
    /// gone.
    pub fn exchange<const N: usize>(&mut self, ours: [u8; N]) -> Result<[u8; N]> {
        let mut theirs = [0; N];
        self.0.write_all(&ours)?;
        self.0
            .read_exact(&mut theirs)
            .context("the peer is gone; its own message says why")?;
        Ok(theirs)
    }
}
