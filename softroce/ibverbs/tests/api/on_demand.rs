//! On-demand paging: registered memory whose pages come with the copies that need them.

use std::ffi::c_int;
use std::ptr;

use doorbell_softroce_ibverbs::api;
use doorbell_verbs_sys::*;

use crate::common::*;

const PAGE: usize = 4096;

/// Pages that are not populated yet.
struct Pages(*mut u8, usize);

impl Pages {
    fn new(count: usize) -> Self {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping.
        let at = unsafe { libc::mmap(ptr::null_mut(), count * PAGE, rights, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        Self(at.cast(), count)
    }

    fn addr(&self, page: usize) -> u64 {
        (self.0.expose_provenance() + page * PAGE) as u64
    }

    fn present(&self) -> Vec<bool> {
        let mut found = vec![0_u8; self.1];
        // SAFETY: all is mapped, and there is a byte for each page.
        let result = unsafe { libc::mincore(self.0.cast(), self.1 * PAGE, found.as_mut_ptr()) };
        assert_eq!(result, 0);
        found.iter().map(|page| page & 1 == 1).collect()
    }

    fn unmap(&self, page: usize) {
        // SAFETY: a page of ours, which nothing refers to.
        assert_eq!(unsafe { libc::munmap(self.0.add(page * PAGE).cast(), PAGE) }, 0);
    }
}

fn register(side: &Side, addr: *mut u8, len: usize) -> *mut ibv_mr {
    let access = (ALL_RIGHTS | IBV_ACCESS_ON_DEMAND) as c_int;
    // SAFETY: live.
    let mr = unsafe { (api().reg_mr)(side.pd, addr.cast(), len, access) };
    assert!(!mr.is_null(), "errno {}", errno());
    mr
}

fn keys_of(mr: *mut ibv_mr) -> (u32, u32) {
    // SAFETY: live.
    unsafe { ((*mr).lkey, (*mr).rkey) }
}

#[test]
fn pages_come_with_the_copies_that_need_them() {
    crate::setup();
    let (a, b) = pair(("soft0", "soft1"), &Setup::default());
    let pages = Pages::new(3);
    let mr = register(&b, pages.0, 3 * PAGE);
    assert_eq!(pages.present(), [false; 3]);
    a.fill(0, b"abcdefgh");
    let write = |page| {
        a.post(
            rdma(1, IBV_WR_RDMA_WRITE, pages.addr(page), keys_of(mr).1),
            &mut [a.sge(0, 8)],
        )
    };
    assert_eq!(write(1), 0);
    a.done(1);
    assert_eq!(pages.present(), [false, true, false]);
    let read = rdma(2, IBV_WR_RDMA_READ, pages.addr(1), keys_of(mr).1);
    assert_eq!(a.post(read, &mut [a.sge(64, 8)]), 0);
    a.done(2);
    assert_eq!(a.bytes(64..72), b"abcdefgh");
    pages.unmap(2);
    assert_eq!(write(2), 0);
    assert_eq!(a.wait().status, IBV_WC_REM_ACCESS_ERR, "nothing is mapped there");
    // SAFETY: live, and not used again.
    assert_eq!(unsafe { (api().dereg_mr)(mr) }, 0);
}

#[test]
fn an_implicit_region_is_the_whole_address_space() {
    crate::setup();
    let (a, b) = pair(("soft0", "soft1"), &Setup::default());
    let (from, to) = (
        register(&a, ptr::null_mut(), usize::MAX),
        register(&b, ptr::null_mut(), usize::MAX),
    );
    let (source, target) = (Pages::new(1), Pages::new(1));
    let sge = |pages: &Pages, mr| ibv_sge {
        addr: pages.addr(0),
        length: 8,
        lkey: keys_of(mr).0,
    };
    // SAFETY: a page of ours, which no request uses yet.
    unsafe { source.0.copy_from_nonoverlapping(b"anywhere".as_ptr(), 8) };
    assert_eq!(b.receive(1, &mut [sge(&target, to)]), 0);
    assert_eq!(a.post(request(2, IBV_WR_SEND), &mut [sge(&source, from)]), 0);
    a.done(2);
    b.done(1);
    // SAFETY: as above.
    assert_eq!(unsafe { target.0.cast::<[u8; 8]>().read_volatile() }, *b"anywhere");
    let nowhere = ibv_sge {
        addr: 0,
        length: 8,
        lkey: keys_of(from).0,
    };
    assert_eq!(a.post(request(3, IBV_WR_SEND), &mut [nowhere]), 0);
    assert_eq!(a.wait().status, IBV_WC_LOC_PROT_ERR, "the null pointer");
    // SAFETY: live, and not used again.
    unsafe { assert_eq!(((api().dereg_mr)(from), (api().dereg_mr)(to)), (0, 0)) };
}

#[test]
fn prefetching_populates() {
    crate::setup();
    let side = Side::new("soft0", &Setup::default());
    let pages = Pages::new(3);
    let mr = register(&side, pages.0, 3 * PAGE);
    let advise = |advice, page| {
        let mut sge = ibv_sge {
            addr: pages.addr(page),
            length: PAGE as u32,
            lkey: keys_of(mr).0,
        };
        // SAFETY: live.
        unsafe { (*inline::verbs_get_ctx(side.context)).advise_mr.unwrap()(side.pd, advice, 0, &mut sge, 1) }
    };
    assert_eq!(advise(IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT, 0), 0);
    assert_eq!(pages.present(), [false; 3]);
    assert_eq!(advise(IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE, 1), 0);
    assert_eq!(pages.present(), [false, true, false]);
    pages.unmap(2);
    assert_eq!(advise(IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH, 2), libc::EFAULT);
    // SAFETY: live, and not used again.
    assert_eq!(unsafe { (api().dereg_mr)(mr) }, 0);
}
