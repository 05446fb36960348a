//! Queue pairs by number: direct index from the number's block to its page, and there to the slot.

use crate::Qpn;
use crate::qp::QueuePair;
use crate::qpn::{QpnAllocator, QpnBlock};
use crate::random::NumberKey;

/// Slot + 1 of each number of a block; 0 if free.
type Page = [u32; QpnBlock::LEN as usize];

#[derive(Debug)]
pub(crate) struct QpTable {
    slots: Vec<Option<QueuePair>>,
    free: Vec<u32>,
    qpns: QpnAllocator,
    /// By block: page + 1; 0 if none of its numbers was used.
    page_index: Box<[u16]>,
    pages: Vec<Page>,
}

impl QpTable {
    pub(crate) const MAX: usize = 1 << 16;

    pub(crate) fn new(key: NumberKey) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            qpns: QpnAllocator::new(key),
            page_index: vec![0; QpnBlock::COUNT].into_boxed_slice(),
            pages: Vec::new(),
        }
    }

    pub(crate) fn next_block(&self) -> QpnBlock {
        self.qpns.next_block()
    }

    pub(crate) fn qpns(&mut self) -> &mut QpnAllocator {
        &mut self.qpns
    }

    pub(crate) fn wants_qpn_block(&self) -> bool {
        self.qpns.is_low(self.len())
    }

    pub(crate) fn has_free_qpns(&self) -> bool {
        self.qpns.capacity() > self.len()
    }

    /// High-water mark of slots.
    pub(crate) fn slots(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Inserts the queue pair that `make` creates; `None` at the maximum, or if no number is free.
    pub(crate) fn insert(&mut self, make: impl FnOnce(Qpn) -> QueuePair) -> Option<Qpn> {
        let used = self.len();
        if used == Self::MAX {
            return None;
        }
        let (page_index, pages) = (&self.page_index, &self.pages);
        let qpn = self.qpns.alloc(used, |qpn| entry(page_index, pages, qpn) == 0)?;
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        self.slots[index as usize] = Some(make(qpn));
        *self.entry_mut(qpn) = index + 1;
        Some(qpn)
    }

    pub(crate) fn remove(&mut self, qpn: Qpn) -> bool {
        let Some(index) = self.find(qpn) else {
            return false;
        };
        self.slots[index as usize] = None;
        *self.entry_mut(qpn) = 0;
        self.free.push(index);
        true
    }

    pub(crate) fn find(&self, qpn: Qpn) -> Option<u32> {
        entry(&self.page_index, &self.pages, qpn).checked_sub(1)
    }

    pub(crate) fn get(&self, index: u32) -> Option<&QueuePair> {
        self.slots.get(index as usize)?.as_ref()
    }

    #[inline]
    pub(crate) fn find_mut(&mut self, qpn: Qpn) -> Option<(u32, &mut QueuePair)> {
        let index = self.find(qpn)?;
        self.get_mut(index).map(|qp| (index, qp))
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut QueuePair> {
        self.slots.get_mut(index as usize)?.as_mut()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut QueuePair> {
        self.slots.iter_mut().flatten()
    }

    /// The entry of a number; allocates a page for its block.
    fn entry_mut(&mut self, qpn: Qpn) -> &mut u32 {
        let page = &mut self.page_index[QpnBlock::of(qpn).index()];
        if *page == 0 {
            self.pages.push([0; QpnBlock::LEN as usize]);
            // At most one for each of the 2^14 blocks.
            *page = self.pages.len() as u16;
        }
        &mut self.pages[usize::from(*page) - 1][QpnBlock::offset(qpn)]
    }
}

fn entry(page_index: &[u16], pages: &[Page], qpn: Qpn) -> u32 {
    let page = usize::from(page_index[QpnBlock::of(qpn).index()]);
    page.checked_sub(1).map_or(0, |page| pages[page][QpnBlock::offset(qpn)])
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
            xrc_domain: None,
            ack_before_requests: false,
        };
        table
            .insert(|qpn| QueuePair::new(qpn, init, &EndpointConfig::default(), None))
            .unwrap()
    }

    const COUNT: usize = QpnBlock::LEN as usize;

    #[test]
    fn qpn_is_reused_only_after_all_others() {
        let mut table = QpTable::new(1.into());
        let staying = insert(&mut table);
        let mut seen = vec![staying];
        for _ in 0..COUNT - 2 {
            let qpn = insert(&mut table);
            assert!(!seen.contains(&qpn));
            assert!(table.remove(qpn) && !table.remove(qpn));
            assert_eq!(table.find(qpn), None);
            seen.push(qpn);
        }
        assert!(table.find(staying).is_some());
        assert_eq!((table.len(), table.slots()), (1, 2));
    }

    #[test]
    fn more_blocks_are_taken_before_the_numbers_run_out() {
        let mut table = QpTable::new(7.into());
        let mut all: Vec<Qpn> = (0..3 * COUNT).map(|_| insert(&mut table)).collect();
        all.iter().for_each(|&qpn| assert!(table.find(qpn).is_some()));
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 3 * COUNT);
    }

    #[test]
    fn given_blocks_and_no_others() {
        let mut table = QpTable::new(1.into());
        let (first, last) = (
            QpnBlock::new(0).unwrap(),
            QpnBlock::new(QpnBlock::COUNT as u16 - 1).unwrap(),
        );
        table.qpns().add_block(first);
        let mut all: Vec<Qpn> = (0..COUNT / 2).map(|_| insert(&mut table)).collect();
        assert!(all.iter().all(|&qpn| QpnBlock::of(qpn) == first));
        assert!(table.wants_qpn_block());
        table.qpns().add_block(last);
        assert!(!table.wants_qpn_block());
        // All but the three reserved numbers.
        while all.len() < 2 * COUNT - 3 {
            all.push(insert(&mut table));
        }
        let none = table.insert(|_| unreachable!("there is no number left"));
        assert_eq!(none, None);
        assert!(all.iter().all(|&qpn| [first, last].contains(&QpnBlock::of(qpn))));
        assert!(all.iter().all(|qpn| !matches!(qpn.get(), 0 | 1 | 0x00ff_ffff)));
        assert!(table.remove(all[5]));
        assert_eq!(insert(&mut table), all[5]);
    }

    /// No distance from one number to the next is much more frequent than by chance, 1 in 1024.
    #[test]
    fn the_next_number_cannot_be_predicted() {
        let mut table = QpTable::new(1.into());
        table.qpns().add_block(QpnBlock::new(3).unwrap());
        let all: Vec<u32> = (0..COUNT).map(|_| insert(&mut table).get()).collect();
        let mut by_distance = [0; COUNT];
        all.windows(2)
            .for_each(|pair| by_distance[pair[1].wrapping_sub(pair[0]) as usize % COUNT] += 1);
        assert!(by_distance.iter().all(|&count| count < 8), "{by_distance:?}");
    }

    #[test]
    fn seeds_differ() {
        let qpn = |seed: u64| insert(&mut QpTable::new(seed.into()));
        assert_ne!(qpn(1), qpn(2));
        assert_ne!(qpn(0), qpn(1 << 40));
        let of_block = |seed: u64| {
            let mut table = QpTable::new(seed.into());
            table.qpns().add_block(QpnBlock::new(3).unwrap());
            insert(&mut table)
        };
        assert_ne!(of_block(1), of_block(2));
    }
}
