//! How the ends find each other: the TCP exchange of the stock ping-pongs. Each says LID, queue pair number, first sequence number and GID, in hexadecimal
//! with colons between and a NUL at the end; the client first, which also ends with `done`.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::Role;
use crate::side::{Target, Whereabouts};

const PATIENCE: Duration = Duration::from_secs(60);
/// `0000:000000:000000:`, 32 digits and the NUL.
const LINE: usize = 19 + 32 + 1;
const DONE: [u8; 5] = *b"done\0";

/// The TCP connection.
pub(crate) struct Rendezvous(TcpStream);

impl Rendezvous {
    /// Waits for the other end, or goes to it, trying until it is there.
    pub(crate) fn open(role: Role) -> Result<Self> {
        let stream = match role {
            Role::Listen(at) => TcpListener::bind(at)?.accept()?.0,
            Role::Connect(to) => {
                let deadline = Instant::now() + PATIENCE;
                loop {
                    match TcpStream::connect(to) {
                        Err(_) if Instant::now() < deadline => sleep(Duration::from_millis(50)),
                        result => break result?,
                    }
                }
            }
        };
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self(stream))
    }

    pub(crate) fn say(&mut self, ours: &Whereabouts) -> Result<()> {
        let gid: String = ours.gid.iter().map(|byte| format!("{byte:02x}")).collect();
        let line = format!("0000:{:06x}:{:06x}:{gid}\0", ours.qpn, ours.psn);
        Ok(self.0.write_all(line.as_bytes())?)
    }

    pub(crate) fn hear(&mut self) -> Result<Whereabouts> {
        let mut line = [0; LINE];
        self.0.read_exact(&mut line).context("the other end said too little")?;
        let text = std::str::from_utf8(&line)?.trim_end_matches('\0');
        let parts: Vec<&str> = text.split(':').collect();
        let [_, qpn, psn, gid] = parts[..] else {
            anyhow::bail!("not a pingpong: {text}");
        };
        Ok(Whereabouts {
            qpn: u32::from_str_radix(qpn, 16)?,
            psn: u32::from_str_radix(psn, 16)?,
            gid: u128::from_str_radix(gid, 16)?.to_be_bytes(),
        })
    }

    pub(crate) fn say_done(&mut self) -> Result<()> {
        Ok(self.0.write_all(&DONE)?)
    }

    pub(crate) fn hear_done(&mut self) -> Result<()> {
        let mut done = [0; DONE.len()];
        self.0.read_exact(&mut done).context("the client did not finish")?;
        ensure!(done == DONE, "the client said {}", done.escape_ascii());
        Ok(())
    }

    /// Between two of ours: where each may write at the other.
    pub(crate) fn swap(&mut self, ours: Target) -> Result<Target> {
        let mut bytes = [0; 12];
        bytes[..8].copy_from_slice(&ours.addr.to_be_bytes());
        bytes[8..].copy_from_slice(&ours.rkey.to_be_bytes());
        self.0.write_all(&bytes)?;
        self.0.read_exact(&mut bytes)?;
        let (addr, rkey) = bytes.split_at(8);
        Ok(Target {
            addr: u64::from_be_bytes(addr.try_into()?),
            rkey: u32::from_be_bytes(rkey.try_into()?),
        })
    }
}
