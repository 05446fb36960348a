//! Entry points of `tests/fuzz`: what processes send each other before and beside a collective. Not
//! a part of the API.

use super::auth::FrameMac;
use super::mesh::{Frame, Inbound};
use super::wire::{BootstrapMessage, HEADER, MAX_BODY, MAX_HELLO, body_length};

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
        let fitted = again(&message).expect("what is encoded is a message");
        assert_eq!(again(&fitted), Some(fitted));
    }
}

/// The bytes as those of a mesh connection, in pieces of `size`: as they are, and as the body of a
/// frame that its MAC authenticates.
///
/// # Panics
/// When a frame is taken without its MAC, or does not survive being encoded and decoded.
pub fn frames(bytes: &[u8], size: usize) {
    let key = [7; 32];
    let mut inbound = Inbound::new(FrameMac::new(&key));
    for piece in bytes.chunks(size.max(1)) {
        inbound.extend(piece);
        match inbound.next() {
            Ok(None) => {}
            Ok(Some(frame)) => panic!("{frame:?} has no MAC"),
            Err(_) => break,
        }
    }
    let mut sealed = [&(bytes.len() as u32).to_le_bytes(), bytes].concat();
    let tag = FrameMac::new(&key).seal(&sealed);
    sealed.extend_from_slice(&tag);
    let mut inbound = Inbound::new(FrameMac::new(&key));
    for piece in sealed.chunks(size.max(1)) {
        inbound.extend(piece);
    }
    match (inbound.next(), Frame::decode(bytes)) {
        (Ok(Some(received)), Some(frame)) => assert_eq!(received, frame),
        (Err(_), None) => return,
        (received, frame) => panic!("{received:?} is not {frame:?}"),
    }
    let frame = |bytes: &[u8]| {
        let mut encoded = Vec::new();
        Frame::decode(bytes).expect("a frame").encode(&mut encoded);
        encoded.split_off(4)
    };
    // Text that is not UTF-8 is replaced once.
    let fitted = frame(bytes);
    assert_eq!(frame(&fitted), fitted);
}
