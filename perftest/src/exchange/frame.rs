//! Frames on a byte stream: a 32-bit big-endian length, then so many bytes of JSON.

use std::io::{self, Read, Write};

use super::Message;

/// The most bytes of JSON in a frame. A thousand queue pairs need about a third of it.
pub(crate) const LIMIT: u32 = 1 << 20;

/// What each side sends before its first frame.
pub(crate) const PREAMBLE: [u8; 8] = *b"DOORBELL";

/// Writes one message with one write, so that a small message is one packet.
///
/// # Errors
/// Those of the stream, and `InvalidData` when the message is too long for a frame.
pub(crate) fn write(stream: &mut impl Write, message: &Message) -> io::Result<()> {
    let body = serde_json::to_vec(message)?;
    let length = u32::try_from(body.len()).ok().filter(|length| *length <= LIMIT);
    let length =
        length.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the message is too long for a frame"))?;
    let mut frame = Vec::with_capacity(4 + body.len());
    frame.extend_from_slice(&length.to_be_bytes());
    frame.extend_from_slice(&body);
    stream.write_all(&frame)
}

/// Reads one message; `None` when the stream ended between frames.
///
/// # Errors
/// Those of the stream, `UnexpectedEof` when it ended inside a frame, `InvalidData` when the frame
/// is too long or is not a message.
pub(crate) fn read(stream: &mut impl Read) -> io::Result<Option<Message>> {
    let mut length = [0; 4];
    let mut received = 0;
    while received < length.len() {
        match stream.read(&mut length[received..]) {
            Ok(0) if received == 0 => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => received += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    let length = u32::from_be_bytes(length);
    if length > LIMIT {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a frame of {length} bytes is over the limit of {LIMIT}"),
        ));
    }
    // The buffer grows with what arrives, so a large length alone allocates nothing.
    let mut body = Vec::new();
    stream.take(length.into()).read_to_end(&mut body)?;
    if body.len() < length as usize {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    serde_json::from_slice(&body).map(Some).map_err(|e| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("not a message of this protocol: {e}"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive() {
        let mut stream = Vec::new();
        write(&mut stream, &Message::Ready).unwrap();
        write(&mut stream, &Message::Failed("no".into())).unwrap();
        let mut stream = stream.as_slice();
        assert_eq!(read(&mut stream).unwrap(), Some(Message::Ready));
        assert_eq!(read(&mut stream).unwrap(), Some(Message::Failed("no".into())));
        assert_eq!(read(&mut stream).unwrap(), None);
    }

    #[test]
    fn hostile_bytes_are_errors() {
        for (bytes, kind) in [
            (&b"\0\0"[..], io::ErrorKind::UnexpectedEof),
            (b"\0\0\0\x05{}", io::ErrorKind::UnexpectedEof),
            (b"\xff\xff\xff\xff{}", io::ErrorKind::InvalidData),
            (b"\0\0\0\x02{}", io::ErrorKind::InvalidData),
            (b"\0\0\0\x02\xff\xff", io::ErrorKind::InvalidData),
            (b"\0\0\0\0", io::ErrorKind::InvalidData),
            (b"GET / HTTP/1.1\r\n\r\n", io::ErrorKind::InvalidData),
        ] {
            assert_eq!(read(&mut &bytes[..]).unwrap_err().kind(), kind, "{bytes:?}");
        }
    }

    #[test]
    fn deep_nesting_does_not_overflow_the_stack() {
        let body = "[".repeat(LIMIT as usize);
        let mut bytes = LIMIT.to_be_bytes().to_vec();
        bytes.extend_from_slice(body.as_bytes());
        assert_eq!(
            read(&mut bytes.as_slice()).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
    }

    #[test]
    fn a_message_too_long_is_not_sent() {
        let mut stream = Vec::new();
        assert!(write(&mut stream, &Message::Failed("x".repeat(LIMIT as usize))).is_err());
        assert!(stream.is_empty());
    }
}
