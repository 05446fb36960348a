//! A key that grants WRITE does not grant atomics.
use doorbell_verbs::{Remote, RemoteWord, Write};

fn misuse(remote: Remote<Write>) -> Option<RemoteWord> {
    remote.word(0)
}

fn main() {}
