//! A shared receive queue has one poster; its handle only creates queue pairs.
use doorbell_verbs::{Buffer, SharedReceiveQueue};

fn misuse(srq: &SharedReceiveQueue, buffer: Buffer) {
    srq.handle().receive(buffer).unwrap();
}

fn main() {}
