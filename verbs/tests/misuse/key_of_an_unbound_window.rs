//! An unbound window has no key.
use doorbell_verbs::MemoryWindow;

fn misuse(window: &MemoryWindow) {
    let _ = window.remote();
}

fn main() {}
