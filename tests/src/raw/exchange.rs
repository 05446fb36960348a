//! The exchange of the stock ping-pongs over TCP: LID, queue pair number, first PSN and GID, in
//! hexadecimal, separated by colons, NUL-terminated; the client first, which ends with `done`.

use std::io::{Read, Write};

use anyhow::{Context, Result, bail, ensure};

use super::QpAddress;
use crate::interop::Channel;

/// `0000:000000:000000:`, 32 digits and the NUL.
const ADDRESS_LEN: usize = 19 + 32 + 1;
const DONE: [u8; 5] = *b"done\0";

impl Channel {
    /// Exchanges queue pairs' addresses; `connect` brings them to RTS, towards the peer's. Fails
    /// when the peer is gone, or sends something else.
    pub fn exchange_addresses(
        &mut self,
        is_server: bool,
        ours: &[QpAddress],
        connect: impl FnOnce(&[QpAddress]) -> Result<()>,
    ) -> Result<()> {
        if !is_server {
            self.send_addresses(ours)?;
        }
        let theirs = ours
            .iter()
            .map(|_| self.receive_address())
            .collect::<Result<Vec<_>>>()?;
        connect(&theirs)?;
        if is_server {
            self.send_addresses(ours)?;
            self.receive_done()
        } else {
            Ok(self.stream.write_all(&DONE)?)
        }
    }

    fn send_addresses(&mut self, ours: &[QpAddress]) -> Result<()> {
        for QpAddress { qpn, psn, gid } in ours {
            let gid: String = gid.iter().map(|byte| format!("{byte:02x}")).collect();
            let line = format!("0000:{qpn:06x}:{psn:06x}:{gid}\0");
            self.stream.write_all(line.as_bytes())?;
        }
        Ok(())
    }

    fn receive_address(&mut self) -> Result<QpAddress> {
        let mut line = [0; ADDRESS_LEN];
        self.stream.read_exact(&mut line).context("the peer sent too little")?;
        let text = std::str::from_utf8(&line)?.trim_end_matches('\0');
        let parts: Vec<&str> = text.split(':').collect();
        let [_, qpn, psn, gid] = parts[..] else {
            bail!("not a pingpong: {text}");
        };
        Ok(QpAddress {
            qpn: u32::from_str_radix(qpn, 16)?,
            psn: u32::from_str_radix(psn, 16)?,
            gid: u128::from_str_radix(gid, 16)?.to_be_bytes(),
        })
    }

    fn receive_done(&mut self) -> Result<()> {
        let mut done = [0; DONE.len()];
        self.stream.read_exact(&mut done).context("the client did not finish")?;
        ensure!(done == DONE, "the client sent {}", done.escape_ascii());
        Ok(())
    }
}
