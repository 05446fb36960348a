//! The extended verbs: ibv_wr_post(3) and ibv_create_cq_ex(3).

use std::mem::{offset_of, size_of};
use std::ptr;

use anyhow::{Context, Result};
use doorbell_verbs_sys::*;

use super::qp::init_attr;
use super::window::lacks;
use super::{Ah, Cq, Device, Errno, Mw, Pd, Qp, Setup, zeroed};

/// The entry, if the extended context has it. To be used inside `unsafe`: the context is live.
macro_rules! extended {
    ($context:expr, $field:ident) => {{
        let extended = inline::verbs_get_ctx($context);
        if extended.is_null() || (*extended).sz < size_of::<verbs_context>() - offset_of!(verbs_context, $field) {
            None
        } else {
            (*extended).$field
        }
    }};
}

impl Pd {
    /// A queue pair with the `ibv_wr_*` operations `IBV_QP_EX_WITH_*`.
    pub(in crate::conformance) fn qp_ex(
        &self,
        send_cq: &Cq,
        recv_cq: &Cq,
        setup: &Setup,
        psn: u32,
        operations: u32,
    ) -> Result<Qp> {
        let device = self.device();
        let plain = init_attr(send_cq, recv_cq, None, setup);
        let mut init: ibv_qp_init_attr_ex = zeroed();
        init.send_cq = plain.send_cq;
        init.recv_cq = plain.recv_cq;
        init.cap = plain.cap;
        init.qp_type = plain.qp_type;
        init.sq_sig_all = plain.sq_sig_all;
        init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        init.pd = self.raw();
        init.send_ops_flags = operations.into();
        // SAFETY: PD, queues and context are live, and the queue pair holds them.
        let qp = unsafe {
            match extended!(device.raw(), create_qp_ex) {
                Some(create) => create(device.raw(), &mut init),
                None => return lacks("ibv_create_qp_ex"),
            }
        };
        if qp.is_null() && Errno::last() == Errno(libc::EOPNOTSUPP) {
            return lacks("requests by calls for these operations");
        }
        Ok(self.adopt(qp, [send_cq, recv_cq], None, setup, (psn, init.cap))?)
    }
}

/// A batch of requests by `ibv_wr_*`. The caller keeps the order: a request, then its setters.
pub(in crate::conformance) struct Calls<'a> {
    qp: &'a Qp,
    ex: *mut ibv_qp_ex,
}

/// Calls an entry that the case has requested at creation. To be used inside `unsafe`.
macro_rules! call {
    ($self:ident, $entry:ident $(, $argument:expr)*) => {
        ((*$self.ex).$entry.context(concat!("there is no ", stringify!($entry)))?)($self.ex $(, $argument)*)
    };
}

impl Qp {
    pub(in crate::conformance) fn calls(&self) -> Result<Calls<'_>> {
        let Some(convert) = self.device().api().qp_to_qp_ex else {
            return lacks("ibv_qp_to_qp_ex");
        };
        // SAFETY: live.
        let ex = unsafe { convert(self.raw()) };
        if ex.is_null() {
            return lacks("requests by calls");
        }
        let calls = Calls { qp: self, ex };
        // SAFETY: live.
        unsafe { call!(calls, wr_start) };
        Ok(calls)
    }

    pub(in crate::conformance) fn has_write_and_read(&self) -> Result<(bool, bool)> {
        let calls = self.calls()?;
        // SAFETY: live.
        let found = unsafe { ((*calls.ex).wr_rdma_write.is_some(), (*calls.ex).wr_rdma_read.is_some()) };
        calls.abort()?;
        Ok(found)
    }
}

impl Calls<'_> {
    fn next(&self, wr_id: u64, flags: u32) {
        // SAFETY: live; between start and complete the fields are the user's.
        unsafe {
            (*self.ex).wr_id = wr_id;
            (*self.ex).wr_flags = flags;
        }
    }

    pub(in crate::conformance) fn send(&self, wr_id: u64, flags: u32) -> Result<()> {
        self.next(wr_id, flags);
        // SAFETY: between start and complete.
        unsafe { call!(self, wr_send) };
        Ok(())
    }

    pub(in crate::conformance) fn send_imm(&self, wr_id: u64, flags: u32, imm: [u8; 4]) -> Result<()> {
        self.next(wr_id, flags);
        // SAFETY: as above.
        unsafe { call!(self, wr_send_imm, u32::from_ne_bytes(imm)) };
        Ok(())
    }

    pub(in crate::conformance) fn write(&self, wr_id: u64, flags: u32, rkey: u32, at: u64) -> Result<()> {
        self.next(wr_id, flags);
        // SAFETY: as above; the device checks key and address.
        unsafe { call!(self, wr_rdma_write, rkey, at) };
        Ok(())
    }

    pub(in crate::conformance) fn write_imm(
        &self,
        wr_id: u64,
        flags: u32,
        rkey: u32,
        at: u64,
        imm: [u8; 4],
    ) -> Result<()> {
        self.next(wr_id, flags);
        // SAFETY: as above.
        unsafe { call!(self, wr_rdma_write_imm, rkey, at, u32::from_ne_bytes(imm)) };
        Ok(())
    }

    pub(in crate::conformance) fn read(&self, wr_id: u64, flags: u32, rkey: u32, at: u64) -> Result<()> {
        self.next(wr_id, flags);
        // SAFETY: as above.
        unsafe { call!(self, wr_rdma_read, rkey, at) };
        Ok(())
    }

    pub(in crate::conformance) fn compare_swap(
        &self,
        wr_id: u64,
        flags: u32,
        (rkey, at): (u32, u64),
        compare: u64,
        swap: u64,
    ) -> Result<()> {
        self.next(wr_id, flags);
        // SAFETY: as above.
        unsafe { call!(self, wr_atomic_cmp_swp, rkey, at, compare, swap) };
        Ok(())
    }

    pub(in crate::conformance) fn fetch_add(&self, wr_id: u64, flags: u32, rkey: u32, at: u64, add: u64) -> Result<()> {
        self.next(wr_id, flags);
        // SAFETY: as above.
        unsafe { call!(self, wr_atomic_fetch_add, rkey, at, add) };
        Ok(())
    }

    pub(in crate::conformance) fn bind(
        &self,
        wr_id: u64,
        flags: u32,
        mw: &Mw,
        rkey: u32,
        binding: super::Binding<'_>,
    ) -> Result<()> {
        self.next(wr_id, flags);
        let info = binding.info();
        // SAFETY: as above; the window and its region are live.
        unsafe { call!(self, wr_bind_mw, mw.raw(), rkey, &info) };
        Ok(())
    }

    pub(in crate::conformance) fn local_invalidate(&self, wr_id: u64, flags: u32, rkey: u32) -> Result<()> {
        self.next(wr_id, flags);
        // SAFETY: as above.
        unsafe { call!(self, wr_local_inv, rkey) };
        Ok(())
    }

    pub(in crate::conformance) fn send_invalidate(&self, wr_id: u64, flags: u32, rkey: u32) -> Result<()> {
        self.next(wr_id, flags);
        // SAFETY: as above.
        unsafe { call!(self, wr_send_inv, rkey) };
        Ok(())
    }

    pub(in crate::conformance) fn set_sge(&self, sge: ibv_sge) -> Result<()> {
        // SAFETY: as above.
        unsafe { call!(self, wr_set_sge, sge.lkey, sge.addr, sge.length) };
        Ok(())
    }

    pub(in crate::conformance) fn set_sge_list(&self, sges: &[ibv_sge]) -> Result<()> {
        // SAFETY: as above; the list lives through the call.
        unsafe { call!(self, wr_set_sge_list, sges.len(), sges.as_ptr()) };
        Ok(())
    }

    pub(in crate::conformance) fn set_inline(&self, bytes: &[u8]) -> Result<()> {
        // SAFETY: as above; the bytes live through the call, which only reads them.
        unsafe { call!(self, wr_set_inline_data, bytes.as_ptr().cast_mut().cast(), bytes.len()) };
        Ok(())
    }

    pub(in crate::conformance) fn set_inline_list(&self, parts: &[&[u8]]) -> Result<()> {
        let list: Vec<ibv_data_buf> = parts
            .iter()
            .map(|part| ibv_data_buf {
                addr: part.as_ptr().cast_mut().cast(),
                length: part.len(),
            })
            .collect();
        // SAFETY: as above.
        unsafe { call!(self, wr_set_inline_data_list, list.len(), list.as_ptr()) };
        Ok(())
    }

    pub(in crate::conformance) fn set_destination(&self, ah: &Ah, qpn: u32, qkey: u32) -> Result<()> {
        // SAFETY: as above; the case holds the handle until the request is complete.
        unsafe { call!(self, wr_set_ud_addr, ah.raw(), qpn, qkey) };
        Ok(())
    }

    pub(in crate::conformance) fn complete(self) -> Result<Errno> {
        // SAFETY: started, and not ended.
        Ok(Errno(unsafe { call!(self, wr_complete) }))
    }

    pub(in crate::conformance) fn abort(self) -> Result<()> {
        // SAFETY: started, and not ended.
        unsafe { call!(self, wr_abort) };
        debug_assert!(!self.qp.raw().is_null());
        Ok(())
    }
}

/// An extended completion queue. It is a [`Cq`] as well.
pub(in crate::conformance) struct CqEx {
    pub(in crate::conformance) cq: Cq,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::conformance) struct Read {
    pub(in crate::conformance) wr_id: u64,
    pub(in crate::conformance) status: ibv_wc_status,
    pub(in crate::conformance) opcode: ibv_wc_opcode,
    pub(in crate::conformance) byte_len: u32,
    pub(in crate::conformance) imm: [u8; 4],
    pub(in crate::conformance) qp_num: u32,
    pub(in crate::conformance) src_qp: u32,
    pub(in crate::conformance) wc_flags: u32,
}

impl Device {
    /// A completion queue with these fields (`IBV_WC_EX_WITH_*`).
    pub(in crate::conformance) fn cq_ex(&self, entries: u32, fields: u64) -> Result<CqEx> {
        let mut init: ibv_cq_init_attr_ex = zeroed();
        init.cqe = entries;
        init.wc_flags = fields;
        // SAFETY: live.
        let cq = unsafe {
            match extended!(self.raw(), create_cq_ex) {
                Some(create) => create(self.raw(), &mut init),
                None => return lacks("ibv_create_cq_ex"),
            }
        };
        // An extended queue begins with a plain one (ibv_cq_ex_to_cq).
        let cq = self.adopt_cq(cq.cast(), None);
        match cq {
            Ok(cq) => Ok(CqEx { cq }),
            Err(Errno(libc::EOPNOTSUPP | libc::ENOSYS)) => lacks("completion queues with these fields"),
            Err(error) => Err(error.into()),
        }
    }
}

/// Calls a reading entry. To be used inside `unsafe`.
macro_rules! read {
    ($ex:expr, $entry:ident) => {
        ((*$ex).$entry.context(concat!("there is no ", stringify!($entry)))?)($ex)
    };
}

impl CqEx {
    fn raw(&self) -> *mut ibv_cq_ex {
        self.cq.raw().cast()
    }

    /// Starts a poll: `Ok(false)` when the queue is empty; then there is no poll to end.
    pub(in crate::conformance) fn start(&self) -> Result<bool> {
        let ex = self.raw();
        let mut attr: ibv_poll_cq_attr = zeroed();
        // SAFETY: live, and no poll is open.
        match unsafe { (*ex).start_poll.context("there is no start_poll")?(ex, &mut attr) } {
            0 => Ok(true),
            libc::ENOENT => Ok(false),
            error => Err(Errno(error).into()),
        }
    }

    /// Advances to the next completion: `Ok(false)` when there is none.
    pub(in crate::conformance) fn next(&self) -> Result<bool> {
        let ex = self.raw();
        // SAFETY: live, and a poll is open.
        match unsafe { read!(ex, next_poll) } {
            0 => Ok(true),
            libc::ENOENT => Ok(false),
            error => Err(Errno(error).into()),
        }
    }

    pub(in crate::conformance) fn end(&self) -> Result<()> {
        let ex = self.raw();
        // SAFETY: live, and a poll is open.
        unsafe { read!(ex, end_poll) };
        Ok(())
    }

    /// The poll's current completion, with the fields of `IBV_WC_STANDARD_FLAGS`.
    pub(in crate::conformance) fn current(&self) -> Result<Read> {
        let ex = self.raw();
        // SAFETY: live, and a poll is at a completion.
        unsafe {
            let (wr_id, status) = ((*ex).wr_id, (*ex).status);
            Ok(Read {
                wr_id,
                status,
                opcode: read!(ex, read_opcode),
                byte_len: read!(ex, read_byte_len),
                imm: read!(ex, read_imm_data).to_ne_bytes(),
                qp_num: read!(ex, read_qp_num),
                src_qp: read!(ex, read_src_qp),
                wc_flags: read!(ex, read_wc_flags),
            })
        }
    }

    /// wr_id and status of the current completion, which need no flag.
    pub(in crate::conformance) fn head(&self) -> (u64, ibv_wc_status) {
        let ex = self.raw();
        // SAFETY: live, and a poll is at a completion.
        unsafe { ((*ex).wr_id, (*ex).status) }
    }

    /// Its timestamp in device ticks, and the wall clock's in nanoseconds.
    pub(in crate::conformance) fn times(&self) -> Result<(u64, u64)> {
        let ex = self.raw();
        // SAFETY: live, and a poll is at a completion.
        unsafe { Ok((read!(ex, read_completion_ts), read!(ex, read_completion_wallclock_ns))) }
    }

    pub(in crate::conformance) fn reads_length_and_time(&self) -> (bool, bool) {
        let ex = self.raw();
        // SAFETY: live.
        unsafe { ((*ex).read_byte_len.is_some(), (*ex).read_completion_ts.is_some()) }
    }

    /// Waits until a poll starts at a completion.
    pub(in crate::conformance) fn wait(&self) -> Result<()> {
        let since = std::time::Instant::now();
        while !self.start()? {
            anyhow::ensure!(since.elapsed() < self.cq.device().time_limit(), "no completion");
            std::thread::yield_now();
        }
        Ok(())
    }
}

/// The clock of ibv_query_rt_values_ex(3) and ibv_query_device_ex(3).
pub(in crate::conformance) struct Clock {
    pub(in crate::conformance) now: u64,
    /// Mask of the timestamp's bits.
    pub(in crate::conformance) mask: u64,
}

impl Device {
    pub(in crate::conformance) fn query_ex(&self) -> Result<ibv_device_attr_ex> {
        let mut attr: ibv_device_attr_ex = zeroed();
        // SAFETY: live; `attr` may be written.
        match unsafe { inline::query_device_ex(self.raw(), ptr::from_mut(&mut attr)) } {
            0 => Ok(attr),
            libc::EOPNOTSUPP => lacks("ibv_query_device_ex"),
            error => Err(Errno(error).into()),
        }
    }

    /// Not offered when the device has no timestamps.
    pub(in crate::conformance) fn clock(&self) -> Result<Clock> {
        let mask = self.query_ex()?.completion_timestamp_mask;
        if mask == 0 {
            return lacks("time stamps");
        }
        let mut values = ibv_values_ex {
            // `IBV_VALUES_MASK_RAW_CLOCK` of the header.
            comp_mask: 1,
            raw_clock: libc::timespec { tv_sec: 0, tv_nsec: 0 },
        };
        // SAFETY: live; `values` may be written.
        let result = unsafe {
            match extended!(self.raw(), query_rt_values) {
                Some(query) => query(self.raw(), &mut values),
                None => return lacks("ibv_query_rt_values_ex"),
            }
        };
        anyhow::ensure!(result == 0, "ibv_query_rt_values_ex: {}", Errno(result));
        let clock = values.raw_clock;
        Ok(Clock {
            now: clock.tv_sec as u64 * 1_000_000_000 + clock.tv_nsec as u64,
            mask,
        })
    }
}
