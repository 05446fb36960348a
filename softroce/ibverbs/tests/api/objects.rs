//! Devices, contexts and objects: their attributes, and invalid creations.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::net::UdpSocket;
use std::ptr;

use doorbell_softroce_ibverbs::{AlreadyInUse, api, configure, last_open_error};
use doorbell_verbs_sys::*;

use crate::common::*;

#[test]
fn the_list_of_devices() {
    crate::setup();
    assert_eq!(configure(Vec::new()), Err(AlreadyInUse));
    let (mut first, mut second) = (0, 0);
    // SAFETY: lists of live devices, freed once.
    unsafe {
        let (one, two) = (
            (api().get_device_list)(&mut first),
            (api().get_device_list)(&mut second),
        );
        assert_eq!((first, second), (15, 15));
        let device = *one;
        assert_eq!(device, *two, "pointers to devices are stable");
        (api().free_device_list)(one);
        (api().free_device_list)(two);
        assert_eq!(CStr::from_ptr((*device).name.as_ptr()), c"soft0");
        assert_eq!(CStr::from_ptr((*device).dev_name.as_ptr()), c"uverbs0");
        assert_eq!(
            ((*device).node_type, (*device).transport_type),
            (IBV_NODE_CA, IBV_TRANSPORT_IB)
        );
        assert_ne!((api().get_device_guid)(device), 0);
        (api().free_device_list)((api().get_device_list)(ptr::null_mut()));
    }
}

#[test]
fn device_port_and_gid() {
    crate::setup();
    let context = open("soft0").unwrap();
    // SAFETY: live; each struct is filled on success.
    unsafe {
        assert_eq!((*context).abi_compat, inline::VERBS_ABI_IS_EXTENDED);
        let mut device = MaybeUninit::<ibv_device_attr>::uninit();
        assert_eq!((api().query_device)(context, device.as_mut_ptr()), 0);
        let device = device.assume_init();
        assert_eq!(
            (device.max_sge, device.phys_port_cnt, device.atomic_cap),
            (32, 1, IBV_ATOMIC_HCA)
        );
        assert!(device.max_qp_rd_atom >= 16);

        let query_ex = (*inline::verbs_get_ctx(context)).query_device_ex.unwrap();
        let mut extended = MaybeUninit::<ibv_device_attr_ex>::uninit();
        let size = size_of::<ibv_device_attr_ex>();
        assert_eq!(query_ex(context, ptr::null(), extended.as_mut_ptr(), size), 0);
        let extended = extended.assume_init();
        assert_eq!(
            (extended.orig_attr.max_qp, extended.phys_port_cnt_ex),
            (device.max_qp, 1)
        );
        assert_eq!(
            (extended.completion_timestamp_mask, extended.hca_core_clock),
            (u64::MAX, 1_000_000)
        );
        // Atomic WRITE, and FLUSH of global visibility.
        let placement = 1_u64 << 40 | 1 << 38;
        let flags = u64::from(device.device_cap_flags);
        assert_eq!(extended.device_cap_flags_ex, flags | placement);
        let paging = u64::from(IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT);
        assert_eq!((extended.odp_caps.general_caps, extended.raw_packet_caps), (paging, 0));
        // An older program has a shorter struct, a newer one a longer one.
        let known = std::mem::offset_of!(ibv_device_attr_ex, max_dm_size);
        let mut bytes = [0xee_u8; 2 * size_of::<ibv_device_attr_ex>()];
        assert_eq!(query_ex(context, ptr::null(), bytes.as_mut_ptr().cast(), known), 0);
        assert_eq!(bytes[known..], [0xee; 2 * size_of::<ibv_device_attr_ex>()][known..]);
        assert_eq!(query_ex(context, ptr::null(), bytes.as_mut_ptr().cast(), 2 * size), 0);
        assert!(bytes[size..].iter().all(|&byte| byte == 0));
        assert_eq!(
            query_ex(context, ptr::null(), bytes.as_mut_ptr().cast(), 8),
            libc::EINVAL
        );
        let input = ibv_query_device_ex_input { comp_mask: 1 };
        assert_eq!(query_ex(context, &input, bytes.as_mut_ptr().cast(), size), libc::EINVAL);

        let mut port = MaybeUninit::<ibv_port_attr>::uninit();
        assert_eq!(inline::query_port(api(), context, 1, port.as_mut_ptr()), 0);
        let port = port.assume_init();
        assert_eq!(
            (port.state, u32::from(port.link_layer)),
            (IBV_PORT_ACTIVE, IBV_LINK_LAYER_ETHERNET)
        );
        assert_eq!(port.active_mtu, IBV_MTU_4096, "of loopback");
        assert!(port.active_speed != 0 && port.active_width != 0);
        let mut old = [0xee_u8; size_of::<ibv_port_attr>()];
        assert_eq!((api().query_port)(context, 1, old.as_mut_ptr().cast()), 0);
        assert_eq!(old[48..], [0xee; 4], "the exported form leaves what came later alone");
        assert_eq!(
            inline::query_port(api(), context, 2, old.as_mut_ptr().cast()),
            libc::EINVAL
        );

        let mut pkey = 0;
        assert_eq!((api().query_pkey)(context, 1, 0, &mut pkey), 0);
        assert_eq!(pkey, 0xffff);
        assert_eq!((api().close_device)(context), 0);
    }
}

#[test]
fn contexts_share_the_device() {
    crate::setup();
    let (one, two) = (open("soft0").unwrap(), open("soft0").unwrap());
    assert_ne!(one, two);
    // SAFETY: live, closed once.
    unsafe {
        assert_eq!((api().close_device)(one), 0);
        let pd = (api().alloc_pd)(two);
        assert!(!pd.is_null());
        assert_eq!((api().dealloc_pd)(pd), 0);
        assert_eq!((api().close_device)(two), 0);
    }
}

#[test]
fn completed_message_is_acknowledged_before_destroy_qp() {
    crate::setup();
    let setup = Setup {
        retry_cnt: 1,
        ..Setup::default()
    };
    for round in 0..20 {
        let (a, mut b) = pair(("soft0", "soft1"), &setup);
        assert_eq!(b.receive(1, &mut [b.sge(0, 64)]), 0);
        assert_eq!(a.post(request(2, IBV_WR_SEND), &mut [a.sge(0, 64)]), 0);
        b.done(1);
        if round % 2 == 0 {
            let mut attr = attr();
            attr.qp_state = IBV_QPS_ERR;
            assert_eq!(b.modify(&mut attr, IBV_QP_STATE), 0);
        }
        // SAFETY: live, destroyed once.
        assert_eq!(unsafe { (api().destroy_qp)(b.qp) }, 0);
        b.qp_gone = true;
        a.done(2);
    }
}

#[test]
fn unsupported_calls_fail_cleanly() {
    crate::setup();
    let a = Side::new("soft0", &Setup::default());
    // SAFETY: live objects; the entries are filled, which is what is tested.
    unsafe {
        let ops = &(*a.context).ops;
        assert!(ops._compat_create_ah.unwrap()().is_null());
        let mut init = init_attr(a.cq, &Setup::default());
        init.qp_type = IBV_QPT_RAW_PACKET;
        assert!((api().create_qp)(a.pd, &mut init).is_null());
        assert_eq!(errno(), libc::EOPNOTSUPP);
    }
}

#[test]
fn sizes_out_of_range() {
    crate::setup();
    let a = Side::new("soft0", &Setup::default());
    let refused = |change: fn(&mut ibv_qp_init_attr)| {
        let mut init = init_attr(a.cq, &Setup::default());
        change(&mut init);
        // SAFETY: live.
        assert!(unsafe { (api().create_qp)(a.pd, &mut init) }.is_null());
        assert_eq!(errno(), libc::EINVAL);
    };
    refused(|init| init.cap.max_send_wr = 1 << 20);
    refused(|init| init.cap.max_recv_sge = 33);
    refused(|init| init.cap.max_inline_data = 513);
    refused(|init| init.send_cq = ptr::null_mut());
    for cqe in [0, -1, i32::MAX] {
        // SAFETY: live.
        assert!(unsafe { (api().create_cq)(a.context, cqe, ptr::null_mut(), ptr::null_mut(), 0) }.is_null());
        assert_eq!(errno(), libc::EINVAL);
    }
}

#[test]
fn invalid_registrations() {
    crate::setup();
    let a = Side::new("soft0", &Setup::default());
    let mut word = 0_u64;
    let refused = |addr: *mut u64, len, access: u32, error| {
        // SAFETY: a live PD; nothing is registered.
        let mr = unsafe { (api().reg_mr)(a.pd, addr.cast(), len, access as i32) };
        assert_eq!((mr.is_null(), errno()), (true, error));
    };
    refused(&mut word, 0, ALL_RIGHTS, libc::EINVAL);
    refused(&mut word, usize::MAX, ALL_RIGHTS, libc::EINVAL);
    refused(&mut word, 8, IBV_ACCESS_REMOTE_WRITE, libc::EINVAL);
    refused(&mut word, 8, 1 << 12, libc::EOPNOTSUPP);
    refused(
        ptr::without_provenance_mut(4096),
        8,
        IBV_ACCESS_LOCAL_WRITE,
        libc::EFAULT,
    );
    // A constant is in read-only memory; it can be registered for reading.
    static CONSTANT: [u64; 512] = [7; 512];
    let constant = CONSTANT.as_ptr().cast_mut();
    refused(constant, 4096, IBV_ACCESS_LOCAL_WRITE, libc::EFAULT);
    // SAFETY: a live PD and memory that stays; the region is only read.
    unsafe {
        let mr = (api().reg_mr)(a.pd, constant.cast(), 4096, IBV_ACCESS_REMOTE_READ as i32);
        assert!(!mr.is_null());
        assert_eq!((api().dereg_mr)(mr), 0);
    }
}

#[test]
fn region_with_iova() {
    crate::setup();
    let (a, b) = pair(("soft0", "soft1"), &Setup::default());
    let mut memory = vec![0_u64; 64].into_boxed_slice();
    // SAFETY: a live PD; the memory outlives the registration.
    let mr = unsafe { api().reg_mr_iova.unwrap()(b.pd, memory.as_mut_ptr().cast(), 512, 0x10_0000, ALL_RIGHTS as i32) };
    a.fill(0, &[3; 8]);
    // SAFETY: just made.
    let rkey = unsafe { (*mr).rkey };
    assert_eq!(
        a.post(rdma(1, IBV_WR_RDMA_WRITE, 0x10_0008, rkey), &mut [a.sge(0, 8)]),
        0
    );
    a.done(1);
    // SAFETY: live, destroyed once.
    assert_eq!(unsafe { (api().dereg_mr)(mr) }, 0);
    assert_eq!(memory[..3], [0, 0x0303_0303_0303_0303, 0]);
}

#[test]
fn attributes_that_are_refused_change_nothing() {
    crate::setup();
    let setup = Setup::default();
    let (a, b) = (Side::new("soft0", &setup), Side::new("soft1", &setup));
    let (gid, qpn) = (b.gid(), b.qpn());
    let mut early = rtr_attr(&setup, gid, qpn, 0);
    assert_eq!(a.modify(&mut early, RTR_MASK), libc::EINVAL, "from RESET");
    a.init(&setup);
    let refused = |change: fn(&mut ibv_qp_attr), mask| {
        let mut attr = rtr_attr(&setup, gid, qpn, 0);
        change(&mut attr);
        assert_eq!(a.modify(&mut attr, mask), libc::EINVAL);
        assert_eq!(a.state(), IBV_QPS_INIT);
    };
    refused(|_| (), RTR_MASK & !IBV_QP_AV);
    refused(|_| (), RTR_MASK | IBV_QP_QKEY);
    // None of ibv_modify_qp(3), and two that a soft device does not support.
    for bit in [1 << 21, 1 << 30, 1 << 31, IBV_QP_ALT_PATH, IBV_QP_RATE_LIMIT] {
        refused(|_| (), RTR_MASK | bit);
    }
    refused(|attr| attr.ah_attr.is_global = 0, RTR_MASK);
    refused(|attr| attr.ah_attr.grh.sgid_index = 4, RTR_MASK);
    refused(|attr| attr.ah_attr.grh.dgid.raw = [0; 16], RTR_MASK);
    refused(|attr| attr.ah_attr.port_num = 2, RTR_MASK);
    refused(|attr| attr.path_mtu = 6, RTR_MASK);
    refused(|attr| attr.max_dest_rd_atomic = 129, RTR_MASK);
    refused(|attr| attr.qp_state = 9, RTR_MASK);
    a.connect_to(&setup, gid, qpn, (5, 6));
    let (mut attr, mut init) = (attr(), MaybeUninit::uninit());
    // SAFETY: live; both are filled on success.
    let init: ibv_qp_init_attr = unsafe {
        assert_eq!((api().query_qp)(a.qp, &mut attr, -1, init.as_mut_ptr()), 0);
        init.assume_init()
    };
    assert_eq!(
        (attr.qp_state, attr.dest_qp_num, attr.path_mtu),
        (IBV_QPS_RTS, qpn, setup.mtu)
    );
    assert_eq!(
        (attr.sq_psn, attr.rq_psn, attr.timeout, attr.retry_cnt),
        (5, 6, setup.timeout, setup.retry_cnt)
    );
    // SAFETY: a GID is 16 bytes however it was written.
    let (set, read) = unsafe { (gid.raw, attr.ah_attr.grh.dgid.raw) };
    assert_eq!(set, read);
    assert_eq!((attr.ah_attr.grh.flow_label, attr.ah_attr.grh.hop_limit), (0x54321, 1));
    assert_eq!(
        (init.cap.max_send_wr, init.cap.max_inline_data, init.send_cq),
        (setup.depth, 128, a.cq)
    );
    assert_eq!(attr.qp_access_flags, ALL_RIGHTS & !IBV_ACCESS_LOCAL_WRITE);
}

#[test]
fn address_in_use() {
    crate::setup();
    let address = own_address(6).to_string();
    let held = UdpSocket::bind((own_address(6), 4791)).unwrap();
    assert_eq!(open("taken"), Err(libc::EADDRINUSE));
    let reason = last_open_error().unwrap();
    assert!(
        reason.contains("taken") && reason.contains(&address) && !reason.contains('\n'),
        "{reason}"
    );
    drop(held);
    let context = open("taken").unwrap();
    // SAFETY: live, closed once.
    assert_eq!(unsafe { (api().close_device)(context) }, 0);
}
