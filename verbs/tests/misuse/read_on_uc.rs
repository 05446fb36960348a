//! UC has no acknowledgements, and so no READ.
use doorbell_verbs::{Buffer, QueuePair, Read, Remote, Uc};

fn misuse(qp: &mut QueuePair<Uc>, buffer: Buffer, remote: Remote<Read>) {
    qp.read(buffer, remote).unwrap();
}

fn main() {}
