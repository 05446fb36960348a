//! Unique ids: the address where the ranks of a group meet, and the secret that authenticates them.

use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

use doorbell_rendezvous::Secret;

/// Maximum length of a host name in bytes (RFC 1035).
pub(crate) const MAX_HOST: usize = 255;

/// The rendezvous address of a group: `doorbell:HOST:PORT:SECRET`, an IPv6 address in brackets. Any
/// process that has it may join, so it goes to members only; `Debug` does not show the secret.
#[doc(alias = "ncclUniqueId")]
#[derive(Clone, Debug)]
pub struct UniqueId {
    host: String,
    port: u16,
    secret: Secret,
}

/// Text that is not a unique id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("this is no unique id: {why}; one reads doorbell:HOST:PORT:SECRET, with 32 hexadecimal digits at the end")]
pub struct NotAnId {
    why: &'static str,
}

impl UniqueId {
    /// From its parts.
    ///
    /// # Errors
    /// When `host` is neither an address nor a valid name, or the port is 0.
    pub fn new(host: &str, port: u16, secret: Secret) -> Result<Self, NotAnId> {
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
            secret,
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

    /// The secret that authenticates members.
    #[must_use]
    pub const fn secret(&self) -> Secret {
        self.secret
    }
}

impl fmt::Display for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (open, close) = if self.host.contains(':') { ("[", "]") } else { ("", "") };
        let secret = u128::from_be_bytes(*self.secret.bytes());
        write!(f, "doorbell:{open}{}{close}:{}:{secret:032x}", self.host, self.port)
    }
}

impl FromStr for UniqueId {
    type Err = NotAnId;

    fn from_str(text: &str) -> Result<Self, NotAnId> {
        let no = |why| NotAnId { why };
        let rest = text
            .strip_prefix("doorbell:")
            .ok_or(no("it does not begin with doorbell:"))?;
        let (rest, secret) = rest.rsplit_once(':').ok_or(no("it has no secret"))?;
        let (host, port) = rest.rsplit_once(':').ok_or(no("it has no port"))?;
        let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(host) if host.contains(':') => host,
            None if !host.contains(':') => host,
            _ => return Err(no("brackets are for IPv6 addresses, and those need them")),
        };
        const DIGITS: &str = "its secret is not 32 hexadecimal digits";
        if secret.len() != 32 || !secret.bytes().all(|c| c.is_ascii_hexdigit()) {
            return Err(no(DIGITS));
        }
        let secret = u128::from_str_radix(secret, 16).map_err(|_| no(DIGITS))?;
        let digits = !port.is_empty() && port.bytes().all(|c| c.is_ascii_digit());
        let port = port
            .parse()
            .ok()
            .filter(|_| digits)
            .ok_or(no("its port is no number up to 65535"))?;
        Self::new(host, port, Secret::from_bytes(secret.to_be_bytes()))
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
            let secret = Secret::from_bytes(std::array::from_fn(|i| i as u8));
            let id = UniqueId::new(host, 4000, secret).unwrap();
            assert_eq!(id.to_string(), text);
            assert_eq!(text.parse::<UniqueId>().unwrap().to_string(), text);
            assert!(!format!("{id:?}").contains("0001"), "Debug shows the secret");
        }
    }

    #[test]
    fn invalid_ids_are_explained() {
        let secret = "0".repeat(32);
        for (text, why) in [
            (String::new(), "does not begin"),
            ("doorbell:".into(), "no secret"),
            (format!("doorbell:{secret}"), "no secret"),
            (format!("doorbell:4000:{secret}"), "no port"),
            (format!("doorbell::4000:{secret}"), "neither a name"),
            (format!("doorbell:a b:4000:{secret}"), "neither a name"),
            (format!("doorbell:{}:4000:{secret}", "a".repeat(256)), "neither a name"),
            (format!("doorbell:fe80::1:4000:{secret}"), "brackets"),
            (format!("doorbell:[a]:4000:{secret}"), "brackets"),
            (format!("doorbell:[fe80::g]:4000:{secret}"), "neither a name"),
            (format!("doorbell:a:0:{secret}"), "port 0"),
            (format!("doorbell:a:65536:{secret}"), "no number"),
            (format!("doorbell:a:+1:{secret}"), "no number"),
            (format!("doorbell:a:4000:{secret}0"), "32 hexadecimal"),
            (format!("doorbell:a:4000:+{}", &secret[1..]), "32 hexadecimal"),
            (format!("doorbell:a:4000:{}é", &secret[2..]), "32 hexadecimal"),
        ] {
            let said = text.parse::<UniqueId>().unwrap_err().to_string();
            assert!(said.contains(why), "{text}: {said}");
        }
    }
}
