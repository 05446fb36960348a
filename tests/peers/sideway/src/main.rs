//! The column `sideway`: its guards post and its pollers drain; the accounting is the user's work.

use std::error::Error;
use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Arc;

use doorbell_peer_common::{BATCH, BYTES, Buffer, DEPTH, Queue, RECEIVE, Remote};
use sideway::ibverbs::AccessFlags;
use sideway::ibverbs::completion::{
    BasicCompletionQueue, ExtendedCompletionQueue, GenericCompletionQueue, PollCompletionQueueError,
    WorkCompletionStatus,
};
use sideway::ibverbs::device::DeviceList;
use sideway::ibverbs::memory_region::MemoryRegion;
use sideway::ibverbs::queue_pair::{
    BasicQueuePair, ExtendedQueuePair, PostSendGuard, QueuePair, SendOperationFlags, SetInlineData,
    SetScatterGatherEntry, WorkRequestFlags,
};

/// By its own type: sideway's enum of both would cost a branch for each call.
enum Completions {
    Basic(Arc<BasicCompletionQueue>),
    Extended(Arc<ExtendedCompletionQueue>),
}

enum Posting {
    Basic(BasicQueuePair),
    Extended(ExtendedQueuePair),
}

struct Accounting {
    sends: Queue<&'static Buffer>,
    receives: Queue<&'static Buffer>,
    pool: Vec<&'static Buffer>,
}

impl Accounting {
    #[inline]
    fn flags(&mut self) -> WorkRequestFlags {
        if self.sends.is_signaled() {
            WorkRequestFlags::Signaled
        } else {
            WorkRequestFlags::none()
        }
    }

    #[inline]
    fn retire(&mut self, wr_id: u64) {
        let queue = if wr_id & RECEIVE == 0 {
            &mut self.sends
        } else {
            &mut self.receives
        };
        queue.retire(wr_id as u32, &mut self.pool);
    }
}

#[inline(never)]
fn measure_write<Q: QueuePair>(qp: &mut Q, own: &mut Accounting, buffer: &'static Buffer, remote: &Remote) -> bool {
    if !own.sends.has_room(1) {
        return false;
    }
    let flags = own.flags();
    let wr_id = own.sends.put(Some(buffer));
    let mut guard = qp.start_post_send();
    let request = guard.construct_wr(wr_id, flags).setup_write(remote.rkey, remote.addr);
    // SAFETY: the memory is registered and lives as long as the program.
    unsafe { request.setup_sge(buffer.lkey, buffer.addr, buffer.length) };
    guard.post().is_ok()
}

#[inline(never)]
fn measure_inline<Q: QueuePair>(qp: &mut Q, own: &mut Accounting, bytes: &[u8], remote: &Remote) -> bool {
    if !own.sends.has_room(1) {
        return false;
    }
    let flags = own.flags() | WorkRequestFlags::Inline;
    let wr_id = own.sends.put(None);
    let mut guard = qp.start_post_send();
    let request = guard.construct_wr(wr_id, flags).setup_write(remote.rkey, remote.addr);
    request.setup_inline_data(bytes);
    guard.post().is_ok()
}

#[inline(never)]
fn measure_batch<Q: QueuePair>(qp: &mut Q, own: &mut Accounting, remote: &Remote) -> bool {
    if !own.sends.has_room(BATCH) {
        return false;
    }
    let mut guard = qp.start_post_send();
    for _ in 0..BATCH {
        let Some(buffer) = own.pool.pop() else { return false };
        let flags = own.flags();
        let wr_id = own.sends.put(Some(buffer));
        let request = guard.construct_wr(wr_id, flags).setup_write(remote.rkey, remote.addr);
        // SAFETY: the memory is registered and lives as long as the program.
        unsafe { request.setup_sge(buffer.lkey, buffer.addr, buffer.length) };
    }
    guard.post().is_ok()
}

#[inline(never)]
fn measure_receive<Q: QueuePair>(qp: &mut Q, own: &mut Accounting, buffer: &'static Buffer) -> bool {
    if !own.receives.has_room(1) {
        return false;
    }
    let wr_id = RECEIVE | own.receives.put(Some(buffer));
    let mut guard = qp.start_post_recv();
    let request = guard.construct_wr(wr_id);
    // SAFETY: the memory is registered and lives as long as the program.
    unsafe { request.setup_sge(buffer.lkey, buffer.addr, buffer.length) };
    guard.post().is_ok()
}

#[inline(never)]
fn measure_list<Q: QueuePair>(qp: &mut Q, own: &mut Accounting) -> bool {
    if !own.receives.has_room(BATCH) {
        return false;
    }
    let mut guard = qp.start_post_recv();
    for _ in 0..BATCH {
        let Some(buffer) = own.pool.pop() else { return false };
        let wr_id = RECEIVE | own.receives.put(Some(buffer));
        let request = guard.construct_wr(wr_id);
        // SAFETY: the memory is registered and lives as long as the program.
        unsafe { request.setup_sge(buffer.lkey, buffer.addr, buffer.length) };
    }
    guard.post().is_ok()
}

#[inline(never)]
fn measure_drain(cq: &BasicCompletionQueue, own: &mut Accounting) -> bool {
    match cq.start_poll() {
        Ok(completions) => {
            for done in completions {
                if done.status() != WorkCompletionStatus::Success as u32 {
                    return false;
                }
                own.retire(done.wr_id());
            }
            true
        }
        Err(error) => matches!(error, PollCompletionQueueError::CompletionQueueEmpty),
    }
}

#[inline(never)]
fn measure_drain_ex(cq: &ExtendedCompletionQueue, own: &mut Accounting) -> bool {
    match cq.start_poll() {
        Ok(completions) => {
            for done in completions {
                if done.status() != WorkCompletionStatus::Success as u32 {
                    return false;
                }
                own.retire(done.wr_id());
            }
            true
        }
        Err(error) => matches!(error, PollCompletionQueueError::CompletionQueueEmpty),
    }
}

fn post<Q: QueuePair>(qp: &mut Q, own: &mut Accounting, row: &str) -> bool {
    let remote = black_box(&Remote {
        addr: 0x10000,
        rkey: 0x4321,
    });
    let bytes = black_box(&[0_u8; BATCH]);
    match row.trim_end_matches("_wr").trim_end_matches("_ex") {
        "write" => own
            .pool
            .pop()
            .is_some_and(|buffer| measure_write(qp, own, buffer, remote)),
        "receive" => own.pool.pop().is_some_and(|buffer| measure_receive(qp, own, buffer)),
        "inline" => measure_inline(qp, own, bytes, remote),
        "batch" => measure_batch(qp, own, remote),
        "list" | "drain" => measure_list(qp, own),
        _ => false,
    }
}

struct Peer {
    qp: Posting,
    cq: Completions,
    accounting: Accounting,
    _region: Arc<MemoryRegion>,
}

impl doorbell_peer_common::Peer for Peer {
    fn lacks(_row: &str) -> Option<&'static str> {
        None
    }

    fn open(row: &str) -> Result<Self, Box<dyn Error>> {
        let devices = DeviceList::new()?;
        let context = devices.get(0).ok_or("no device")?.open()?;
        let pd = context.alloc_pd()?;
        let memory = Box::leak(Box::new([0_u8; 2 * DEPTH as usize * BYTES]));
        // SAFETY: the memory lives as long as the program.
        let region = unsafe { pd.reg_mr(memory.as_ptr() as usize, memory.len(), AccessFlags::LocalWrite)? };
        let mut queues = context.create_cq_builder();
        queues.setup_cqe(2 * DEPTH);
        let (cq, generic) = if row.ends_with("_ex") {
            let cq = queues.build_ex()?;
            (Completions::Extended(cq.clone()), GenericCompletionQueue::from(cq))
        } else {
            let cq = queues.build()?;
            (Completions::Basic(cq.clone()), GenericCompletionQueue::from(cq))
        };
        let mut pairs = pd.create_qp_builder();
        pairs
            .setup_max_send_wr(DEPTH)
            .setup_max_recv_wr(DEPTH)
            .setup_max_inline_data(BYTES as u32)
            .setup_send_cq(generic.clone())
            .setup_recv_cq(generic)
            .setup_send_ops_flags(SendOperationFlags::Write);
        let qp = if row.ends_with("_wr") {
            Posting::Extended(pairs.build_ex()?)
        } else {
            Posting::Basic(pairs.build()?)
        };
        Ok(Self {
            qp,
            cq,
            accounting: Accounting {
                sends: Queue::default(),
                receives: Queue::default(),
                pool: Buffer::pool(memory.as_mut_ptr(), region.lkey()),
            },
            _region: region,
        })
    }

    fn post(&mut self, row: &str) -> bool {
        match &mut self.qp {
            Posting::Basic(qp) => post(qp, &mut self.accounting, row),
            Posting::Extended(qp) => post(qp, &mut self.accounting, row),
        }
    }

    fn drain(&mut self) -> bool {
        match &self.cq {
            Completions::Basic(cq) => measure_drain(cq, &mut self.accounting),
            Completions::Extended(cq) => measure_drain_ex(cq, &mut self.accounting),
        }
    }
}

fn main() -> ExitCode {
    doorbell_peer_common::main::<Peer>()
}
