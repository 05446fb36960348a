//! A proxy driven step by step, on queue pairs that the test connects itself.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use doorbell_cuda::DevicePtr;
use doorbell_gpudirect::proxy::{
    Connections, Descriptor, FailureCause, Operation, PeerMemory, Proxy, Queue, RankInfo, SignalOp, SignalUpdate,
};
use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_verbs::{Buffer, CompletionQueue, Library, PeerAll, QueuePair};

const TIMEOUT: Duration = Duration::from_secs(60);
const BYTES: usize = 4096;

/// One rank that is its own peer, with its memory.
struct World {
    proxy: Proxy,
    data: Arc<Buffer<PeerAll>>,
    signals: Arc<Buffer<PeerAll>>,
}

impl World {
    fn new() -> Self {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            let [_, _, high, low] = std::process::id().to_be_bytes();
            let mut config = DeviceConfig::new("soft0");
            config.address = Some(IpAddr::V4(Ipv4Addr::new(127, 190 + high % 32, low, 3)));
            configure(vec![config]).unwrap();
        });
        let device = Library::new(api()).open("soft0").unwrap();
        let pd = device.protection_domain().unwrap();
        let data: Vec<u8> = (0..BYTES).map(|at| at as u8).collect();
        let data = Arc::new(pd.register(data, PeerAll).unwrap());
        let signals = Arc::new(pd.register(doorbell_verbs::Memory::zeroed(64), PeerAll).unwrap());
        let cq = device.completion_queue(64).unwrap();
        let pair = |cq: &CompletionQueue| {
            let builder = pd.queue_pair(cq).max_send_wr(8).max_recv_wr(1).max_inline_data(8);
            builder
                .allow_remote_read()
                .allow_remote_write()
                .allow_remote_atomic()
                .rc()
                .unwrap()
        };
        let (one, two) = (pair(&cq), pair(&cq));
        let (to, from) = (two.endpoint(), one.endpoint());
        let (one, two): (QueuePair, QueuePair) = (one.connect(&to).unwrap(), two.connect(&from).unwrap());
        let memory = PeerMemory {
            data: data.remote(),
            signals: signals.remote(),
        };
        // SAFETY: the connections keep the buffer until their queue pairs are gone; the test reads
        // its bytes only when puts are complete.
        let local = unsafe { data.alias(..) };
        let keep = Box::new((two, Arc::clone(&data), Arc::clone(&signals)));
        let wire = Connections::new(&pd, cq, vec![(one, memory)], (local, BYTES as u64), keep).unwrap();
        Self {
            proxy: Proxy::new(wire),
            data,
            signals,
        }
    }

    fn drive(&mut self, queue: &Queue, until: u64) {
        let began = Instant::now();
        while queue.completed() < until {
            self.proxy.progress();
            assert!(began.elapsed() < TIMEOUT, "{} of {until}", queue.completed());
        }
    }

    fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.data.read_at(at, &mut bytes);
        bytes
    }

    fn signal(&self, number: usize) -> u64 {
        self.signals.load_u64(number * 8, std::sync::atomic::Ordering::Acquire)
    }
}

fn put(local: u64, remote: u64, len: u64, signaling: Option<SignalUpdate>) -> Descriptor {
    Descriptor {
        operation: Operation::Put(signaling),
        peer: 0,
        len,
        local,
        remote,
        id: 0,
    }
}

#[test]
fn step_by_step() {
    let mut world = World::new();
    let queue = world.proxy.queue(64);
    assert!(!world.proxy.progress(), "nothing was submitted");
    let add = |value| SignalUpdate {
        signal: 7,
        update: SignalOp::Add(value),
    };
    // More than the queue pair holds at once: the rest is consumed as slots become free.
    for round in 0..20u64 {
        let descriptor = put(round * 16, 2048 + round * 16, 16, Some(add(3)));
        assert!(queue.try_put(&descriptor).is_some());
    }
    assert_eq!((queue.completed(), world.signal(7)), (0, 0), "nothing goes by itself");
    world.drive(&queue, 20);
    assert_eq!(world.signal(7), 60);
    assert_eq!(world.bytes(2048, 320), world.bytes(0, 320));
    assert_eq!(queue.failure(), None);
    assert!(queue.quiet(Some(Duration::ZERO)).unwrap());
}

#[test]
fn invalid_descriptors_are_reported_and_skipped() {
    let mut world = World::new();
    let fine = put(0, 1024, 64, None);
    let signal = |signal| SignalUpdate {
        signal,
        update: SignalOp::Set(u64::MAX),
    };
    let cases = [
        (Descriptor { peer: 1, ..fine }, FailureCause::Peer),
        (put(BYTES as u64, 0, 1, None), FailureCause::Local),
        (put(0, BYTES as u64 - 1, 2, None), FailureCause::Remote),
        (put(0, 0, u64::MAX >> 8, None), FailureCause::Local),
        (put(0, 8, 8, Some(signal(8))), FailureCause::Signal),
        (put(0, 8, 8, Some(signal(u64::MAX >> 8))), FailureCause::Signal),
    ];
    for (descriptor, cause) in cases {
        let queue = world.proxy.queue(4);
        [fine, descriptor, put(0, 0, 0, Some(signal(7)))]
            .iter()
            .for_each(|one| assert!(queue.try_put(one).is_some()));
        world.drive(&queue, 3);
        let failed = queue.failure().unwrap();
        assert_eq!(failed.cause, cause, "{failed}");
        assert!(queue.put(&fine).is_err());
        // The signal behind it has arrived nevertheless, with all of its bits.
        assert_eq!(world.signal(7), u64::MAX);
    }
    assert_eq!(world.bytes(8, 8), (8..16).collect::<Vec<u8>>());
}

#[test]
fn stopping_the_proxy_releases_waits() {
    let world = World::new();
    let queue = world.proxy.queue(4);
    queue.put(&put(0, 1024, 64, None)).unwrap();
    let place = RankInfo {
        heap: DevicePtr(0),
        signals: DevicePtr(0),
        rank: 0,
        ranks: 1,
    };
    let kernels = world.proxy.kernel_queue(None, 4, place, Arc::new(())).unwrap();
    drop(world.proxy);
    assert_eq!(queue.quiet(Some(TIMEOUT)).unwrap_err().cause, FailureCause::Stopped);
    assert_eq!(kernels.failure().unwrap().cause, FailureCause::Stopped);
}
