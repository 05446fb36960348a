//! Sleeping polls, so the completions of an earlier poll must have been read.

use doorbell_verbs::CompletionQueue;

fn misuse(cq: &mut CompletionQueue) {
    let done = cq.poll().unwrap();
    let _ = cq.wait(None).unwrap();
    drop(done);
}

fn main() {}
