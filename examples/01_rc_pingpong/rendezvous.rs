//! How the two ends find each other before RDMA can: a TCP connection on which each says where its queue pair is, in one line of text.
//!
//! The lines are those of `ibv_rc_pingpong`: LID, queue pair number, first sequence number and GID in hexadecimal, colons between, a NUL at the end. The
//! client speaks first; the server connects its queue pair before it answers; the client ends with `done`.

use std::io::{Read, Write};
use std::net::{Ipv6Addr, TcpListener, TcpStream};

use doorbell_verbs::{Endpoint, Gid, Lid, Mtu, Psn, Qpn, QueuePair};

use crate::Result;

/// `0000:000000:000000:` and 32 digits, and the NUL.
const LINE: usize = 4 + 1 + 6 + 1 + 6 + 1 + 32 + 1;
const DONE: [u8; 5] = *b"done\0";

/// A server waiting to be found.
#[derive(Debug)]
pub(crate) struct Rendezvous(TcpListener);

impl Rendezvous {
    /// Listens on `port`, or on any that is free for 0, in IPv6 and IPv4.
    pub(crate) fn listen(port: u16) -> Result<Self> {
        let listener =
            TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|_| TcpListener::bind(("0.0.0.0", port)));
        Ok(Self(listener.map_err(|error| format!("TCP port {port}: {error}"))?))
    }

    pub(crate) fn port(&self) -> Result<u16> {
        Ok(self.0.local_addr()?.port())
    }

    /// Waits for a client, has `connect` connect to its queue pair, and tells it where ours is.
    pub(crate) fn accept(
        self,
        ours: &Endpoint,
        connect: impl FnOnce(&Endpoint) -> Result<QueuePair>,
    ) -> Result<QueuePair> {
        let (mut stream, _) = self.0.accept()?;
        let theirs = receive(&mut stream, ours.mtu)?;
        let qp = connect(&theirs)?;
        stream.write_all(&line(ours))?;
        let mut done = [0; DONE.len()];
        stream
            .read_exact(&mut done)
            .map_err(|error| format!("the client did not finish: {error}"))?;
        Ok(qp)
    }
}

/// Tells a server where our queue pair is, and gets where its own is.
pub(crate) fn meet(server: &str, port: u16, ours: &Endpoint) -> Result<Endpoint> {
    let mut stream =
        TcpStream::connect((server, port)).map_err(|error| format!("{server}, TCP port {port}: {error}"))?;
    stream.write_all(&line(ours))?;
    let theirs = receive(&mut stream, ours.mtu)?;
    stream.write_all(&DONE)?;
    Ok(theirs)
}

fn line(endpoint: &Endpoint) -> [u8; LINE] {
    let gid: String = endpoint.gid.0.iter().map(|byte| format!("{byte:02x}")).collect();
    let text = format!(
        "{:04x}:{:06x}:{:06x}:{gid}\0",
        endpoint.lid.0,
        endpoint.qpn.get(),
        endpoint.psn.get()
    );
    text.into_bytes().try_into().expect("every number has its full width")
}

fn receive(stream: &mut TcpStream, mtu: Mtu) -> Result<Endpoint> {
    let mut bytes = [0; LINE];
    stream
        .read_exact(&mut bytes)
        .map_err(|error| format!("the other end said too little: {error}"))?;
    parse(&bytes, mtu).ok_or_else(|| format!("not a pingpong: {}", bytes.escape_ascii()).into())
}

/// The line says nothing of the MTU: both ends are to be told the same one.
fn parse(bytes: &[u8; LINE], mtu: Mtu) -> Option<Endpoint> {
    let text = std::str::from_utf8(bytes.strip_suffix(b"\0")?).ok()?;
    let mut parts = text.split(':');
    let mut number = || u32::from_str_radix(parts.next()?, 16).ok();
    let (lid, qpn, psn) = (number()?, number()?, number()?);
    let gid = u128::from_str_radix(parts.next()?, 16).ok()?;
    Some(Endpoint {
        gid: Gid(gid.to_be_bytes()),
        lid: Lid(u16::try_from(lid).ok()?),
        qpn: Qpn::new(qpn)?,
        psn: Psn::new(psn)?,
        mtu,
        rd_atomic: 1,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_as_written() {
        let endpoint = Endpoint {
            gid: Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 0, 1]),
            lid: Lid(0),
            qpn: Qpn::truncated(0x0000_1234),
            psn: Psn::truncated(0x00ab_cdef),
            mtu: Mtu::B1024,
            rd_atomic: 1,
        };
        assert_eq!(
            &line(&endpoint),
            b"0000:001234:abcdef:00000000000000000000ffff0a090001\0"
        );
        assert_eq!(parse(&line(&endpoint), Mtu::B1024), Some(endpoint));
    }

    #[test]
    fn other_lines_are_refused() {
        for text in [
            "0000:001234:abcdef;00000000000000000000ffff0a090001\0",
            "xxxx:001234:abcdef:00000000000000000000ffff0a090001\0",
        ] {
            assert_eq!(parse(text.as_bytes().try_into().unwrap(), Mtu::B1024), None);
        }
        assert_eq!(parse(&[b'0'; LINE], Mtu::B1024), None);
    }
}
