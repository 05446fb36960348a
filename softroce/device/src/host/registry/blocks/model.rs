//! Loom model of members that claim blocks concurrently, some of them of a dead member: no block
//! has two owners, and no claim fails while a block is free. Run by `cargo xtask sanitize loom`.

use std::sync::Arc;

use loom::thread;

use super::*;

fn member(slot: u16) -> MemberId {
    MemberId::new(slot, 1)
}

fn blocks(words: [u64; 2]) -> Arc<Blocks<2>> {
    Arc::new(Blocks {
        releases: AtomicU64::new(1),
        words: words.map(AtomicU64::new),
    })
}

/// Members 1 and 2 claim a block each; 0 is dead.
fn both_claim(words: [u64; 2]) {
    loom::model(move || {
        let blocks = blocks(words);
        let is_alive = |member: MemberId| member.slot() != 0;
        let other = thread::spawn({
            let blocks = Arc::clone(&blocks);
            move || blocks.claim(member(2), 0, is_alive)
        });
        let ours = blocks.claim(member(1), 0, is_alive).unwrap();
        let theirs = other.join().unwrap().unwrap();
        assert_ne!(ours, theirs);
        assert_eq!(
            [blocks.owner(ours), blocks.owner(theirs)],
            [Some(member(1)), Some(member(2))]
        );
    });
}

#[test]
fn claim_new_blocks() {
    both_claim([0, 0]);
}

#[test]
fn claim_a_dead_members_and_a_released_block() {
    both_claim([member(0).pack(), 1]);
}

/// A member may be taken for dead while it still releases its blocks.
#[test]
fn claim_while_the_owner_leaves() {
    loom::model(|| {
        let blocks = blocks([member(1).pack(), 1]);
        let is_alive = |owner: MemberId| owner != member(1);
        let leaving = thread::spawn({
            let blocks = Arc::clone(&blocks);
            move || blocks.release_all(member(1))
        });
        let first = blocks.claim(member(2), 0, is_alive).unwrap();
        let second = blocks.claim(member(2), 0, is_alive).unwrap();
        leaving.join().unwrap();
        assert_ne!(first, second);
        assert_eq!([blocks.owner(first), blocks.owner(second)], [Some(member(2)); 2]);
    });
}
