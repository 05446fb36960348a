//! A buffer posted to a shared receive queue belongs to it until a completion returns it.
use doorbell_verbs::{Buffer, SharedReceiveQueue};

fn misuse(srq: &mut SharedReceiveQueue, mut buffer: Buffer) {
    srq.receive(buffer).unwrap();
    buffer[0] = 1;
}

fn main() {}
