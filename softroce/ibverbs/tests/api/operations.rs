//! Every operation, with every byte checked.

use doorbell_softroce_ibverbs::api;
use doorbell_verbs_sys::*;

use crate::common::*;

fn two() -> (Side, Side) {
    crate::setup();
    pair(("soft0", "soft1"), &Setup::default())
}

const SIZES: [usize; 9] = [0, 1, 7, 8, 1023, 1024, 1025, 3 * 1024 + 5, 1 << 15];

/// WRITEs of every size, to an unaligned remote address.
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

/// Two devices share an address, and a process group: packets are demultiplexed by QPN. Packets
/// from elsewhere arrive at the UDP port holder, which forwards them.
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

/// The UDP port holder exits: another member takes the port over, and lost packets are
/// retransmitted.
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

#[test]
fn write_with_immediate() {
    let (a, b) = two();
    for (id, size) in (1..).zip(SIZES) {
        assert_eq!(b.receive(100 + id, &mut []), 0);
        let sent = pattern(size, id as u32);
        a.fill(0, &sent);
        let mut wr = rdma(id, IBV_WR_RDMA_WRITE_WITH_IMM, b.addr(), b.rkey());
        wr.anon_1.imm_data = 0x1234_5678_u32.to_be();
        assert_eq!(a.post(wr, &mut [a.sge(0, size)]), 0);
        let wc = b.done(100 + id);
        assert_eq!((wc.opcode, wc.byte_len as usize), (IBV_WC_RECV_RDMA_WITH_IMM, size));
        assert_eq!(
            (wc.wc_flags & IBV_WC_WITH_IMM, wc.qp_num, wc.src_qp),
            (IBV_WC_WITH_IMM, b.qpn(), a.qpn())
        );
        // SAFETY: the flag says that the immediate is the member written.
        assert_eq!(u32::from_be(unsafe { wc.anon_1.imm_data }), 0x1234_5678);
        assert_eq!(b.bytes(0..size), sent);
        a.done(id);
    }
}

#[test]
fn send_gathers_and_scatters() {
    let (a, b) = two();
    for (id, size) in (1..).zip(SIZES) {
        let (third, rest) = (size / 3, size - size / 3);
        let mut into = [b.sge(0, rest), b.sge(40_000, third)];
        assert_eq!(b.receive(100 + id, &mut into), 0);
        let sent = pattern(size, id as u32);
        a.fill(5, &sent[..third]);
        a.fill(20_000, &sent[third..]);
        assert_eq!(
            a.post(request(id, IBV_WR_SEND), &mut [a.sge(5, third), a.sge(20_000, rest)]),
            0
        );
        let wc = b.done(100 + id);
        assert_eq!((wc.opcode, wc.byte_len as usize, wc.wc_flags), (IBV_WC_RECV, size, 0));
        let received = [b.bytes(0..rest), b.bytes(40_000..40_000 + third)].concat();
        assert_eq!(received, sent);
        assert_eq!(a.done(id).opcode, IBV_WC_SEND);
    }
}

#[test]
fn send_with_immediate() {
    let (a, b) = two();
    assert_eq!(b.receive(1, &mut [b.sge(0, 64)]), 0);
    let mut wr = request(2, IBV_WR_SEND_WITH_IMM);
    wr.anon_1.imm_data = 7_u32.to_be();
    assert_eq!(a.post(wr, &mut []), 0);
    let wc = b.done(1);
    assert_eq!((wc.opcode, wc.byte_len, wc.wc_flags), (IBV_WC_RECV, 0, IBV_WC_WITH_IMM));
    a.done(2);
}

#[test]
fn inline_data_is_taken_when_posted() {
    let (a, b) = two();
    let mut parts = [*b"inline, ", *b"gathered"];
    // Inline data needs no lkey.
    let [mut first, mut second] = [0, 1].map(|index: usize| ibv_sge {
        addr: parts[index].as_mut_ptr().expose_provenance() as u64,
        length: 8,
        lkey: 0,
    });
    for (id, sges) in [(1, &mut [first, second][..]), (2, &mut [second][..])] {
        let mut wr = rdma(id, IBV_WR_RDMA_WRITE, b.addr() + 16 * id, b.rkey());
        wr.send_flags |= IBV_SEND_INLINE;
        assert_eq!(a.post(wr, sges), 0);
    }
    parts = [[0; 8]; 2];
    assert_eq!(parts.concat(), [0; 16]);
    a.done(1);
    a.done(2);
    assert_eq!(b.bytes(16..32), b"inline, gathered");
    assert_eq!(b.bytes(32..40), b"gathered");
    first.length = 121;
    second.length = 8;
    let mut wr = rdma(3, IBV_WR_RDMA_WRITE, b.addr(), b.rkey());
    wr.send_flags |= IBV_SEND_INLINE;
    let long = [0_u8; 121];
    first.addr = long.as_ptr().expose_provenance() as u64;
    second.addr = long.as_ptr().expose_provenance() as u64;
    assert_eq!(
        a.post(wr, &mut [first, second]),
        libc::EINVAL,
        "129 bytes inline on a queue pair for 128"
    );
}

#[test]
fn read() {
    let (a, b) = two();
    for (id, size) in (1..).zip(SIZES) {
        let there = pattern(size, id as u32);
        b.fill(1, &there);
        let half = size / 2;
        let mut into = [a.sge(9, half), a.sge(30_000, size - half)];
        assert_eq!(a.post(rdma(id, IBV_WR_RDMA_READ, b.addr() + 1, b.rkey()), &mut into), 0);
        let wc = a.done(id);
        assert_eq!(wc.opcode, IBV_WC_RDMA_READ);
        assert_eq!(
            [a.bytes(9..9 + half), a.bytes(30_000..30_000 + size - half)].concat(),
            there
        );
    }
}

#[test]
fn atomics() {
    let (a, b) = two();
    b.fill(8, &40_u64.to_ne_bytes());
    let atomic = |id, opcode, compare_add, swap| {
        let mut wr = request(id, opcode);
        wr.wr.atomic = ibv_send_wr_atomic {
            remote_addr: b.addr() + 8,
            compare_add,
            swap,
            rkey: b.rkey(),
        };
        assert_eq!(a.post(wr, &mut [a.sge(16, 8)]), 0);
        (a.done(id).opcode, a.word(2), b.word(1))
    };
    assert_eq!(atomic(1, IBV_WR_ATOMIC_FETCH_AND_ADD, 2, 0), (IBV_WC_FETCH_ADD, 40, 42));
    assert_eq!(atomic(2, IBV_WR_ATOMIC_CMP_AND_SWP, 41, 7), (IBV_WC_COMP_SWAP, 42, 42));
    assert_eq!(atomic(3, IBV_WR_ATOMIC_CMP_AND_SWP, 42, 7), (IBV_WC_COMP_SWAP, 42, 7));
    assert_eq!(
        atomic(4, IBV_WR_ATOMIC_FETCH_AND_ADD, u64::MAX, 0),
        (IBV_WC_FETCH_ADD, 7, 6)
    );
}

#[test]
fn a_list_is_posted_in_order_up_to_the_first_bad_one() {
    let (a, b) = two();
    let mut sges = [a.sge(0, 8), a.sge(8, 8), a.sge(16, 8)];
    a.fill(0, &pattern(24, 1));
    let mut list = [1, 2, 3].map(|id| rdma(id, IBV_WR_RDMA_WRITE, b.addr() + 8 * id, b.rkey()));
    for (wr, sge) in list.iter_mut().zip(&mut sges) {
        (wr.sg_list, wr.num_sge) = (sge, 1);
    }
    list[0].send_flags = 0;
    list[2].opcode = IBV_WR_BIND_MW;
    let [first, second, third] = &mut list;
    first.next = second;
    second.next = third;
    let mut bad = std::ptr::null_mut();
    // SAFETY: a live queue pair and a list whose memory outlives the call.
    let result = unsafe { inline::post_send(a.qp, first, &mut bad) };
    assert_eq!((result, bad), (libc::EINVAL, &raw mut *third));
    a.done(2);
    assert!(a.poll().is_none(), "the first was not signaled, the third not posted");
    assert_eq!(b.bytes(8..24), pattern(24, 1)[..16]);
}

#[test]
fn full_queue_returns_enomem_until_it_drains() {
    crate::setup();
    let setup = Setup {
        depth: 4,
        sig_all: true,
        ..Setup::default()
    };
    let (a, b) = pair(("soft0", "soft1"), &setup);
    // However many complete, none is lost. SAFETY: live.
    assert_eq!(unsafe { (api().resize_cq)(a.cq, 6000) }, 0);
    let mut posted = 0_u64;
    let mut write = |flags| {
        let mut wr = rdma(posted, IBV_WR_RDMA_WRITE, b.addr(), b.rkey());
        wr.send_flags = flags;
        let result = a.post(wr, &mut [a.sge(0, 40_000)]);
        posted += u64::from(result == 0);
        result
    };
    for _ in 0..4 {
        assert_eq!(write(0), 0);
    }
    // Earlier ones may complete meanwhile, so at most as many again are accepted.
    let refused = (0..5000).map(|_| write(0)).find(|&result| result != 0);
    assert_eq!(refused, Some(libc::ENOMEM));
    for id in 0..posted {
        a.done(id);
    }
}
