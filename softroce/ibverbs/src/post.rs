//! Posting: converts C's lists of work requests to the engine's, one by one without allocation.

use core::ffi::c_int;
use std::slice;

use doorbell_roce_proto::memory::{AtomicOp, Sge};
use doorbell_roce_proto::wire::Transport;
use doorbell_roce_proto::work::{Destination, Operation, Payload, PostError, ReceiveRequest, Remote, SendRequest};
use doorbell_roce_proto::{LKey, Qpn, RKey};
use doorbell_softroce::{Posting, capacity};
use doorbell_verbs_sys::{
    IBV_SEND_FENCE, IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_SEND_SOLICITED, IBV_WR_ATOMIC_CMP_AND_SWP,
    IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_BIND_MW, IBV_WR_LOCAL_INV, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE,
    IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_SEND_WITH_INV, ibv_pd, ibv_qp, ibv_recv_wr,
    ibv_send_wr, ibv_sge, ibv_srq,
};

use crate::queue_pair::SoftQp;
use crate::shared_receive::SoftSrq;
use crate::wr::{has_remote, remote_srq};
use crate::{address, window};

const MAX_SGES: usize = capacity::SGES as usize;
const MAX_INLINE: usize = capacity::INLINE as usize;

/// ibv_post_send(3): queues the whole list, then transmits (one doorbell).
pub(crate) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: `qp` is live and ours by contract.
    let (soft, transport) = unsafe { (SoftQp::handle(qp), SoftQp::transport(qp)) };
    soft.post_send(|posting| {
        let mut next = wr;
        // SAFETY: well formed by contract: each request is live, the last one's `next` is null.
        while let Some(request) = unsafe { next.as_ref() } {
            // SAFETY: so are its SGE list, its inline memory, and the address handle of a datagram.
            if let Err(refused) = unsafe { send_one(posting, request, transport, qp) } {
                // SAFETY: writable by contract (man page).
                unsafe { *bad_wr = next };
                return errno_of(refused);
            }
            next = request.next;
        }
        0
    })
}

pub(crate) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: `qp` is live and ours by contract.
    let soft = unsafe { SoftQp::handle(qp) };
    // SAFETY: the list is well formed, and `bad_wr` writable by contract (man page).
    soft.post_receive(|posting| unsafe { each_receive(wr, bad_wr, |request| posting.receive(request)) })
}

pub(crate) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: `srq` is live and ours by contract.
    let soft = unsafe { SoftSrq::handle(srq) };
    // SAFETY: as in `post_recv`.
    soft.post_receive(|posting| unsafe { each_receive(wr, bad_wr, |request| posting.receive(request)) })
}

/// Passes the receives of a list to `post`, up to the first that is refused.
///
/// # Safety
/// Each request is live and the last one's `next` is null; `bad_wr` is writable.
unsafe fn each_receive(
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
    mut post: impl FnMut(&ReceiveRequest<'_>) -> Result<(), PostError>,
) -> c_int {
    let mut next = wr;
    // SAFETY: by contract.
    while let Some(request) = unsafe { next.as_ref() } {
        let wr_id = request.wr_id;
        // SAFETY: so is its SGE list.
        let posted = unsafe { elements(request.sg_list, request.num_sge) }
            .and_then(|list| with_sges(list, |sges| post(&ReceiveRequest { wr_id, sges })));
        if let Err(refused) = posted {
            // SAFETY: by contract.
            unsafe { *bad_wr = next };
            return errno_of(refused);
        }
        next = request.next;
    }
    0
}

pub(crate) fn errno_of(refused: PostError) -> c_int {
    match refused {
        PostError::Full => libc::ENOMEM,
        PostError::UnknownQp | PostError::State | PostError::Invalid => libc::EINVAL,
    }
}

/// # Safety
/// `list` points to `count` elements when that is positive.
unsafe fn elements<'a>(list: *const ibv_sge, count: c_int) -> Result<&'a [ibv_sge], PostError> {
    match usize::try_from(count) {
        Ok(0) => Ok(&[]),
        // SAFETY: that many by contract.
        Ok(count) if count <= MAX_SGES && !list.is_null() => Ok(unsafe { slice::from_raw_parts(list, count) }),
        _ => Err(PostError::Invalid),
    }
}

pub(crate) fn to_sge(element: &ibv_sge) -> Sge {
    Sge {
        addr: element.addr,
        len: element.length,
        lkey: LKey(element.lkey),
    }
}

/// On the stack; a single SGE, the common case, does not initialise the whole array.
fn with_sges<R>(list: &[ibv_sge], post: impl FnOnce(&[Sge]) -> R) -> R {
    match list {
        [] => post(&[]),
        [one] => post(&[to_sge(one)]),
        many => {
            let mut sges = [to_sge(&many[0]); MAX_SGES];
            for (to, from) in sges.iter_mut().zip(many) {
                *to = to_sge(from);
            }
            post(&sges[..many.len()])
        }
    }
}

/// # Safety
/// These are live: its SGE list, with IBV_SEND_INLINE the memory it names, for a bind its window
/// and region (ours), the queue pair, and the address handle of a SEND over UD (ours).
unsafe fn send_one(
    posting: &mut Posting<'_>,
    wr: &ibv_send_wr,
    transport: Transport,
    qp: *mut ibv_qp,
) -> Result<(), PostError> {
    // SAFETY: by contract.
    let short = || unsafe { short_write(wr) };
    if !has_remote(transport)
        && let Some(request) = short()
    {
        return posting.send(&request);
    }
    // SAFETY: by contract.
    let operation = unsafe { operation_of(wr) }?;
    let remote = match (transport, operation) {
        (Transport::Rc | Transport::Uc, _) => None,
        // SAFETY: by contract; a queue pair's domain never changes.
        (Transport::Ud, Operation::Send { .. }) => Some(Remote::Datagram(unsafe { destination_of(wr, (*qp).pd) }?)),
        // Its union holds another member than an address handle.
        (Transport::Ud, _) => return Err(PostError::Invalid),
        // SAFETY: plain data, which the caller has filled for XRC (man page).
        (Transport::Xrc, _) => Some(remote_srq(unsafe { wr.qp_type.xrc.remote_srqn })),
    };
    // A local request has no payload: its SGE list is ignored.
    let count = if operation.is_local() { 0 } else { wr.num_sge };
    // SAFETY: by contract.
    let list = unsafe { elements(wr.sg_list, count) }?;
    let mut post = |payload: Payload<'_>| {
        let request = SendRequest {
            wr_id: wr.wr_id,
            operation,
            payload,
            signaled: wr.send_flags & IBV_SEND_SIGNALED != 0,
            fence: wr.send_flags & IBV_SEND_FENCE != 0,
            solicited: wr.send_flags & IBV_SEND_SOLICITED != 0,
        };
        match &remote {
            None => posting.send(&request),
            Some(to) => posting.send_to(&request, to),
        }
    };
    let inline = wr.send_flags & IBV_SEND_INLINE != 0 && !operation.is_local();
    match list {
        [one] if !inline => post(Payload::Gather(&[to_sge(one)])),
        // SAFETY: by contract, and not modified during the call.
        [one] if one.length as usize <= MAX_INLINE => post(Payload::Inline(unsafe { bytes_of(one) })),
        // SAFETY: by contract.
        list => unsafe { post_elements(list, inline, &mut post) },
    }
}

/// The most frequent request, a WRITE of one inline element: with its kind known here, the tests of
/// it further on fold.
///
/// # Safety
/// Its SGE list is live, and with IBV_SEND_INLINE the memory it names.
#[inline(always)]
unsafe fn short_write(wr: &ibv_send_wr) -> Option<SendRequest<'_>> {
    if wr.opcode != IBV_WR_RDMA_WRITE || wr.num_sge != 1 || wr.send_flags & IBV_SEND_INLINE == 0 {
        return None;
    }
    // SAFETY: by contract; the caller has filled the member of the union for the opcode (man page).
    let (one, target) = unsafe { (wr.sg_list.as_ref()?, wr.wr.rdma) };
    if one.length as usize > MAX_INLINE {
        return None;
    }
    Some(SendRequest {
        wr_id: wr.wr_id,
        operation: Operation::Write {
            addr: target.remote_addr,
            rkey: RKey(target.rkey),
            imm: None,
        },
        // SAFETY: by contract, and not modified during the call.
        payload: Payload::Inline(unsafe { bytes_of(one) }),
        signaled: wr.send_flags & IBV_SEND_SIGNALED != 0,
        fence: wr.send_flags & IBV_SEND_FENCE != 0,
        solicited: wr.send_flags & IBV_SEND_SOLICITED != 0,
    })
}

/// Posts a payload of any number of elements. Not inlined: its arrays are large.
///
/// # Safety
/// The memory that the elements of an `inline` payload name is live.
#[inline(never)]
unsafe fn post_elements(
    list: &[ibv_sge],
    inline: bool,
    post: &mut dyn FnMut(Payload<'_>) -> Result<(), PostError>,
) -> Result<(), PostError> {
    if !inline {
        return with_sges(list, |sges| post(Payload::Gather(sges)));
    }
    // Refused before it is read: the engine checks only the queue pair's own limit.
    if list.iter().map(|element| u64::from(element.length)).sum::<u64>() > MAX_INLINE as u64 {
        return Err(PostError::Invalid);
    }
    let mut gathered = [0; MAX_INLINE];
    let mut len = 0;
    for element in list {
        // SAFETY: by contract, and not modified during the call.
        let bytes = unsafe { bytes_of(element) };
        gathered[len..len + bytes.len()].copy_from_slice(bytes);
        len += bytes.len();
    }
    post(Payload::Inline(&gathered[..len]))
}

/// # Safety
/// It is readable and unchanged for as long as the reference is used.
unsafe fn bytes_of<'a>(element: &ibv_sge) -> &'a [u8] {
    if element.length == 0 {
        return &[];
    }
    // The program cast its pointer to an integer for the C struct, which exposed its provenance.
    let start = std::ptr::with_exposed_provenance::<u8>(element.addr as usize);
    // SAFETY: by contract.
    unsafe { slice::from_raw_parts(start, element.length as usize) }
}

/// The path is copied: the handle may be destroyed once the request is posted.
///
/// # Safety
/// The request's address handle is null, or live and ours.
unsafe fn destination_of(wr: &ibv_send_wr, pd: *mut ibv_pd) -> Result<Destination, PostError> {
    // SAFETY: the union's members are plain data; SENDs of a UD queue pair use this one (man page).
    let ud = unsafe { wr.wr.ud };
    // SAFETY: by contract.
    let path = unsafe { address::path_of(ud.ah, pd) }.ok_or(PostError::Invalid)?;
    Ok(Destination {
        path,
        qpn: Qpn::new(ud.remote_qpn),
        qkey: ud.remote_qkey,
    })
}

/// # Safety
/// The window and the region of a bind are null, or live and ours.
unsafe fn operation_of(wr: &ibv_send_wr) -> Result<Operation, PostError> {
    // SAFETY: called for opcodes with immediate data only, for which the caller has filled it.
    let imm = || Some(u32::from_be(unsafe { wr.anon_1.imm_data }));
    // SAFETY: as above, for the opcodes that invalidate.
    let invalidated = || RKey(unsafe { wr.anon_1.invalidate_rkey });
    // A program need not initialise the member that its opcode does not use, so only the used one
    // is read. SAFETY: called for WRITE and READ only, for which the caller has filled it (man
    // page).
    let rdma = || unsafe { wr.wr.rdma };
    // SAFETY: as above, for the atomics.
    let atomic = || unsafe { wr.wr.atomic };
    let write = |imm| Operation::Write {
        addr: rdma().remote_addr,
        rkey: RKey(rdma().rkey),
        imm,
    };
    let on_word = |op| Operation::Atomic {
        addr: atomic().remote_addr,
        rkey: RKey(atomic().rkey),
        op,
    };
    Ok(match wr.opcode {
        IBV_WR_SEND => Operation::Send { imm: None },
        IBV_WR_SEND_WITH_IMM => Operation::Send { imm: imm() },
        IBV_WR_SEND_WITH_INV => Operation::SendInvalidate { rkey: invalidated() },
        IBV_WR_LOCAL_INV => Operation::Invalidate { rkey: invalidated() },
        IBV_WR_BIND_MW => {
            // SAFETY: filled by the caller for the opcode; window and region by contract.
            let bind = unsafe {
                window::posted_bind(
                    wr.anon_2.bind_mw.mw,
                    wr.anon_2.bind_mw.rkey,
                    &wr.anon_2.bind_mw.bind_info,
                )
            };
            Operation::Bind(bind?)
        }
        IBV_WR_RDMA_WRITE => write(None),
        IBV_WR_RDMA_WRITE_WITH_IMM => write(imm()),
        IBV_WR_RDMA_READ => Operation::Read {
            addr: rdma().remote_addr,
            rkey: RKey(rdma().rkey),
        },
        IBV_WR_ATOMIC_CMP_AND_SWP => on_word(AtomicOp::CompareSwap {
            compare: atomic().compare_add,
            swap: atomic().swap,
        }),
        IBV_WR_ATOMIC_FETCH_AND_ADD => on_word(AtomicOp::FetchAdd {
            add: atomic().compare_add,
        }),
        _ => return Err(PostError::Invalid),
    })
}
