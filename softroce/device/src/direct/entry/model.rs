//! Loom models of an entry that is withdrawn, and published again, while initiators use it. Run by
//! `cargo xtask sanitize loom`.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread;

use super::*;
use crate::sync::AtomicU64;

const KEY: u32 = 0x0005_1234;
const QPN: Qpn = Qpn::new(7);

struct Model {
    guard: AtomicU64,
    words: [AtomicU64; 2],
    /// The access words of the initiators' rings.
    access: [AtomicU64; 2],
    /// The memory behind the entry; its owner has it to itself after the wait.
    memory: UnsafeCell<u64>,
}

// SAFETY: the cell is what is to be proved; loom reports two threads that access it at once.
unsafe impl Send for Model {}
// SAFETY: as above.
unsafe impl Sync for Model {}

impl EntryWords for Model {
    type Word = AtomicU64;

    fn guard(&self) -> &AtomicU64 {
        &self.guard
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        &self.words[index]
    }
}

impl Model {
    fn published() -> Arc<Self> {
        let model = Self {
            guard: AtomicU64::new(0),
            words: [AtomicU64::new(0), AtomicU64::new(0)],
            access: [AtomicU64::new(0), AtomicU64::new(0)],
            memory: UnsafeCell::new(1),
        };
        publish(&model, KEY, [1, 1]);
        Arc::new(model)
    }

    /// A direct READ by one of the initiators.
    fn read(&self, initiator: usize) {
        let word = &self.access[initiator];
        Access { qpn: QPN, key: KEY }.begin(word);
        if let Some((_, words)) = read(self, KEY) {
            assert_eq!(words, [1, 1]);
            // SAFETY: what is to be proved.
            self.memory.with(|memory| assert_eq!(unsafe { *memory }, 1));
        }
        Access::end(word);
    }

    /// A direct READ by what an earlier one has read.
    fn read_again(&self, publication: Publication) {
        let word = &self.access[0];
        Access { qpn: QPN, key: KEY }.begin(word);
        if publication.is_current(self) {
            // SAFETY: what is to be proved.
            self.memory.with(|memory| assert_eq!(unsafe { *memory }, 1));
        }
        Access::end(word);
    }

    /// A deregistration.
    fn end_registration(&self, initiators: usize) {
        withdraw(self);
        for word in &self.access[..initiators] {
            while Access::of(word).is_some_and(|access| access.key == KEY) {
                thread::yield_now();
            }
        }
    }
}

#[test]
fn no_access_outlasts_the_wait() {
    loom::model(|| {
        let model = Model::published();
        let initiator = thread::spawn({
            let model = Arc::clone(&model);
            move || model.read(0)
        });
        model.end_registration(1);
        // SAFETY: what is to be proved.
        model.memory.with_mut(|memory| unsafe { *memory = 2 });
        initiator.join().unwrap();
    });
}

/// Though the memory is registered again, under the same key.
#[test]
fn no_access_by_a_remembered_publication_outlasts_the_wait() {
    loom::model(|| {
        let model = Model::published();
        let (publication, _) = read::<2>(&*model, KEY).unwrap();
        let initiator = thread::spawn({
            let model = Arc::clone(&model);
            move || model.read_again(publication)
        });
        model.end_registration(1);
        // SAFETY: what is to be proved.
        model.memory.with_mut(|memory| unsafe { *memory = 2 });
        publish(&*model, KEY, [2, 2]);
        initiator.join().unwrap();
    });
}

#[test]
fn each_initiator_is_waited_for() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let model = Model::published();
        let initiators = [0, 1].map(|initiator| {
            let model = Arc::clone(&model);
            thread::spawn(move || model.read(initiator))
        });
        model.end_registration(2);
        // SAFETY: what is to be proved.
        model.memory.with_mut(|memory| unsafe { *memory = 2 });
        for initiator in initiators {
            initiator.join().unwrap();
        }
    });
}

/// A ring that the target attaches while it withdraws: it scans the access word, or the initiator
/// finds that the region was withdrawn.
#[test]
fn an_initiator_that_is_attached_late_is_waited_for_or_declines() {
    loom::model(|| {
        let model = Model::published();
        let (attached, enabled) = (Arc::new(loom::sync::Mutex::new(false)), Arc::new(AtomicU64::new(0)));
        let initiator = thread::spawn({
            let (model, enabled) = (Arc::clone(&model), Arc::clone(&enabled));
            move || {
                if enabled.load(Ordering::Acquire) != 0 {
                    model.read(0);
                }
            }
        });
        let attaching = thread::spawn({
            let (attached, enabled) = (Arc::clone(&attached), Arc::clone(&enabled));
            move || {
                let mut attached = attached.lock().unwrap();
                *attached = true;
                enabled.store(1, Ordering::Release);
            }
        });
        withdraw(&*model);
        let is_accessed = || *attached.lock().unwrap() && Access::of(&model.access[0]).is_some();
        while is_accessed() {
            thread::yield_now();
        }
        // SAFETY: what is to be proved.
        model.memory.with_mut(|memory| unsafe { *memory = 2 });
        initiator.join().unwrap();
        attaching.join().unwrap();
    });
}

/// The index of a key is given to another region before the wait for the first has ended, even
/// with the same tag.
#[test]
fn a_reader_gets_one_publication() {
    for next in [KEY, KEY + 1] {
        loom::model(move || {
            let model = Model::published();
            let reader = thread::spawn({
                let model = Arc::clone(&model);
                move || {
                    for name in [KEY, KEY + 1] {
                        assert!(matches!(read(&*model, name), None | Some((_, [1, 1] | [2, 2]))));
                    }
                }
            });
            withdraw(&*model);
            publish(&*model, next, [2, 2]);
            reader.join().unwrap();
            assert!(matches!(read(&*model, next), Some((_, [2, 2]))));
        });
    }
}
