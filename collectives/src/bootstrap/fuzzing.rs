//! Entry points of `tests/fuzz`: what processes send each other before and beside a collective. Not
//! a part of the API.

use super::auth::{FrameMac, NONCE, TAG};
use super::mesh::{Frame, Inbound};
use super::wire::{BootstrapMessage, HEADER, MAX_BODY, MAX_HELLO, body_length};

const KEY: [u8; 32] = [7; 32];

/// A message of the rendezvous, header and body.
///
/// # Panics
/// When a message does not survive being encoded and decoded, but for text that grew too long.
pub fn message(bytes: &[u8]) {
    let Some((header, body)) = bytes.split_first_chunk::<HEADER>() else {
        return;
    };
    let length = body_length(*header, MAX_BODY);
    assert!(length.is_none_or(|length| length <= MAX_BODY));
    assert!(body_length(*header, MAX_HELLO).is_none_or(|hello| Some(hello) == length && hello <= MAX_HELLO));
    let again = |message: &BootstrapMessage| BootstrapMessage::decode(&message.encode()[HEADER..]);
    if let Some(message) = BootstrapMessage::decode(body) {
        let sealed = message.sealed(&mut FrameMac::new(&KEY));
        assert_eq!(sealed.len(), message.encode().len() + TAG);
        let is_hello = matches!(
            message,
            BootstrapMessage::Register { .. } | BootstrapMessage::Connect { .. }
        );
        assert_eq!(message.handshake([0; NONCE]).is_some(), is_hello);
        let fitted = again(&message).expect("what is encoded is a message");
        assert_eq!(again(&fitted), Some(fitted));
    }
}

/// The bytes as those of a mesh connection, in pieces of `size`: as they are, and as the body of a
/// frame that its MAC authenticates, with another one behind it.
///
/// # Panics
/// When a frame is taken without its MAC, or does not survive being encoded and decoded.
pub fn frames(bytes: &[u8], size: usize) {
    assert_eq!(read(bytes, size).unwrap_or_default(), [], "they have no MACs");
    let mut mac = FrameMac::new(&KEY);
    let mut sealed = [&(bytes.len() as u32).to_le_bytes(), bytes].concat();
    let tag = mac.seal(&sealed);
    sealed.extend_from_slice(&tag);
    let Some(frame) = Frame::decode(bytes) else {
        assert!(read(&sealed, size).is_err());
        return;
    };
    frame.seal(&mut mac, &mut sealed);
    // Text that is not UTF-8 is replaced once.
    let mut encoded = Vec::new();
    frame.encode(&mut encoded);
    let fitted = Frame::decode(&encoded[4..]).expect("a frame");
    assert_eq!(read(&sealed, size).as_deref(), Ok(&[frame, fitted.clone()][..]));
    let mut again = Vec::new();
    fitted.encode(&mut again);
    assert_eq!(again, encoded);
}

fn read(bytes: &[u8], size: usize) -> Result<Vec<Frame>, &'static str> {
    let mut inbound = Inbound::new(FrameMac::new(&KEY));
    let mut frames = Vec::new();
    for piece in bytes.chunks(size.max(1)) {
        inbound.extend(piece);
        while let Some(frame) = inbound.next()? {
            frames.push(frame);
        }
    }
    Ok(frames)
}
