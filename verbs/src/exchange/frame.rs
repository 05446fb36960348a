//! The frame that each side sends: a header of fixed length, and data of the length in it.

use super::MAX_DATA;

const MAGIC: [u8; 8] = *b"DBELLXCH";
pub(super) const VERSION: u16 = 1;
/// Magic, version and length: the part that is the same in all versions.
pub(super) const PREFIX_LEN: usize = 12;
pub(super) const HEADER_LEN: usize = PREFIX_LEN + 32;

/// An endpoint of either kind, serialised.
pub(super) type EndpointBytes = [u8; HEADER_LEN - PREFIX_LEN];

#[derive(Debug, PartialEq, Eq)]
pub(super) enum FrameError {
    Magic,
    Version(u16),
    Length(usize),
}

pub(super) fn write(endpoint: &EndpointBytes, data: &[u8]) -> Option<Vec<u8>> {
    let len = u16::try_from(data.len()).ok().filter(|_| data.len() <= MAX_DATA)?;
    let mut frame = Vec::with_capacity(HEADER_LEN + data.len());
    frame.extend_from_slice(&MAGIC);
    frame.extend_from_slice(&VERSION.to_be_bytes());
    frame.extend_from_slice(&len.to_be_bytes());
    frame.extend_from_slice(endpoint);
    frame.extend_from_slice(data);
    Some(frame)
}

/// The length of the data, if the first [`PREFIX_LEN`] bytes are valid.
pub(super) fn length(header: &[u8; HEADER_LEN]) -> Result<usize, FrameError> {
    if header[..8] != MAGIC {
        return Err(FrameError::Magic);
    }
    let version = u16::from_be_bytes([header[8], header[9]]);
    if version != VERSION {
        return Err(FrameError::Version(version));
    }
    let len = usize::from(u16::from_be_bytes([header[10], header[11]]));
    if len > MAX_DATA {
        return Err(FrameError::Length(len));
    }
    Ok(len)
}

pub(super) fn endpoint(header: &[u8; HEADER_LEN]) -> EndpointBytes {
    let mut bytes = [0; HEADER_LEN - PREFIX_LEN];
    bytes.copy_from_slice(&header[PREFIX_LEN..]);
    bytes
}
