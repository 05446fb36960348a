//! Frames on a byte stream: a 32-bit big-endian length, then so many bytes.

use std::io::{self, Read, Write};

const LENGTH: usize = 4;
/// What is read at once: memory is taken as bytes arrive, not as a length announces them.
const PIECE: usize = 4096;

/// The bytes of a stream up to the end of a frame, as they arrive.
#[derive(Debug, Default)]
pub struct FrameReader {
    received: Vec<u8>,
    preamble: &'static [u8],
}

impl FrameReader {
    /// Of a stream that begins with `preamble`.
    #[must_use]
    pub fn behind(preamble: &'static [u8]) -> Self {
        Self {
            received: Vec::new(),
            preamble,
        }
    }

    /// Reads up to the end of the next frame, and nothing behind it; `None` when the stream has no
    /// more bytes yet ([`WouldBlock`](io::ErrorKind::WouldBlock)).
    ///
    /// # Errors
    /// Those of the stream; `UnexpectedEof` at its end; `InvalidData` when it does not begin with
    /// the preamble, or the frame is longer than `max` bytes.
    pub fn read(&mut self, stream: &mut impl Read, max: usize) -> io::Result<Option<Vec<u8>>> {
        while let missing @ 1.. = self.missing(max)? {
            let mut piece = [0; PIECE];
            match stream.read(&mut piece[..missing.min(PIECE)]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => self.received.extend_from_slice(&piece[..n]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        let mut frame = std::mem::take(&mut self.received);
        frame.drain(..self.preamble.len() + LENGTH);
        self.preamble = &[];
        Ok(Some(frame))
    }

    /// Whether the preamble has come.
    #[must_use]
    pub fn has_preamble(&self) -> bool {
        self.received.starts_with(self.preamble)
    }

    /// Bytes up to the end of the preamble and length, or of the frame once that is known.
    fn missing(&self, max: usize) -> io::Result<usize> {
        let (received, preamble) = (&self.received, self.preamble);
        let common = received.len().min(preamble.len());
        if received[..common] != preamble[..common] {
            return Err(invalid("it does not speak this protocol, or speaks another version"));
        }
        let Some(length) = received.get(preamble.len()..).and_then(<[u8]>::first_chunk) else {
            return Ok(preamble.len() + LENGTH - received.len());
        };
        match u32::from_be_bytes(*length) as usize {
            length if length <= max => Ok(preamble.len() + LENGTH + length - received.len()),
            length => Err(invalid(&format!(
                "a frame of {length} bytes is over the limit of {max}"
            ))),
        }
    }
}

/// Reads one frame from a stream that waits for its bytes.
///
/// # Errors
/// As [`FrameReader::read`].
pub fn read(stream: &mut impl Read, max: usize) -> io::Result<Vec<u8>> {
    let frame = FrameReader::default().read(stream, max)?;
    frame.ok_or(io::ErrorKind::WouldBlock.into())
}

/// Writes one frame with one write, so that a small one is one packet.
///
/// # Errors
/// Those of the stream; `InvalidInput` when it is longer than `max` bytes.
pub fn write(stream: &mut impl Write, frame: &[u8], max: usize) -> io::Result<()> {
    let length = u32::try_from(frame.len()).ok().filter(|_| frame.len() <= max);
    let too_long = || io::Error::new(io::ErrorKind::InvalidInput, "the message is too long for a frame");
    let length = length.ok_or_else(too_long)?;
    stream.write_all(&[&length.to_be_bytes(), frame].concat())
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_however_they_are_split() {
        let mut bytes = b"PREAMBLE".to_vec();
        let frames = [vec![7; 3 * PIECE], Vec::new(), b"x".to_vec()];
        for frame in &frames {
            write(&mut bytes, frame, 1 << 20).unwrap();
        }
        for size in [1, 3, 8, 9, PIECE, bytes.len()] {
            let mut reader = FrameReader::behind(b"PREAMBLE");
            let (mut pieces, mut read) = (Pieces(bytes.chunks(size).collect()), Vec::new());
            while read.len() < frames.len() {
                read.extend(reader.read(&mut pieces, 1 << 20).unwrap());
            }
            assert_eq!(read, frames, "pieces of {size}");
        }
    }

    /// A non-blocking stream: after each piece nothing more has come.
    struct Pieces<'a>(std::collections::VecDeque<&'a [u8]>);

    impl Read for Pieces<'_> {
        fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
            let Some(piece) = self.0.front_mut() else { return Ok(0) };
            if piece.is_empty() {
                self.0.pop_front();
                return Err(io::ErrorKind::WouldBlock.into());
            }
            piece.read(to)
        }
    }

    #[test]
    fn hostile_bytes_are_errors() {
        for (bytes, kind) in [
            (&b""[..], io::ErrorKind::UnexpectedEof),
            (b"PREA", io::ErrorKind::UnexpectedEof),
            (b"PREAMBLE\0\0", io::ErrorKind::UnexpectedEof),
            (b"PREAMBLE\0\0\0\x05{}", io::ErrorKind::UnexpectedEof),
            (b"PREAMBLE\0\0\0\x06", io::ErrorKind::InvalidData),
            (b"PREAMBLE\xff\xff\xff\xff", io::ErrorKind::InvalidData),
            (b"X", io::ErrorKind::InvalidData),
            (b"PREAMBLF", io::ErrorKind::InvalidData),
        ] {
            let mut reader = FrameReader::behind(b"PREAMBLE");
            let error = reader.read(&mut &bytes[..], 5).unwrap_err();
            assert_eq!(error.kind(), kind, "{bytes:?}");
        }
    }

    #[test]
    fn an_announced_length_takes_no_memory() {
        let mut reader = FrameReader::default();
        let length = (1_u32 << 30).to_be_bytes();
        let mut pieces = Pieces([&length[..]].into());
        assert!(reader.read(&mut pieces, 1 << 30).unwrap().is_none());
        assert!(reader.received.capacity() < 1024);
    }

    #[test]
    fn a_frame_too_long_is_not_sent() {
        let mut stream = Vec::new();
        assert!(write(&mut stream, &[0; 6], 5).is_err());
        assert!(stream.is_empty());
    }
}
