//! Splitting a buffer consumes it: only its parts are left.
use doorbell_verbs::Buffer;

fn misuse(buffer: Buffer) -> (Buffer, Buffer) {
    let (first, _) = buffer.split_at(8);
    (first, buffer)
}

fn main() {}
