//! By `DeviceMemory::read` only: its addresses are not mapped in this process.
use doorbell_verbs::{Buffer, Opaque, PeerWrite};

fn misuse(buffer: Buffer<Opaque<PeerWrite>>, into: &mut [u8]) {
    buffer.read_at(0, into);
}

fn main() {}
