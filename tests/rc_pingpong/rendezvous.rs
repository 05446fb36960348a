//! The rendezvous of `ibv_rc_pingpong` over TCP: LID, queue pair number, first PSN and GID in
//! hexadecimal, by colons, NUL-terminated. The client sends first, and ends with `done`.

use std::io::{Read, Write};
use std::net::{Ipv6Addr, TcpListener, TcpStream};

use doorbell::{Endpoint, Gid, Lid, Mtu, Psn, Qpn, QueuePair};

use crate::Result;

/// `0000:000000:000000:` and 32 digits, and the NUL.
const ENCODED_LEN: usize = 4 + 1 + 6 + 1 + 6 + 1 + 32 + 1;
const DONE: [u8; 5] = *b"done\0";

#[derive(Debug)]
pub(crate) struct Rendezvous(TcpListener);

impl Rendezvous {
    /// Listens on `port`, in IPv6 and IPv4.
    pub(crate) fn listen(port: u16) -> Result<Self> {
        let listener =
            TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|_| TcpListener::bind(("0.0.0.0", port)));
        Ok(Self(listener.map_err(|error| format!("TCP port {port}: {error}"))?))
    }

    pub(crate) fn accept(
        self,
        ours: &Endpoint,
        connect: impl FnOnce(&Endpoint) -> Result<QueuePair>,
    ) -> Result<QueuePair> {
        let (mut stream, _) = self.0.accept()?;
        let theirs = receive(&mut stream, ours.mtu)?;
        let qp = connect(&theirs)?;
        stream.write_all(&encode(ours))?;
        let mut done = [0; DONE.len()];
        stream
            .read_exact(&mut done)
            .map_err(|error| format!("the client did not finish: {error}"))?;
        Ok(qp)
    }
}

pub(crate) fn exchange_endpoints(server: &str, port: u16, ours: &Endpoint) -> Result<Endpoint> {
    let mut stream =
        TcpStream::connect((server, port)).map_err(|error| format!("{server}, TCP port {port}: {error}"))?;
    stream.write_all(&encode(ours))?;
    let theirs = receive(&mut stream, ours.mtu)?;
    stream.write_all(&DONE)?;
    Ok(theirs)
}

fn encode(endpoint: &Endpoint) -> [u8; ENCODED_LEN] {
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
    let mut bytes = [0; ENCODED_LEN];
    stream
        .read_exact(&mut bytes)
        .map_err(|error| format!("the other end sent too little: {error}"))?;
    parse(&bytes, mtu).ok_or_else(|| format!("not a pingpong: {}", bytes.escape_ascii()).into())
}

/// The line contains no MTU: both ends must be given the same.
fn parse(bytes: &[u8; ENCODED_LEN], mtu: Mtu) -> Option<Endpoint> {
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
        max_dest_rd_atomic: 1,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_parsed_as_encoded() {
        let endpoint = Endpoint {
            gid: Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 0, 1]),
            lid: Lid(0),
            qpn: Qpn::truncated(0x0000_1234),
            psn: Psn::truncated(0x00ab_cdef),
            mtu: Mtu::B1024,
            max_dest_rd_atomic: 1,
        };
        assert_eq!(
            &encode(&endpoint),
            b"0000:001234:abcdef:00000000000000000000ffff0a090001\0"
        );
        assert_eq!(parse(&encode(&endpoint), Mtu::B1024), Some(endpoint));
    }

    #[test]
    fn malformed_endpoints_are_refused() {
        for text in [
            "0000:001234:abcdef;00000000000000000000ffff0a090001\0",
            "xxxx:001234:abcdef:00000000000000000000ffff0a090001\0",
        ] {
            assert_eq!(parse(text.as_bytes().try_into().unwrap(), Mtu::B1024), None);
        }
        assert_eq!(parse(&[b'0'; ENCODED_LEN], Mtu::B1024), None);
    }
}
