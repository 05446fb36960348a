//! The common setup of most tests.

use doorbell_verbs::{
    Backend, Buffer, ClassicCq, Completion, CompletionQueue, Context, CqKind, Endpoint, ExtendedCq, Gid, Lid, Local,
    Mtu, PostList, PreparedQueuePair, ProtectionDomain, Psn, Qpn, QueuePair, QueuePairBuilder, QueuePairError,
    ReliableConnection, UnreliableDatagram, WrPost,
};

use crate::stub::Stub;

pub(crate) const PEER: Endpoint = Endpoint {
    gid: Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 2]),
    lid: Lid(0),
    qpn: Qpn::truncated(0x77),
    psn: Psn::truncated(0x1234),
    mtu: Mtu::B4096,
    max_dest_rd_atomic: 4,
};

pub(crate) trait TestBackend: Backend + Sized {
    /// Whether a batch that the provider refuses is refused as a whole.
    const WHOLE: bool;

    fn rc(builder: QueuePairBuilder<'_>) -> Result<PreparedQueuePair<ReliableConnection, Self>, QueuePairError>;

    fn ud(builder: QueuePairBuilder<'_>) -> Result<QueuePair<UnreliableDatagram, Self>, QueuePairError>;
}

impl TestBackend for PostList {
    const WHOLE: bool = false;

    fn rc(builder: QueuePairBuilder<'_>) -> Result<PreparedQueuePair, QueuePairError> {
        builder.rc()
    }

    fn ud(builder: QueuePairBuilder<'_>) -> Result<QueuePair<UnreliableDatagram>, QueuePairError> {
        builder.ud()
    }
}

impl TestBackend for WrPost {
    const WHOLE: bool = true;

    fn rc(builder: QueuePairBuilder<'_>) -> Result<PreparedQueuePair<ReliableConnection, Self>, QueuePairError> {
        builder.wr_post().rc()
    }

    fn ud(builder: QueuePairBuilder<'_>) -> Result<QueuePair<UnreliableDatagram, Self>, QueuePairError> {
        builder.wr_post().ud()
    }
}

pub(crate) trait TestCq: CqKind {
    fn make(context: &Context, entries: u32) -> CompletionQueue<Self>;
}

impl TestCq for ClassicCq {
    fn make(context: &Context, entries: u32) -> CompletionQueue {
        context.completion_queue(entries).unwrap()
    }
}

impl TestCq for ExtendedCq {
    fn make(context: &Context, entries: u32) -> CompletionQueue<Self> {
        context.extended_completion_queue(entries).create().unwrap()
    }
}

/// The results of `each` for every request that one poll finds completed.
pub(crate) fn poll_each<Q: CqKind, T>(
    cq: &mut CompletionQueue<Q>,
    mut each: impl FnMut(Completion<'_, Q>) -> T,
) -> Vec<T> {
    let mut made = Vec::new();
    cq.poll().unwrap().for_each(|done| made.push(each(done)));
    made
}

pub(crate) fn poll_count<Q: CqKind>(cq: &mut CompletionQueue<Q>) -> usize {
    poll_each(cq, |_| ()).len()
}

/// Instantiates each function as a test: for this backend, and this kind of queue if generic.
macro_rules! over {
    ($module:ident: $($kind:ident),+; $names:tt) => {
        mod $module {
            use doorbell_verbs::*;

            $crate::rig::over!(@ ($($kind),+) $names);
        }
    };
    (@ $kinds:tt ($($name:ident),* $(,)?)) => {
        $( $crate::rig::over!(# $kinds $name); )*
    };
    (# ($($kind:ident),+) $name:ident) => {
        #[test]
        fn $name() {
            super::$name::<$($kind),+>();
        }
    };
}
pub(crate) use over;

macro_rules! over_both_backends {
    ($($name:ident),* $(,)?) => {
        $crate::rig::over!(post_list: PostList; ($($name),*));
        $crate::rig::over!(work_requests: WrPost; ($($name),*));
    };
}
pub(crate) use over_both_backends;

macro_rules! over_all_kinds {
    ($($name:ident),* $(,)?) => {
        $crate::rig::over!(post_list_classic: PostList, ClassicCq; ($($name),*));
        $crate::rig::over!(work_requests_classic: WrPost, ClassicCq; ($($name),*));
        $crate::rig::over!(post_list_extended: PostList, ExtendedCq; ($($name),*));
        $crate::rig::over!(work_requests_extended: WrPost, ExtendedCq; ($($name),*));
    };
}
pub(crate) use over_all_kinds;

pub(crate) fn opened() -> (&'static Stub, Context, ProtectionDomain) {
    let stub = Stub::new();
    let context = stub.open();
    let pd = context.protection_domain().unwrap();
    (stub, context, pd)
}

/// A connected queue pair of `depth`, its classic completion queue, and `n` buffers of 64 bytes.
pub(crate) fn rig<B: TestBackend>(
    stub: &'static Stub,
    depth: u32,
    n: usize,
) -> (QueuePair<ReliableConnection, B>, CompletionQueue, Vec<Buffer>) {
    rig_of(stub, depth, n)
}

pub(crate) fn rig_of<B: TestBackend, Q: TestCq>(
    stub: &'static Stub,
    depth: u32,
    n: usize,
) -> (QueuePair<ReliableConnection, B>, CompletionQueue<Q>, Vec<Buffer>) {
    stub.extend();
    let context = stub.open();
    let pd = context.protection_domain().unwrap();
    let cq = Q::make(&context, 2 * depth);
    let builder = pd
        .queue_pair(&cq)
        .max_send_wr(depth)
        .max_recv_wr(depth)
        .max_inline_data(32)
        .max_send_sge(4)
        .max_recv_sge(4);
    let qp = B::rc(builder).unwrap().connect(&PEER).unwrap();
    let buffers = pd
        .register(vec![0_u8; 64 * n.max(1)], Local)
        .unwrap()
        .chunks(64)
        .collect();
    (qp, cq, buffers)
}
