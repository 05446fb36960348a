//! The verbs of the stub, and their table.

use core::ffi::{c_char, c_int, c_void};
use std::sync::atomic::Ordering;

use doorbell_verbs_sys::*;

use crate::allocation::ProviderScope;

use super::address::{create_ah, create_ah_from_wc, destroy_ah};
use super::events::{
    ack_async_event, ack_cq_events, create_comp_channel, destroy_comp_channel, get_async_event, get_cq_event, resize_cq,
};
use super::{
    Cq, DEVICES, NEXT, Posted, Stub, StubQp, Verb, WorkQueue, calls, events, extended_cq, flush, memory, shared,
    windows,
};

pub(super) unsafe fn stub_of(context: *mut ibv_context) -> &'static Stub {
    // SAFETY: every context of this provider has a stub's device, its first field.
    unsafe { &*(*context).device.cast::<Stub>() }
}

pub(super) fn set_errno(errno: c_int) {
    // SAFETY: the calling thread's own errno.
    unsafe { *libc::__errno_location() = errno }
}

unsafe extern "C" fn get_device_list(num: *mut c_int) -> *mut *mut ibv_device {
    let devices = DEVICES.lock().unwrap();
    let listed = devices.iter().map(|stub| (&raw const **stub).cast_mut().cast());
    // Null-terminated, as the real list: freeing finds its length by that.
    let list: Box<[*mut ibv_device]> = listed.chain([core::ptr::null_mut()]).collect();
    // SAFETY: the caller's.
    unsafe { *num = list.len() as c_int - 1 };
    Box::into_raw(list).cast()
}
unsafe extern "C" fn free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: allocated by get_device_list, thus a box that ends behind the first null pointer.
    unsafe {
        let len = (0..).take_while(|&at| !(*list.add(at)).is_null()).count() + 1;
        drop(Box::from_raw(core::ptr::slice_from_raw_parts_mut(list, len)));
    }
}
unsafe extern "C" fn get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: a stub's device.
    unsafe { (*device.cast::<Stub>()).c_name.as_ptr() }
}
unsafe extern "C" fn get_device_guid(_: *mut ibv_device) -> u64 {
    0x0102_0304_0506_0708_u64.to_be()
}
unsafe extern "C" fn open_device(device: *mut ibv_device) -> *mut ibv_context {
    // SAFETY: all-zero is a valid context without functions; those called are filled in.
    let mut whole: Box<verbs_context> = Box::new(unsafe { core::mem::zeroed() });
    // SAFETY: a stub's device.
    let stub = unsafe { &*device.cast::<Stub>() };
    if stub.extended.load(Ordering::Relaxed) != 0 {
        whole.context.abi_compat = inline::VERBS_ABI_IS_EXTENDED;
        whole.sz = size_of::<verbs_context>();
        whole.modify_cq = Some(events::modify_cq);
        whole.create_cq_ex = Some(extended_cq::create_cq_ex);
        whole.query_rt_values = Some(extended_cq::query_rt_values);
        whole.create_qp_ex = Some(calls::create_qp_ex);
        whole.query_device_ex = Some(memory::query_device_ex);
        whole.advise_mr = Some(memory::advise_mr);
        whole.alloc_dm = Some(memory::alloc_dm);
        whole.free_dm = Some(memory::free_dm);
        whole.reg_dm_mr = Some(memory::reg_dm_mr);
    }
    let context = &mut whole.context;
    context.device = device;
    context.async_fd = stub.async_fd;
    context.num_comp_vectors = 4;
    context.ops.alloc_mw = Some(windows::alloc_mw);
    context.ops.dealloc_mw = Some(windows::dealloc_mw);
    context.ops.bind_mw = Some(windows::bind_mw);
    context.ops.post_send = Some(post_send);
    context.ops.post_recv = Some(post_recv);
    context.ops.post_srq_recv = Some(shared::post_srq_recv);
    context.ops.poll_cq = Some(poll_cq);
    context.ops.req_notify_cq = Some(events::req_notify_cq);
    stub.count("context", 1);
    // SAFETY: a member of the struct just allocated.
    unsafe { &raw mut (*Box::into_raw(whole)).context }
}
unsafe extern "C" fn close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: made by open_device.
    let stub = unsafe { stub_of(context) };
    for kind in ["pd", "mr", "cq", "qp", "srq", "channel"] {
        assert_eq!(stub.live(kind), 0, "{kind} alive when the device is closed");
    }
    stub.count("context", -1);
    // SAFETY: as above.
    let whole = unsafe { context.byte_sub(core::mem::offset_of!(verbs_context, context)) };
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(whole.cast::<verbs_context>()) });
    0
}
pub(super) unsafe extern "C" fn query_device(_: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    // SAFETY: the caller's.
    unsafe {
        attr.write_bytes(0, 1);
        (*attr).phys_port_cnt = 1;
        (*attr).max_qp_wr = 4096;
        (*attr).max_sge = 8;
        (*attr).max_srq = 64;
        (*attr).max_srq_wr = 1024;
        (*attr).max_srq_sge = 4;
        (*attr).max_cqe = 8192;
        (*attr).max_qp_rd_atom = 16;
        (*attr).max_qp_init_rd_atom = 16;
        (*attr).atomic_cap = IBV_ATOMIC_HCA;
    }
    0
}
unsafe extern "C" fn query_port(context: *mut ibv_context, _: u8, attr: *mut _compat_ibv_port_attr) -> c_int {
    let attr = attr.cast::<ibv_port_attr>();
    // SAFETY: the caller's.
    unsafe {
        (*attr).state = stub_of(context).state().port_state;
        (*attr).max_mtu = IBV_MTU_4096;
        (*attr).active_mtu = IBV_MTU_1024;
        (*attr).gid_tbl_len = 4;
        (*attr).link_layer = IBV_LINK_LAYER_ETHERNET as u8;
        (*attr).active_width = 2;
        (*attr).active_speed = 32;
    }
    0
}
/// Index 1 holds 10.0.0.1, index 2 a link-local address; the others are empty.
unsafe extern "C" fn query_gid(_: *mut ibv_context, _: u8, index: c_int, gid: *mut ibv_gid) -> c_int {
    let mut raw = [0; 16];
    match index {
        1 => raw[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, 1]),
        2 => (raw[0], raw[1], raw[15]) = (0xfe, 0x80, 1),
        _ => {}
    }
    // SAFETY: the caller's.
    unsafe { (*gid).raw = raw };
    0
}
unsafe extern "C" fn query_pkey(_: *mut ibv_context, _: u8, _: c_int, _: *mut u16) -> c_int {
    0
}
unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: a live context.
    unsafe { stub_of(context) }.count("pd", 1);
    Box::into_raw(Box::new(ibv_pd { context, handle: 0 }))
}
unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: made by alloc_pd.
    let stub = unsafe { stub_of((*pd).context) };
    for kind in ["mr", "qp", "ah", "srq"] {
        assert_eq!(stub.live(kind), 0, "{kind} alive when the protection domain goes");
    }
    stub.count("pd", -1);
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(pd) });
    0
}
pub(super) unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: a live domain.
    let (stub, context) = unsafe { (stub_of((*pd).context), (*pd).context) };
    if let Some(errno) = stub.failing(Verb::RegMr) {
        set_errno(errno);
        return core::ptr::null_mut();
    }
    stub.count("mr", 1);
    let key = NEXT.fetch_add(1, Ordering::Relaxed) + 0x1000;
    stub.state()
        .regions
        .insert(key, (addr as u64, length as u64, access as u32));
    Box::into_raw(Box::new(ibv_mr {
        context,
        pd,
        addr,
        length,
        handle: 0,
        lkey: key,
        rkey: key | 0x8000_0000,
    }))
}
unsafe extern "C" fn dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: made by reg_mr.
    let (stub, lkey, addr) = unsafe { (stub_of((*mr).context), (*mr).lkey, (*mr).addr) };
    if let Some(errno) = stub.failing(Verb::DeregMr) {
        return errno;
    }
    // SAFETY: must still be there: this read shows a use after free under ASan and valgrind.
    unsafe { addr.cast::<u8>().read_volatile() };
    stub.count("mr", -1);
    let mut state = stub.state();
    state.regions.remove(&lkey);
    state.log.push("dereg_mr");
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(mr) });
    0
}
unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: a live context.
    if let Some(errno) = unsafe { stub_of(context) }.failing(Verb::CreateCq) {
        set_errno(errno);
        return core::ptr::null_mut();
    }
    // SAFETY: all-zero is a valid ibv_cq_ex, without functions.
    let mut raw: ibv_cq_ex = unsafe { core::mem::zeroed() };
    (raw.context, raw.cqe, raw.cq_context, raw.channel) = (context, cqe, cq_context, channel);
    // SAFETY: a live context.
    let stub = unsafe { stub_of(context) };
    stub.count("cq", 1);
    stub.state().vector = Some(vector);
    Cq::leak(raw).cast()
}
unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: made by create_cq.
    let stub = unsafe { stub_of((*cq).context) };
    assert_eq!(
        stub.state()
            .qps
            .values()
            .filter(|qp| qp.send_cq == cq as usize || qp.recv_cq == cq as usize)
            .count(),
        0,
        "queue pairs alive when their completion queue goes"
    );
    if let Some(errno) = stub.failing(Verb::DestroyCq) {
        return errno;
    }
    // SAFETY: live; its channel too.
    let inner = unsafe { &*cq.cast::<Cq>() };
    events::forget(inner);
    assert!(inner.poll.lock().unwrap().is_none(), "destroyed while it is polled");
    stub.count("cq", -1);
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(cq.cast::<Cq>()) });
    0
}
unsafe extern "C" fn create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the caller's.
    let (stub, attr) = unsafe { (stub_of((*pd).context), &mut *attr) };
    if let Some(errno) = stub.failing(Verb::CreateQp) {
        set_errno(errno);
        return core::ptr::null_mut();
    }
    // SAFETY: the caller's.
    unsafe { create(pd, attr) }
}
pub(super) unsafe fn create(pd: *mut ibv_pd, attr: &mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the caller's.
    let stub = unsafe { stub_of((*pd).context) };
    attr.cap.max_inline_data = attr.cap.max_inline_data.next_multiple_of(64);
    let qpn = NEXT.fetch_add(1, Ordering::Relaxed);
    // SAFETY: all-zero is a valid ibv_qp_ex.
    let mut qp: Box<ibv_qp_ex> = Box::new(unsafe { core::mem::zeroed() });
    // SAFETY: the caller's.
    (qp.qp_base.context, qp.qp_base.qp_num) = (unsafe { (*pd).context }, qpn);
    let raw = Box::into_raw(qp).cast();
    stub.count("qp", 1);
    stub.state().qps.insert(
        qpn,
        StubQp {
            raw: raw as usize,
            transport: attr.qp_type,
            state: IBV_QPS_RESET,
            srq: attr.srq as usize,
            signal_all: attr.sq_sig_all != 0,
            send_cq: attr.send_cq as usize,
            recv_cq: attr.recv_cq as usize,
            send: WorkQueue::default(),
            recv: WorkQueue::default(),
            building: None,
            aborts: 0,
            masks: Vec::new(),
            attr: None,
        },
    );
    raw
}
unsafe extern "C" fn query_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, _: c_int, _: *mut ibv_qp_init_attr) -> c_int {
    // SAFETY: the caller's.
    unsafe { (*attr).qp_state = stub_of((*qp).context).state().qps[&(*qp).qp_num].state };
    0
}
unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: the caller's.
    let (stub, qpn, attr) = unsafe { (stub_of((*qp).context), (*qp).qp_num, *attr) };
    let moves = mask as u32 & IBV_QP_STATE != 0;
    if !(moves && attr.qp_state == IBV_QPS_ERR)
        && let Some(errno) = stub.failing(Verb::ModifyQp)
    {
        return errno;
    }
    let mut state = stub.state();
    let qp = state.qps.get_mut(&qpn).unwrap();
    qp.masks.push(mask as u32);
    if !moves {
        qp.attr = Some(attr);
        return 0;
    }
    qp.state = attr.qp_state;
    if attr.qp_state == IBV_QPS_RTR {
        qp.attr = Some(attr);
    }
    if attr.qp_state == IBV_QPS_ERR {
        flush(qp, qpn);
    }
    if attr.qp_state == IBV_QPS_RESET {
        qp.send.pending.clear();
        qp.recv.pending.clear();
    }
    0
}
unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: made by create_qp.
    let (stub, qpn) = unsafe { (stub_of((*qp).context), (*qp).qp_num) };
    if let Some(errno) = stub.failing(Verb::DestroyQp) {
        return errno;
    }
    for cq in stub.queues_of(qpn) {
        // SAFETY: alive as long as a queue pair on it.
        let cq = unsafe { &*(cq as *const Cq) };
        assert!(
            !extended_cq::is_polled_here(cq),
            "destroyed by the thread that polls its queue"
        );
    }
    stub.count("qp", -1);
    stub.all_acknowledged(qp as usize);
    let mut state = stub.state();
    state.log.push("destroy_qp");
    let gone = state.qps.remove(&qpn).unwrap();
    if state.purges {
        shared::purge(&gone, qpn);
    }
    drop(state);
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(qp.cast::<ibv_qp_ex>()) });
    0
}
unsafe extern "C" fn fork_init() -> c_int {
    0
}

pub(super) unsafe fn sges_of(list: *const ibv_sge, num: c_int) -> Vec<(u64, u32, u32)> {
    // SAFETY: the request's list.
    (0..num as usize)
        .map(|at| unsafe { &*list.add(at) })
        .map(|sge| (sge.addr, sge.length, sge.lkey))
        .collect()
}

unsafe extern "C" fn post_send(qp: *mut ibv_qp, mut wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
    let _uncounted = ProviderScope::begin();
    // SAFETY: the caller's.
    let (stub, qpn) = unsafe { (stub_of((*qp).context), (*qp).qp_num) };
    let mut state = stub.state();
    let queue = state.qps.get_mut(&qpn).unwrap();
    queue.send.doorbells += 1;
    let mut refuse = queue.send.refuse.take();
    let failed = queue.state == IBV_QPS_ERR;
    while !wr.is_null() {
        if let Some((0, errno)) = refuse {
            // SAFETY: the caller's.
            unsafe { *bad = wr };
            return errno;
        }
        refuse = refuse.map(|(index, errno)| (index - 1, errno));
        // SAFETY: well-formed by contract; both unions are written for the opcode, or zero.
        let request = unsafe {
            let inline = if (*wr).send_flags & IBV_SEND_INLINE != 0 && (*wr).num_sge == 1 {
                let sge = *(*wr).sg_list;
                let at = core::ptr::with_exposed_provenance::<u8>(sge.addr as usize);
                core::slice::from_raw_parts(at, sge.length as usize).to_vec()
            } else {
                Vec::new()
            };
            let (bind, invalidate) = windows::of_request(&*wr);
            let atomic = (*wr).opcode == IBV_WR_ATOMIC_CMP_AND_SWP || (*wr).opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
            Posted {
                wr_id: (*wr).wr_id,
                opcode: (*wr).opcode,
                flags: (*wr).send_flags,
                imm: u32::from_be((*wr).anon_1.imm_data),
                to: (queue.transport == IBV_QPT_UD).then(|| {
                    let ud = (*wr).wr.ud;
                    (ud.ah as usize, ud.remote_qpn, ud.remote_qkey)
                }),
                remote: match atomic {
                    true => ((*wr).wr.atomic.remote_addr, (*wr).wr.atomic.rkey),
                    false => ((*wr).wr.rdma.remote_addr, (*wr).wr.rdma.rkey),
                },
                atomic: ((*wr).wr.atomic.compare_add, (*wr).wr.atomic.swap),
                sges: sges_of((*wr).sg_list, (*wr).num_sge),
                inline,
                bind,
                invalidate,
            }
        };
        queue.send.pending.push_back(request);
        // SAFETY: as above.
        wr = unsafe { (*wr).next };
    }
    if failed {
        flush(queue, qpn);
    }
    drop(state);
    if let Some(errno) = stub.failing(Verb::PostSend) {
        return errno;
    }
    if stub.auto.load(Ordering::Relaxed) != 0 {
        stub.complete_sends(qpn, usize::MAX);
    }
    0
}

unsafe extern "C" fn post_recv(qp: *mut ibv_qp, mut wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    let _uncounted = ProviderScope::begin();
    // SAFETY: the caller's.
    let (stub, qpn) = unsafe { (stub_of((*qp).context), (*qp).qp_num) };
    let mut state = stub.state();
    let queue = state.qps.get_mut(&qpn).unwrap();
    queue.recv.doorbells += 1;
    let mut refuse = queue.recv.refuse.take();
    while !wr.is_null() {
        if let Some((0, errno)) = refuse {
            // SAFETY: the caller's.
            unsafe { *bad = wr };
            return errno;
        }
        refuse = refuse.map(|(index, errno)| (index - 1, errno));
        // SAFETY: the chain is well-formed by contract.
        let (wr_id, sges) = unsafe { ((*wr).wr_id, sges_of((*wr).sg_list, (*wr).num_sge)) };
        queue.recv.pending.push_back(Posted::receive(wr_id, sges));
        // SAFETY: as above.
        wr = unsafe { (*wr).next };
    }
    0
}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, num: c_int, wc: *mut ibv_wc) -> c_int {
    let _uncounted = ProviderScope::begin();
    // SAFETY: made by create_cq.
    let cq = unsafe { &*cq.cast::<Cq>() };
    // SAFETY: a live context.
    if unsafe { stub_of(cq.context()) }.failing(Verb::PollCq).is_some() {
        return -1;
    }
    let mut queue = cq.queue.lock().unwrap();
    let n = queue.len().min(num as usize);
    for (at, completion) in queue.drain(..n).enumerate() {
        // SAFETY: the caller has space for `num`.
        unsafe { *wc.add(at) = completion };
    }
    n as c_int
}

pub(super) static API: Api = Api {
    // SAFETY: the stub moves no data, and asserts that nothing is destroyed before its dependents.
    promise: unsafe { Promise::given() },
    get_device_list,
    free_device_list,
    get_device_name,
    get_device_guid,
    open_device,
    close_device,
    get_async_event,
    ack_async_event,
    query_device,
    query_port,
    query_gid,
    query_pkey,
    alloc_pd,
    dealloc_pd,
    reg_mr,
    dereg_mr,
    create_comp_channel,
    destroy_comp_channel,
    create_cq,
    resize_cq,
    destroy_cq,
    get_cq_event,
    ack_cq_events,
    create_qp,
    query_qp,
    modify_qp,
    destroy_qp,
    fork_init,
    create_srq: Some(shared::create_srq),
    modify_srq: Some(shared::modify_srq),
    query_srq: Some(shared::query_srq),
    destroy_srq: Some(shared::destroy_srq),
    create_ah: Some(create_ah),
    create_ah_from_wc: Some(create_ah_from_wc),
    destroy_ah: Some(destroy_ah),
    attach_mcast: None,
    detach_mcast: None,
    rereg_mr: Some(memory::rereg_mr),
    reg_mr_iova: None,
    reg_mr_iova2: Some(memory::reg_mr_iova2),
    reg_dmabuf_mr: Some(memory::reg_dmabuf_mr),
    query_gid_ex: None,
    query_gid_table: None,
    get_pkey_index: None,
    get_device_index: None,
    qp_to_qp_ex: Some(calls::qp_to_qp_ex),
    query_ece: None,
    set_ece: None,
    query_qp_data_in_order: None,
};
