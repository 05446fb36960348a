//! Memory windows by the safe API on soft devices, by both backends: access only to bound memory,
//! with the bound rights. The rest is in `verbs/tests/windows.rs`.

use std::time::{Duration, Instant};

use doorbell_tests::soft::open;
use doorbell_verbs::{
    AllAccess, Backend, BoundWindow, Buffer, Completion, CompletionQueue, CompletionStatus, KeyAccess, Local,
    MemoryWindow, PreparedQueuePair, ProtectionDomain, QueuePair, QueuePairBuilder, ReliableConnection, Remote,
    Success, Windowed, WriteAccess,
};

const TIMEOUT: Duration = Duration::from_secs(60);
const LEN: usize = 8192;

struct End<B: Backend> {
    qp: QueuePair<ReliableConnection, B>,
    cq: CompletionQueue,
    pd: ProtectionDomain,
}

type Prepare<B> = for<'a> fn(QueuePairBuilder<'a>) -> PreparedQueuePair<ReliableConnection, B>;

fn connected<B: Backend>(prepare: Prepare<B>) -> (End<B>, End<B>) {
    let side = |n| {
        let context = open(n);
        let pd = context.protection_domain().unwrap();
        let cq = context.completion_queue(32).unwrap();
        let builder = pd.queue_pair(&cq).max_send_wr(16).max_recv_wr(16).max_inline_data(64);
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

    fn bind<K: KeyAccess>(
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

    fn write(&mut self, bytes: Vec<u8>, to: Remote<WriteAccess>) -> Result<(), CompletionStatus> {
        let buffer = self.pd.register(bytes, Local).unwrap();
        self.qp.post(|batch| drop(batch.write(buffer, to).signaled())).unwrap();
        self.next(|done| done.result().map(drop).map_err(|failure| failure.status))
    }
}

/// The key as the peer decodes it.
fn decoded<K: KeyAccess>(key: Remote<K>) -> Remote<K> {
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

fn a_peer_accesses_bound_memory<B: Backend>(prepare: Prepare<B>) {
    let (mut peer, mut owner) = connected(prepare);
    let mut inbox = owner.inbox();
    let window = owner.bind(owner.pd.memory_window().unwrap(), &inbox, 1001, 5000, AllAccess);
    let remote = decoded(window.remote());
    let write = Remote::<WriteAccess>::from_bytes(&remote.to_bytes()).unwrap();
    peer.write(pattern(5000), write).unwrap();
    let mut wanted = vec![0; LEN];
    wanted[1001..6001].copy_from_slice(&pattern(5000));
    assert_eq!(bytes(&inbox), wanted);
    inbox.store_u64(1008, 41, std::sync::atomic::Ordering::Release);
    let word = peer.pd.register(vec![0_u8; 8], Local).unwrap().into_word().unwrap();
    peer.qp
        .post(|batch| drop(batch.fetch_add(word, remote.word(7).unwrap(), 1).signaled()))
        .unwrap();
    assert_eq!(peer.next(|mut done| done.take_word().unwrap().get()), 41);
    let into = peer.pd.register(vec![0_u8; 5000], Local).unwrap();
    peer.qp.post(|batch| drop(batch.read(into, remote).signaled())).unwrap();
    let read: Buffer = peer.next(|mut done| done.take().unwrap());
    assert_eq!(&read[7..15], 42_u64.to_ne_bytes());
    assert_eq!((&read[..7], &read[15..]), (&pattern(5000)[..7], &pattern(5000)[15..]));
}

fn a_window_is_invalidated_and_rebound<B: Backend>(prepare: Prepare<B>) {
    let (mut peer, mut owner) = connected(prepare);
    let inbox = owner.inbox();
    let mut window = owner.pd.memory_window().unwrap();
    // Rebound, each time with a new key.
    let mut former = None;
    for round in 0..3_u8 {
        let bound = owner.bind(window, &inbox, 64, 64, WriteAccess);
        assert_ne!(former.replace(bound.rkey()), Some(bound.rkey()));
        peer.write(vec![round; 64], decoded(bound.remote())).unwrap();
        assert_eq!(bytes(&inbox)[64..128], [round; 64]);
        owner.qp.invalidate(bound).unwrap();
        window = owner.next(|mut done| {
            assert_eq!(done.result().unwrap(), Success::Invalidate);
            done.take_window().unwrap()
        });
    }
    let bound = owner.bind(window, &inbox, 64, 64, WriteAccess);
    let key = decoded(bound.remote());
    drop(bound);
    assert_eq!(peer.write(vec![9; 8], key), Err(CompletionStatus::RemoteAccess));
    assert_eq!(bytes(&inbox)[64..128], [2; 64]);
}

fn the_peer_invalidates_the_key<B: Backend>(prepare: Prepare<B>) {
    let (mut peer, mut owner) = connected(prepare);
    let inbox = owner.inbox();
    let bound = owner.bind(owner.pd.memory_window().unwrap(), &inbox, 0, 64, WriteAccess);
    let key = decoded(bound.remote());
    let receive = owner.pd.register(vec![0_u8; 64], Local).unwrap();
    owner.qp.receive(receive).unwrap();
    let bytes_of_it = vec![5_u8; 64];
    let buffer = peer.pd.register(bytes_of_it, Local).unwrap();
    peer.qp
        .post(|batch| {
            batch.write(buffer, key);
            batch.send_inline_with_invalidate(b"done", key.rkey()).signaled();
        })
        .unwrap();
    let window = owner.next(|mut done| {
        assert_eq!(done.result().unwrap(), Success::Receive { len: 4, imm: None });
        assert_eq!(
            &done.take::<Local>().unwrap_or_else(|| panic!("no buffer"))[..4],
            b"done"
        );
        bound.invalidated(done.into_invalidation().unwrap()).unwrap()
    });
    assert_eq!(bytes(&inbox)[..64], [5; 64]);
    peer.next(|done| done.result().map(drop)).unwrap();
    peer.next(|done| done.result().map(drop)).unwrap();
    // The window can be bound again, and the former key is invalid.
    let again = owner.bind(window, &inbox, 0, 64, WriteAccess);
    peer.write(vec![6; 64], decoded(again.remote())).unwrap();
    assert_eq!(peer.write(vec![7; 64], key), Err(CompletionStatus::RemoteAccess));
    assert_eq!(bytes(&inbox)[..64], [6; 64]);
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
                super::$name(|builder| builder.wr_post().rc().unwrap());
            }
        }
    )* };
}

by_both_backends!(
    a_peer_accesses_bound_memory,
    a_window_is_invalidated_and_rebound,
    the_peer_invalidates_the_key
);
