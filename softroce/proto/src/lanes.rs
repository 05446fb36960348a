//! Lanes that take nothing more for now, and the queue pairs that wait for them.

use crate::qp::LaneId;

/// The lanes that are full: mostly none.
#[derive(Debug, Default)]
pub(crate) struct FullLanes {
    /// Each with the slots of the queue pairs that wait for it.
    full: Vec<(LaneId, Vec<u32>)>,
    /// By slot: the lane that it waits for.
    waits: Vec<Option<LaneId>>,
}

impl FullLanes {
    /// Makes room for as many slots.
    pub(crate) fn grow(&mut self, slots: usize) {
        if slots > self.waits.len() {
            self.waits.resize(slots, None);
        }
    }

    /// The lane takes nothing more until [`ready`](Self::ready).
    pub(crate) fn fill(&mut self, lane: LaneId) {
        if !self.contains(lane) {
            self.full.push((lane, Vec::new()));
        }
    }

    /// Whether there is one.
    pub(crate) fn has_any(&self) -> bool {
        !self.full.is_empty()
    }

    fn contains(&self, lane: LaneId) -> bool {
        self.full.iter().any(|(full, _)| *full == lane)
    }

    /// Whether the queue pair in slot `index`, which wants to use `lane`, has to wait; it is remembered then.
    pub(crate) fn blocks(&mut self, index: u32, lane: Option<LaneId>) -> bool {
        let Some((lane, waiting)) = self.full.iter_mut().find(|(full, _)| Some(*full) == lane) else {
            return false;
        };
        if let Some(waits) = self.waits.get_mut(index as usize)
            && *waits != Some(*lane)
        {
            *waits = Some(*lane);
            waiting.push(index);
        }
        true
    }

    /// The lane takes packets again: gives the slots of those that waited. A slot may have another queue pair by now, which has nothing to send: no matter.
    pub(crate) fn ready(&mut self, lane: LaneId) -> Vec<u32> {
        let Some(place) = self.full.iter().position(|(full, _)| *full == lane) else {
            return Vec::new();
        };
        let (_, waiting) = self.full.swap_remove(place);
        for index in &waiting {
            if let Some(waits) = self.waits.get_mut(*index as usize)
                && *waits == Some(lane)
            {
                *waits = None;
            }
        }
        waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: LaneId = LaneId(1);
    const B: LaneId = LaneId(2);

    #[test]
    fn each_waits_once_for_its_lane() {
        let mut lanes = FullLanes::default();
        lanes.grow(3);
        assert!(!lanes.blocks(0, Some(A)));
        lanes.fill(A);
        lanes.fill(A);
        assert!(lanes.blocks(0, Some(A)) && lanes.blocks(0, Some(A)) && lanes.blocks(2, Some(A)));
        assert!(!lanes.blocks(1, Some(B)) && !lanes.blocks(1, None));
        assert_eq!(lanes.ready(B), []);
        assert_eq!(lanes.ready(A), [0, 2]);
        assert!(!lanes.blocks(0, Some(A)));
    }

    #[test]
    fn another_lane_is_another_wait() {
        let mut lanes = FullLanes::default();
        lanes.grow(1);
        lanes.fill(A);
        lanes.fill(B);
        assert!(lanes.blocks(0, Some(A)) && lanes.blocks(0, Some(B)));
        assert_eq!(lanes.ready(A), [0]);
        assert!(lanes.blocks(0, Some(B)));
        assert_eq!(lanes.ready(B), [0]);
    }
}
