//! A key is never turned into one that grants more.
use doorbell_verbs::{Read, ReadWrite, Remote};

fn misuse(remote: Remote<Read>) -> Remote<ReadWrite> {
    remote.into()
}

fn main() {}
