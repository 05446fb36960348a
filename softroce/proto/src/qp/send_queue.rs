//! The send queue: a ring of WQEs with their SGEs and inline data, allocated at creation.
//!
//! Requests are numbered from 0 without wrapping; those from `head` to `tail` are in the ring.

use crate::memory::{AccessError, Memory, PdId, Sge};
use crate::qp::{MAX_MESSAGE, QpInit, sges};
use crate::wire::{Transport, XrcEth};
use crate::work::{Destination, Operation, Payload, PostError, Remote, SendRequest};
use crate::{LKey, RKey};

/// A work queue element: a queued send request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wqe {
    pub(crate) wr_id: u64,
    pub(crate) operation: Operation,
    pub(crate) len: u32,
    elements: u32,
    pub(crate) inline: bool,
    pub(crate) signaled: bool,
    pub(crate) fence: bool,
    pub(crate) solicited: bool,
    /// The number of its first packet; set when it begins.
    pub(crate) first: u64,
    /// The number of PSNs it takes, 0 if local; set when it begins.
    pub(crate) packets: u32,
}

impl Wqe {
    const EMPTY: Self = Self {
        wr_id: 0,
        operation: Operation::Read { addr: 0, rkey: RKey(0) },
        len: 0,
        elements: 0,
        inline: false,
        signaled: false,
        fence: false,
        solicited: false,
        first: 0,
        packets: 0,
    };

    pub(crate) const fn end(&self) -> u64 {
        self.first + self.packets as u64
    }

    /// See [`Operation::awaits_data`].
    pub(crate) const fn awaits_data(&self) -> bool {
        self.operation.awaits_data()
    }
}

#[derive(Debug)]
pub(crate) struct SendQueue {
    /// Slots: a power of two, at least `limit`.
    wqes: Box<[Wqe]>,
    sges: Box<[Sge]>,
    inline: Box<[u8]>,
    /// UD and XRC: where each request goes; empty for RC and UC.
    remotes: Box<[Option<Remote>]>,
    limit: u64,
    max_sge: usize,
    max_inline: usize,
    pub(crate) head: u64,
    pub(crate) tail: u64,
}

impl SendQueue {
    pub(crate) fn new(init: &QpInit) -> Self {
        let slots = (init.max_send_wr.max(1) as usize).next_power_of_two();
        let (max_sge, max_inline) = (init.max_send_sge as usize, init.max_inline as usize);
        let has_remotes = matches!(init.transport, Transport::Ud | Transport::Xrc);
        let empty_sge = Sge {
            addr: 0,
            len: 0,
            lkey: LKey(0),
        };
        Self {
            wqes: vec![Wqe::EMPTY; slots].into_boxed_slice(),
            sges: vec![empty_sge; slots * max_sge].into_boxed_slice(),
            remotes: vec![None; if has_remotes { slots } else { 0 }].into_boxed_slice(),
            inline: vec![0; slots * max_inline].into_boxed_slice(),
            limit: u64::from(init.max_send_wr),
            max_sge,
            max_inline,
            head: 0,
            tail: 0,
        }
    }

    const fn slot(&self, number: u64) -> usize {
        number as usize & (self.wqes.len() - 1)
    }

    pub(crate) fn get(&self, number: u64) -> &Wqe {
        &self.wqes[self.slot(number)]
    }

    pub(crate) fn get_mut(&mut self, number: u64) -> &mut Wqe {
        let slot = self.slot(number);
        &mut self.wqes[slot]
    }

    pub(crate) const fn is_half_full(&self) -> bool {
        (self.tail - self.head) * 2 >= self.limit
    }

    pub(crate) fn clear(&mut self) {
        self.head = 0;
        self.tail = 0;
    }

    pub(crate) fn post(&mut self, request: &SendRequest<'_>, signal_all: bool) -> Result<(), PostError> {
        let len = self.check(request)?;
        if self.tail - self.head >= self.limit {
            return Err(PostError::Full);
        }
        let slot = self.slot(self.tail);
        let (elements, inline) = match request.payload {
            Payload::Gather(sges) => {
                let start = slot * self.max_sge;
                self.sges[start..start + sges.len()].copy_from_slice(sges);
                (sges.len() as u32, false)
            }
            Payload::Inline(bytes) => {
                let start = slot * self.max_inline;
                self.inline[start..start + bytes.len()].copy_from_slice(bytes);
                (0, true)
            }
        };
        self.wqes[slot] = Wqe {
            wr_id: request.wr_id,
            operation: request.operation,
            len,
            elements,
            inline,
            signaled: request.signaled || signal_all,
            fence: request.fence,
            solicited: request.solicited,
            first: 0,
            packets: 0,
        };
        self.tail += 1;
        Ok(())
    }

    /// Returns the length of the message.
    #[inline(always)]
    pub(crate) fn check_post(&self, request: &SendRequest<'_>, ahead: u32) -> Result<u32, PostError> {
        let len = self.check(request)?;
        if self.tail - self.head + u64::from(ahead) >= self.limit {
            return Err(PostError::Full);
        }
        Ok(len)
    }

    pub(crate) fn post_to(
        &mut self,
        request: &SendRequest<'_>,
        to: &Remote,
        signal_all: bool,
    ) -> Result<(), PostError> {
        let slot = self.slot(self.tail);
        self.post(request, signal_all)?;
        if let Some(remote) = self.remotes.get_mut(slot) {
            *remote = Some(*to);
        }
        Ok(())
    }

    pub(crate) fn destination(&self, number: u64) -> Option<Destination> {
        match self.remotes.get(self.slot(number)) {
            Some(Some(Remote::Datagram(to))) => Some(*to),
            _ => None,
        }
    }

    pub(crate) fn remote_srq(&self, number: u64) -> Option<XrcEth> {
        match self.remotes.get(self.slot(number)) {
            Some(Some(Remote::Srq(to))) => Some(*to),
            _ => None,
        }
    }

    #[inline(always)]
    fn check(&self, request: &SendRequest<'_>) -> Result<u32, PostError> {
        let len = match request.payload {
            Payload::Gather(sges) if sges.len() <= self.max_sge => sges::total(sges),
            Payload::Inline(bytes) if bytes.len() <= self.max_inline && !request.operation.awaits_data() => {
                bytes.len() as u64
            }
            _ => return Err(PostError::Invalid),
        };
        if let (Operation::Atomic { .. }, Payload::Gather(sges)) = (request.operation, request.payload)
            && !matches!(sges, [sge] if sge.len == 8)
        {
            return Err(PostError::Invalid);
        }
        if len > u64::from(MAX_MESSAGE) || len > 0 && request.operation.is_without_payload() {
            return Err(PostError::Invalid);
        }
        if matches!(request.operation, Operation::Flush(flush) if flush.len > MAX_MESSAGE) {
            return Err(PostError::Invalid);
        }
        Ok(len as u32)
    }

    pub(crate) fn sges(&self, number: u64) -> &[Sge] {
        let slot = self.slot(number);
        let start = slot * self.max_sge;
        &self.sges[start..start + self.wqes[slot].elements as usize]
    }

    #[inline]
    pub(crate) fn gather<M: Memory>(
        &self,
        number: u64,
        memory: &mut M,
        pd: PdId,
        offset: u64,
        dst: &mut [u8],
    ) -> Result<(), AccessError> {
        if self.get(number).inline {
            let start = self.slot(number) * self.max_inline + offset as usize;
            dst.copy_from_slice(&self.inline[start..start + dst.len()]);
            return Ok(());
        }
        sges::gather(memory, pd, self.sges(number), offset, dst)
    }
}
