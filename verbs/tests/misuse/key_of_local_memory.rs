//! Memory registered without remote rights has no key for peers.
use doorbell_verbs::Buffer;

fn misuse(buffer: &Buffer) {
    let _ = buffer.remote();
}

fn main() {}
