//! Stream-ordered posting, on the soft device and the stand-in for a GPU.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Once;
use std::sync::atomic::Ordering;
use std::time::Duration;

use doorbell_cuda::{CaptureMode, Context as CudaContext, Event, HostMemory, Memory as _, Stream, WaitCondition};
use doorbell_cuda_standin::{ExecutionMode, Standin};
use doorbell_gpudirect::proxy::IdlePolicy;
use doorbell_gpudirect::stream::{StreamError, StreamQueue};
use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_verbs::{
    Buffer, CompletionQueue, Library, Local, PeerWrite, ProtectionDomain, QueuePair, Remote, WriteAccess,
};

const TIMEOUT: Option<Duration> = Some(Duration::from_secs(120));

struct Pair {
    pd: ProtectionDomain,
    inbox: Buffer<PeerWrite>,
    _peer: (QueuePair, CompletionQueue),
}

impl Pair {
    fn new() -> (Self, QueuePair, CompletionQueue) {
        Self::with(true)
    }

    fn with(signal_all: bool) -> (Self, QueuePair, CompletionQueue) {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            let [_, _, high, low] = std::process::id().to_be_bytes();
            let mut config = DeviceConfig::new("soft0");
            config.address = Some(IpAddr::V4(Ipv4Addr::new(127, 190 + high % 32, low, 2)));
            configure(vec![config]).unwrap();
        });
        let device = Library::new(api()).open("soft0").unwrap();
        let pd = device.protection_domain().unwrap();
        let (cq, other) = (
            device.completion_queue(64).unwrap(),
            device.completion_queue(64).unwrap(),
        );
        let builder = pd.queue_pair(&cq).max_send_wr(8).max_recv_wr(1).max_inline_data(8);
        let one = if signal_all { builder.signal_all() } else { builder }.rc().unwrap();
        let two = pd
            .queue_pair(&other)
            .max_send_wr(8)
            .max_recv_wr(1)
            .allow_remote_write()
            .rc()
            .unwrap();
        let (to, from) = (two.endpoint(), one.endpoint());
        let inbox = pd.register(vec![0; 4096], PeerWrite).unwrap();
        let pair = Self {
            pd: pd.clone(),
            inbox,
            _peer: (two.connect(&from).unwrap(), other),
        };
        (pair, one.connect(&to).unwrap(), cq)
    }

    fn word(&self, at: u64) -> Remote<WriteAccess> {
        self.inbox.remote().slice(at * 8, 8).unwrap()
    }

    fn value(&self, at: usize) -> u64 {
        self.inbox.load_u64(at * 8, Ordering::Acquire)
    }

    fn buffer(&self, value: u64) -> Buffer<Local> {
        self.pd.register(value.to_ne_bytes().to_vec(), Local).unwrap()
    }
}

fn context(standin: &Standin) -> CudaContext {
    standin.driver().unwrap().device(0).unwrap().context().unwrap()
}

fn gate(context: &CudaContext, stream: &Stream) -> HostMemory {
    let gate = HostMemory::alloc(context, 8).unwrap();
    stream.wait_value64(gate.all(), WaitCondition::Equal(1)).unwrap();
    gate
}

fn open(gate: &HostMemory) {
    gate.atomic_u64(0).unwrap().store(1, Ordering::Release);
}

#[test]
fn posts_wait_for_streams_and_streams_for_posts() {
    let standin = Standin::load(ExecutionMode::Prompt);
    let context = context(&standin);
    let (pair, qp, cq) = Pair::new();
    let (queue, mut poster) = StreamQueue::without_thread(&context, qp, cq).unwrap();
    let (stream, behind) = (Stream::new(&context).unwrap(), Stream::new(&context).unwrap());
    let closed = gate(&context, &stream);
    let (buffer, to) = (pair.buffer(77), pair.word(0));
    let posted = queue.post_after(&stream, move |batch| {
        batch.write(buffer, to);
    });
    let posted = posted.unwrap();
    let after = HostMemory::alloc(&context, 8).unwrap();
    posted.enqueue_wait(&behind).unwrap();
    behind.write_value64(after.all(), 1).unwrap();

    for _ in 0..100 {
        assert!(!poster.progress(), "the stream has not come so far");
    }
    assert!(!posted.is_complete());
    assert!(!behind.is_idle().unwrap());
    open(&closed);
    while !posted.is_complete() {
        poster.progress();
    }
    behind.synchronize().unwrap();
    assert_eq!(after.atomic_u64(0).unwrap().load(Ordering::Acquire), 1);
    assert_eq!(pair.value(0), 77);
    let mut buffers = posted.finish(TIMEOUT).unwrap();
    assert_eq!(buffers.len(), 1);
    assert!(buffers[0].take::<Local>().is_some());
    assert_eq!(queue.failure(), None);
    drop((stream, behind, after, closed, queue, poster));
    context.reap();
}

#[test]
fn posts_wait_for_events_in_their_order() {
    let standin = Standin::load(ExecutionMode::Prompt);
    let context = context(&standin);
    let (pair, qp, cq) = Pair::new();
    let queue = StreamQueue::spawn(&context, qp, cq, IdlePolicy::default()).unwrap();
    let stream = Stream::new(&context).unwrap();
    let never = Event::new(&context).unwrap();
    let (event, to) = (Event::new(&context).unwrap(), pair.word(0));
    let closed = gate(&context, &stream);
    stream.record(&event).unwrap();
    let write = |value: u64| {
        let buffer = pair.buffer(value);
        move |batch: &mut doorbell_verbs::Batch<'_, 'static>| {
            batch.write(buffer, to);
        }
    };
    // The first has nothing to wait for, the second blocks the third.
    let first = queue.post_after(&never, write(1)).unwrap();
    let (second, third) = (
        queue.post_after(&event, write(2)).unwrap(),
        queue.post_after(&never, write(3)).unwrap(),
    );
    drop(first.finish(TIMEOUT).unwrap());
    assert_eq!(pair.value(0), 1);
    assert!(!second.is_complete() && !third.is_complete());
    open(&closed);
    third.finish(TIMEOUT).unwrap();
    assert!(second.is_complete());
    assert_eq!(pair.value(0), 3);
}

/// More than the queue pair and the words can hold, in a chain of posts and waits.
#[test]
fn long_chains() {
    let standin = Standin::load(ExecutionMode::Prompt);
    let context = context(&standin);
    let (pair, qp, cq) = Pair::new();
    let queue = StreamQueue::spawn(&context, qp, cq, IdlePolicy::default()).unwrap();
    let stream = Stream::new(&context).unwrap();
    let to = [pair.word(0), pair.word(1)];
    for value in 1u64..=600 {
        let buffers = [pair.buffer(value), pair.buffer(value)];
        let build = move |batch: &mut doorbell_verbs::Batch<'_, 'static>| {
            for (buffer, to) in buffers.into_iter().zip(to) {
                batch.write(buffer, to);
            }
        };
        let posted = queue.post_after(&stream, build).unwrap();
        posted.enqueue_wait(&stream).unwrap();
        if value % 200 == 0 {
            stream.synchronize().unwrap();
            assert_eq!((pair.value(0), pair.value(1)), (value, value));
            posted.finish(TIMEOUT).unwrap();
        }
    }
    let closed = gate(&context, &stream);
    let full = (0..).find_map(|_| queue.post_after(&stream, |_| {}).err()).unwrap();
    assert!(matches!(full, StreamError::Full));
    open(&closed);
    stream.synchronize().unwrap();
}

#[test]
fn graphs_post_each_time() {
    const TIMES: u64 = 100;
    let standin = Standin::load(ExecutionMode::Prompt);
    let context = context(&standin);
    let (pair, qp, cq) = Pair::new();
    let queue = StreamQueue::spawn(&context, qp, cq, IdlePolicy::default()).unwrap();
    let stream = Stream::new(&context).unwrap();
    let (to, mut time) = (pair.word(0), 0u64);
    let buffers = pair
        .pd
        .register_chunks(vec![0; 8 * TIMES as usize + 8], 8, Local)
        .unwrap();
    let mut buffers = buffers.map(move |mut buffer| {
        time += 1;
        buffer.copy_from_slice(&time.to_ne_bytes());
        buffer
    });
    let repeated = queue.repeated(move |batch| {
        if let Some(buffer) = buffers.next() {
            batch.write(buffer, to);
        }
    });
    let repeated = repeated.unwrap();
    // Nothing was posted, so there is nothing to wait for.
    repeated.enqueue_wait(&stream).unwrap();
    stream.synchronize().unwrap();
    let graph = stream.capture(CaptureMode::Relaxed, &[], || {
        assert!(matches!(queue.post_after(&stream, |_| {}), Err(StreamError::Capturing)));
        repeated.enqueue_post(&stream).unwrap();
        repeated.enqueue_wait(&stream).unwrap();
        Ok(())
    });
    let graph = graph.unwrap().instantiate().unwrap();
    stream.synchronize().unwrap();
    assert_eq!(pair.value(0), 0);
    for time in 1..=TIMES {
        graph.launch(&stream).unwrap();
        if time % 7 == 0 {
            stream.synchronize().unwrap();
            assert_eq!(pair.value(0), time);
        }
    }
    stream.synchronize().unwrap();
    assert_eq!(pair.value(0), TIMES);
    // Also without a graph, several at a time.
    repeated.enqueue_post(&stream).unwrap();
    repeated.enqueue_post(&stream).unwrap();
    repeated.enqueue_wait(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(pair.value(0), TIMES + 1);
    assert_eq!(repeated.failure(), None);
}

#[test]
fn failures_release_streams() {
    let standin = Standin::load(ExecutionMode::Prompt);
    let context = context(&standin);
    let stream = Stream::new(&context).unwrap();

    // Refused locally, refused by the peer, and failed because that broke the queue pair.
    let (pair, qp, cq) = Pair::new();
    let queue = StreamQueue::spawn(&context, qp, cq, IdlePolicy::default()).unwrap();
    let fine = pair.word(0);
    let wrong = Remote::<WriteAccess>::from_raw(fine.addr(), fine.rkey().0 ^ 0x5500, 8);
    let writes = |to: Remote<WriteAccess>, count: u64| {
        let buffers: Vec<_> = (0..count).map(|_| pair.buffer(5)).collect();
        move |batch: &mut doorbell_verbs::Batch<'_, 'static>| {
            buffers.into_iter().for_each(|buffer| {
                batch.write(buffer, to);
            });
        }
    };
    let posts = [(fine, 9, false), (fine, 1, true), (wrong, 1, false), (fine, 2, false)];
    let posts = posts.map(|(to, count, good)| (queue.post_after(&stream, writes(to, count)).unwrap(), good));
    posts
        .iter()
        .for_each(|(posted, _)| posted.enqueue_wait(&stream).unwrap());
    stream.synchronize().unwrap();
    for (index, (posted, good)) in posts.into_iter().enumerate() {
        let finished = posted.finish(TIMEOUT);
        assert_eq!(finished.is_ok(), good, "{index}: {finished:?}");
        assert!(good || matches!(finished, Err(StreamError::Failed(_))));
    }
    assert!(queue.failure().unwrap().to_string().contains("the queue is full"));
    let repeated = queue.repeated(move |batch| {
        batch.write_inline(&[7; 8], fine);
    });
    let repeated = repeated.unwrap();
    repeated.enqueue_post(&stream).unwrap();
    repeated.enqueue_wait(&stream).unwrap();
    stream.synchronize().unwrap();
    assert!(repeated.failure().is_some());

    // The queue is dropped while posts wait for a stream that waits for the posts.
    let (pair, qp, cq) = Pair::new();
    let queue = StreamQueue::spawn(&context, qp, cq, IdlePolicy::default()).unwrap();
    let (closed, other) = (gate(&context, &stream), Stream::new(&context).unwrap());
    let to = pair.word(0);
    let posted = queue.post_after(&stream, move |batch| {
        batch.write_inline(&[7; 8], to);
    });
    let posted = posted.unwrap();
    posted.enqueue_wait(&other).unwrap();
    drop(queue);
    other.synchronize().unwrap();
    assert!(matches!(posted.finish(TIMEOUT), Err(StreamError::Failed(_))));
    assert_eq!(pair.value(0), 0);
    open(&closed);
    stream.synchronize().unwrap();
}

#[test]
fn invalid_allocations_are_refused() {
    let standin = Standin::load(ExecutionMode::Prompt);
    let context = context(&standin);
    let (_pair, qp, cq) = Pair::with(false);
    assert!(matches!(
        StreamQueue::without_thread(&context, qp, cq),
        Err(StreamError::NotSignaled)
    ));
    let (_pair, qp, cq) = Pair::new();
    let (queue, poster) = StreamQueue::without_thread(&context, qp, cq).unwrap();
    let stream = Stream::new(&context).unwrap();
    let posted = queue.post_after(&stream, |_| {}).unwrap();
    let late = posted.finish(Some(Duration::from_millis(5))).unwrap_err();
    let StreamError::Timeout(posted) = late else {
        panic!("{late}")
    };
    drop(poster);
    assert!(posted.is_complete());
    assert!(matches!(queue.post_after(&stream, |_| {}), Err(StreamError::Gone)));
    assert!(matches!(queue.repeated(|_| {}), Err(StreamError::Gone)));
}
