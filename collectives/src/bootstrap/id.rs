//! Unique ids: the address where the ranks of a group meet, and the nonce that authenticates them.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::net::Ipv6Addr;
use std::str::FromStr;

/// Maximum length of a host name in bytes (RFC 1035).
pub(crate) const MAX_HOST: usize = 255;

/// A 128-bit nonce shared by the members of a group.
///
/// It travels over TCP in plain text: it keeps out other jobs, port scanners and hosts that cannot
/// read the network's traffic, and nothing more. `Debug` does not show it.
#[derive(Clone, Copy)]
pub struct Nonce([u8; 16]);

impl Nonce {
    /// A random nonce.
    ///
    /// # Errors
    /// When `/dev/urandom` cannot be read.
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// Derives a nonce from values that a launcher gave all ranks. It is as secret as these: a job
    /// number can be guessed, and protects against mistakes only.
    #[must_use]
    pub fn derived(words: &[&str]) -> Self {
        const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
        let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
        for message in words {
            // The length separates the words: "a", "bc" is not "ab", "c".
            let length = (message.len() as u64).to_le_bytes();
            for byte in length.iter().chain(message.as_bytes()) {
                hash = (hash ^ u128::from(*byte)).wrapping_mul(PRIME);
            }
        }
        Self(hash.to_be_bytes())
    }

    /// The bytes, as sent.
    #[must_use]
    pub const fn bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// From received bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

impl PartialEq for Nonce {
    /// Compares in constant time.
    fn eq(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).fold(0, |all, (a, b)| all | (a ^ b)) == 0
    }
}

impl Eq for Nonce {}

impl fmt::Debug for Nonce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Nonce(..)")
    }
}

/// The rendezvous address of a group: `doorbell:HOST:PORT:NONCE`, an IPv6 address in brackets. Any
/// process that has it may join, so it goes to members only.
#[doc(alias = "ncclUniqueId")]
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UniqueId {
    host: String,
    port: u16,
    nonce: Nonce,
}

/// Text that is not a unique id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("this is no unique id: {why}; one reads doorbell:HOST:PORT:NONCE, with 32 hexadecimal digits at the end")]
pub struct NotAnId {
    why: &'static str,
}

impl UniqueId {
    /// From its parts.
    ///
    /// # Errors
    /// When `host` is neither an address nor a valid name, or the port is 0.
    pub fn new(host: &str, port: u16, nonce: Nonce) -> Result<Self, NotAnId> {
        let of_a_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        let is_name = !host.is_empty() && host.chars().all(of_a_name);
        if host.len() > MAX_HOST || !(is_name || host.parse::<Ipv6Addr>().is_ok()) {
            return Err(NotAnId {
                why: "its host is neither a name nor an address",
            });
        }
        if port == 0 {
            return Err(NotAnId {
                why: "port 0 is no port to connect to",
            });
        }
        Ok(Self {
            host: host.to_owned(),
            port,
            nonce,
        })
    }

    /// The host's name or address.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The TCP port.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// The nonce that authenticates members.
    #[must_use]
    pub const fn nonce(&self) -> Nonce {
        self.nonce
    }
}

impl fmt::Display for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (open, close) = if self.host.contains(':') { ("[", "]") } else { ("", "") };
        let nonce = u128::from_be_bytes(self.nonce.0);
        write!(f, "doorbell:{open}{}{close}:{}:{nonce:032x}", self.host, self.port)
    }
}

impl FromStr for UniqueId {
    type Err = NotAnId;

    fn from_str(text: &str) -> Result<Self, NotAnId> {
        let no = |why| NotAnId { why };
        let rest = text
            .strip_prefix("doorbell:")
            .ok_or(no("it does not begin with doorbell:"))?;
        let (rest, nonce) = rest.rsplit_once(':').ok_or(no("it has no nonce"))?;
        let (host, port) = rest.rsplit_once(':').ok_or(no("it has no port"))?;
        let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(host) if host.contains(':') => host,
            None if !host.contains(':') => host,
            _ => return Err(no("brackets are for IPv6 addresses, and those need them")),
        };
        if nonce.len() != 32 || !nonce.bytes().all(|c| c.is_ascii_hexdigit()) {
            return Err(no("its nonce is not 32 hexadecimal digits"));
        }
        let nonce = u128::from_str_radix(nonce, 16).map_err(|_| no("its nonce is not 32 hexadecimal digits"))?;
        let digits = !port.is_empty() && port.bytes().all(|c| c.is_ascii_digit());
        let port = port
            .parse()
            .ok()
            .filter(|_| digits)
            .ok_or(no("its port is no number up to 65535"))?;
        Self::new(host, port, Nonce(nonce.to_be_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_round_trip() {
        for (host, text) in [
            ("127.0.0.1", "doorbell:127.0.0.1:4000:000102030405060708090a0b0c0d0e0f"),
            (
                "node-1.cluster",
                "doorbell:node-1.cluster:4000:000102030405060708090a0b0c0d0e0f",
            ),
            ("fe80::1", "doorbell:[fe80::1]:4000:000102030405060708090a0b0c0d0e0f"),
        ] {
            let nonce = Nonce::from_bytes(std::array::from_fn(|i| i as u8));
            let id = UniqueId::new(host, 4000, nonce).unwrap();
            assert_eq!(id.to_string(), text);
            assert_eq!(text.parse(), Ok(id));
        }
        let random = UniqueId::new("a", 1, Nonce::random().unwrap()).unwrap();
        assert_eq!(random.to_string().parse(), Ok(random));
    }

    #[test]
    fn invalid_ids_are_explained() {
        let nonce = "0".repeat(32);
        for (text, why) in [
            (String::new(), "does not begin"),
            ("doorbell:".into(), "no nonce"),
            (format!("doorbell:{nonce}"), "no nonce"),
            (format!("doorbell:4000:{nonce}"), "no port"),
            (format!("doorbell::4000:{nonce}"), "neither a name"),
            (format!("doorbell:a b:4000:{nonce}"), "neither a name"),
            (format!("doorbell:{}:4000:{nonce}", "a".repeat(256)), "neither a name"),
            (format!("doorbell:fe80::1:4000:{nonce}"), "brackets"),
            (format!("doorbell:[a]:4000:{nonce}"), "brackets"),
            (format!("doorbell:[fe80::g]:4000:{nonce}"), "neither a name"),
            (format!("doorbell:a:0:{nonce}"), "port 0"),
            (format!("doorbell:a:65536:{nonce}"), "no number"),
            (format!("doorbell:a:+1:{nonce}"), "no number"),
            (format!("doorbell:a:4000:{nonce}0"), "32 hexadecimal"),
            (format!("doorbell:a:4000:+{}", &nonce[1..]), "32 hexadecimal"),
            (format!("doorbell:a:4000:{}é", &nonce[2..]), "32 hexadecimal"),
        ] {
            let said = text.parse::<UniqueId>().unwrap_err().to_string();
            assert!(said.contains(why), "{text}: {said}");
        }
    }

    #[test]
    fn derived_nonces_depend_on_every_word_and_its_length() {
        let all = [&["a", "bc"][..], &["ab", "c"], &["abc"], &["a", "bc", ""], &["a", "bd"]].map(Nonce::derived);
        for (i, one) in all.iter().enumerate() {
            assert_eq!(all.iter().position(|other| other == one), Some(i));
        }
        assert_eq!(Nonce::derived(&["a", "bc"]), all[0]);
        assert!(!format!("{:?}", all[0]).contains(char::is_numeric));
    }
}
