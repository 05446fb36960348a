//! The inline functions of `<infiniband/verbs.h>`, compiled from inlines.c, on the soft device.

use core::ffi::c_int;
use std::process::Command;
use std::ptr;

use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_verbs_sys::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE, ibv_context, ibv_cq, ibv_gid, ibv_mr, ibv_pd, ibv_qp, ibv_qp_attr,
    ibv_qp_ex,
};
use libloading::Library;

use crate::headers::{has_headers, run};
use crate::missing;

/// `struct library` of the C source.
#[repr(C)]
struct Functions {
    modify_qp: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int,
    destroy_qp: unsafe extern "C" fn(*mut ibv_qp) -> c_int,
    destroy_cq: unsafe extern "C" fn(*mut ibv_cq) -> c_int,
    dereg_mr: unsafe extern "C" fn(*mut ibv_mr) -> c_int,
    qp_to_qp_ex: unsafe extern "C" fn(*mut ibv_qp) -> *mut ibv_qp_ex,
}

type UseInlines =
    unsafe extern "C" fn(*mut ibv_context, *mut ibv_pd, *mut ibv_mr, *const ibv_gid, *const Functions) -> c_int;

#[test]
fn the_soft_device_serves_the_inline_functions_of_c() {
    let dir = tempfile::tempdir().unwrap();
    if !has_headers(dir.path()) {
        return missing("no C compiler with <rdma/rdma_cma.h> (gcc and librdmacm-dev)");
    }
    let library = dir.path().join("inlines.so");
    // Lazy binding: inline functions that are not called refer to a library that is not loaded.
    run(Command::new("cc")
        .args([
            "-std=gnu11",
            "-O1",
            "-Wall",
            "-Werror",
            "-shared",
            "-fPIC",
            "-Wl,-z,lazy",
            "-o",
        ])
        .arg(&library)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/abi/inlines.c")));
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let mut config = DeviceConfig::new("soft0");
    config.address = Some([127, 32 + high % 64, low, 1].into());
    configure(vec![config]).unwrap();
    let functions = Functions {
        modify_qp: api().modify_qp,
        destroy_qp: api().destroy_qp,
        destroy_cq: api().destroy_cq,
        dereg_mr: api().dereg_mr,
        qp_to_qp_ex: api().qp_to_qp_ex.unwrap(),
    };
    let memory = Box::into_raw(Box::new([0_u64; 64]));
    let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    // SAFETY: the verbs' contracts: each object is live, used on its own device, and destroyed
    // once, after its users. The function has the type in its C source, and the library stays
    // loaded during the call.
    unsafe {
        let list = (api().get_device_list)(ptr::null_mut());
        let context = (api().open_device)(*list);
        (api().free_device_list)(list);
        assert!(!context.is_null());
        let pd = (api().alloc_pd)(context);
        let mr = (api().reg_mr)(pd, memory.cast(), 512, access as c_int);
        let mut gid = ibv_gid { raw: [0; 16] };
        assert_eq!((api().query_gid)(context, 1, 0, &mut gid), 0);
        let inlines = Library::new(&library).unwrap();
        let use_inlines = inlines.get::<UseInlines>(b"use_inlines").unwrap();
        let line = use_inlines(context, pd, mr, &gid, &functions);
        assert_eq!(line, 0, "the check in this line of inlines.c failed");
        assert_eq!((api().dereg_mr)(mr), 0);
        assert_eq!((api().dealloc_pd)(pd), 0);
        assert_eq!((api().close_device)(context), 0);
        drop(Box::from_raw(memory));
    }
}
