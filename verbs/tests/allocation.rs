//! Posting, receiving and polling neither allocate nor free: counted by an allocator per thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use doorbell_verbs::{Buffer, CompletionQueue, PostError, QueuePair, ReliableConnection, Remote, WriteAccess};
use doorbell_verbs_sys::IBV_WC_RECV;

use crate::rig::{TestBackend, TestCq, over_all_kinds, rig_of};
use crate::stub::Stub;

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
    static PAUSED: Cell<bool> = const { Cell::new(false) };
}

struct Counting;

fn count() {
    // An exiting thread has no counter, and runs no test.
    let _ = PAUSED.try_with(|paused| {
        if !paused.get() {
            let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
        }
    });
}

// SAFETY: the system's allocator does all the work; counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: by contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count();
        // SAFETY: by contract.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: by contract.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Excludes this thread's allocations: the provider's records are not the crate's.
pub(crate) struct ProviderScope(bool);

impl ProviderScope {
    pub(crate) fn begin() -> Self {
        Self(PAUSED.replace(true))
    }
}

impl Drop for ProviderScope {
    fn drop(&mut self) {
        PAUSED.set(self.0);
    }
}

pub(crate) fn calls_in(what: impl FnOnce()) -> u64 {
    let before = CALLS.get();
    what();
    CALLS.get() - before
}

#[test]
fn the_allocator_counts() {
    assert_eq!(calls_in(|| drop(std::hint::black_box(Box::new(1_u64)))), 2);
    let paused = calls_in(|| {
        let _provider = ProviderScope::begin();
        drop(std::hint::black_box(Box::new(1_u64)));
    });
    assert_eq!(paused, 0);
}

const DEPTH: u32 = 32;
const BATCH: usize = 16;

fn round<B: TestBackend, Q: TestCq>(
    stub: &'static Stub,
    qp: &mut QueuePair<ReliableConnection, B>,
    cq: &mut CompletionQueue<Q>,
    pool: &mut Vec<Buffer>,
) {
    let remote: Remote<WriteAccess> = Remote::from_raw(0x1000, 7, 4096);
    let posted: Result<(), PostError> = (|| {
        qp.write(pool.pop().unwrap(), remote)?;
        qp.write_inline(&[7; 16], remote)?;
        qp.send_inline(&[])?;
        qp.post(|batch| {
            for buffer in pool.drain(..BATCH) {
                batch.write(buffer, remote);
            }
            batch.send_gather([pool.pop().unwrap(), pool.pop().unwrap()]).signaled();
        })?;
        qp.receive(pool.pop().unwrap())?;
        qp.post_receives(|batch| {
            for buffer in pool.drain(..BATCH - 1) {
                batch.receive(buffer);
            }
        })
    })();
    posted.unwrap();
    {
        let _provider = ProviderScope::begin();
        stub.complete_sends(qp.qpn().get(), usize::MAX);
        for _ in 0..BATCH {
            stub.complete_receive(qp.qpn().get(), IBV_WC_RECV, 64, None);
        }
    }
    cq.poll().unwrap().for_each(|mut done| {
        assert!(done.is_ok());
        while let Some(buffer) = done.take() {
            pool.push(buffer);
        }
    });
}

over_all_kinds! { neither_posting_nor_polling_allocates }

fn neither_posting_nor_polling_allocates<B: TestBackend, Q: TestCq>() {
    let stub = Stub::new();
    let buffers = 64;
    let (mut qp, mut cq, mut pool) = rig_of::<B, Q>(stub, DEPTH, buffers);
    // The first completion of a queue pair puts it in the poller's table.
    round(stub, &mut qp, &mut cq, &mut pool);
    // Many times round the rings, so that the slow path of finding free slots is taken too.
    for number in 0..100 {
        let calls = calls_in(|| round(stub, &mut qp, &mut cq, &mut pool));
        assert_eq!(calls, 0, "calls of the allocator in round {number}");
    }
    assert_eq!(
        pool.len(),
        buffers,
        "every round ends with a signaled request, which gives all buffers back"
    );
}
