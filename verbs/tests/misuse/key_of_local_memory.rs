//! There is no key to memory registered without remote rights.
use doorbell_verbs::Buffer;

fn misuse(buffer: &Buffer) {
    let _ = buffer.remote();
}

fn main() {}
