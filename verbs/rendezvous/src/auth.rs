//! Authentication of connections: both ends prove that they know the secret, which is never sent.
//!
//! Each end contributes a nonce. HKDF-SHA-256 (RFC 5869) of the secret, with both nonces as salt
//! and the protocol, the direction and both ends' roles as info, gives the key of each direction.
//! Every frame carries an HMAC-SHA-256 (RFC 2104) over its number in that direction and its bytes;
//! the first one is the proof. A key is of one direction of one connection, so a frame that was
//! reflected, replayed, reordered or recorded on another connection is forged. Frames are not
//! encrypted.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::connection::Protocol;
use super::hello::Hello;
use super::secret::Secret;

pub(super) type HmacSha256 = Hmac<Sha256>;
/// A random number of one end of one connection.
pub type Nonce = [u8; NONCE];

/// Block size of SHA-256, to which HMAC pads keys.
pub(super) const BLOCK: usize = 64;
/// Length of a [`Nonce`].
pub const NONCE: usize = BLOCK / 2;
/// Length of the MAC behind a frame.
pub const TAG: usize = 32;

/// The frame's MAC is not that of the awaited frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("it does not prove the group's secret")]
pub struct Forged;

/// The MACs of both directions, for one end of a connection.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) send: FrameMac,
    pub(super) receive: FrameMac,
}

impl Session {
    pub(super) fn client(protocol: &Protocol, secret: &Secret, hello: &Hello, server: &Nonce) -> Self {
        let [send, receive] = directions(protocol, secret, hello, server);
        Self { send, receive }
    }

    pub(super) fn server(protocol: &Protocol, secret: &Secret, hello: &Hello, server: &Nonce) -> Self {
        let [receive, send] = directions(protocol, secret, hello, server);
        Self { send, receive }
    }
}

/// To the server, and to the client: what makes the keys of a connection its own.
fn directions(protocol: &Protocol, secret: &Secret, hello: &Hello, server: &Nonce) -> [FrameMac; 2] {
    let mut salt = [0; BLOCK];
    salt[..NONCE].copy_from_slice(&hello.nonce);
    salt[NONCE..].copy_from_slice(server);
    let ends = [hello.client.to_le_bytes(), hello.server.to_le_bytes()].concat();
    [&b"to the server"[..], b"to the client"].map(|direction| {
        let info = [protocol.preamble, direction, &ends].concat();
        FrameMac::new(&hkdf(&salt, secret.bytes(), &info))
    })
}

/// HKDF-SHA-256 for 32 bytes: one block, so that neither length can be invalid. A shorter salt is
/// padded with zeros, as HMAC does.
fn hkdf(salt: &[u8; BLOCK], input: &[u8], info: &[u8]) -> [u8; TAG] {
    let extracted = HmacSha256::new(salt.into()).chain_update(input).finalize();
    let expanded = keyed(&extracted.into_bytes().into())
        .chain_update(info)
        .chain_update([1]);
    expanded.finalize().into_bytes().into()
}

fn keyed(key: &[u8; TAG]) -> HmacSha256 {
    let mut padded = [0; BLOCK];
    padded[..TAG].copy_from_slice(key);
    HmacSha256::new(&padded.into())
}

/// The MAC of the frames of one direction.
pub struct FrameMac {
    keyed: HmacSha256,
    next: u64,
}

impl FrameMac {
    /// With this key.
    #[must_use]
    pub fn new(key: &[u8; TAG]) -> Self {
        Self {
            keyed: keyed(key),
            next: 0,
        }
    }

    /// The MAC of the next frame.
    pub fn seal(&mut self, frame: &[u8]) -> [u8; TAG] {
        self.next_mac(frame).finalize().into_bytes().into()
    }

    /// Checks the MAC of the next frame.
    ///
    /// # Errors
    /// [`Forged`], found in constant time.
    pub fn open(&mut self, frame: &[u8], tag: &[u8]) -> Result<(), Forged> {
        self.next_mac(frame).verify_slice(tag).map_err(|_| Forged)
    }

    fn next_mac(&mut self, frame: &[u8]) -> HmacSha256 {
        let number = self.next.to_le_bytes();
        self.next += 1;
        self.keyed.clone().chain_update(number).chain_update(frame)
    }
}

impl fmt::Debug for FrameMac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameMac")
            .field("next", &self.next)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "auth_tests.rs"]
mod tests;
