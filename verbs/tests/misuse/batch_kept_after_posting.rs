//! A batch cannot be kept beyond its closure.
use doorbell_verbs::{Batch, QueuePair};

fn misuse<'q, 'd>(qp: &'q mut QueuePair, kept: &mut Option<&'q mut Batch<'q, 'd>>) {
    let _ = qp.post(|batch| *kept = Some(batch));
}

fn main() {}
