//! UD supports SEND only.
use doorbell_verbs::{Buffer, QueuePair, Remote, Ud, Write};

fn misuse(qp: &mut QueuePair<Ud>, buffer: Buffer, remote: Remote<Write>) {
    qp.write(buffer, remote).unwrap();
}

fn main() {}
