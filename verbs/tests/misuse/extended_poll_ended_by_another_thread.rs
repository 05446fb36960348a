//! The thread that started a poll of an extended queue holds its lock, and must end it.
use doorbell_verbs::{CompletionQueue, ExtendedCq};

fn misuse(cq: &mut CompletionQueue<ExtendedCq>) {
    let completions = cq.poll().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || drop(completions));
    });
}

fn main() {}
