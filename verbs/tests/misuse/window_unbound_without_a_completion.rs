//! Only a completion proves that a peer has invalidated a window's key.
use doorbell_verbs::{BoundWindow, WriteAccess};

fn misuse(window: BoundWindow<WriteAccess>) {
    let key = window.rkey();
    let _ = window.invalidated(key);
}

fn main() {}
