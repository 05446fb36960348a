//! UC and UD: losses, IPv6, address handles in both directions.

use std::mem::MaybeUninit;
use std::ptr;
use std::time::Instant;

use doorbell_softroce_ibverbs::api;
use doorbell_verbs_sys::*;

use crate::common::*;

const GRH: usize = 40;

fn of_type(names: (&str, &str), qp_type: ibv_qp_type) -> (Side, Side) {
    crate::setup();
    let setup = Setup {
        qp_type,
        ..Setup::default()
    };
    pair(names, &setup)
}

pub(crate) struct Ah(pub(crate) *mut ibv_ah);

impl Ah {
    pub(crate) fn to(side: &Side, gid: ibv_gid) -> Self {
        let mut attr = attr().ah_attr;
        attr.is_global = 1;
        attr.port_num = 1;
        attr.grh.dgid = gid;
        attr.grh.hop_limit = 3;
        // SAFETY: the PD is live, as is the attribute.
        let ah = unsafe { api().create_ah.unwrap()(side.pd, &mut attr) };
        assert!(!ah.is_null(), "errno {}", errno());
        Self(ah)
    }

    fn back(side: &Side, wc: &ibv_wc, at: usize) -> Self {
        let mut wc = *wc;
        let grh = std::ptr::with_exposed_provenance_mut::<ibv_grh>((side.addr() + at as u64) as usize);
        // SAFETY: the PD is live, and 40 bytes of the buffer are behind the pointer.
        let ah = unsafe { api().create_ah_from_wc.unwrap()(side.pd, &mut wc, grh, 1) };
        assert!(!ah.is_null(), "errno {}", errno());
        Self(ah)
    }
}

impl Drop for Ah {
    fn drop(&mut self) {
        // SAFETY: live, and not used again.
        assert_eq!(unsafe { api().destroy_ah.unwrap()(self.0) }, 0);
    }
}

fn datagram(wr_id: u64, opcode: ibv_wr_opcode, ah: &Ah, remote_qpn: u32) -> ibv_send_wr {
    let mut wr = request(wr_id, opcode);
    wr.wr.ud = ibv_send_wr_ud {
        ah: ah.0,
        remote_qpn,
        remote_qkey: QKEY,
    };
    wr
}

fn queried(side: &Side) -> (ibv_qp_attr, ibv_qp_init_attr) {
    let (mut found, mut init) = (attr(), MaybeUninit::uninit());
    // SAFETY: live, both to be written; filled on success.
    unsafe {
        assert_eq!((api().query_qp)(side.qp, &mut found, 0, init.as_mut_ptr()), 0);
        (found, init.assume_init())
    }
}

#[test]
fn uc_messages_are_whole_or_lost() {
    let (a, b) = of_type(("faulty0", "faulty1"), IBV_QPT_UC);
    const MESSAGES: u64 = 200;
    let size = |message: u64| 1 + (message as usize * 397) % 7000;
    assert_eq!(b.receive(0, &mut [b.sge(0, 8192)]), 0);
    let mut received = 0;
    // Receives are numbered in posting order: the receive of a lost message serves the next one.
    let mut take = |b: &Side| {
        let Some(wc) = b.poll() else { return false };
        assert_eq!(
            (wc.status, wc.wr_id, wc.wc_flags),
            (IBV_WC_SUCCESS, received, IBV_WC_WITH_IMM)
        );
        // SAFETY: the flag says so.
        let message = u64::from(u32::from_be(unsafe { wc.anon_1.imm_data }));
        assert_eq!(wc.byte_len as usize, size(message));
        assert!(
            b.bytes(0..size(message)) == pattern(size(message), message as u32),
            "message {message}"
        );
        received += 1;
        assert_eq!(b.receive(received, &mut [b.sge(0, 8192)]), 0);
        true
    };
    let began = Instant::now();
    // Until one has arrived: the progress thread may be descheduled for many messages.
    let (mut message, mut some) = (0, false);
    while message < MESSAGES || !some {
        a.fill(0, &pattern(size(message), message as u32));
        let mut wr = request(message, IBV_WR_SEND_WITH_IMM);
        wr.anon_1.imm_data = (message as u32).to_be();
        assert_eq!(a.post(wr, &mut [a.sge(0, size(message))]), 0);
        a.done(message);
        // Poll long enough to see this one, if it arrived, before sending the next.
        some |= (0..200).any(|_| take(&b));
        message += 1;
        assert!(began.elapsed() < TIMEOUT, "none of {message} arrived");
    }
    assert_eq!(b.state(), IBV_QPS_RTS);
}

fn ud_both_ways(names: (&str, &str)) {
    let (a, b) = of_type(names, IBV_QPT_UD);
    let there = Ah::to(&a, b.gid());
    for (id, size) in (1..).zip([0, 1, 100, 1023, 1024]) {
        let sent = pattern(size, id as u32);
        a.fill(0, &sent);
        assert_eq!(b.receive(100 + id, &mut [b.sge(4096, GRH + size)]), 0);
        let mut wr = datagram(id, IBV_WR_SEND_WITH_IMM, &there, b.qpn());
        wr.anon_1.imm_data = 9_u32.to_be();
        assert_eq!(a.post(wr, &mut [a.sge(0, size)]), 0);
        let wc = b.done(100 + id);
        assert_eq!(
            (wc.opcode, wc.byte_len as usize, wc.wc_flags, wc.src_qp),
            (IBV_WC_RECV, GRH + size, IBV_WC_GRH | IBV_WC_WITH_IMM, a.qpn())
        );
        assert_eq!(b.bytes(4096 + GRH..4096 + GRH + size), sent);
        assert_eq!(a.done(id).opcode, IBV_WC_SEND);
        let back = Ah::back(&b, &wc, 4096);
        assert_eq!(a.receive(300 + id, &mut [a.sge(8192, GRH + 16)]), 0);
        let mut answer = datagram(id, IBV_WR_SEND, &back, wc.src_qp);
        answer.send_flags |= IBV_SEND_INLINE;
        b.fill(0, b"the answer");
        assert_eq!(b.post(answer, &mut [b.sge(0, 10)]), 0);
        // Once posted, the handle is no longer needed.
        drop(back);
        let wc = a.done(300 + id);
        assert_eq!(
            (wc.byte_len as usize, wc.wc_flags, wc.src_qp),
            (GRH + 10, IBV_WC_GRH, b.qpn())
        );
        assert_eq!(a.bytes(8192 + GRH..8192 + GRH + 10), b"the answer");
        b.done(id);
    }
    let (found, init) = queried(&a);
    assert_eq!((found.qkey, init.qp_type), (QKEY, IBV_QPT_UD));
}

#[test]
fn ud_over_ipv6() {
    ud_both_ways(("six", "six"));
}

#[test]
fn ud_wrong_qkey_or_no_address_handle() {
    let (a, b) = of_type(("soft0", "soft1"), IBV_QPT_UD);
    let there = Ah::to(&a, b.gid());
    assert_eq!(b.receive(1, &mut [b.sge(0, GRH + 8)]), 0);
    let mut wrong = datagram(2, IBV_WR_SEND, &there, b.qpn());
    // SAFETY: the member written above.
    unsafe { wrong.wr.ud.remote_qkey += 1 };
    assert_eq!(a.post(wrong, &mut [a.sge(0, 8)]), 0);
    a.done(2);
    a.fill(0, b"the one!");
    assert_eq!(a.post(datagram(3, IBV_WR_SEND, &there, b.qpn()), &mut [a.sge(0, 8)]), 0);
    a.done(3);
    b.done(1);
    assert_eq!(b.bytes(GRH..GRH + 8), b"the one!");
    let mut none = datagram(4, IBV_WR_SEND, &there, b.qpn());
    none.wr.ud.ah = ptr::null_mut();
    assert_eq!(a.post(none, &mut [a.sge(0, 8)]), libc::EINVAL);
    // A handle of another protection domain is invalid for this queue pair.
    let foreign = Ah::to(&b, b.gid());
    let of_another = datagram(4, IBV_WR_SEND, &foreign, b.qpn());
    assert_eq!(a.post(of_another, &mut [a.sge(0, 8)]), libc::EINVAL);
    // A request without an address handle in its union is refused.
    let write = rdma(5, IBV_WR_RDMA_WRITE, b.addr(), b.rkey());
    assert_eq!(a.post(write, &mut [a.sge(0, 8)]), libc::EINVAL);
}

/// Loss drops whole datagrams; a protection domain with an address handle is in use.
#[test]
fn ud_under_faults() {
    let (a, b) = of_type(("faulty0", "faulty1"), IBV_QPT_UD);
    let there = Ah::to(&a, b.gid());
    // SAFETY: live; it is refused.
    assert_eq!(unsafe { (api().dealloc_pd)(a.pd) }, libc::EBUSY);
    const DATAGRAMS: u64 = 300;
    let (began, mut received) = (Instant::now(), 0);
    assert_eq!(b.receive(0, &mut [b.sge(0, GRH + 1024)]), 0);
    // As in the test of UC.
    let mut number = 0;
    while number < DATAGRAMS || received == 0 {
        assert!(began.elapsed() < TIMEOUT, "none of {number} arrived");
        let sent = pattern(900, number as u32);
        a.fill(0, &sent);
        let mut wr = datagram(number, IBV_WR_SEND_WITH_IMM, &there, b.qpn());
        wr.anon_1.imm_data = (number as u32).to_be();
        assert_eq!(a.post(wr, &mut [a.sge(0, 900)]), 0);
        a.done(number);
        for _ in 0..200 {
            let Some(wc) = b.poll() else { continue };
            assert_eq!((wc.status, wc.byte_len as usize), (IBV_WC_SUCCESS, GRH + 900));
            // SAFETY: every datagram here has one.
            let number = u32::from_be(unsafe { wc.anon_1.imm_data });
            assert!(b.bytes(GRH..GRH + 900) == pattern(900, number), "datagram {number}");
            received += 1;
            assert_eq!(b.receive(received, &mut [b.sge(0, GRH + 1024)]), 0);
        }
        number += 1;
    }
}

#[test]
fn address_handles_refused() {
    let (a, _b) = of_type(("soft0", "soft1"), IBV_QPT_UD);
    let mut vector = attr().ah_attr;
    let mut wc = MaybeUninit::<ibv_wc>::zeroed();
    // SAFETY: live or zero, and refused; integers all zero are a completion, and a header of no IP
    // version.
    unsafe {
        assert!(api().create_ah.unwrap()(a.pd, &mut vector).is_null());
        assert_eq!(errno(), libc::EINVAL);
        let mut grh = MaybeUninit::<ibv_grh>::zeroed();
        for flags in [0, IBV_WC_GRH] {
            (*wc.as_mut_ptr()).wc_flags = flags;
            assert!(api().create_ah_from_wc.unwrap()(a.pd, wc.as_mut_ptr(), grh.as_mut_ptr(), 1).is_null());
            assert_eq!(errno(), libc::EINVAL);
        }
    }
}
