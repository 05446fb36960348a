//! An atomic's result goes to eight aligned bytes, not to a buffer of any size.
use doorbell_verbs::{Buffer, QueuePair, RemoteWord};

fn misuse(qp: &mut QueuePair, buffer: Buffer, at: RemoteWord) {
    qp.fetch_add(buffer, at, 1).unwrap();
}

fn main() {}
