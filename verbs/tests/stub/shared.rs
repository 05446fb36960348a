//! The stub's shared receive queues: tests choose which queue pair consumes which receive.

use core::ffi::{c_int, c_void};

use doorbell_verbs_sys::*;

use crate::allocation::ProviderScope;

use super::provider::{set_errno, sges_of, stub_of};
use super::{Cq, Posted, Stub, StubQp, Verb, WorkQueue, completion, failure, push};

#[derive(Default)]
pub(super) struct StubSrq {
    queue: WorkQueue,
    max_wr: u32,
    max_sge: u32,
    limit: u32,
}

impl Stub {
    fn srq_of(&self, qpn: u32) -> usize {
        let srq = self.state().qps[&qpn].srq;
        assert_ne!(srq, 0, "the queue pair has a shared receive queue");
        srq
    }

    pub(crate) fn has_shared_receives(&self, qpn: u32) -> bool {
        self.state().qps[&qpn].srq != 0
    }

    pub(crate) fn pending_shared(&self, qpn: u32) -> Vec<Posted> {
        let srq = self.srq_of(qpn);
        self.state().srqs[&srq].queue.pending.iter().cloned().collect()
    }

    pub(crate) fn shared_doorbells(&self, qpn: u32) -> usize {
        let srq = self.srq_of(qpn);
        self.state().srqs[&srq].queue.doorbells
    }

    /// The next post to the queue pair's SRQ refuses request number `index`.
    pub(crate) fn refuse_shared(&self, qpn: u32, index: usize, errno: c_int) {
        let srq = self.srq_of(qpn);
        self.state().srqs.get_mut(&srq).unwrap().queue.refuse = Some((index, errno));
    }

    /// A queue pair consumes the receive at `place` and completes it with a message of `len` bytes.
    pub(crate) fn complete_shared(&self, qpn: u32, place: usize, len: u32) {
        self.end_shared(qpn, place, |request| {
            let mut wc = completion(request.wr_id, qpn, IBV_WC_SUCCESS, IBV_WC_RECV);
            wc.byte_len = len;
            wc
        });
    }

    /// A queue pair flushes the receive at `place`, which it had consumed.
    pub(crate) fn flush_shared(&self, qpn: u32, place: usize) {
        self.end_shared(qpn, place, |request| failure(request.wr_id, qpn, IBV_WC_WR_FLUSH_ERR));
    }

    fn end_shared(&self, qpn: u32, place: usize, end: impl FnOnce(&Posted) -> ibv_wc) {
        let srq = self.srq_of(qpn);
        let mut state = self.state();
        let queue = &mut state.srqs.get_mut(&srq).unwrap().queue;
        let request = queue.pending.remove(place).expect("a receive is posted there");
        push(state.qps[&qpn].recv_cq, end(&request));
    }

    pub(crate) fn limit(&self, qpn: u32) -> u32 {
        let srq = self.srq_of(qpn);
        self.state().srqs[&srq].limit
    }

    pub(crate) fn raise_on_shared(&self, qpn: u32, event_type: u32) {
        let srq = self.srq_of(qpn) as *mut ibv_srq;
        self.raise(ibv_async_event {
            element: ibv_async_event_element { srq },
            event_type,
        });
    }

    /// From now on unpolled completions are removed with their queue pair.
    pub(crate) fn purge_completions(&self) {
        self.state().purges = true;
    }
}

pub(super) fn purge(gone: &StubQp, qpn: u32) {
    for cq in [gone.send_cq, gone.recv_cq] {
        // SAFETY: they outlive the queue pair.
        let cq = unsafe { &*(cq as *const Cq) };
        cq.queue.lock().unwrap().retain(|wc| wc.qp_num != qpn);
    }
}

pub(super) unsafe extern "C" fn create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: the caller's.
    let (stub, context, init) = unsafe { (stub_of((*pd).context), (*pd).context, &*init) };
    if let Some(errno) = stub.failing(Verb::CreateSrq) {
        set_errno(errno);
        return core::ptr::null_mut();
    }
    // SAFETY: all-zero is a valid ibv_srq.
    let mut srq: Box<ibv_srq> = Box::new(unsafe { core::mem::zeroed() });
    (srq.context, srq.srq_context, srq.pd) = (context, init.srq_context, pd);
    let raw = Box::into_raw(srq);
    stub.count("srq", 1);
    stub.state().srqs.insert(
        raw as usize,
        StubSrq {
            max_wr: init.attr.max_wr,
            max_sge: init.attr.max_sge,
            ..StubSrq::default()
        },
    );
    raw
}

pub(super) unsafe extern "C" fn modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int {
    // SAFETY: the caller's.
    let (stub, attr) = unsafe { (stub_of((*srq).context), &*attr) };
    assert_eq!(mask as u32, IBV_SRQ_LIMIT);
    let mut state = stub.state();
    let srq = state.srqs.get_mut(&(srq as usize)).unwrap();
    if attr.srq_limit > srq.max_wr {
        return libc::EINVAL;
    }
    srq.limit = attr.srq_limit;
    0
}

pub(super) unsafe extern "C" fn query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    // SAFETY: the caller's.
    let stub = unsafe { stub_of((*srq).context) };
    let state = stub.state();
    let found = &state.srqs[&(srq as usize)];
    // SAFETY: the caller's.
    unsafe {
        *attr = ibv_srq_attr {
            max_wr: found.max_wr,
            max_sge: found.max_sge,
            srq_limit: found.limit,
        };
    }
    0
}

pub(super) unsafe extern "C" fn destroy_srq(srq: *mut ibv_srq) -> c_int {
    // SAFETY: made by create_srq.
    let stub = unsafe { stub_of((*srq).context) };
    let users = stub.state().qps.values().filter(|qp| qp.srq == srq as usize).count();
    assert_eq!(users, 0, "queue pairs alive when their shared receive queue goes");
    if let Some(errno) = stub.failing(Verb::DestroySrq) {
        return errno;
    }
    stub.count("srq", -1);
    stub.all_acknowledged(srq as usize);
    let mut state = stub.state();
    state.log.push("destroy_srq");
    state.srqs.remove(&(srq as usize));
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(srq) });
    0
}

pub(super) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    let _uncounted = ProviderScope::begin();
    // SAFETY: the caller's.
    let stub = unsafe { stub_of((*srq).context) };
    let mut state = stub.state();
    let srq = state.srqs.get_mut(&(srq.cast::<c_void>() as usize)).unwrap();
    srq.queue.doorbells += 1;
    let mut refuse = srq.queue.refuse.take();
    while !wr.is_null() {
        if let Some((0, errno)) = refuse {
            // SAFETY: the caller's.
            unsafe { *bad = wr };
            return errno;
        }
        refuse = refuse.map(|(index, errno)| (index - 1, errno));
        // SAFETY: the chain is well-formed by contract.
        let (wr_id, sges) = unsafe { ((*wr).wr_id, sges_of((*wr).sg_list, (*wr).num_sge)) };
        assert!(sges.len() <= srq.max_sge as usize && srq.queue.pending.len() < srq.max_wr as usize);
        srq.queue.pending.push_back(Posted::receive(wr_id, sges));
        // SAFETY: as above.
        wr = unsafe { (*wr).next };
    }
    0
}
