//! A buffer is the only one of its range: were there two, one could be written while the other is posted.
use doorbell_verbs::Buffer;

fn misuse(buffer: &Buffer) -> Buffer {
    buffer.clone()
}

fn main() {}
