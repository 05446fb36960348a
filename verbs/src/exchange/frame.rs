//! What each side says: a head of fixed length, and the data that it announces.

use crate::qp::{BadEndpoint, Endpoint};

use super::MAX_DATA;

const MAGIC: [u8; 8] = *b"DBELLXCH";
pub(super) const VERSION: u16 = 1;
/// Magic, version and length: the part that is the same in all versions.
pub(super) const FIXED: usize = 12;
/// All but the data.
pub(super) const HEAD: usize = FIXED + 32;

/// Why a head is none of ours.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Bad {
    Magic,
    Version(u16),
    Length(usize),
}

/// The whole frame; `None` when there is too much data.
pub(super) fn write(endpoint: &Endpoint, data: &[u8]) -> Option<Vec<u8>> {
    let len = u16::try_from(data.len()).ok().filter(|_| data.len() <= MAX_DATA)?;
    let mut frame = Vec::with_capacity(HEAD + data.len());
    frame.extend_from_slice(&MAGIC);
    frame.extend_from_slice(&VERSION.to_be_bytes());
    frame.extend_from_slice(&len.to_be_bytes());
    frame.extend_from_slice(&endpoint.to_bytes());
    frame.extend_from_slice(data);
    Some(frame)
}

/// The length of the data, if the first [`FIXED`] bytes are right.
pub(super) fn length(head: &[u8; HEAD]) -> Result<usize, Bad> {
    if head[..8] != MAGIC {
        return Err(Bad::Magic);
    }
    let version = u16::from_be_bytes([head[8], head[9]]);
    if version != VERSION {
        return Err(Bad::Version(version));
    }
    let len = usize::from(u16::from_be_bytes([head[10], head[11]]));
    if len > MAX_DATA {
        return Err(Bad::Length(len));
    }
    Ok(len)
}

/// The endpoint in a whole head.
pub(super) fn endpoint(head: &[u8; HEAD]) -> Result<Endpoint, BadEndpoint> {
    let mut bytes = [0; HEAD - FIXED];
    bytes.copy_from_slice(&head[FIXED..]);
    Endpoint::from_bytes(&bytes)
}
