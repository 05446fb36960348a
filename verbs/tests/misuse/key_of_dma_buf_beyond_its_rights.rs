//! Registered for reading only.
use doorbell_verbs::{Buffer, Opaque, Remote, PeerRead, WriteAccess};

fn key(buffer: &Buffer<Opaque<PeerRead>>) -> Remote<WriteAccess> {
    buffer.remote()
}

fn main() {}
