//! Entry points of `tests/fuzz`: what processes send each other before and beside a collective. Not
//! a part of the API.

use doorbell_rendezvous::{FrameMac, Hello, NONCE, TAG};

use super::mesh::{Frame, Inbound};
use super::wire::{BootstrapMessage, RENDEZVOUS, Registration};
use crate::types::Rank;

const KEY: [u8; TAG] = [7; TAG];

/// Behind a one a registration, else a message of the rendezvous.
///
/// # Panics
/// When a message does not survive being encoded and decoded, but for text that grew too long.
pub fn message(bytes: &[u8]) {
    if let Some(payload) = bytes.strip_prefix(&[1]) {
        let again = |hello: &Hello| Registration::of(hello).map(|said| said.hello(Rank(hello.client)));
        let fitted = again(&Hello {
            client: 0,
            server: RENDEZVOUS,
            nonce: [0; NONCE],
            payload: payload.to_vec(),
        });
        if let Some(fitted) = fitted.as_ref().and_then(again) {
            assert_eq!(again(&fitted), Some(fitted));
        }
        return;
    }
    let again = |message: &BootstrapMessage| BootstrapMessage::decode(&message.encode());
    if let Some(message) = BootstrapMessage::decode(bytes) {
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
