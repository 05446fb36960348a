//! Memory other than a plain region: reregistered in use, device memory, null regions, zero-based.

use std::ffi::c_int;
use std::ptr;
use std::time::Instant;

use doorbell_softroce_ibverbs::api;
use doorbell_verbs_sys::*;

use crate::common::*;

fn two() -> (Side, Side) {
    crate::setup();
    pair(("soft0", "soft1"), &Setup::default())
}

fn extended(side: &Side) -> &verbs_context {
    // SAFETY: live, and not changed after it was opened.
    unsafe { &*inline::verbs_get_ctx(side.context) }
}

struct Region(*mut ibv_mr);

impl Region {
    fn of(pd: *mut ibv_pd, memory: *mut u64, words: usize, access: u32) -> Self {
        // SAFETY: live; what is given outlives the region.
        let mr = unsafe { (api().reg_mr)(pd, memory.cast(), 8 * words, access as c_int) };
        assert!(!mr.is_null(), "errno {}", errno());
        Self(mr)
    }

    fn keys(&self) -> (u32, u32) {
        // SAFETY: live.
        unsafe { ((*self.0).lkey, (*self.0).rkey) }
    }

    fn sge(&self, addr: u64, length: u32) -> ibv_sge {
        let lkey = self.keys().0;
        ibv_sge { addr, length, lkey }
    }

    /// ibv_rereg_mr(3): the errno value if refused, which leaves the region unchanged.
    fn change(&self, flags: u32, pd: *mut ibv_pd, memory: *mut u64, len: usize, access: u32) -> Result<(), c_int> {
        let rereg = api().rereg_mr.unwrap();
        // SAFETY: live; what is given outlives the region.
        match unsafe { rereg(self.0, flags as c_int, pd, memory.cast(), len, access as c_int) } {
            0 => Ok(()),
            error => {
                assert_eq!(error, IBV_REREG_MR_ERR_INPUT);
                Err(errno())
            }
        }
    }

    fn moved_to(&self, memory: *mut u64, words: usize) -> Result<(), c_int> {
        self.change(IBV_REREG_MR_CHANGE_TRANSLATION, ptr::null_mut(), memory, 8 * words, 0)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: live, and not used again.
        assert_eq!(unsafe { (api().dereg_mr)(self.0) }, 0);
    }
}

/// Words that peers write while the test reads them.
fn words<const N: usize>() -> *mut u64 {
    Box::leak(Box::new([0_u64; N])).as_mut_ptr()
}

/// What it shares is sealed by its owner and ends with the range; nothing else is registered so.
#[test]
fn a_memfd_is_registered_by_its_descriptor() {
    const LEN: usize = 8192;
    let (a, _b) = two();
    let memfd = |seals: c_int| {
        // SAFETY: plain system calls; the mapping is not unmapped.
        unsafe {
            let fd = libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
            assert_eq!(libc::ftruncate(fd, LEN as i64), 0);
            assert_eq!(libc::fcntl(fd, libc::F_ADD_SEALS, seals), 0);
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let at = libc::mmap(ptr::null_mut(), LEN, rights, libc::MAP_SHARED, fd, 0);
            assert_ne!(at, libc::MAP_FAILED);
            (fd, at)
        }
    };
    let register = |(fd, at): (c_int, *mut libc::c_void), offset: u64, len: usize| {
        let (iova, access) = (at.expose_provenance() as u64, IBV_ACCESS_LOCAL_WRITE as c_int);
        // SAFETY: the domain is live; the memory stays mapped.
        let mr = unsafe { api().reg_dmabuf_mr.unwrap()(a.pd, offset, len, iova, fd, access) };
        if mr.is_null() { Err(errno()) } else { Ok(Region(mr)) }
    };
    let sealed = memfd(libc::F_SEAL_SHRINK);
    let region = register(sealed, 0, LEN).unwrap();
    assert_ne!(region.keys().0, 0);
    assert!(matches!(register(memfd(0), 0, LEN), Err(libc::EINVAL)), "it may shrink");
    assert!(
        matches!(register(sealed, 0, 4096), Err(libc::EINVAL)),
        "it has other bytes"
    );
    assert!(matches!(register(sealed, 4096, 4096), Err(libc::EOPNOTSUPP)));
    // The second on a machine with CUDA, where dma-bufs are supported.
    assert!(matches!(
        register((-1, sealed.1), 0, LEN),
        Err(libc::EOPNOTSUPP | libc::EBADF)
    ));
}

fn word_at(memory: *mut u64) -> u64 {
    // SAFETY: leaked by `words`.
    unsafe { memory.read_volatile() }
}

fn write_word(a: &Side, id: u64, value: u64, addr: u64, rkey: u32) {
    let mut wr = rdma(id, IBV_WR_RDMA_WRITE, addr, rkey);
    wr.send_flags |= IBV_SEND_INLINE;
    a.fill(0, &value.to_ne_bytes());
    assert_eq!(a.post(wr, &mut [a.sge(0, 8)]), 0);
}

#[test]
fn rereg_mr_ends_access_to_the_old_memory() {
    let (a, b) = two();
    // Both at one iova, to which the peer keeps writing.
    let (one, two) = (words::<1>(), words::<1>());
    // SAFETY: live; the memory is leaked.
    let mr = unsafe { api().reg_mr_iova.unwrap()(b.pd, one.cast(), 8, 0, ALL_RIGHTS as c_int) };
    let region = Region(mr);
    let (mut posted, mut done) = (0, 0);
    let mut stream = || {
        if posted - done < 32 {
            posted += 1;
            write_word(&a, posted, posted, 0, region.keys().1);
        }
        if let Some(wc) = a.poll() {
            assert_eq!(wc.status, IBV_WC_SUCCESS);
            done += 1;
        }
    };
    let zero_based = IBV_ACCESS_ZERO_BASED | ALL_RIGHTS;
    let both = IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_ACCESS;
    for (from, to) in [(one, two), (two, one)].into_iter().cycle().take(40) {
        region.change(both, ptr::null_mut(), to, 8, zero_based).unwrap();
        let (left, since) = (word_at(from), Instant::now());
        let begun = word_at(to);
        while word_at(to) == begun {
            stream();
            assert!(since.elapsed() < TIMEOUT, "nothing comes into the new memory");
        }
        assert_eq!(word_at(from), left);
    }
}

#[test]
fn changes_that_are_refused_change_nothing() {
    let (a, b) = two();
    let memory = words::<1>();
    let region = Region::of(b.pd, memory, 1, ALL_RIGHTS | IBV_ACCESS_MW_BIND);
    let (none, nowhere) = (ptr::null_mut(), ptr::null_mut());
    let (place, rights, domain) = (
        IBV_REREG_MR_CHANGE_TRANSLATION,
        IBV_REREG_MR_CHANGE_ACCESS,
        IBV_REREG_MR_CHANGE_PD,
    );
    let refusals = [
        (region.change(0, none, nowhere, 0, 0), libc::EINVAL),
        (region.change(8, none, nowhere, 0, 0), libc::EINVAL),
        (region.change(place, none, memory, 8, ALL_RIGHTS), libc::EINVAL),
        (region.change(place, none, memory, 0, 0), libc::EINVAL),
        (region.change(place, none, nowhere, 8, 0), libc::EFAULT),
        (
            region.change(rights, none, nowhere, 0, IBV_ACCESS_REMOTE_WRITE),
            libc::EINVAL,
        ),
        (
            region.change(rights, none, nowhere, 0, IBV_ACCESS_ZERO_BASED),
            libc::EINVAL,
        ),
        (region.change(rights, none, nowhere, 0, 1 << 12), libc::EOPNOTSUPP),
        // Of another context, here of another device.
        (region.change(domain, a.pd, nowhere, 0, 0), libc::EINVAL),
    ];
    for (number, (result, error)) in refusals.into_iter().enumerate() {
        assert_eq!(result, Err(error), "refusal {number}");
    }
    // While a window is bound to it.
    // SAFETY: live; freed once.
    unsafe {
        let window = inline::alloc_mw(b.pd, IBV_MW_TYPE_1);
        let mut bind = ibv_mw_bind {
            wr_id: 5,
            send_flags: IBV_SEND_SIGNALED,
            bind_info: ibv_mw_bind_info {
                mr: region.0,
                addr: memory.addr() as u64,
                length: 8,
                mw_access_flags: IBV_ACCESS_REMOTE_READ,
            },
        };
        assert_eq!(inline::bind_mw(b.qp, window, &mut bind), 0);
        b.done(5);
        assert_eq!(region.moved_to(memory, 1), Err(libc::EBUSY));
        assert_eq!(inline::dealloc_mw(window), 0);
    }
    region.moved_to(memory, 1).unwrap();
    write_word(&a, 1, 9, memory.addr() as u64, region.keys().1);
    a.done(1);
    assert_eq!(word_at(memory), 9);
}

#[test]
fn addresses_from_zero() {
    let (a, b) = two();
    let memory = words::<4>();
    let region = Region::of(
        b.pd,
        memory,
        4,
        ALL_RIGHTS | IBV_ACCESS_ZERO_BASED | IBV_ACCESS_RELAXED_ORDERING,
    );
    write_word(&a, 1, 5, 8, region.keys().1);
    a.done(1);
    assert_eq!(word_at(memory.wrapping_add(1)), 5);
    region.moved_to(memory.wrapping_add(2), 2).unwrap();
    write_word(&a, 2, 6, 8, region.keys().1);
    a.done(2);
    assert_eq!(word_at(memory.wrapping_add(3)), 6, "it stays so");
    write_word(&a, 3, 7, memory.addr() as u64, region.keys().1);
    assert_eq!(a.wait().status, IBV_WC_REM_ACCESS_ERR);
}

struct Dm(*mut ibv_dm);

impl Dm {
    fn new(side: &Side, length: usize, log_align_req: u32) -> Result<Self, c_int> {
        let mut attr = ibv_alloc_dm_attr {
            length,
            log_align_req,
            comp_mask: 0,
        };
        // SAFETY: live.
        let dm = unsafe { extended(side).alloc_dm.unwrap()(side.context, &mut attr) };
        if dm.is_null() { Err(errno()) } else { Ok(Self(dm)) }
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> c_int {
        // SAFETY: live, and as many bytes.
        unsafe { (*self.0).memcpy_to_dm.unwrap()(self.0, offset, bytes.as_ptr().cast(), bytes.len()) }
    }

    fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>, c_int> {
        let mut bytes = vec![0xee; len];
        // SAFETY: live, and as many bytes.
        match unsafe { (*self.0).memcpy_from_dm.unwrap()(bytes.as_mut_ptr().cast(), self.0, offset, len) } {
            0 => Ok(bytes),
            error => Err(error),
        }
    }

    fn register(&self, side: &Side, offset: u64, len: usize, access: u32) -> Result<Region, c_int> {
        // SAFETY: live.
        let mr = unsafe { extended(side).reg_dm_mr.unwrap()(side.pd, self.0, offset, len, access) };
        if mr.is_null() { Err(errno()) } else { Ok(Region(mr)) }
    }

    fn free(&self, side: &Side) -> c_int {
        // SAFETY: live; once freed, not used again.
        unsafe { extended(side).free_dm.unwrap()(self.0) }
    }
}

const ON_DEVICE: u32 = ALL_RIGHTS | IBV_ACCESS_ZERO_BASED;

#[test]
fn device_memory_is_bounded() {
    crate::setup();
    // A device whose device memory no other test uses.
    let side = Side::new("six", &Setup::default());
    const ALL: usize = 4 << 20;
    assert_eq!(Dm::new(&side, 0, 0).err(), Some(libc::EINVAL));
    assert_eq!(Dm::new(&side, ALL + 1, 0).err(), Some(libc::EINVAL));
    assert_eq!(Dm::new(&side, 8, 13).err(), Some(libc::EINVAL));
    let dm = Dm::new(&side, ALL, 12).unwrap();
    assert_eq!(Dm::new(&side, 1, 0).err(), Some(libc::ENOMEM));
    let end = ALL as u64;
    assert_eq!(dm.write(end - 4, b"12345678"), libc::EFAULT);
    assert_eq!(dm.write(u64::MAX - 3, b"1234"), libc::EFAULT);
    assert_eq!(dm.read(end, 4), Err(libc::EFAULT));
    assert_eq!(dm.read(end - 4, 4), Ok(vec![0; 4]), "nothing was written");
    for (offset, len) in [(3, 4), (4, 3)] {
        assert_eq!(dm.write(offset, &b"1234"[..len]), libc::EINVAL, "not whole words");
        assert_eq!(dm.read(offset, len), Err(libc::EINVAL));
    }
    assert_eq!((dm.write(end - 4, b"1234"), dm.write(u64::MAX, b"")), (0, 0));
    let refused = |offset, len, access| dm.register(&side, offset, len, access).err();
    assert_eq!(refused(0, 8, ALL_RIGHTS), Some(libc::EINVAL), "not from 0");
    drop(dm.register(&side, end, 0, ON_DEVICE).unwrap());
    assert_eq!(refused(1, ALL, ON_DEVICE), Some(libc::EINVAL));
    assert_eq!(refused(u64::MAX, 8, ON_DEVICE), Some(libc::EINVAL));
    let without_local = IBV_ACCESS_ZERO_BASED | IBV_ACCESS_REMOTE_WRITE;
    assert_eq!(refused(0, 8, without_local), Some(libc::EINVAL));
    // Its address is fixed; rights may change.
    let region = dm.register(&side, 0, ALL, ON_DEVICE).unwrap();
    assert_eq!(region.moved_to(words::<1>(), 1), Err(libc::EINVAL));
    let rights = IBV_REREG_MR_CHANGE_ACCESS;
    let reading = IBV_ACCESS_ZERO_BASED | IBV_ACCESS_REMOTE_READ;
    region
        .change(rights, ptr::null_mut(), ptr::null_mut(), 0, reading)
        .unwrap();
    drop(region);
    assert_eq!(dm.free(&side), 0);
    // New allocations are zeroed.
    let again = Dm::new(&side, ALL, 0).unwrap();
    assert_eq!(again.read(end - 4, 4), Ok(vec![0; 4]));
    assert_eq!(again.free(&side), 0);
}

#[test]
fn null_region() {
    let (a, b) = two();
    let null_of = |side: &Side| {
        // SAFETY: live.
        let mr = unsafe { extended(side).alloc_null_mr.unwrap()(side.pd) };
        assert!(!mr.is_null(), "errno {}", errno());
        Region(mr)
    };
    let (zeroes, nowhere) = (null_of(&a), null_of(&b));
    a.fill(0, b"abcdefgh");
    assert_eq!(b.receive(1, &mut [b.sge(0, 2), nowhere.sge(77, 4), b.sge(100, 10)]), 0);
    assert_eq!(
        a.post(
            request(2, IBV_WR_SEND),
            &mut [a.sge(0, 8), zeroes.sge(u64::MAX - 8, 4), a.sge(0, 1)]
        ),
        0
    );
    a.done(2);
    assert_eq!(b.done(1).byte_len, 13);
    assert_eq!(
        (b.bytes(0..2), b.bytes(100..107)),
        (b"ab".into(), b"gh\0\0\0\0a".into())
    );
    // It has no content and grants no remote rights.
    let rights = |access| nowhere.change(IBV_REREG_MR_CHANGE_ACCESS, ptr::null_mut(), ptr::null_mut(), 0, access);
    assert_eq!(rights(ALL_RIGHTS), Err(libc::EINVAL));
    assert_eq!(nowhere.moved_to(words::<1>(), 1), Err(libc::EINVAL));
    write_word(&a, 3, 1, 0, nowhere.keys().1);
    assert_eq!(a.wait().status, IBV_WC_REM_ACCESS_ERR);
}

#[test]
fn advise_mr_prefetch() {
    crate::setup();
    let side = Side::new("soft0", &Setup::default());
    let read_only = Region::of(side.pd, words::<1>(), 1, IBV_ACCESS_REMOTE_READ);
    // SAFETY: live.
    let advise = |advice, flags, sges: &mut [ibv_sge]| unsafe {
        let (first, count) = (sges.as_mut_ptr(), sges.len() as u32);
        extended(&side).advise_mr.unwrap()(side.pd, advice, flags, first, count)
    };
    let (fetch, write) = (
        IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH,
        IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE,
    );
    // SAFETY: live.
    let addr = unsafe { (*read_only.0).addr.addr() } as u64;
    let mut both = [side.sge(0, 64), read_only.sge(addr, 8)];
    assert_eq!(advise(fetch, 0, &mut both), 0);
    assert_eq!(advise(IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT, 1, &mut both), 0);
    assert_eq!(advise(write, 1, &mut both[..1]), 0);
    assert_eq!(advise(write, 1, &mut both), libc::EPERM);
    assert_eq!(advise(fetch, 0, &mut [read_only.sge(addr, 9)]), libc::EFAULT);
    assert_eq!(advise(fetch, 0, &mut []), libc::EINVAL);
    assert_eq!(advise(fetch, 2, &mut both), libc::EINVAL);
    assert_eq!(advise(9, 0, &mut both), libc::EOPNOTSUPP);
}
