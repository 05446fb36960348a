//! The CPU cannot access this memory: a GPU dma-buf, or device memory of the adapter.
use doorbell_verbs::{Buffer, Local, Opaque};

fn misuse(buffer: Buffer<Opaque<Local>>) -> u8 {
    buffer[0]
}

fn main() {}
