//! What most tests begin with.

use doorbell_verbs::{
    Buffer, Classic, Completion, CompletionQueue, Context, CqKind, Endpoint, Extended, Gid, Lid, Local, Mtu, Psn, Qpn,
    QueuePair,
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

/// A kind of completion queue that tests run over.
pub(crate) trait Made: CqKind {
    fn make(context: &Context, entries: u32) -> CompletionQueue<Self>;
}

impl Made for Classic {
    fn make(context: &Context, entries: u32) -> CompletionQueue {
        context.completion_queue(entries).unwrap()
    }
}

impl Made for Extended {
    fn make(context: &Context, entries: u32) -> CompletionQueue<Self> {
        context.extended_completion_queue(entries).create().unwrap()
    }
}

/// Makes a test of each function, generic over the kind of queue, for both.
macro_rules! for_both_kinds {
    ($($name:ident),* $(,)?) => {
        mod classic {
            $( #[test]
            fn $name() {
                super::$name::<doorbell_verbs::Classic>();
            } )*
        }
        mod extended {
            $( #[test]
            fn $name() {
                super::$name::<doorbell_verbs::Extended>();
            } )*
        }
    };
}
pub(crate) use for_both_kinds;

/// What `each` makes of every request that one poll finds completed.
pub(crate) fn poll_each<Q: CqKind, T>(
    cq: &mut CompletionQueue<Q>,
    mut each: impl FnMut(Completion<'_, Q>) -> T,
) -> Vec<T> {
    let mut made = Vec::new();
    cq.poll().unwrap().for_each(|done| made.push(each(done)));
    made
}

/// How many requests one poll finds completed.
pub(crate) fn poll_count<Q: CqKind>(cq: &mut CompletionQueue<Q>) -> usize {
    poll_each(cq, |_| ()).len()
}

/// A connected queue pair of `depth`, its classic completion queue, and `n` buffers of 64 bytes.
pub(crate) fn rig(stub: &'static Stub, depth: u32, n: usize) -> (QueuePair, CompletionQueue, Vec<Buffer>) {
    rig_of(stub, depth, n)
}

/// As [`rig`], with a completion queue of either kind.
pub(crate) fn rig_of<Q: Made>(
    stub: &'static Stub,
    depth: u32,
    n: usize,
) -> (QueuePair, CompletionQueue<Q>, Vec<Buffer>) {
    stub.extend();
    let context = stub.open();
    let pd = context.protection_domain().unwrap();
    let cq = Q::make(&context, 2 * depth);
    let qp = pd
        .queue_pair(&cq)
        .send_depth(depth)
        .recv_depth(depth)
        .max_inline(32)
        .max_send_sge(4)
        .max_recv_sge(4)
        .rc()
        .unwrap();
    let qp = qp.connect(&PEER).unwrap();
    let buffers = pd
        .register(vec![0_u8; 64 * n.max(1)], Local)
        .unwrap()
        .chunks(64)
        .collect();
    (qp, cq, buffers)
}
