//! A key that grants WRITE does not grant atomics.
use doorbell_verbs::{Remote, RemoteWord, WriteAccess};

fn misuse(remote: Remote<WriteAccess>) -> Option<RemoteWord> {
    remote.word(0)
}

fn main() {}
