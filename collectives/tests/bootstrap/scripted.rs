//! The two ends of a rendezvous that follow a script: they end where a test says.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};

use doorbell_collectives::bootstrap::{Secret, UniqueId};
use doorbell_rendezvous::{Connection, Deadline, Hello, HelloListener, NONCE, Protocol};

pub(crate) const PREAMBLE: &[u8; 8] = b"doorbel\x05";
const PROTOCOL: Protocol = Protocol {
    preamble: PREAMBLE,
    max_hello: 1024,
    max_message: 1 << 20,
};
const RENDEZVOUS: u32 = u32::MAX;
/// The nonce of all scripted ranks.
const OWN: [u8; NONCE] = [9; NONCE];
/// How errors name a scripted rank.
pub(crate) const MEMBER: &str = "process 7 on elsewhere";

pub(crate) const TABLE: u8 = 2;
pub(crate) const ACCEPT: u8 = 4;
const CONFIRM: u8 = 6;

fn deadline() -> Deadline {
    Deadline::after(super::TIMEOUT)
}

/// An address, a process and a host.
fn entry(listen: SocketAddr) -> Vec<u8> {
    let ip = match listen.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    let host = b"elsewhere";
    let mut entry = Ipv6Addr::octets(&ip).to_vec();
    entry.extend_from_slice(&listen.port().to_le_bytes());
    entry.extend_from_slice(&7_u32.to_le_bytes());
    entry.extend_from_slice(&(host.len() as u16).to_le_bytes());
    entry.extend_from_slice(host);
    entry
}

/// A rank. Dropping it ends it.
pub(crate) struct ScriptedRank {
    connection: Connection,
    _listener: TcpListener,
}

impl ScriptedRank {
    /// Registers, and receives the acceptance.
    pub(crate) fn register(id: &UniqueId, rank: u32, ranks: u32) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect((id.host(), id.port())).unwrap();
        let hello = Hello {
            client: rank,
            server: RENDEZVOUS,
            nonce: OWN,
            payload: [&ranks.to_le_bytes()[..], &entry(listener.local_addr().unwrap())].concat(),
        };
        let connection = Connection::greet(stream, &PROTOCOL, &id.secret(), &hello, None, deadline());
        let mut rank = Self {
            connection: connection.unwrap(),
            _listener: listener,
        };
        assert_eq!(rank.receive(), ACCEPT);
        rank
    }

    pub(crate) fn confirm(mut self) -> Self {
        self.connection.send(&[CONFIRM], deadline()).unwrap();
        self
    }

    /// The kind of the next message.
    pub(crate) fn receive(&mut self) -> u8 {
        self.connection.receive(deadline()).unwrap()[0]
    }
}

/// A rendezvous.
pub(crate) struct ScriptedRendezvous {
    listener: HelloListener,
    secret: Secret,
}

impl ScriptedRendezvous {
    pub(crate) fn open() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let secret = Secret::random().unwrap();
        let listener = HelloListener::new(listener, 2, &PROTOCOL, secret, None).unwrap();
        Self { listener, secret }
    }

    pub(crate) fn id(&self) -> UniqueId {
        let address = self.listener.address();
        UniqueId::new(&address.ip().to_string(), address.port(), self.secret).unwrap()
    }

    /// Accepts one rank, and receives its confirmation.
    pub(crate) fn accept(&mut self) -> Connection {
        let (_, arrived) = self.listener.next(deadline(), None).unwrap().unwrap();
        let (_, mut connection) = arrived.unwrap();
        connection.send(&[ACCEPT], deadline()).unwrap();
        assert_eq!(connection.receive(deadline()).unwrap(), [CONFIRM]);
        connection
    }
}

/// Sends the table of a group whose ranks all listen here.
pub(crate) fn send_table(to: &mut Connection, ranks: u32, listen: SocketAddr) {
    let mut table = vec![TABLE];
    table.extend_from_slice(&ranks.to_le_bytes());
    for _ in 0..ranks {
        table.extend_from_slice(&OWN);
        table.extend_from_slice(&entry(listen));
    }
    to.send(&table, deadline()).unwrap();
}
