//! A completion cannot be read after the next poll has overwritten it.
use doorbell_verbs::CompletionQueue;

fn misuse(cq: &mut CompletionQueue) {
    let done = cq.poll().unwrap().next().unwrap();
    let _ = cq.poll();
    let _ = done.result();
}

fn main() {}
