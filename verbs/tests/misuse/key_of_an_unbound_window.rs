//! A window that is not bound has no key to hand to a peer.
use doorbell_verbs::MemoryWindow;

fn misuse(window: &MemoryWindow) {
    let _ = window.remote();
}

fn main() {}
