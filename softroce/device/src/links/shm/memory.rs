//! Registered memory as the engine sees it while it handles a record: the table, and the payload.
//!
//! A copy from or to GPU memory is only started: the engine continues as if it were done, and its
//! completions and responses are deferred (see [`gpu`]). If the copy cannot be started, the record
//! is *deferred*: the engine gets an error that changes nothing, and the record is handled again.

use std::ops::Range;

use doorbell_roce_proto::memory::{
    AccessContext, AccessError, AtomicOp, Bind, CopyError, Flush, Invalidator, Memory, PdId, RemoteRight, Sge,
};
use doorbell_roce_proto::qp::LinkId;
use doorbell_roce_proto::wire::{Bth, Opcode};
use doorbell_roce_proto::{LKey, Qpn, RKey};

use super::{is_reliable, is_response};
use crate::gpu::{self, Copies, CopyOwner, CopyRequest, Target};
use crate::links::shm_ring::{RecordBody, Reference};
use crate::memory::{Location, Table};

pub(crate) struct ShmMemory<'a> {
    pub(crate) table: &'a mut Table,
    pub(crate) payload: ShmPayload<'a>,
}

pub(crate) struct ShmPayload<'a> {
    pub(crate) body: RecordBody<'a>,
    pub(crate) copies: &'a mut Copies,
    pub(crate) link: LinkId,
    pub(crate) headers: &'a [u8],
    /// Copies of earlier packets of the same queue pair are in flight.
    pub(crate) copies_pending: bool,
    pub(crate) requested: bool,
    /// Some of them read the sender's memory.
    pub(crate) from_sender: bool,
    /// The record must be handled again later.
    pub(crate) deferred: bool,
}

impl Memory for ShmMemory<'_> {
    fn gather(&mut self, pd: PdId, lkey: LKey, addr: u64, dst: &mut [u8]) -> Result<(), AccessError> {
        self.table.gather(pd, lkey, addr, dst)
    }

    fn check_local(&mut self, pd: PdId, sge: &Sge, write: bool) -> Result<(), AccessError> {
        self.table.check_local(pd, sge, write)
    }

    fn scatter(&mut self, pd: PdId, lkey: LKey, addr: u64, src: &[u8]) -> Result<(), AccessError> {
        self.table.scatter(pd, lkey, addr, src)
    }

    fn check_remote(
        &mut self,
        via: AccessContext,
        rkey: RKey,
        addr: u64,
        len: u64,
        right: RemoteRight,
    ) -> Result<(), AccessError> {
        self.table.check_remote(via, rkey, addr, len, right)
    }

    fn remote_read(&mut self, via: AccessContext, rkey: RKey, addr: u64, dst: &mut [u8]) -> Result<(), AccessError> {
        self.table.remote_read(via, rkey, addr, dst)
    }

    fn remote_write(&mut self, via: AccessContext, rkey: RKey, addr: u64, src: &[u8]) -> Result<(), AccessError> {
        self.table.remote_write(via, rkey, addr, src)
    }

    fn remote_atomic(&mut self, via: AccessContext, rkey: RKey, addr: u64, op: AtomicOp) -> Result<u64, AccessError> {
        self.table.remote_atomic(via, rkey, addr, op)
    }

    fn remote_atomic_write(
        &mut self,
        via: AccessContext,
        rkey: RKey,
        addr: u64,
        word: [u8; 8],
    ) -> Result<(), AccessError> {
        self.table.remote_atomic_write(via, rkey, addr, word)
    }

    fn remote_flush(&mut self, via: AccessContext, flush: &Flush) -> Result<(), AccessError> {
        self.table.remote_flush(via, flush)
    }

    fn bind(&mut self, via: AccessContext, bind: &Bind) -> Result<(), AccessError> {
        self.table.bind(via, bind)
    }

    fn invalidate(&mut self, via: AccessContext, rkey: RKey, by: Invalidator) -> Result<(), AccessError> {
        self.table.invalidate(via, rkey, by)
    }

    fn scatter_by_ref(&mut self, pd: PdId, lkey: LKey, addr: u64, part: Range<usize>) -> Result<(), CopyError> {
        if part.is_empty() {
            return Ok(());
        }
        let Self { table, payload, .. } = self;
        let location = table.local(pd, lkey, addr, part.len(), true)?;
        // SAFETY: inside a region with LOCAL_WRITE, thus to be written.
        unsafe { payload.fetch(part.start, part.len(), (lkey.0, table), location) }
    }

    fn remote_write_by_ref(&mut self, via: AccessContext, rkey: RKey, addr: u64, len: usize) -> Result<(), CopyError> {
        if len == 0 {
            return Ok(());
        }
        let Self { table, payload, .. } = self;
        let (key, location) = table.write_target(via, rkey, addr, len)?;
        // SAFETY: inside a region with REMOTE_WRITE, or a window with it, thus to be written.
        unsafe { payload.fetch(0, len, (key, table), location) }
    }

    fn remote_atomic_write_by_ref(&mut self, via: AccessContext, rkey: RKey, addr: u64) -> Result<(), CopyError> {
        let Self { table, payload, .. } = self;
        let (key, location) = table.word_target(via, rkey, addr)?;
        // SAFETY: as in `remote_write_by_ref`, for a word.
        unsafe { payload.fetch(0, size_of::<u64>(), (key, table), location) }
    }

    fn is_device_memory(&mut self, pd: PdId, sges: &[Sge]) -> bool {
        self.table.is_device_memory(pd, sges)
    }

    fn is_remote_device_memory(&mut self, via: AccessContext, rkey: RKey) -> bool {
        self.table.is_remote_device_memory(via, rkey)
    }

    fn has_pending_copies(&self, qpn: Qpn) -> bool {
        self.table.has_pending_copies(qpn)
    }
}

impl ShmPayload<'_> {
    /// Copies `len` bytes of the payload from `at` on to their location in the region of `key`, or
    /// requests GPU copies if source or destination is GPU memory.
    ///
    /// # Safety
    /// The application lets the location be written for as many bytes.
    unsafe fn fetch(
        &mut self,
        at: usize,
        len: usize,
        (key, table): (u32, &Table),
        location: Location<'_>,
    ) -> Result<(), CopyError> {
        let body = self.body;
        match location {
            Location::Null => Ok(()),
            Location::Host(dst) if !self.body.has_device() => {
                if self.must_wait() {
                    return Err(CopyError::Gone);
                }
                // SAFETY: the same contract. No region is part of a ring, whose mapping is
                // private to this crate; a range that overlaps with the source is this process's or
                // shared memory, as undefined as the application's use of the device is.
                unsafe { self.body.copy_to(at, len, dst) }
            }
            Location::Host(dst) => {
                let bounds = table.bounds(key);
                for (start, piece) in body.pieces(at, len) {
                    // SAFETY: the pieces are parts of the range, for which `dst` may be written.
                    let dst = unsafe { dst.add(start - at) };
                    // SAFETY: the same.
                    unsafe { self.fetch_piece(start, &piece, key, Target::Host(dst, bounds))? };
                }
                Ok(())
            }
            Location::Device(range, offset) if !self.body.has_device() => {
                let memory = range.allocation.memory();
                self.copy_to_device(at, len, key, (memory, range.offset + offset))
            }
            Location::Device(range, offset) => {
                for (start, piece) in body.pieces(at, len) {
                    let to = range.offset + offset + (start - at);
                    let target = Target::Device(range.allocation.memory(), to);
                    // SAFETY: no host memory is written.
                    unsafe { self.fetch_piece(start, &piece, key, target)? };
                }
                Ok(())
            }
        }
    }

    /// # Safety
    /// The application lets a host target be written for the length of the piece.
    unsafe fn fetch_piece(
        &mut self,
        start: usize,
        piece: &Reference,
        key: u32,
        target: Target<'_>,
    ) -> Result<(), CopyError> {
        let len = piece.len();
        if let Reference::Device { id, offset, .. } = *piece {
            let owner = self.copy_owner(key);
            let request = self.copies.request(owner, (self.link, id, offset), target, len);
            self.from_sender |= request == CopyRequest::Queued;
            return self.request_result(request);
        }
        match target {
            Target::Device(memory, to) => self.copy_to_device(start, len, key, (memory, to)),
            Target::Host(..) if self.must_wait() => Err(CopyError::Gone),
            // SAFETY: the same contract.
            Target::Host(dst, _) => unsafe { self.body.copy_to(start, len, dst) },
        }
    }

    fn copy_to_device(&mut self, at: usize, len: usize, key: u32, to: (&gpu::Memory, usize)) -> Result<(), CopyError> {
        let owner = self.copy_owner(key);
        let body = &self.body;
        let request = self.copies.request_from_host(owner, to, len, |ring| {
            // SAFETY: the ring has as many bytes, without another user until they are copied.
            unsafe { body.copy_to(at, len, ring) }
        });
        request.and_then(|request| self.request_result(request))
    }

    fn request_result(&mut self, request: CopyRequest) -> Result<(), CopyError> {
        self.deferred |= request == CopyRequest::RingFull;
        match request {
            CopyRequest::Queued => Ok(()),
            CopyRequest::RingFull | CopyRequest::Refused => Err(CopyError::Gone),
        }
    }

    fn copy_owner(&mut self, key: u32) -> CopyOwner {
        if !self.requested {
            self.requested = true;
            self.copies.next_record();
        }
        let qpn = self.qpn();
        let response = self.headers.first().is_some_and(|opcode| is_response(*opcode));
        let opcode = self.headers.first().and_then(|code| Opcode::from_code(*code));
        let ends = opcode.is_some_and(|opcode| opcode.position().ends());
        CopyOwner {
            qpn,
            key,
            response,
            ends,
        }
    }

    fn qpn(&self) -> Qpn {
        Bth::dest_qp_of(self.headers).unwrap_or(Qpn::new(0))
    }

    /// Whether an immediate copy must wait for GPU copies of earlier packets of the connection, as
    /// the application would see it first otherwise. Unordered transports are not deferred.
    fn must_wait(&mut self) -> bool {
        let wait = self.copies_pending && self.headers.first().is_some_and(|opcode| is_reliable(*opcode));
        self.deferred |= wait;
        wait
    }
}
