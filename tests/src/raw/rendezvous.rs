//! How the ends find each other: the TCP exchange of the stock ping-pongs. Each says LID, queue pair number, first sequence number and GID, in hexadecimal
//! with colons between and a NUL at the end; the client first, which also ends with `done`.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::Whereabouts;
use crate::interop::Role;

const PATIENCE: Duration = Duration::from_secs(60);
/// `0000:000000:000000:`, 32 digits and the NUL.
const LINE: usize = 19 + 32 + 1;
const DONE: [u8; 5] = *b"done\0";

/// The TCP connection.
#[derive(Debug)]
pub struct Rendezvous(TcpStream);

impl Rendezvous {
    /// Waits for the other end, or goes to it, trying until it is there.
    ///
    /// # Errors
    /// When there is no connection within a minute.
    pub fn open(role: Role) -> Result<Self> {
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

    /// Says where a queue pair is.
    ///
    /// # Errors
    /// When the other end is gone.
    pub fn say(&mut self, ours: &Whereabouts) -> Result<()> {
        let gid: String = ours.gid.iter().map(|byte| format!("{byte:02x}")).collect();
        let line = format!("0000:{:06x}:{:06x}:{gid}\0", ours.qpn, ours.psn);
        Ok(self.0.write_all(line.as_bytes())?)
    }

    /// Hears where a queue pair is.
    ///
    /// # Errors
    /// When the other end is gone, or says something else.
    pub fn hear(&mut self) -> Result<Whereabouts> {
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

    /// The client's last word.
    ///
    /// # Errors
    /// When the other end is gone.
    pub fn say_done(&mut self) -> Result<()> {
        Ok(self.0.write_all(&DONE)?)
    }

    /// Hears the client's last word.
    ///
    /// # Errors
    /// When it is another one, or the client is gone.
    pub fn hear_done(&mut self) -> Result<()> {
        let mut done = [0; DONE.len()];
        self.0.read_exact(&mut done).context("the client did not finish")?;
        ensure!(done == DONE, "the client said {}", done.escape_ascii());
        Ok(())
    }

    /// Between two of ours: gives the other end `bytes`, and gets as many from it.
    ///
    /// # Errors
    /// When the other end is gone.
    pub fn swap<const N: usize>(&mut self, ours: [u8; N]) -> Result<[u8; N]> {
        let mut theirs = [0; N];
        self.0.write_all(&ours)?;
        self.0
            .read_exact(&mut theirs)
            .context("the other end is gone; its own message says why")?;
        Ok(theirs)
    }
}
