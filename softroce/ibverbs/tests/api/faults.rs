//! Drop, duplication, reordering and corruption of 3 % each on real sockets; packet capture.

use doorbell_verbs_sys::*;

use crate::common::*;

const MESSAGES: u64 = 200;

fn size_of(message: u64) -> usize {
    1 + (message as usize * 397) % 7000
}

#[test]
fn nothing_is_lost_under_faults() {
    crate::setup();
    let setup = Setup {
        // 134 ms, the cost of a loss at a message's end; eight times this outlasts descheduling.
        timeout: 15,
        ..Setup::default()
    };
    let (a, b) = pair(("faulty0", "faulty1"), &setup);
    let mut received = 0;
    let mut next_receive = 0;
    let mut completed = 0;
    let mut posted = 0;
    let slot = |message: u64| (message % 4) as usize * 8192;
    while completed < MESSAGES || received < MESSAGES {
        while next_receive < received + 4 && next_receive < MESSAGES {
            assert_eq!(b.receive(next_receive, &mut [b.sge(slot(next_receive), 8192)]), 0);
            next_receive += 1;
        }
        while posted < completed + 4 && posted < MESSAGES {
            a.fill(slot(posted), &pattern(size_of(posted), posted as u32));
            assert_eq!(
                a.post(
                    request(posted, IBV_WR_SEND),
                    &mut [a.sge(slot(posted), size_of(posted))]
                ),
                0
            );
            posted += 1;
        }
        if let Some(wc) = b.poll() {
            assert_eq!(
                (wc.status, wc.wr_id, wc.byte_len as usize),
                (IBV_WC_SUCCESS, received, size_of(received))
            );
            let at = slot(received);
            assert!(b.bytes(at..at + size_of(received)) == pattern(size_of(received), received as u32));
            received += 1;
        }
        if let Some(wc) = a.poll() {
            assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, completed));
            completed += 1;
        }
    }
    for round in 0..20_u64 {
        let bytes = pattern(20_000, round as u32);
        b.fill(0, &bytes);
        assert_eq!(
            b.post(
                rdma(1, IBV_WR_RDMA_WRITE, a.addr() + 32_768, a.rkey()),
                &mut [b.sge(0, 20_000)]
            ),
            0
        );
        b.done(1);
        assert!(a.bytes(32_768..52_768) == bytes, "WRITE {round}");
        assert_eq!(
            b.post(
                rdma(2, IBV_WR_RDMA_READ, a.addr() + 32_768, a.rkey()),
                &mut [b.sge(40_000, 20_000)]
            ),
            0
        );
        b.done(2);
        assert!(b.bytes(40_000..60_000) == bytes, "READ {round}");
        let mut add = request(3, IBV_WR_ATOMIC_FETCH_AND_ADD);
        add.wr.atomic = ibv_send_wr_atomic {
            remote_addr: a.addr() + 60_000,
            compare_add: 1,
            swap: 0,
            rkey: a.rkey(),
        };
        assert_eq!(b.post(add, &mut [b.sge(64_000, 8)]), 0);
        b.done(3);
        assert_eq!(b.word(8_000), round, "each addition happened exactly once");
    }
}

#[test]
fn a_capture_shows_the_packets() {
    crate::setup();
    let (a, b) = pair(("captured", "far"), &Setup::default());
    a.fill(0, b"find this in the capture");
    assert_eq!(
        a.post(rdma(1, IBV_WR_RDMA_WRITE, b.addr(), b.rkey()), &mut [a.sge(0, 24)]),
        0
    );
    a.done(1);
    // The device is open: a process that ended now would leave this.
    let file = std::fs::read(capture_file()).unwrap();
    std::fs::remove_file(capture_file()).unwrap();
    assert!(file.windows(24).any(|bytes| bytes == b"find this in the capture"));
    // The WRITE and its ACK: each record has the sender's address in its IPv4 header.
    let octets = |last| match own_address(last) {
        std::net::IpAddr::V4(address) => address.octets(),
        std::net::IpAddr::V6(_) => unreachable!("own addresses are IPv4"),
    };
    for (from, to) in [(5, 2), (2, 5)] {
        let header = [octets(from), octets(to)].concat();
        assert!(file.windows(8).any(|bytes| bytes == header), "from {from} to {to}");
    }
}
