//! A buffer is unique: a copy could be written while the other is posted.
use doorbell_verbs::Buffer;

fn misuse(buffer: &Buffer) -> Buffer {
    buffer.clone()
}

fn main() {}
