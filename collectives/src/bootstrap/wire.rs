//! Wire format of the bootstrap messages, little endian, in the frames of `doorbell-rendezvous`.
//!
//! The parser trusts nothing: a length is checked before anything is allocated, and truncated,
//! overlong or out-of-range input gives `None`.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use doorbell_rendezvous::{Connection, Deadline, Hello, NONCE, Nonce, Protocol, ReceiveError};

use super::Member;
use super::id::MAX_HOST;
use crate::types::Rank;

/// Ranks are the roles of hellos; the last byte of the preamble is the version.
pub(super) const PROTOCOL: Protocol = Protocol {
    preamble: b"doorbel\x05",
    max_hello: 4 + MAX_ENTRY,
    max_message: 1 + 4 + MAX_RANKS as usize * (NONCE + MAX_ENTRY),
};
/// The rendezvous in place of a rank.
pub(super) const RENDEZVOUS: u32 = u32::MAX;
/// Maximum number of ranks: each has a connection to each other.
pub(super) const MAX_RANKS: u32 = 4096;
/// Maximum length of a member's entry, without its nonce.
const MAX_ENTRY: usize = 18 + 4 + 2 + MAX_HOST;
const MAX_REASON: usize = 1024;
/// For a message to pass between two ends of which none waits for another.
pub(super) const SEND_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    pub(super) fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn text(&mut self, max: usize) -> Option<String> {
        let length = usize::from(self.u16()?);
        if length > max {
            return None;
        }
        Some(one_line(&String::from_utf8_lossy(self.bytes(length)?), usize::MAX))
    }

    pub(super) fn end(self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

/// A text that a peer chose, for one-line messages: without control characters, and truncated to
/// `max` bytes.
pub(crate) fn one_line(text: &str, max: usize) -> String {
    let text = &text[..text.floor_char_boundary(max)];
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Writes a text behind its length, truncated to `max` bytes.
fn put_text(to: &mut Vec<u8>, text: &str, max: usize) {
    let text = &text[..text.floor_char_boundary(max)];
    to.extend_from_slice(&(text.len() as u16).to_le_bytes());
    to.extend_from_slice(text.as_bytes());
}

fn put_address(to: &mut Vec<u8>, address: SocketAddr) {
    let ip = match address.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    to.extend_from_slice(&ip.octets());
    to.extend_from_slice(&address.port().to_le_bytes());
}

fn address(from: &mut Reader) -> Option<SocketAddr> {
    let ip = Ipv6Addr::from(from.array::<16>()?).to_canonical();
    Some(SocketAddr::new(ip, from.u16()?))
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Entry {
    pub(super) listen_addr: SocketAddr,
    /// The member's in all its handshakes with the rendezvous and lower ranks.
    pub(super) nonce: Nonce,
    pub(super) member: Member,
}

impl Entry {
    /// All but the nonce.
    fn put(&self, to: &mut Vec<u8>) {
        put_address(to, self.listen_addr);
        put_member(to, &self.member);
    }

    fn read(from: &mut Reader, nonce: Nonce) -> Option<Self> {
        Some(Self {
            listen_addr: address(from)?,
            nonce,
            member: member(from)?,
        })
    }
}

fn put_member(to: &mut Vec<u8>, member: &Member) {
    to.extend_from_slice(&member.process.to_le_bytes());
    put_text(to, &member.host, MAX_HOST);
}

fn member(from: &mut Reader) -> Option<Member> {
    let process = from.u32()?;
    let host = from.text(MAX_HOST)?;
    Some(Member { host, process })
}

/// What a member's hello says to the rendezvous.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Registration {
    pub(super) ranks: u32,
    pub(super) entry: Entry,
}

impl Registration {
    pub(super) fn hello(&self, rank: Rank) -> Hello {
        let mut payload = self.ranks.to_le_bytes().to_vec();
        self.entry.put(&mut payload);
        Hello {
            client: rank.0,
            server: RENDEZVOUS,
            nonce: self.entry.nonce,
            payload,
        }
    }

    pub(super) fn of(hello: &Hello) -> Option<Self> {
        let mut from = Reader(&hello.payload);
        let registration = Self {
            ranks: from.u32()?,
            entry: Entry::read(&mut from, hello.nonce)?,
        };
        from.end()?;
        (hello.server == RENDEZVOUS).then_some(registration)
    }
}

/// A message to a client whose hello is authenticated.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum BootstrapMessage {
    /// From the rendezvous: all members, by rank.
    Table(Vec<Entry>),
    /// From the rendezvous or a rank: the connection is accepted; behind the table, all ranks are
    /// connected to each other.
    Accept,
    Reject(String),
    /// From the rendezvous: a rank has ended, and the group will not be complete.
    Ended(Rank, Member),
    /// To the rendezvous: the rank knows of its acceptance, and will not register again.
    Confirm,
    /// To the rendezvous: the rank is connected to all others.
    Connected,
}

impl BootstrapMessage {
    pub(super) fn send(&self, to: &mut Connection) -> io::Result<()> {
        to.send(&self.encode(), Deadline::after(SEND_TIMEOUT))
    }

    pub(super) fn receive(from: &mut Connection, deadline: Deadline) -> Result<Self, ReceiveError> {
        Self::decode(&from.receive(deadline)?).ok_or(ReceiveError::Malformed)
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut to = Vec::new();
        match self {
            Self::Table(entries) => {
                to.push(2);
                to.extend_from_slice(&(entries.len() as u32).to_le_bytes());
                for entry in entries {
                    to.extend_from_slice(&entry.nonce);
                    entry.put(&mut to);
                }
            }
            Self::Accept => to.push(4),
            Self::Reject(reason) => {
                to.push(5);
                put_text(&mut to, reason, MAX_REASON);
            }
            Self::Confirm => to.push(6),
            Self::Connected => to.push(7),
            Self::Ended(rank, member) => {
                to.push(8);
                to.extend_from_slice(&rank.0.to_le_bytes());
                put_member(&mut to, member);
            }
        }
        to
    }

    pub(super) fn decode(message: &[u8]) -> Option<Self> {
        let mut from = Reader(message);
        let message = match from.u8()? {
            2 => {
                let ranks = from.u32()?;
                if ranks > MAX_RANKS {
                    return None;
                }
                let mut entry = || {
                    let nonce = from.array()?;
                    Entry::read(&mut from, nonce)
                };
                Self::Table((0..ranks).map(|_| entry()).collect::<Option<_>>()?)
            }
            4 => Self::Accept,
            5 => Self::Reject(from.text(MAX_REASON)?),
            6 => Self::Confirm,
            7 => Self::Connected,
            8 => Self::Ended(Rank(from.u32()?), member(&mut from)?),
            _ => return None,
        };
        from.end()?;
        Some(message)
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;

    fn entry() -> Entry {
        Entry {
            listen_addr: "10.0.0.1:4000".parse().unwrap(),
            nonce: [9; NONCE],
            member: Member {
                host: "a".repeat(MAX_HOST),
                process: 7,
            },
        }
    }

    fn messages() -> Vec<BootstrapMessage> {
        let six = Entry {
            listen_addr: "[fe80::1]:1".parse().unwrap(),
            nonce: std::array::from_fn(|i| i as u8),
            member: Member {
                host: String::new(),
                process: 0,
            },
        };
        vec![
            BootstrapMessage::Table(vec![entry(), six, entry()]),
            BootstrapMessage::Accept,
            BootstrapMessage::Reject("no".into()),
            BootstrapMessage::Confirm,
            BootstrapMessage::Connected,
            BootstrapMessage::Ended(Rank(3), entry().member),
        ]
    }

    #[test]
    fn messages_round_trip_and_truncated_ones_are_rejected() {
        for message in messages() {
            let bytes = message.encode();
            assert_eq!(BootstrapMessage::decode(&bytes).as_ref(), Some(&message));
            for cut in 0..bytes.len() {
                assert_eq!(
                    BootstrapMessage::decode(&bytes[..cut]),
                    None,
                    "{message:?} cut to {cut}"
                );
            }
            assert_eq!(BootstrapMessage::decode(&[&bytes[..], &[0]].concat()), None);
        }
    }

    #[test]
    fn registrations_round_trip_and_truncated_ones_are_rejected() {
        let registration = Registration {
            ranks: 4,
            entry: entry(),
        };
        let hello = registration.hello(Rank(3));
        assert_eq!((hello.client, Registration::of(&hello)), (3, Some(registration)));
        assert_eq!(hello.payload.len(), PROTOCOL.max_hello, "the longest hello is let in");
        for cut in 0..hello.payload.len() {
            let payload = hello.payload[..cut].to_vec();
            assert_eq!(
                Registration::of(&Hello {
                    payload,
                    ..hello.clone()
                }),
                None,
                "cut to {cut}"
            );
        }
        let payload = [&hello.payload[..], &[0]].concat();
        assert_eq!(
            Registration::of(&Hello {
                payload,
                ..hello.clone()
            }),
            None
        );
        assert_eq!(Registration::of(&Hello { server: 1, ..hello }), None);
    }

    #[test]
    fn a_hostile_count_allocates_nothing() {
        let mut table = vec![2];
        table.extend_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(BootstrapMessage::decode(&table), None);
    }

    #[test]
    fn texts_of_peers_stay_on_one_line() {
        let said = BootstrapMessage::Reject("a\nb\u{1b}[31m".into()).encode();
        assert_eq!(
            BootstrapMessage::decode(&said),
            Some(BootstrapMessage::Reject("a b [31m".into()))
        );
    }

    proptest! {
        /// What is decoded is about as long as its bytes, and is encoded to a message.
        #[test]
        fn any_bytes_are_a_message_or_none(bytes in message_bytes()) {
            if let Some(message) = BootstrapMessage::decode(&bytes) {
                let again = message.encode();
                // Bytes that are no UTF-8 become replacement characters of three bytes.
                prop_assert!(again.len() <= 3 * bytes.len());
                prop_assert!(BootstrapMessage::decode(&again).is_some());
            }
        }
    }

    /// Any bytes behind a kind that there is, and messages of which some bytes are others.
    fn message_bytes() -> impl Strategy<Value = Vec<u8>> {
        let random = (0..10_u8, vec(any::<u8>(), 0..400)).prop_map(|(kind, rest)| [&[kind], &rest[..]].concat());
        let near = (0..messages().len(), vec((any::<Index>(), any::<u8>()), 0..4)).prop_map(|(which, changes)| {
            let mut bytes = messages()[which].encode();
            for (at, value) in changes {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            bytes
        });
        prop_oneof![random, near]
    }
}
