//! What most tests begin with.

use doorbell_verbs::{Buffer, CompletionQueue, Endpoint, Gid, Lid, Local, Mtu, Psn, Qpn, QueuePair};

use crate::stub::Stub;

pub(crate) const PEER: Endpoint = Endpoint {
    gid: Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 2]),
    lid: Lid(0),
    qpn: Qpn::truncated(0x77),
    psn: Psn::truncated(0x1234),
    mtu: Mtu::B4096,
    rd_atomic: 4,
};

/// A connected queue pair of `depth`, its completion queue, and `n` buffers of 64 bytes.
pub(crate) fn rig(stub: &'static Stub, depth: u32, n: usize) -> (QueuePair, CompletionQueue, Vec<Buffer>) {
    let context = stub.open();
    let pd = context.protection_domain().unwrap();
    let cq = context.completion_queue(2 * depth).unwrap();
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
