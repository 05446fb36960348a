//! By `DeviceMemory::read` only: its addresses are not mapped in this process.
use doorbell_verbs::{Buffer, Opaque, RemoteWrite};

fn misuse(buffer: Buffer<Opaque<RemoteWrite>>, into: &mut [u8]) {
    buffer.read_at(0, into);
}

fn main() {}
