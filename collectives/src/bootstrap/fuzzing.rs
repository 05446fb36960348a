//! Entry points of `tests/fuzz`: what processes send each other before and beside a collective. Not
//! a part of the API.

use super::mesh::Inbound;
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

/// Bytes of a mesh connection that arrive in pieces of `size`, up to the first that are no frame.
///
/// # Panics
/// When a frame does not survive being encoded and decoded.
pub fn frames(bytes: &[u8], size: usize) {
    let mut inbound = Inbound::default();
    for piece in bytes.chunks(size.max(1)) {
        inbound.extend(piece);
        loop {
            let frame = match inbound.next() {
                Ok(Some(frame)) => frame,
                Ok(None) => break,
                Err(_) => return,
            };
            let (mut encoded, mut again) = (Vec::new(), Inbound::default());
            frame.encode(&mut encoded);
            again.extend(&encoded);
            assert_eq!(again.next(), Ok(Some(frame)));
        }
    }
}
