//! A key cannot be converted to one with more rights.
use doorbell_verbs::{ReadAccess, ReadWriteAccess, Remote};

fn misuse(remote: Remote<ReadAccess>) -> Remote<ReadWriteAccess> {
    remote.into()
}

fn main() {}
