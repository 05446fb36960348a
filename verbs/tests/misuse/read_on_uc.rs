//! UC has no acknowledgements, and so no READ.
use doorbell_verbs::{Buffer, QueuePair, ReadAccess, Remote, UnreliableConnection};

fn misuse(qp: &mut QueuePair<UnreliableConnection>, buffer: Buffer, remote: Remote<ReadAccess>) {
    qp.read(buffer, remote).unwrap();
}

fn main() {}
