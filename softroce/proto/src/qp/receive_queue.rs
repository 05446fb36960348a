//! The receive queue: a ring of requests with their SGEs, allocated at creation.

use crate::LKey;
use crate::memory::Sge;
use crate::qp::sges;
use crate::work::{PostError, ReceiveRequest};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Receive {
    pub(crate) wr_id: u64,
    pub(crate) capacity: u64,
    elements: u32,
}

/// The ring; requests are numbered from 0 without wrapping.
#[derive(Debug)]
pub(crate) struct ReceiveQueue {
    receives: Box<[Receive]>,
    sges: Box<[Sge]>,
    limit: u64,
    max_sge: usize,
    head: u64,
    tail: u64,
}

impl ReceiveQueue {
    pub(crate) fn new(max_wr: u32, max_sge: u32) -> Self {
        let slots = (max_wr.max(1) as usize).next_power_of_two();
        let max_sge = max_sge as usize;
        let empty = Receive {
            wr_id: 0,
            capacity: 0,
            elements: 0,
        };
        let empty_sge = Sge {
            addr: 0,
            len: 0,
            lkey: LKey(0),
        };
        Self {
            receives: vec![empty; slots].into_boxed_slice(),
            sges: vec![empty_sge; slots * max_sge].into_boxed_slice(),
            limit: u64::from(max_wr),
            max_sge,
            head: 0,
            tail: 0,
        }
    }

    const fn slot(&self, number: u64) -> usize {
        number as usize & (self.receives.len() - 1)
    }

    pub(crate) const fn max_sge(&self) -> usize {
        self.max_sge
    }

    pub(crate) const fn len(&self) -> u64 {
        self.tail - self.head
    }

    pub(crate) fn clear(&mut self) {
        self.head = 0;
        self.tail = 0;
    }

    pub(crate) fn post(&mut self, request: &ReceiveRequest<'_>) -> Result<(), PostError> {
        if request.sges.len() > self.max_sge {
            return Err(PostError::Invalid);
        }
        if self.len() >= self.limit {
            return Err(PostError::Full);
        }
        let slot = self.slot(self.tail);
        let start = slot * self.max_sge;
        self.sges[start..start + request.sges.len()].copy_from_slice(request.sges);
        self.receives[slot] = Receive {
            wr_id: request.wr_id,
            capacity: sges::total(request.sges),
            elements: request.sges.len() as u32,
        };
        self.tail += 1;
        Ok(())
    }

    pub(crate) fn front(&self) -> Option<(Receive, &[Sge])> {
        if self.head == self.tail {
            return None;
        }
        let slot = self.slot(self.head);
        let start = slot * self.max_sge;
        let receive = self.receives[slot];
        Some((receive, &self.sges[start..start + receive.elements as usize]))
    }

    pub(crate) fn pop(&mut self) -> Option<Receive> {
        let (receive, _) = self.front()?;
        self.head += 1;
        Some(receive)
    }

    /// Moves the oldest request to `other`, which has space for it; false when there is none.
    pub(crate) fn move_to(&mut self, other: &mut Self) -> bool {
        let moved = self.front().is_some_and(|(receive, sges)| {
            let wr_id = receive.wr_id;
            other.post(&ReceiveRequest { wr_id, sges }).is_ok()
        });
        self.head += u64::from(moved);
        moved
    }
}
