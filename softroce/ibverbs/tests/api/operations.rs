//! WRITEs of every size over each kind of path.

use doorbell_softroce_ibverbs::api;
use doorbell_verbs_sys::*;

use crate::common::*;

fn two() -> (Side, Side) {
    crate::setup();
    pair(("soft0", "soft1"), &Setup::default())
}

const SIZES: [usize; 9] = [0, 1, 7, 8, 1023, 1024, 1025, 3 * 1024 + 5, 1 << 15];

fn writes(a: &Side, b: &Side) {
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
    assert!(b.poll().is_none(), "a WRITE completes no receive");
}

#[test]
fn write() {
    let (a, b) = two();
    writes(&a, &b);
    writes(&b, &a);
}

#[test]
fn write_over_ipv6_to_oneself() {
    crate::setup();
    let setup = Setup {
        mtu: IBV_MTU_4096,
        ..Setup::default()
    };
    let (a, b) = pair(("six", "six"), &setup);
    writes(&a, &b);
    writes(&b, &a);
}

/// Packets are demultiplexed by QPN; the UDP port holder forwards those from elsewhere.
#[test]
fn write_between_two_on_one_address_and_a_third() {
    crate::setup();
    let (a, b) = pair(("holder", "guest"), &Setup::default());
    assert_ne!(a.qpn() >> 10, b.qpn() >> 10, "each has blocks of numbers for itself");
    writes(&a, &b);
    writes(&b, &a);
    for member in ["holder", "guest"] {
        let (there, outside) = pair((member, "soft1"), &Setup::default());
        writes(&there, &outside);
        writes(&outside, &there);
    }
    drop((a, b));
}

/// Another member takes the port over, and lost packets are retransmitted.
#[test]
fn write_during_udp_port_takeover() {
    crate::setup();
    let leaving = open("leaving").unwrap();
    let (there, outside) = pair(("staying", "soft1"), &Setup::default());
    writes(&outside, &there);
    // SAFETY: live, closed once.
    assert_eq!(unsafe { (api().close_device)(leaving) }, 0);
    writes(&outside, &there);
    writes(&there, &outside);
}
