//! Importing a device, and objects by their handles.

use std::ffi::c_int;
use std::ptr;

use doorbell_softroce_ibverbs::*;
use doorbell_verbs_sys::*;

use crate::common::*;

fn import(context: *mut ibv_context) -> *mut ibv_context {
    // SAFETY: a live context, and a descriptor of our own.
    let imported = unsafe { import_device(libc::dup((*context).cmd_fd)) };
    assert!(!imported.is_null(), "errno {}", errno());
    imported
}

#[test]
fn an_imported_domain_and_region_are_one_with_the_originals() {
    crate::setup();
    let (a, b) = pair(("soft0", "soft1"), &Setup::default());
    // SAFETY: live objects, each released once.
    unsafe {
        let context = import(b.context);
        let (pd, none) = (import_pd(context, (*b.pd).handle), ptr::null_mut());
        let mr = import_mr(pd, (*b.mr).handle);
        assert_eq!(
            ((*mr).lkey, (*mr).rkey, (*mr).length),
            (b.lkey(), b.rkey(), (*b.mr).length)
        );
        assert!((*mr).addr.is_null() && (*mr).pd == pd);
        let mut word = 0_u64;
        let own = (api().reg_mr)(pd, (&raw mut word).cast(), 8, ALL_RIGHTS as c_int);
        a.fill(0, b"imported");
        let wr = rdma(
            1,
            IBV_WR_RDMA_WRITE,
            (&raw mut word).expose_provenance() as u64,
            (*own).rkey,
        );
        assert_eq!(a.post(wr, &mut [a.sge(0, 8)]), 0);
        a.done(1);
        assert_eq!((&raw const word).read_volatile().to_ne_bytes(), *b"imported");
        assert_eq!((api().dereg_mr)(own), 0);
        unimport_mr(mr);
        let wr = rdma(2, IBV_WR_RDMA_WRITE, b.addr(), b.rkey());
        assert_eq!(a.post(wr, &mut [a.sge(0, 8)]), 0);
        a.done(2);
        // Of the other's type, or of no object.
        for handle in [(*b.mr).handle, u32::MAX] {
            assert_eq!((import_pd(context, handle), errno()), (none, libc::ENOENT));
        }
        // The original can be destroyed meanwhile.
        drop(b);
        unimport_pd(pd);
        assert_eq!((api().close_device)(context), 0);
    }
}

#[test]
fn an_import_destroys_the_object_of_all() {
    crate::setup();
    let (a, b) = pair(("soft0", "soft1"), &Setup::default());
    // SAFETY: live objects, each released once.
    unsafe {
        let context = import(b.context);
        let mut word = 0_u64;
        let mr = (api().reg_mr)(b.pd, (&raw mut word).cast(), 8, ALL_RIGHTS as c_int);
        assert_eq!((api().dereg_mr)(import_mr(b.pd, (*mr).handle)), 0);
        let wr = rdma(
            1,
            IBV_WR_RDMA_WRITE,
            (&raw mut word).expose_provenance() as u64,
            (*mr).rkey,
        );
        assert_eq!(a.post(wr, &mut [a.sge(0, 8)]), 0);
        assert_eq!(a.wait().status, IBV_WC_REM_ACCESS_ERR);
        assert_eq!(
            (import_mr(b.pd, (*mr).handle), errno()),
            (ptr::null_mut(), libc::ENOENT)
        );
        unimport_mr(mr);
        assert_eq!((api().close_device)(context), 0);
    }
}

#[test]
fn imported_device_memory_has_the_same_bytes() {
    crate::setup();
    let original = open("soft0").unwrap();
    let mut attr = ibv_alloc_dm_attr {
        length: 64,
        log_align_req: 0,
        comp_mask: 0,
    };
    // SAFETY: live objects, each released once; as many bytes as are copied.
    unsafe {
        let dm = (*inline::verbs_get_ctx(original)).alloc_dm.unwrap()(original, &mut attr);
        let context = import(original);
        let imported = import_dm(context, (*dm).handle);
        assert_eq!((*dm).memcpy_to_dm.unwrap()(dm, 4, b"12345678".as_ptr().cast(), 8), 0);
        let mut bytes = [0; 8];
        assert_eq!(
            (*imported).memcpy_from_dm.unwrap()(bytes.as_mut_ptr().cast(), imported, 4, 8),
            0
        );
        assert_eq!(&bytes, b"12345678");
        unimport_dm(imported);
        assert_eq!((*inline::verbs_get_ctx(original)).free_dm.unwrap()(dm), 0);
        // The device file lasts until its last context is closed.
        assert_eq!((api().close_device)(original), 0);
        let again = import(context);
        assert_eq!((api().close_device)(context), 0);
        let fd = (*again).cmd_fd;
        assert_eq!((api().close_device)(again), 0);
        assert_eq!(
            (libc::fcntl(fd, libc::F_GETFD), errno()),
            (-1, libc::EBADF),
            "it is closed"
        );
    }
}

#[test]
fn only_a_device_file_of_this_process_is_imported() {
    crate::setup();
    let (one, two) = (open("soft0").unwrap(), open("soft0").unwrap());
    // SAFETY: live objects, each released once; the descriptors are our own.
    unsafe {
        let other = libc::memfd_create(c"other".as_ptr(), libc::MFD_CLOEXEC);
        for (fd, error) in [(-1, libc::EINVAL), (other, libc::EOPNOTSUPP)] {
            assert_eq!((import_device(fd), errno()), (ptr::null_mut(), error));
        }
        assert_eq!(libc::close(other), 0, "it was not taken");
        let pd = (api().alloc_pd)(one);
        assert_eq!((import_pd(two, (*pd).handle), errno()), (ptr::null_mut(), libc::ENOENT));
        assert_eq!((api().dealloc_pd)(pd), 0);
        assert_eq!(((api().close_device)(one), (api().close_device)(two)), (0, 0));
    }
}
