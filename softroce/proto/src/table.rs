//! The queue pairs by number, reached by direct index.
//!
//! A number is a slot (16 bits) and a generation (8 bits), scrambled by a constant that the seed chooses: a slot used again has another number, and a
//! restarted device most likely has none of the numbers that its peers still send to.

use std::collections::VecDeque;

use crate::Qpn;
use crate::qp::QueuePair;

const SLOT_BITS: u32 = 16;
const SLOT_MASK: u32 = (1 << SLOT_BITS) - 1;

/// A number that is not given out: 0 and 1 are the special queue pairs, the last one means multicast (IBTA vol 1, 3.5.3 and 10.5).
const fn is_reserved(number: u32) -> bool {
    matches!(number, 0 | 1 | 0x00ff_ffff)
}

/// The table.
#[derive(Debug)]
pub(crate) struct QpTable {
    slots: Vec<Slot>,
    /// Slots to be used again, the longest unused first.
    free: VecDeque<u32>,
    scramble: u32,
}

#[derive(Debug)]
struct Slot {
    /// Of the queue pair, or of the last one there was.
    qpn: Qpn,
    generation: u8,
    qp: Option<QueuePair>,
}

impl QpTable {
    /// As many as a slot number can tell apart.
    pub(crate) const MAX: usize = 1 << SLOT_BITS;

    pub(crate) fn new(seed: u64) -> Self {
        // SplitMix64's finaliser: seeds that differ little give numbers that differ a lot.
        let mut mixed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        Self {
            slots: Vec::new(),
            free: VecDeque::new(),
            scramble: Qpn::new((mixed ^ mixed >> 31) as u32).get(),
        }
    }

    /// Slots there have ever been.
    pub(crate) fn slots(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Puts in what `make` makes of its number; `None` when all slots are taken.
    pub(crate) fn insert(&mut self, make: impl FnOnce(Qpn) -> QueuePair) -> Option<Qpn> {
        let index = match self.free.pop_front() {
            Some(index) => index,
            None if self.slots.len() < Self::MAX => {
                let (qpn, generation, qp) = (Qpn::new(0), 0, None);
                self.slots.push(Slot { qpn, generation, qp });
                self.slots.len() as u32 - 1
            }
            None => return None,
        };
        let slot = &mut self.slots[index as usize];
        let number = loop {
            let number = (u32::from(slot.generation) << SLOT_BITS | index) ^ self.scramble;
            slot.generation = slot.generation.wrapping_add(1);
            if !is_reserved(number) {
                break number;
            }
        };
        slot.qpn = Qpn::new(number);
        slot.qp = Some(make(slot.qpn));
        Some(slot.qpn)
    }

    pub(crate) fn remove(&mut self, qpn: Qpn) -> bool {
        let Some(index) = self.find(qpn) else {
            return false;
        };
        self.slots[index as usize].qp = None;
        self.free.push_back(index);
        true
    }

    /// The slot of a queue pair that exists.
    pub(crate) fn find(&self, qpn: Qpn) -> Option<u32> {
        let index = (qpn.get() ^ self.scramble) & SLOT_MASK;
        let slot = self.slots.get(index as usize)?;
        (slot.qpn == qpn && slot.qp.is_some()).then_some(index)
    }

    pub(crate) fn get(&self, index: u32) -> Option<&QueuePair> {
        self.slots.get(index as usize)?.qp.as_ref()
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut QueuePair> {
        self.slots.get_mut(index as usize)?.qp.as_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EndpointConfig;
    use crate::memory::PdId;
    use crate::qp::QpInit;
    use crate::wire::Transport;
    use crate::work::CqId;

    fn insert(table: &mut QpTable) -> Qpn {
        let init = QpInit {
            pd: PdId(0),
            send_cq: CqId(0),
            recv_cq: CqId(0),
            max_send_wr: 1,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
            signal_all: false,
            transport: Transport::Rc,
            srq: None,
        };
        table
            .insert(|qpn| QueuePair::new(qpn, init, &EndpointConfig::default(), None))
            .unwrap()
    }

    #[test]
    fn numbers_are_not_used_again_soon() {
        let mut table = QpTable::new(1);
        let first = insert(&mut table);
        let mut seen = vec![first];
        for _ in 0..200 {
            assert!(table.remove(*seen.last().unwrap()));
            let qpn = insert(&mut table);
            assert!(!seen.contains(&qpn));
            assert_eq!(table.find(first), None);
            seen.push(qpn);
        }
        assert_eq!(table.len(), 1);
        assert_eq!(table.slots(), 1);
    }

    #[test]
    fn never_a_reserved_number() {
        for scramble in [0, 1, 0x00ff_ffff, 0x00ff_0000] {
            let mut table = QpTable {
                scramble,
                ..QpTable::new(0)
            };
            for _ in 0..600 {
                let (a, b) = (insert(&mut table), insert(&mut table));
                assert!(!is_reserved(a.get()) && !is_reserved(b.get()) && a != b);
                table.remove(a);
                table.remove(b);
            }
        }
    }

    #[test]
    fn seeds_differ() {
        let qpn = |seed| insert(&mut QpTable::new(seed));
        assert_ne!(qpn(1), qpn(2));
        assert_ne!(qpn(0), qpn(1 << 40));
    }
}
