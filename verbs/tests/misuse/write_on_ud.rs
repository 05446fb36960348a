//! UD supports SEND only.
use doorbell_verbs::{Buffer, QueuePair, Remote, UnreliableDatagram, WriteAccess};

fn misuse(qp: &mut QueuePair<UnreliableDatagram>, buffer: Buffer, remote: Remote<WriteAccess>) {
    qp.write(buffer, remote).unwrap();
}

fn main() {}
