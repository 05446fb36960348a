//! Allocation of queue pair numbers (QPNs) in blocks, which processes on one address divide.

use std::collections::VecDeque;

use crate::Qpn;
use crate::random::{NumberKey, Purpose};

/// A block of 1024 queue pair numbers with one owner.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct QpnBlock(u16);

impl QpnBlock {
    const BITS: u32 = 10;
    const INDEX_BITS: u32 = 24 - Self::BITS;
    /// Numbers per block.
    pub const LEN: u32 = 1 << Self::BITS;
    /// Number of blocks.
    pub const COUNT: usize = 1 << Self::INDEX_BITS;

    /// The block with this index; `None` from [`COUNT`](Self::COUNT) on.
    pub fn new(index: u16) -> Option<Self> {
        (usize::from(index) < Self::COUNT).then_some(Self(index))
    }

    /// The block that contains a number.
    pub const fn of(qpn: Qpn) -> Self {
        Self((qpn.get() >> Self::BITS) as u16)
    }

    /// Its index, below [`COUNT`](Self::COUNT).
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    pub(crate) const fn offset(qpn: Qpn) -> usize {
        (qpn.get() % Self::LEN) as usize
    }

    /// The number at `offset`; `None` for reserved numbers: 0 and 1 are the special queue pairs,
    /// the last one means multicast (IBTA vol 1, 3.5.3 and 10.5).
    fn number(self, offset: u32) -> Option<Qpn> {
        let number = (u32::from(self.0) << Self::BITS) | offset;
        (!matches!(number, 0 | 1 | 0x00ff_ffff)).then_some(Qpn::new(number))
    }
}

/// Allocates round-robin: a number is reused only after all others. The order of the blocks, and of
/// the numbers in each, follows from the key: who knows some cannot predict the next one.
#[derive(Debug)]
pub(crate) struct QpnAllocator {
    /// The current block first.
    cursors: VecDeque<BlockCursor>,
    /// No other process is on the address: blocks are added as needed, not by the owner.
    owns_address: bool,
    key: NumberKey,
}

#[derive(Debug)]
struct BlockCursor {
    block: QpnBlock,
    /// Place of the next number in its order.
    next: u32,
    /// Numbers left until the next block is used.
    left: u32,
}

impl QpnAllocator {
    pub(crate) fn new(key: NumberKey) -> Self {
        Self {
            cursors: VecDeque::new(),
            owns_address: true,
            key,
        }
    }

    /// The block to add next, if it is free.
    pub(crate) fn next_block(&self) -> QpnBlock {
        let added = self.cursors.len() as u32;
        QpnBlock(self.key.permute(Purpose::QpnBlock, QpnBlock::INDEX_BITS, added) as u16)
    }

    /// Adds a block; from here on the endpoint uses only given ones.
    pub(crate) fn add_block(&mut self, block: QpnBlock) {
        self.owns_address = false;
        self.push_block(block);
    }

    fn push_block(&mut self, block: QpnBlock) {
        self.cursors.push_front(BlockCursor {
            block,
            next: 0,
            left: QpnBlock::LEN,
        });
    }

    /// Whether at least half of the numbers are in use, so that freed ones would be reused soon.
    pub(crate) fn is_low(&self, used: usize) -> bool {
        2 * used >= self.cursors.len() * QpnBlock::LEN as usize
    }

    pub(crate) fn capacity(&self) -> usize {
        if self.owns_address {
            return QpnBlock::COUNT * QpnBlock::LEN as usize - 3;
        }
        let reserved = |cursor: &BlockCursor| {
            (0..QpnBlock::LEN)
                .filter(|&at| cursor.block.number(at).is_none())
                .count()
        };
        let all = |cursor| QpnBlock::LEN as usize - reserved(cursor);
        self.cursors.iter().map(all).sum()
    }

    pub(crate) fn alloc(&mut self, used: usize, is_free: impl Fn(Qpn) -> bool) -> Option<Qpn> {
        if self.owns_address && self.is_low(used) && self.cursors.len() < QpnBlock::COUNT {
            self.push_block(self.next_block());
        }
        // Every block once from its cursor, and the beginning of the first one again.
        for _ in 0..=self.cursors.len() {
            let cursor = self.cursors.front_mut()?;
            while cursor.left > 0 {
                let order = Purpose::QpnOrder(cursor.block.0);
                let number = cursor
                    .block
                    .number(self.key.permute(order, QpnBlock::BITS, cursor.next));
                cursor.next = (cursor.next + 1) % QpnBlock::LEN;
                cursor.left -= 1;
                if let Some(free) = number.filter(|&number| is_free(number)) {
                    return Some(free);
                }
            }
            cursor.left = QpnBlock::LEN;
            self.cursors.rotate_left(1);
        }
        None
    }
}
