//! Messages of the protocol, from bytes of a peer.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;

use doorbell_verbs::{Remote, WriteAccess};

use super::ServeError;

const MAGIC: [u8; 4] = *b"DBFS";
const VERSION: u8 = 1;
const LENGTH: u8 = 1;
const READ: u8 = 2;
const DONE: u8 = 0;
const FAILED: u8 = 1;
const HEAD: usize = 8;
/// The length of a serialised key.
const REMOTE: usize = 24;
const MAX_NAME: usize = 1024;
/// The maximum length of a request.
pub(super) const MAX_REQUEST: usize = HEAD + 8 + REMOTE + MAX_NAME;
const MAX_TEXT: usize = 200;
/// The maximum length of an answer.
pub(super) const MAX_ANSWER: usize = HEAD + 12 + MAX_TEXT;
/// The maximum of a read.
pub(super) const MAX_READ: u64 = 1 << 30;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Request {
    Length {
        name: OsString,
    },
    Read {
        name: OsString,
        offset: u64,
        into: Remote<WriteAccess>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    Done(u64),
    Failed { errno: i32, text: String },
}

impl Request {
    /// # Errors
    /// For a name that is too long.
    pub(super) fn to_bytes(&self) -> Result<Vec<u8>, ServeError> {
        let (kind, name, offset, into) = match self {
            Self::Length { name } => (LENGTH, name, 0, [0; REMOTE]),
            Self::Read { name, offset, into } => (READ, name, *offset, into.to_bytes()),
        };
        let len = u16::try_from(name.len()).unwrap_or(u16::MAX);
        if name.is_empty() || usize::from(len) > MAX_NAME {
            return Err(ServeError::Protocol("a name that is empty or longer than 1024 bytes"));
        }
        let mut bytes = head(kind, len);
        bytes.extend(offset.to_be_bytes());
        bytes.extend(into);
        bytes.extend(name.as_bytes());
        Ok(bytes)
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self, ServeError> {
        let (kind, len, rest) = parse_head(bytes)?;
        let (offset, rest) = rest.split_first_chunk::<8>().ok_or(SHORT)?;
        let (into, name) = rest.split_at_checked(REMOTE).ok_or(SHORT)?;
        if name.len() != usize::from(len) || name.is_empty() || name.len() > MAX_NAME || name.contains(&0) {
            return Err(ServeError::Protocol("a name of an invalid length, or with a zero"));
        }
        let name = OsStr::from_bytes(name).to_owned();
        match kind {
            LENGTH => Ok(Self::Length { name }),
            READ => {
                let into = Remote::from_bytes(into).map_err(|_| ServeError::Protocol("an invalid key"))?;
                if into.len() > MAX_READ {
                    return Err(ServeError::Protocol("a read of more than 1 GiB"));
                }
                let offset = u64::from_be_bytes(*offset);
                Ok(Self::Read { name, offset, into })
            }
            _ => Err(ServeError::Protocol("an unknown request")),
        }
    }
}

impl Answer {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let (kind, value, errno, text) = match self {
            Self::Done(value) => (DONE, *value, 0, &b""[..]),
            Self::Failed { errno, text } => (FAILED, 0, *errno, text.as_bytes()),
        };
        let text = &text[..text.len().min(MAX_TEXT)];
        let mut bytes = head(kind, text.len() as u16);
        bytes.extend(value.to_be_bytes());
        bytes.extend(errno.to_be_bytes());
        bytes.extend(text);
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self, ServeError> {
        let (kind, len, rest) = parse_head(bytes)?;
        let (value, rest) = rest.split_first_chunk::<8>().ok_or(SHORT)?;
        let (errno, text) = rest.split_first_chunk::<4>().ok_or(SHORT)?;
        if text.len() != usize::from(len) || text.len() > MAX_TEXT {
            return Err(ServeError::Protocol("a text of an invalid length"));
        }
        match kind {
            DONE => Ok(Self::Done(u64::from_be_bytes(*value))),
            FAILED => Ok(Self::Failed {
                errno: i32::from_be_bytes(*errno),
                // Printed by programs: one line without control characters.
                text: String::from_utf8_lossy(text).replace(char::is_control, " "),
            }),
            _ => Err(ServeError::Protocol("an unknown answer")),
        }
    }
}

const SHORT: ServeError = ServeError::Protocol("a message that is too short");

fn head(kind: u8, len: u16) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend([VERSION, kind]);
    bytes.extend(len.to_be_bytes());
    bytes
}

/// Kind, length and rest of a message.
fn parse_head(bytes: &[u8]) -> Result<(u8, u16, &[u8]), ServeError> {
    let (head, rest) = bytes.split_first_chunk::<HEAD>().ok_or(SHORT)?;
    let [a, b, c, d, version, kind, high, low] = *head;
    if [a, b, c, d] != MAGIC {
        return Err(ServeError::Protocol("no message of this protocol"));
    }
    if version != VERSION {
        return Err(ServeError::Protocol("a message of another version"));
    }
    Ok((kind, u16::from_be_bytes([high, low]), rest))
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt as _;

    use proptest::prelude::*;

    use super::*;

    fn requests() -> impl Strategy<Value = Request> {
        let name = prop::collection::vec(1u8.., 1..MAX_NAME).prop_map(OsString::from_vec);
        let read = (any::<u64>(), 0..1u64 << 40, any::<u32>(), 0..=MAX_READ);
        (name, any::<bool>(), read).prop_map(|(name, length, (offset, addr, rkey, len))| {
            let into = Remote::from_raw(addr, rkey, len);
            match length {
                true => Request::Length { name },
                false => Request::Read { name, offset, into },
            }
        })
    }

    proptest! {
        #[test]
        fn messages_are_read_as_written_and_nothing_else(request in requests(), value: u64, errno: i32, text in "[a-z ]{0,200}", cut: prop::sample::Index, at: prop::sample::Index, byte: u8) {
            let bytes = request.to_bytes().unwrap();
            prop_assert!(bytes.len() <= MAX_REQUEST);
            prop_assert_eq!(Request::from_bytes(&bytes).unwrap(), request);
            prop_assert!(Request::from_bytes(&bytes[..cut.index(bytes.len())]).is_err());
            // Of changed bytes anything but a panic, or a name or length beyond the limits.
            let mut changed = bytes.clone();
            changed[at.index(bytes.len())] = byte;
            if let Ok(Request::Read { name, into, .. }) = Request::from_bytes(&changed) {
                prop_assert!(into.len() <= MAX_READ && name.len() <= MAX_NAME);
            }
            for answer in [Answer::Done(value), Answer::Failed { errno, text }] {
                let bytes = answer.to_bytes();
                prop_assert!(bytes.len() <= MAX_ANSWER);
                prop_assert!(Answer::from_bytes(&bytes[..cut.index(bytes.len())]).is_err());
                prop_assert_eq!(Answer::from_bytes(&bytes).unwrap(), answer);
            }
        }
    }
}
