//! Loom model of a slot with one member after the other, while others read it and mark the dead.
//! Run by `cargo xtask sanitize loom`.

use std::sync::Arc;

use loom::thread;

use super::*;

const DEAD: u64 = 2;
const FIRST: u64 = 3;
const SECOND: u64 = 5;

fn of_first() -> Arc<Guarded> {
    Arc::new(Guarded {
        guard: AtomicU64::new(FIRST),
        value: AtomicU64::new(100),
    })
}

#[test]
fn a_reader_never_gets_another_owners_value() {
    loom::model(|| {
        let slot = of_first();
        let writer = thread::spawn({
            let slot = Arc::clone(&slot);
            move || slot.set(DEAD, 200, SECOND)
        });
        assert!(matches!(slot.get(FIRST), None | Some(100)));
        assert!(matches!(slot.get(SECOND), None | Some(200)));
        writer.join().unwrap();
        assert_eq!((slot.get(FIRST), slot.get(SECOND)), (None, Some(200)));
    });
}

#[test]
fn marking_the_first_gone_does_not_affect_the_second() {
    loom::model(|| {
        let slot = of_first();
        let survivor = thread::spawn({
            let slot = Arc::clone(&slot);
            move || slot.change(FIRST, DEAD)
        });
        slot.set(DEAD, 200, SECOND);
        survivor.join().unwrap();
        assert_eq!(slot.get(SECOND), Some(200));
    });
}
