//! By `DeviceMemory::read` only: its addresses are no addresses of this process.
use doorbell_verbs::{Buffer, Opaque, RemoteWrite};

fn look(buffer: Buffer<Opaque<RemoteWrite>>, into: &mut [u8]) {
    buffer.read_at(0, into);
}

fn main() {}
