//! Parent domains and thread domains.

use std::ffi::c_int;
use std::ptr;

use doorbell_softroce_ibverbs::api;
use doorbell_verbs_sys::*;

use crate::common::*;

fn calls(context: *mut ibv_context) -> &'static verbs_context {
    // SAFETY: live while a test uses it, and not changed after it was opened.
    unsafe { &*inline::verbs_get_ctx(context) }
}

fn parent_of(context: *mut ibv_context, pd: *mut ibv_pd, td: *mut ibv_td, mask: u32) -> Result<*mut ibv_pd, c_int> {
    let mut attr = ibv_parent_domain_init_attr {
        pd,
        td,
        comp_mask: mask,
        alloc: None,
        free: None,
        pd_context: ptr::null_mut(),
    };
    // SAFETY: live, or null where that is refused.
    let parent = unsafe { calls(context).alloc_parent_domain.unwrap()(context, &mut attr) };
    if parent.is_null() { Err(errno()) } else { Ok(parent) }
}

#[test]
fn a_parent_domain_is_its_protection_domain_with_users_of_its_own() {
    crate::setup();
    let (a, b) = pair(("soft0", "soft1"), &Setup::default());
    let known = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
    // SAFETY: live objects, each destroyed once.
    unsafe {
        let td = calls(b.context).alloc_td.unwrap()(b.context, &mut ibv_td_init_attr { comp_mask: 0 });
        let parent = parent_of(b.context, b.pd, td, known).unwrap();
        assert_eq!((*parent).handle, (*b.pd).handle);
        assert_eq!(calls(b.context).dealloc_td.unwrap()(td), libc::EBUSY);
        let mut word = 0_u64;
        let mr = (api().reg_mr)(parent, (&raw mut word).cast(), 8, ALL_RIGHTS as c_int);
        assert_eq!((api().dealloc_pd)(parent), libc::EBUSY, "of the region");
        a.fill(0, b"one PD  ");
        let wr = rdma(
            1,
            IBV_WR_RDMA_WRITE,
            (&raw mut word).expose_provenance() as u64,
            (*mr).rkey,
        );
        assert_eq!(a.post(wr, &mut [a.sge(0, 8)]), 0);
        a.done(1);
        assert_eq!((&raw const word).read_volatile().to_ne_bytes(), *b"one PD  ");
        assert_eq!((api().dereg_mr)(mr), 0);
        let mut attr = extended_cq_attr(8, IBV_WC_STANDARD_FLAGS, ptr::null_mut());
        (attr.comp_mask, attr.parent_domain) = (IBV_CQ_INIT_ATTR_MASK_PD, parent);
        let cq = create_cq_ex(b.context, &mut attr);
        assert_eq!((api().dealloc_pd)(parent), libc::EBUSY, "of the completion queue");
        assert_eq!((api().destroy_cq)(cq.cast()), 0);
        attr.parent_domain = b.pd;
        assert!(create_cq_ex(b.context, &mut attr).is_null());
        assert_eq!(errno(), libc::EINVAL, "not a parent domain");
        assert_eq!((api().dealloc_pd)(parent), 0);
        assert_eq!(calls(b.context).dealloc_td.unwrap()(td), 0);
    }
}

#[test]
fn the_creation_of_domains_is_checked() {
    crate::setup();
    let (one, two) = (open("soft0").unwrap(), open("soft0").unwrap());
    let none = ptr::null_mut();
    // SAFETY: live objects, each destroyed once.
    unsafe {
        let pd = (api().alloc_pd)(one);
        let td = calls(two).alloc_td.unwrap()(two, &mut ibv_td_init_attr { comp_mask: 0 });
        assert_eq!(parent_of(one, none, ptr::null_mut(), 0), Err(libc::EINVAL));
        assert_eq!(
            parent_of(two, pd, ptr::null_mut(), 0),
            Err(libc::EINVAL),
            "of another context"
        );
        assert_eq!(parent_of(one, pd, td, 0), Err(libc::EINVAL), "of another context");
        assert_eq!(parent_of(one, pd, ptr::null_mut(), 1 << 9), Err(libc::EINVAL));
        assert!(calls(two).alloc_td.unwrap()(two, &mut ibv_td_init_attr { comp_mask: 1 }).is_null());
        let parent = parent_of(one, pd, ptr::null_mut(), 0).unwrap();
        assert_eq!((api().dealloc_pd)(pd), libc::EBUSY, "of its parent domain");
        assert_eq!((api().dealloc_pd)(parent), 0);
        assert_eq!((api().dealloc_pd)(pd), 0);
        assert_eq!(calls(two).dealloc_td.unwrap()(td), 0);
        assert_eq!(((api().close_device)(one), (api().close_device)(two)), (0, 0));
    }
}
