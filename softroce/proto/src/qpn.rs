//! Queue pair numbers in blocks, so that several processes on one address can divide them.

use std::collections::VecDeque;

use crate::Qpn;

/// A run of 1024 queue pair numbers that one owner has.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Block(u16);

impl Block {
    const BITS: u32 = 10;
    /// How many numbers a block has.
    pub const LEN: u32 = 1 << Self::BITS;
    /// How many blocks there are.
    pub const COUNT: usize = 1 << (24 - Self::BITS);

    /// The block with that index; `None` from [`COUNT`](Self::COUNT) on.
    pub fn new(index: u16) -> Option<Self> {
        (usize::from(index) < Self::COUNT).then_some(Self(index))
    }

    /// The block that a number belongs to, whether or not that is given out.
    pub const fn of(qpn: Qpn) -> Self {
        Self((qpn.get() >> Self::BITS) as u16)
    }

    /// Its index, below [`COUNT`](Self::COUNT).
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The place of a number in its block.
    pub(crate) const fn offset(qpn: Qpn) -> usize {
        (qpn.get() % Self::LEN) as usize
    }

    /// Its number at `offset`, which counts modulo its length; `None` for one that is not given out: 0 and 1 are the special queue pairs, the last one
    /// means multicast (IBTA vol 1, 3.5.3 and 10.5).
    fn number(self, offset: u32) -> Option<Qpn> {
        let number = (u32::from(self.0) << Self::BITS) | (offset % Self::LEN);
        (!matches!(number, 0 | 1 | 0x00ff_ffff)).then_some(Qpn::new(number))
    }
}

/// The blocks of an endpoint, in rounds: a number comes again only when all others have had their turn.
#[derive(Debug)]
pub(crate) struct QpnAllocator {
    /// The one whose turn it is comes first.
    cursors: VecDeque<BlockCursor>,
    /// The endpoint has the address for itself, and takes a block when it needs one; or others are on it as well, and its owner gives it blocks.
    owns_address: bool,
    seed: u64,
}

/// How far a block has got.
#[derive(Debug)]
struct BlockCursor {
    block: Block,
    /// The next number's offset.
    next: u32,
    /// Offsets until it is the next block's turn.
    left: u32,
}

impl QpnAllocator {
    pub(crate) fn new(seed: u64) -> Self {
        // SplitMix64's finaliser: seeds that differ little give numbers that differ a lot.
        let mut mixed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        Self {
            cursors: VecDeque::new(),
            owns_address: true,
            seed: mixed ^ mixed >> 31,
        }
    }

    /// From here on the endpoint has this block and those given later, and takes none itself.
    pub(crate) fn add_block(&mut self, block: Block) {
        self.owns_address = false;
        self.push_block(block);
    }

    fn push_block(&mut self, block: Block) {
        self.cursors.push_front(BlockCursor {
            block,
            // So that who restarts has other numbers than before, should it have the same block.
            next: (self.seed >> 32) as u32 % Block::LEN,
            left: Block::LEN,
        });
    }

    /// Whether more than half of the numbers are in use: with few left they come again too soon.
    pub(crate) fn is_low(&self, used: usize) -> bool {
        2 * used >= self.cursors.len() * Block::LEN as usize
    }

    /// How many queue pairs the blocks have numbers for.
    pub(crate) fn capacity(&self) -> usize {
        if self.owns_address {
            return Block::COUNT * Block::LEN as usize - 3;
        }
        let reserved = |cursor: &BlockCursor| (0..Block::LEN).filter(|&at| cursor.block.number(at).is_none()).count();
        let all = |cursor| Block::LEN as usize - reserved(cursor);
        self.cursors.iter().map(all).sum()
    }

    /// The next number for which `is_free`; `None` when there is none in all the blocks.
    pub(crate) fn alloc(&mut self, used: usize, is_free: impl Fn(Qpn) -> bool) -> Option<Qpn> {
        if self.owns_address && self.is_low(used) && self.cursors.len() < Block::COUNT {
            self.push_block(Block(
                (self.seed as usize + self.cursors.len()) as u16 % Block::COUNT as u16,
            ));
        }
        // Every block once from where it is, and the first one's beginning again.
        for _ in 0..=self.cursors.len() {
            let cursor = self.cursors.front_mut()?;
            while cursor.left > 0 {
                let number = cursor.block.number(cursor.next);
                cursor.next = (cursor.next + 1) % Block::LEN;
                cursor.left -= 1;
                if let Some(free) = number.filter(|&number| is_free(number)) {
                    return Some(free);
                }
            }
            cursor.left = Block::LEN;
            self.cursors.rotate_left(1);
        }
        None
    }
}
