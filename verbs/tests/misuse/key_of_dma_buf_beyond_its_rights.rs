//! Registered for reading only.
use doorbell_verbs::{Buffer, Opaque, Remote, RemoteRead, Write};

fn key(buffer: &Buffer<Opaque<RemoteRead>>) -> Remote<Write> {
    buffer.remote()
}

fn main() {}
