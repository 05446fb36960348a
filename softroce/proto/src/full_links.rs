//! Back-pressure: lossless links that are full, and the queue pairs that wait for them.

use crate::qp::LinkId;

/// The full lossless links: usually none.
#[derive(Debug, Default)]
pub(crate) struct FullLinks {
    /// Each with the slots of the queue pairs that wait for it.
    full: Vec<(LinkId, Vec<u32>)>,
    /// By slot: the link that it waits for.
    waits: Vec<Option<LinkId>>,
}

impl FullLinks {
    pub(crate) fn grow(&mut self, slots: usize) {
        if slots > self.waits.len() {
            self.waits.resize(slots, None);
        }
    }

    pub(crate) fn fill(&mut self, link: LinkId) {
        if !self.contains(link) {
            self.full.push((link, Vec::new()));
        }
    }

    pub(crate) fn has_any(&self) -> bool {
        !self.full.is_empty()
    }

    pub(crate) fn contains(&self, link: LinkId) -> bool {
        self.full.iter().any(|(full, _)| *full == link)
    }

    /// The queue pair in slot `index` waits for `link`, if that is full, behind those that do.
    pub(crate) fn wait(&mut self, index: u32, link: LinkId) {
        if let Some((_, waiting)) = self.full.iter_mut().find(|(full, _)| *full == link)
            && let Some(waits) = self.waits.get_mut(index as usize)
            && *waits != Some(link)
        {
            *waits = Some(link);
            waiting.push(index);
        }
    }

    /// Returns the slots that waited. One may hold another queue pair by now, with nothing to send.
    pub(crate) fn ready(&mut self, link: LinkId) -> Vec<u32> {
        let Some(position) = self.full.iter().position(|(full, _)| *full == link) else {
            return Vec::new();
        };
        let (_, waiting) = self.full.swap_remove(position);
        for index in &waiting {
            if let Some(waits) = self.waits.get_mut(*index as usize)
                && *waits == Some(link)
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

    const A: LinkId = LinkId(1);
    const B: LinkId = LinkId(2);

    #[test]
    fn each_qp_waits_once_for_its_link() {
        let mut links = FullLinks::default();
        links.grow(3);
        assert!(!links.contains(A));
        links.wait(1, A);
        links.fill(A);
        links.fill(A);
        assert!(links.contains(A) && !links.contains(B));
        [0, 0, 2].into_iter().for_each(|index| links.wait(index, A));
        assert_eq!(links.ready(B), []);
        assert_eq!(links.ready(A), [0, 2]);
        assert!(!links.contains(A));
    }

    #[test]
    fn links_are_independent() {
        let mut links = FullLinks::default();
        links.grow(1);
        links.fill(A);
        links.fill(B);
        links.wait(0, A);
        links.wait(0, B);
        assert_eq!(links.ready(A), [0]);
        assert!(links.contains(B));
        assert_eq!(links.ready(B), [0]);
    }
}
