//! Who splits a buffer has its parts, and the whole no more.
use doorbell_verbs::Buffer;

fn misuse(buffer: Buffer) -> (Buffer, Buffer) {
    let (first, _) = buffer.split_at(8);
    (first, buffer)
}

fn main() {}
