//! What most tests begin with.

use doorbell_verbs::{
    Backend, Buffer, CompletionQueue, Endpoint, Gid, Lid, Local, Mtu, PostList, PreparedQueuePair, Psn, Qpn, QueuePair,
    QueuePairBuilder, QueuePairError, Rc, WorkRequests,
};

use crate::stub::Stub;

pub(crate) const PEER: Endpoint = Endpoint {
    gid: Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 2]),
    lid: Lid(0),
    qpn: Qpn::truncated(0x77),
    psn: Psn::truncated(0x1234),
    mtu: Mtu::B4096,
    rd_atomic: 4,
};

/// The backends, for tests that run over both.
pub(crate) trait Kind: Backend + Sized {
    /// Whether a batch that the provider refuses is refused whole.
    const WHOLE: bool;

    fn rc(builder: QueuePairBuilder<'_>) -> Result<PreparedQueuePair<Rc, Self>, QueuePairError>;
}

impl Kind for PostList {
    const WHOLE: bool = false;

    fn rc(builder: QueuePairBuilder<'_>) -> Result<PreparedQueuePair, QueuePairError> {
        builder.rc()
    }
}

impl Kind for WorkRequests {
    const WHOLE: bool = true;

    fn rc(builder: QueuePairBuilder<'_>) -> Result<PreparedQueuePair<Rc, Self>, QueuePairError> {
        builder.work_requests().rc()
    }
}

/// Makes a test of each of these functions for either backend.
macro_rules! over_both_backends {
    ($($name:ident),* $(,)?) => {
        mod post_list {
            $(
                #[test]
                fn $name() {
                    super::$name::<doorbell_verbs::PostList>();
                }
            )*
        }
        mod work_requests {
            $(
                #[test]
                fn $name() {
                    super::$name::<doorbell_verbs::WorkRequests>();
                }
            )*
        }
    };
}
pub(crate) use over_both_backends;

/// A connected queue pair of `depth`, its completion queue, and `n` buffers of 64 bytes.
pub(crate) fn rig<B: Kind>(
    stub: &'static Stub,
    depth: u32,
    n: usize,
) -> (QueuePair<Rc, B>, CompletionQueue, Vec<Buffer>) {
    stub.extend();
    let context = stub.open();
    let pd = context.protection_domain().unwrap();
    let cq = context.completion_queue(2 * depth).unwrap();
    let builder = pd
        .queue_pair(&cq)
        .send_depth(depth)
        .recv_depth(depth)
        .max_inline(32)
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
