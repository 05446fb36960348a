//! A key cannot be converted to one with more rights.
use doorbell_verbs::{Read, ReadWrite, Remote};

fn misuse(remote: Remote<Read>) -> Remote<ReadWrite> {
    remote.into()
}

fn main() {}
