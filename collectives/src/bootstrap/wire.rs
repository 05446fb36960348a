//! Wire format of the bootstrap messages.
//!
//! A message is eight bytes of magic, the length of its body, and a body of at most [`MAX_BODY`]
//! bytes, little endian; behind all but challenges and refusals is the MAC of these. The parser
//! trusts nothing: a length is checked before anything is allocated, and truncated, overlong or
//! out-of-range input gives `None`.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::Member;
use super::auth::{FrameMac, Handshake, NONCE, Nonce, RENDEZVOUS};
use super::id::MAX_HOST;
use crate::types::Rank;

/// The first bytes of each message; the last one is the version.
pub(super) const MAGIC: [u8; 8] = *b"doorbel\x02";
pub(super) const HEADER: usize = MAGIC.len() + 4;
/// Maximum number of ranks: each has a connection to each other.
pub(super) const MAX_RANKS: u32 = 4096;
/// Maximum length of a member's entry in the table.
const MAX_ENTRY: usize = 18 + 4 + NONCE + 2 + MAX_HOST;
/// Maximum body length of a hello, the first message of a client.
pub(super) const MAX_HELLO: usize = 1 + 4 + 4 + MAX_ENTRY;
/// Maximum body length of a message without MAC.
pub(super) const MAX_PLAIN: usize = 1 + 2 + MAX_REASON;
pub(super) const MAX_BODY: usize = 1 + 4 + MAX_RANKS as usize * MAX_ENTRY;
const MAX_REASON: usize = 1024;

#[derive(Clone)]
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// A peer chose the text and it goes into one-line messages: control characters are replaced.
    pub(crate) fn text(&mut self, max: usize) -> Option<String> {
        let length = usize::from(self.u16()?);
        if length > max {
            return None;
        }
        let text = String::from_utf8_lossy(self.bytes(length)?);
        Some(text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect())
    }

    pub(crate) fn end(self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

/// Writes a text behind its length, truncated to `max` bytes.
pub(crate) fn put_text(to: &mut Vec<u8>, text: &str, max: usize) {
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
    fn put(&self, to: &mut Vec<u8>) {
        put_address(to, self.listen_addr);
        to.extend_from_slice(&self.nonce);
        to.extend_from_slice(&self.member.process.to_le_bytes());
        put_text(to, &self.member.host, MAX_HOST);
    }

    fn read(from: &mut Reader) -> Option<Self> {
        let listen_addr = address(from)?;
        let nonce = from.array()?;
        let process = from.u32()?;
        let host = from.text(MAX_HOST)?;
        Some(Self {
            listen_addr,
            nonce,
            member: Member { host, process },
        })
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum BootstrapMessage {
    /// The hello of a member to the rendezvous.
    Register {
        rank: Rank,
        ranks: u32,
        entry: Entry,
    },
    /// From the rendezvous: all members, by rank.
    Table(Vec<Entry>),
    /// To a member: the hello of the connection from `from` to `to`.
    Connect {
        nonce: Nonce,
        from: Rank,
        to: Rank,
    },
    Accept,
    Reject(String),
    /// The first message of a rendezvous, without MAC: its nonce.
    Challenge(Nonce),
    /// To an unauthenticated peer, without MAC.
    Refuse(String),
}

impl BootstrapMessage {
    /// The handshake that a hello is part of.
    pub(super) fn handshake(&self, server_nonce: Nonce) -> Option<Handshake> {
        let (client, server, client_nonce) = match self {
            Self::Register { rank, entry, .. } => (*rank, RENDEZVOUS, entry.nonce),
            Self::Connect { nonce, from, to } => (*from, *to, *nonce),
            _ => return None,
        };
        Some(Handshake {
            client,
            server,
            client_nonce,
            server_nonce,
        })
    }

    pub(super) fn sealed(&self, mac: &mut FrameMac) -> Vec<u8> {
        let mut frame = self.encode();
        let tag = mac.seal(&frame);
        frame.extend_from_slice(&tag);
        frame
    }

    /// Header and body.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut to = MAGIC.to_vec();
        to.extend_from_slice(&[0; 4]);
        match self {
            Self::Register { rank, ranks, entry } => {
                to.push(1);
                to.extend_from_slice(&rank.0.to_le_bytes());
                to.extend_from_slice(&ranks.to_le_bytes());
                entry.put(&mut to);
            }
            Self::Table(entries) => {
                to.push(2);
                to.extend_from_slice(&(entries.len() as u32).to_le_bytes());
                entries.iter().for_each(|entry| entry.put(&mut to));
            }
            Self::Connect { nonce, from, to: other } => {
                to.push(3);
                to.extend_from_slice(nonce);
                to.extend_from_slice(&from.0.to_le_bytes());
                to.extend_from_slice(&other.0.to_le_bytes());
            }
            Self::Accept => to.push(4),
            Self::Reject(reason) => {
                to.push(5);
                put_text(&mut to, reason, MAX_REASON);
            }
            Self::Challenge(nonce) => {
                to.push(6);
                to.extend_from_slice(nonce);
            }
            Self::Refuse(reason) => {
                to.push(7);
                put_text(&mut to, reason, MAX_REASON);
            }
        }
        let length = (to.len() - HEADER) as u32;
        to[MAGIC.len()..HEADER].copy_from_slice(&length.to_le_bytes());
        to
    }

    pub(super) fn decode(body: &[u8]) -> Option<Self> {
        let mut from = Reader(body);
        let message = match from.u8()? {
            1 => Self::Register {
                rank: Rank(from.u32()?),
                ranks: from.u32()?,
                entry: Entry::read(&mut from)?,
            },
            2 => {
                let ranks = from.u32()?;
                if ranks > MAX_RANKS {
                    return None;
                }
                Self::Table((0..ranks).map(|_| Entry::read(&mut from)).collect::<Option<_>>()?)
            }
            3 => Self::Connect {
                nonce: from.array()?,
                from: Rank(from.u32()?),
                to: Rank(from.u32()?),
            },
            4 => Self::Accept,
            5 => Self::Reject(from.text(MAX_REASON)?),
            6 => Self::Challenge(from.array()?),
            7 => Self::Refuse(from.text(MAX_REASON)?),
            _ => return None,
        };
        from.end()?;
        Some(message)
    }
}

pub(super) fn body_length(header: [u8; HEADER], max: usize) -> Option<usize> {
    let mut from = Reader(&header);
    let length = (from.array()? == MAGIC).then(|| from.u32())??;
    usize::try_from(length).ok().filter(|length| *length <= max)
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
        let nonce = std::array::from_fn(|i| i as u8);
        let six = Entry {
            listen_addr: "[fe80::1]:1".parse().unwrap(),
            nonce,
            member: Member {
                host: String::new(),
                process: 0,
            },
        };
        vec![
            BootstrapMessage::Register {
                rank: Rank(3),
                ranks: 4,
                entry: entry(),
            },
            BootstrapMessage::Table(vec![entry(), six, entry()]),
            BootstrapMessage::Connect {
                nonce,
                from: Rank(1),
                to: Rank(2),
            },
            BootstrapMessage::Accept,
            BootstrapMessage::Reject("no".into()),
            BootstrapMessage::Challenge(nonce),
            BootstrapMessage::Refuse("no".into()),
        ]
    }

    #[test]
    fn messages_round_trip_and_truncated_ones_are_rejected() {
        for message in messages() {
            let bytes = message.encode();
            let header = bytes[..HEADER].try_into().unwrap();
            assert_eq!(body_length(header, MAX_BODY), Some(bytes.len() - HEADER));
            let body = &bytes[HEADER..];
            assert_eq!(BootstrapMessage::decode(body).as_ref(), Some(&message));
            for cut in 0..body.len() {
                assert_eq!(BootstrapMessage::decode(&body[..cut]), None, "{message:?} cut to {cut}");
            }
            assert_eq!(BootstrapMessage::decode(&[body, &[0]].concat()), None);
        }
        let come = messages()[0].encode();
        assert!(come.len() <= HEADER + MAX_HELLO, "the longest hello is let in");
    }

    #[test]
    fn a_hostile_count_or_length_allocates_nothing() {
        let mut table = vec![2];
        table.extend_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(BootstrapMessage::decode(&table), None);
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&MAGIC);
        header[8..].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(body_length(header, MAX_HELLO), None);
        header[0] ^= 1;
        header[8..].copy_from_slice(&1_u32.to_le_bytes());
        assert_eq!(body_length(header, MAX_HELLO), None);
    }

    #[test]
    fn texts_of_peers_stay_on_one_line() {
        let said = BootstrapMessage::Reject("a\nb\u{1b}[31m".into()).encode();
        assert_eq!(
            BootstrapMessage::decode(&said[HEADER..]),
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
                prop_assert!(again.len() <= HEADER + 3 * bytes.len());
                let header = again[..HEADER].try_into().unwrap();
                prop_assert_eq!(body_length(header, MAX_BODY), Some(again.len() - HEADER));
                prop_assert!(BootstrapMessage::decode(&again[HEADER..]).is_some());
            }
        }

        #[test]
        fn a_header_gives_no_length_over_the_limit(mut header: [u8; HEADER], magic: bool, max in 0..MAX_BODY) {
            if magic {
                header[..MAGIC.len()].copy_from_slice(&MAGIC);
            }
            let stated = u32::from_le_bytes(header[MAGIC.len()..].try_into().unwrap()) as usize;
            prop_assert_eq!(body_length(header, max), (magic && stated <= max).then_some(stated));
        }
    }

    /// Any bytes behind a kind that there is, and messages of which some bytes are others.
    fn message_bytes() -> impl Strategy<Value = Vec<u8>> {
        let random = (0..9_u8, vec(any::<u8>(), 0..400)).prop_map(|(kind, rest)| [&[kind], &rest[..]].concat());
        let near = (0..messages().len(), vec((any::<Index>(), any::<u8>()), 0..4)).prop_map(|(which, changes)| {
            let mut bytes = messages()[which].encode();
            bytes.drain(..HEADER);
            for (at, value) in changes {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            bytes
        });
        prop_oneof![random, near]
    }
}
