//! Every operation, between two soft devices of one process, through the C calls.

use crate::common::*;
use doorbell_verbs_sys::*;

fn two() -> (Side, Side) {
    devices(|| vec![device("soft0", 1), device("soft1", 2)]);
    pair(("soft0", "soft1"), &Setup::default())
}

const SIZES: [usize; 9] = [0, 1, 7, 8, 1023, 1024, 1025, 3 * 1024 + 5, 1 << 15];

#[test]
fn write() {
    let (a, b) = two();
    for (id, size) in (1..).zip(SIZES) {
        let sent = pattern(size, id as u32);
        a.fill(0, &sent);
        assert_eq!(
            a.post(
                rdma(id, IBV_WR_RDMA_WRITE, b.addr() + 3, b.rkey()),
                &mut [a.sge(0, size)]
            ),
            0
        );
        assert_eq!(a.done(id).opcode, IBV_WC_RDMA_WRITE);
        assert_eq!(b.bytes(3..3 + size), sent);
    }
    assert!(b.poll().is_none(), "a WRITE is nobody's completion");
}
