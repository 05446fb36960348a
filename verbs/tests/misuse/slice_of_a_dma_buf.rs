//! The processor does not reach this memory: a GPU's, by a dma-buf, or the adapter's own.
use doorbell_verbs::{Buffer, Local, Opaque};

fn look(buffer: Buffer<Opaque<Local>>) -> u8 {
    buffer[0]
}

fn main() {}
