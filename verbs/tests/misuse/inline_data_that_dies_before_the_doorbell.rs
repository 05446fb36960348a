//! Inline data is read when the doorbell rings, so it must live until then.
use doorbell_verbs::QueuePair;

fn misuse(qp: &mut QueuePair) {
    let _ = qp.post(|batch| {
        let bytes = [1, 2, 3];
        batch.send_inline(&bytes);
    });
}

fn main() {}
