//! Memory windows by the safe API on soft devices, both ends in this process, by both backends:
//! bound memory can be accessed by the peer, with the bound rights and until it is unbound.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Once;
use std::time::{Duration, Instant};

use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_verbs::{
    All, Backend, BoundWindow, Buffer, Completion, CompletionQueue, Context, Key, Library, Local, MemoryWindow,
    PreparedQueuePair, ProtectionDomain, QueuePair, QueuePairBuilder, Rc, Read, Reclaim, Remote, Status, Success,
    Type1, Windowed, Write,
};

/// Longer than any step takes, on a busy machine too.
const TIMEOUT: Duration = Duration::from_secs(60);
const LEN: usize = 8192;

/// Device `soft0` or `soft1`, on an address of this process's own.
fn open(n: u8) -> Context {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let [_, _, high, low] = std::process::id().to_be_bytes();
        let device = |n: u8| DeviceConfig {
            address: Some(IpAddr::V4(Ipv4Addr::new(127, 96 + high % 64, low, 1 + n))),
            ..DeviceConfig::new(format!("soft{n}"))
        };
        configure(vec![device(0), device(1)]).unwrap();
    });
    Library::new(api()).open(&format!("soft{n}")).unwrap()
}

/// One end of a connection.
struct End<B: Backend> {
    qp: QueuePair<Rc, B>,
    cq: CompletionQueue,
    pd: ProtectionDomain,
}

type Prepare<B> = for<'a> fn(QueuePairBuilder<'a>) -> PreparedQueuePair<Rc, B>;

fn connected<B: Backend>(prepare: Prepare<B>) -> (End<B>, End<B>) {
    let side = |n| {
        let context = open(n);
        let pd = context.protection_domain().unwrap();
        let cq = context.completion_queue(32).unwrap();
        let builder = pd.queue_pair(&cq).send_depth(16).recv_depth(16).max_inline(64);
        let prepared = prepare(builder.allow_remote_read().allow_remote_write().allow_remote_atomic());
        (prepared, cq, pd)
    };
    let ((qp_a, cq_a, pd_a), (qp_b, cq_b, pd_b)) = (side(0), side(1));
    let (to_a, to_b) = (qp_a.endpoint(), qp_b.endpoint());
    let (qp_a, qp_b) = (qp_a.connect(&to_b).unwrap(), qp_b.connect(&to_a).unwrap());
    let a = End {
        qp: qp_a,
        cq: cq_a,
        pd: pd_a,
    };
    let b = End {
        qp: qp_b,
        cq: cq_b,
        pd: pd_b,
    };
    (a, b)
}

impl<B: Backend> End<B> {
    /// Passes the next completion to `take`.
    fn next<R>(&mut self, take: impl FnOnce(Completion<'_>) -> R) -> R {
        let start = Instant::now();
        loop {
            if let Some(done) = self.cq.poll().unwrap().next() {
                return take(done);
            }
            assert!(start.elapsed() < TIMEOUT, "no completion");
        }
    }

    fn inbox(&self) -> Buffer<Windowed> {
        self.pd.register(vec![0; LEN], Windowed).unwrap()
    }

    fn bind<K: Key>(
        &mut self,
        window: MemoryWindow,
        inbox: &Buffer<Windowed>,
        at: usize,
        len: usize,
        key: K,
    ) -> BoundWindow<K> {
        self.qp.bind(window, inbox, at..at + len, key).unwrap();
        self.next(|mut done| {
            assert_eq!(done.result().unwrap(), Success::Bind);
            done.take_bound_window().unwrap()
        })
    }

    /// Writes as the peer; returns the result.
    fn write(&mut self, bytes: Vec<u8>, to: Remote<Write>) -> Result<(), Status> {
        let buffer = self.pd.register(bytes, Local).unwrap();
        self.qp.post(|batch| drop(batch.write(buffer, to).signalled())).unwrap();
        self.next(|done| done.result().map(drop).map_err(|failure| failure.status))
    }
}

/// The key as the peer decodes it.
fn decoded<K: Key>(key: Remote<K>) -> Remote<K> {
    Remote::from_bytes(&key.to_bytes()).unwrap()
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + 3) as u8).collect()
}

fn bytes(inbox: &Buffer<Windowed>) -> Vec<u8> {
    let mut all = vec![0; LEN];
    inbox.read_at(0, &mut all);
    all
}

fn a_peer_reaches_what_is_bound<B: Backend>(prepare: Prepare<B>) {
    let (mut peer, mut owner) = connected(prepare);
    let mut inbox = owner.inbox();
    let window = owner.bind(owner.pd.memory_window().unwrap(), &inbox, 1001, 5000, All);
    let remote = decoded(window.remote());
    let write = Remote::<Write>::from_bytes(&remote.to_bytes()).unwrap();
    peer.write(pattern(5000), write).unwrap();
    let mut wanted = vec![0; LEN];
    wanted[1001..6001].copy_from_slice(&pattern(5000));
    assert_eq!(bytes(&inbox), wanted);
    inbox.store_u64(1008, 41, std::sync::atomic::Ordering::Release);
    let word = peer.pd.register(vec![0_u8; 8], Local).unwrap().into_word().unwrap();
    peer.qp
        .post(|batch| drop(batch.fetch_add(word, remote.word(7).unwrap(), 1).signalled()))
        .unwrap();
    assert_eq!(peer.next(|mut done| done.take_word().unwrap().get()), 41);
    let into = peer.pd.register(vec![0_u8; 5000], Local).unwrap();
    peer.qp
        .post(|batch| drop(batch.read(into, remote).signalled()))
        .unwrap();
    let read: Buffer = peer.next(|mut done| done.take().unwrap());
    assert_eq!(&read[7..15], 42_u64.to_ne_bytes());
    assert_eq!((&read[..7], &read[15..]), (&pattern(5000)[..7], &pattern(5000)[15..]));
}

fn a_window_taken_away<B: Backend>(prepare: Prepare<B>) {
    let (mut peer, mut owner) = connected(prepare);
    let inbox = owner.inbox();
    let mut window = owner.pd.memory_window().unwrap();
    // Rebound, each time with a new key.
    let mut former = None;
    for round in 0..3_u8 {
        let bound = owner.bind(window, &inbox, 64, 64, Write);
        assert_ne!(former.replace(bound.rkey()), Some(bound.rkey()));
        peer.write(vec![round; 64], decoded(bound.remote())).unwrap();
        assert_eq!(bytes(&inbox)[64..128], [round; 64]);
        owner.qp.invalidate(bound).unwrap();
        window = owner.next(|mut done| {
            assert_eq!(done.result().unwrap(), Success::Invalidate);
            done.take_window().unwrap()
        });
    }
    let bound = owner.bind(window, &inbox, 64, 64, Write);
    let key = decoded(bound.remote());
    drop(bound);
    assert_eq!(peer.write(vec![9; 8], key), Err(Status::RemoteAccess));
    assert_eq!(bytes(&inbox)[64..128], [2; 64]);
}

fn the_peer_takes_the_key_away<B: Backend>(prepare: Prepare<B>) {
    let (mut peer, mut owner) = connected(prepare);
    let inbox = owner.inbox();
    let bound = owner.bind(owner.pd.memory_window().unwrap(), &inbox, 0, 64, Write);
    let key = decoded(bound.remote());
    let receive = owner.pd.register(vec![0_u8; 64], Local).unwrap();
    owner.qp.receive(receive).unwrap();
    let bytes_of_it = vec![5_u8; 64];
    let buffer = peer.pd.register(bytes_of_it, Local).unwrap();
    peer.qp
        .post(|batch| {
            batch.write(buffer, key);
            batch.send_inline_with_invalidate(b"done", key.rkey()).signalled();
        })
        .unwrap();
    let invalidated = owner.next(|mut done| {
        assert_eq!(done.result().unwrap(), Success::Receive { len: 4, imm: None });
        assert_eq!(
            &done.take::<Local>().unwrap_or_else(|| panic!("no buffer"))[..4],
            b"done"
        );
        done.invalidated().unwrap()
    });
    assert_eq!(bytes(&inbox)[..64], [5; 64]);
    let window = bound.invalidated(invalidated).unwrap();
    // The completions of the WRITE and the SEND.
    peer.next(|done| done.result().map(drop)).unwrap();
    peer.next(|done| done.result().map(drop)).unwrap();
    // The window can be bound again, and the former key is invalid.
    let again = owner.bind(window, &inbox, 0, 64, Write);
    peer.write(vec![6; 64], decoded(again.remote())).unwrap();
    assert_eq!(peer.write(vec![7; 64], key), Err(Status::RemoteAccess));
    assert_eq!(bytes(&inbox)[..64], [6; 64]);
}

fn type_1<B: Backend>(prepare: Prepare<B>) {
    let (mut peer, mut owner) = connected(prepare);
    let inbox = owner.inbox();
    let window = owner.pd.memory_window_type_1().unwrap();
    owner.qp.bind_type_1(window, &inbox, ..64, Write).unwrap();
    let bound = owner.next(|mut done| done.take_bound_window::<Write, Type1>().unwrap());
    let key = decoded(bound.remote());
    peer.write(vec![1; 64], key).unwrap();
    owner.qp.unbind_type_1(bound).unwrap();
    let window = owner.next(|mut done| done.take_window::<Type1>().unwrap());
    assert_eq!(peer.write(vec![2; 64], key), Err(Status::RemoteAccess));
    assert_eq!(bytes(&inbox)[..64], [1; 64]);
    drop(window);
}

fn regions_and_queue_pairs_go_in_order<B: Backend>(prepare: Prepare<B>) {
    let (_peer, mut owner) = connected(prepare);
    let inbox = owner.inbox();
    let bound = owner.bind(owner.pd.memory_window().unwrap(), &inbox, 0, 64, Read);
    // The window holds the region until it is dropped.
    let Err(Reclaim::Shared(inbox)) = inbox.into_memory() else {
        panic!("the region is deregistered under a window");
    };
    drop(owner.qp);
    drop(bound);
    inbox.into_memory().unwrap();
}

fn a_bad_binding_costs_the_queue_pair_and_the_window<B: Backend>(prepare: Prepare<B>) {
    let (_peer, mut owner) = connected(prepare);
    let inbox = owner.inbox();
    // Of a protection domain other than the queue pair's.
    let other = owner.pd.context().protection_domain().unwrap();
    let elsewhere = other.register(vec![0; 64], Windowed).unwrap();
    owner
        .qp
        .bind(other.memory_window().unwrap(), &elsewhere, .., Read)
        .unwrap();
    let failed = owner.next(|mut done| {
        assert!(done.take_bound_window::<Read, doorbell_verbs::Type2>().is_none());
        done.result().unwrap_err().status
    });
    assert_eq!(failed, Status::WindowBind);
    elsewhere.into_memory().unwrap();
    inbox.into_memory().unwrap();
}

macro_rules! by_both_backends {
    ($($name:ident),*) => { $(
        mod $name {
            #[test]
            fn by_post_lists() {
                super::$name(|builder| builder.rc().unwrap());
            }

            #[test]
            fn by_work_requests() {
                super::$name(|builder| builder.work_requests().rc().unwrap());
            }
        }
    )* };
}

by_both_backends!(
    a_peer_reaches_what_is_bound,
    a_window_taken_away,
    the_peer_takes_the_key_away,
    type_1,
    regions_and_queue_pairs_go_in_order,
    a_bad_binding_costs_the_queue_pair_and_the_window
);
