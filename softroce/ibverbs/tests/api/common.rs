//! The verbs as a C program calls them, on soft devices with addresses unique to this process.

use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::ptr;
use std::sync::Once;
use std::time::{Duration, Instant};

use doorbell_softroce_ibverbs::{DeviceConfig, LinkChoice, api, configure};
use doorbell_verbs_sys::*;

/// Longer than anything here takes, also on a busy machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

pub(crate) const QKEY: u32 = 0x1111_1111;

pub(crate) const ALL_RIGHTS: u32 =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

/// An address unique to this process, so that concurrent test processes do not interfere.
pub(crate) fn own_address(last: u8) -> IpAddr {
    let pid = std::process::id();
    IpAddr::V4(Ipv4Addr::new(127, 1 + (pid >> 8) as u8 % 250, pid as u8, last))
}

/// A port unique to this process, for tests that cannot use an address of their own.
pub(crate) fn own_port() -> u16 {
    20_000 + (std::process::id() % 40_000) as u16
}

pub(crate) fn capture_file() -> PathBuf {
    std::env::temp_dir().join(format!("doorbell-test-{}.pcap", std::process::id()))
}

pub(crate) fn over_udp() -> bool {
    module_path!().starts_with("over_udp")
}

pub(crate) fn device(name: &str, last: u8) -> DeviceConfig {
    DeviceConfig {
        address: Some(own_address(last)),
        link: if over_udp() {
            LinkChoice::Udp
        } else {
            LinkChoice::Automatic
        },
        ..DeviceConfig::new(name)
    }
}

pub(crate) fn devices(configs: impl FnOnce() -> Vec<DeviceConfig>) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| configure(configs()).unwrap());
}

pub(crate) fn open(name: &str) -> Result<*mut ibv_context, c_int> {
    let mut count = 0;
    // SAFETY: the list is freed below; what it points to stays.
    unsafe {
        let list = (api().get_device_list)(&mut count);
        assert!(!list.is_null());
        let all = std::slice::from_raw_parts(list, count as usize).to_vec();
        assert!(
            (*list.add(count as usize)).is_null(),
            "the list ends with a null pointer"
        );
        (api().free_device_list)(list);
        let named = |device: &&*mut ibv_device| CStr::from_ptr((api().get_device_name)(**device)).to_str() == Ok(name);
        let device = all.iter().find(named).unwrap_or_else(|| panic!("no device {name}"));
        let context = (api().open_device)(*device);
        if context.is_null() { Err(errno()) } else { Ok(context) }
    }
}

/// The GID index of the address with RoCE v2.
const ROUTABLE: u8 = 3;

pub(crate) fn errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

#[derive(Clone, Copy, Debug)]
// fields: one per independent attribute of a test's objects
pub(crate) struct Setup {
    pub(crate) bytes: usize,
    pub(crate) rights: u32,
    pub(crate) access: u32,
    pub(crate) depth: u32,
    pub(crate) mtu: ibv_mtu,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) sig_all: bool,
    pub(crate) qp_type: ibv_qp_type,
    pub(crate) source_index: u8,
    /// Created by ibv_create_qp_ex for these operations.
    pub(crate) send_ops: Option<u32>,
    /// Completion queue created by ibv_create_cq_ex, with these fields.
    pub(crate) wc_flags: Option<u32>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            bytes: 1 << 16,
            rights: ALL_RIGHTS,
            access: ALL_RIGHTS,
            depth: 64,
            mtu: IBV_MTU_1024,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 1,
            sig_all: false,
            qp_type: IBV_QPT_RC,
            source_index: ROUTABLE,
            send_ops: None,
            wc_flags: None,
        }
    }
}

/// Context, PD, CQ, QP and a registered buffer; destroyed on drop, with each result checked.
pub(crate) struct Side {
    pub(crate) context: *mut ibv_context,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) cq: *mut ibv_cq,
    pub(crate) qp: *mut ibv_qp,
    pub(crate) mr: *mut ibv_mr,
    /// Of u64, for alignment. Behind a raw pointer, as the device writes it concurrently.
    memory: *mut [u64],
    pub(crate) qp_gone: bool,
}

// SAFETY: verbs objects may be used from any thread (man pages).
unsafe impl Send for Side {}

impl Side {
    pub(crate) fn new(device: &str, setup: &Setup) -> Self {
        Self::with_channel(device, setup, ptr::null_mut())
    }

    pub(crate) fn with_channel(device: &str, setup: &Setup, channel: *mut ibv_comp_channel) -> Self {
        let context = if channel.is_null() {
            open(device).unwrap()
        } else {
            // SAFETY: live by the caller.
            unsafe { (*channel).context }
        };
        let memory = Box::into_raw(vec![0_u64; setup.bytes.div_ceil(8)].into_boxed_slice());
        // SAFETY: each call's arguments were made by the calls before; the memory lives until the
        // side is dropped.
        unsafe {
            let pd = (api().alloc_pd)(context);
            assert!(!pd.is_null());
            let entries = 4 * setup.depth;
            let cq = match setup.wc_flags {
                None => (api().create_cq)(context, entries as c_int, ptr::null_mut(), channel, 0),
                Some(fields) => create_cq_ex(context, &mut extended_cq_attr(entries, fields, channel)).cast(),
            };
            assert!(!cq.is_null());
            let mr = (api().reg_mr)(pd, memory.cast(), setup.bytes, setup.rights as c_int);
            assert!(!mr.is_null(), "errno {}", errno());
            let mut init = init_attr(cq, setup);
            let qp = match setup.send_ops {
                None => (api().create_qp)(pd, &mut init),
                Some(operations) => create_qp_ex(context, &mut extended_attr(pd, &init, operations)),
            };
            assert!(!qp.is_null(), "errno {}", errno());
            assert_eq!((*qp).state, IBV_QPS_RESET);
            Self {
                context,
                pd,
                cq,
                qp,
                mr,
                memory,
                qp_gone: false,
            }
        }
    }

    pub(crate) fn gid(&self) -> ibv_gid {
        self.gid_at(ROUTABLE)
    }

    pub(crate) fn gid_at(&self, index: u8) -> ibv_gid {
        let mut gid = MaybeUninit::uninit();
        // SAFETY: the context is live; filled on success.
        unsafe {
            assert_eq!((api().query_gid)(self.context, 1, index.into(), gid.as_mut_ptr()), 0);
            gid.assume_init()
        }
    }

    pub(crate) fn qpn(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.qp).qp_num }
    }

    pub(crate) fn rkey(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.mr).rkey }
    }

    pub(crate) fn lkey(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.mr).lkey }
    }

    pub(crate) fn addr(&self) -> u64 {
        self.memory.cast::<u8>().expose_provenance() as u64
    }

    pub(crate) fn len(&self) -> usize {
        self.memory.len() * 8
    }

    pub(crate) fn byte(&self, index: usize) -> u8 {
        assert!(index < self.len());
        // SAFETY: in the buffer.
        unsafe { self.memory.cast::<u8>().add(index).read_volatile() }
    }

    pub(crate) fn bytes(&self, range: std::ops::Range<usize>) -> Vec<u8> {
        range.map(|index| self.byte(index)).collect()
    }

    pub(crate) fn fill(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len());
        // SAFETY: in the buffer.
        unsafe {
            self.memory
                .cast::<u8>()
                .add(at)
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
        };
    }

    pub(crate) fn word(&self, index: usize) -> u64 {
        u64::from_ne_bytes(self.bytes(8 * index..8 * index + 8).try_into().unwrap())
    }

    pub(crate) fn modify(&self, attr: &mut ibv_qp_attr, mask: u32) -> c_int {
        // SAFETY: live.
        unsafe { (api().modify_qp)(self.qp, attr, mask as c_int) }
    }

    pub(crate) fn init(&self, setup: &Setup) {
        let mut attr = attr();
        attr.qp_state = IBV_QPS_INIT;
        attr.port_num = 1;
        attr.qp_access_flags = setup.access;
        attr.qkey = QKEY;
        let own = if setup.qp_type == IBV_QPT_UD {
            IBV_QP_QKEY
        } else {
            IBV_QP_ACCESS_FLAGS
        };
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | own;
        assert_eq!(self.modify(&mut attr, mask), 0);
    }

    pub(crate) fn connect_to(&self, setup: &Setup, gid: ibv_gid, qpn: u32, psns: (u32, u32)) {
        let mut attr = rtr_attr(setup, gid, qpn, psns.1);
        let (rtr, rts) = match setup.qp_type {
            IBV_QPT_RC => (RTR_MASK, RTS_MASK),
            IBV_QPT_XRC_SEND => (RTR_MASK & !OF_RESPONDERS, RTS_MASK),
            IBV_QPT_UC => (RTR_MASK & !OF_RESPONDERS, IBV_QP_STATE | IBV_QP_SQ_PSN),
            _ => (IBV_QP_STATE, IBV_QP_STATE | IBV_QP_SQ_PSN),
        };
        assert_eq!(self.modify(&mut attr, rtr), 0);
        attr.qp_state = IBV_QPS_RTS;
        attr.timeout = setup.timeout;
        attr.retry_cnt = setup.retry_cnt;
        attr.rnr_retry = setup.rnr_retry;
        attr.sq_psn = psns.0;
        attr.max_rd_atomic = 4;
        assert_eq!(self.modify(&mut attr, rts), 0);
        // SAFETY: live.
        assert_eq!(unsafe { (*self.qp).state }, IBV_QPS_RTS);
    }

    pub(crate) fn sge(&self, at: usize, len: usize) -> ibv_sge {
        ibv_sge {
            addr: self.addr() + at as u64,
            length: len as u32,
            lkey: self.lkey(),
        }
    }

    pub(crate) fn post(&self, mut wr: ibv_send_wr, sges: &mut [ibv_sge]) -> c_int {
        wr.sg_list = sges.as_mut_ptr();
        wr.num_sge = sges.len() as c_int;
        let mut bad = ptr::null_mut();
        // SAFETY: live; a list of one.
        let result = unsafe { inline::post_send(self.qp, &mut wr, &mut bad) };
        assert_eq!(bad.is_null(), result == 0);
        result
    }

    pub(crate) fn receive(&self, wr_id: u64, sges: &mut [ibv_sge]) -> c_int {
        let mut wr = ibv_recv_wr {
            wr_id,
            next: ptr::null_mut(),
            sg_list: sges.as_mut_ptr(),
            num_sge: sges.len() as c_int,
        };
        let mut bad = ptr::null_mut();
        // SAFETY: live; a list of one.
        unsafe { inline::post_recv(self.qp, &mut wr, &mut bad) }
    }

    pub(crate) fn poll(&self) -> Option<ibv_wc> {
        let mut wc = MaybeUninit::uninit();
        // SAFETY: live, room for one, filled on success.
        unsafe {
            match inline::poll_cq(self.cq, 1, wc.as_mut_ptr()) {
                0 => None,
                1 => Some(wc.assume_init()),
                error => panic!("ibv_poll_cq: {error}"),
            }
        }
    }

    pub(crate) fn wait(&self) -> ibv_wc {
        let since = Instant::now();
        loop {
            if let Some(wc) = self.poll() {
                return wc;
            }
            assert!(since.elapsed() < TIMEOUT, "no completion");
        }
    }

    /// Waits for the completion of this request, which must succeed.
    pub(crate) fn done(&self, wr_id: u64) -> ibv_wc {
        let wc = self.wait();
        assert_eq!(
            (wc.wr_id, wc.status),
            (wr_id, IBV_WC_SUCCESS),
            "of queue pair {:#x}",
            wc.qp_num
        );
        wc
    }

    pub(crate) fn state(&self) -> ibv_qp_state {
        let (mut attr, mut init) = (attr(), MaybeUninit::uninit());
        // SAFETY: live, both to be written.
        unsafe {
            assert_eq!(
                (api().query_qp)(self.qp, &mut attr, IBV_QP_STATE as c_int, init.as_mut_ptr()),
                0
            )
        };
        attr.qp_state
    }
}

impl Side {
    pub(crate) fn into_memory(self) -> *mut [u64] {
        let memory = self.memory;
        std::mem::forget(self);
        memory
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        // SAFETY: each object is live and destroyed once, after those that use it; the memory is
        // free when its region is gone.
        unsafe {
            if !self.qp_gone {
                assert_eq!((api().destroy_cq)(self.cq), libc::EBUSY);
                assert_eq!((api().destroy_qp)(self.qp), 0);
            }
            assert_eq!((api().dealloc_pd)(self.pd), libc::EBUSY);
            assert_eq!((api().dereg_mr)(self.mr), 0);
            assert_eq!((api().destroy_cq)(self.cq), 0);
            assert_eq!((api().dealloc_pd)(self.pd), 0);
            assert_eq!((api().close_device)(self.context), 0);
            drop(Box::from_raw(self.memory));
        }
    }
}

pub(crate) const RTR_MASK: u32 = IBV_QP_STATE
    | IBV_QP_AV
    | IBV_QP_PATH_MTU
    | IBV_QP_DEST_QPN
    | IBV_QP_RQ_PSN
    | IBV_QP_MAX_DEST_RD_ATOMIC
    | IBV_QP_MIN_RNR_TIMER;

const OF_RESPONDERS: u32 = IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;

pub(crate) const RTS_MASK: u32 =
    IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;

pub(crate) fn rtr_attr(setup: &Setup, gid: ibv_gid, qpn: u32, rq_psn: u32) -> ibv_qp_attr {
    let mut attr = attr();
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = setup.mtu;
    attr.dest_qp_num = qpn;
    attr.rq_psn = rq_psn;
    attr.max_dest_rd_atomic = 4;
    attr.min_rnr_timer = setup.min_rnr_timer;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = 1;
    attr.ah_attr.grh.dgid = gid;
    attr.ah_attr.grh.sgid_index = setup.source_index;
    attr.ah_attr.grh.hop_limit = 1;
    attr.ah_attr.grh.flow_label = 0x54321;
    attr
}

/// # Safety
/// All objects named are live.
pub(crate) unsafe fn create_qp_ex(context: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp {
    // SAFETY: a soft device's context is extended, and has all of it.
    unsafe { (*inline::verbs_get_ctx(context)).create_qp_ex.unwrap()(context, attr) }
}

/// # Safety
/// All objects named are live.
pub(crate) unsafe fn create_cq_ex(context: *mut ibv_context, attr: *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex {
    // SAFETY: as above.
    unsafe { (*inline::verbs_get_ctx(context)).create_cq_ex.unwrap()(context, attr) }
}

pub(crate) fn extended_cq_attr(cqe: u32, fields: u32, channel: *mut ibv_comp_channel) -> ibv_cq_init_attr_ex {
    ibv_cq_init_attr_ex {
        cqe,
        cq_context: ptr::null_mut(),
        channel,
        comp_vector: 0,
        wc_flags: u64::from(fields),
        comp_mask: 0,
        flags: 0,
        parent_domain: ptr::null_mut(),
    }
}

pub(crate) fn extended_attr(pd: *mut ibv_pd, init: &ibv_qp_init_attr, operations: u32) -> ibv_qp_init_attr_ex {
    // SAFETY: integers and pointers.
    let mut attr: ibv_qp_init_attr_ex = unsafe { MaybeUninit::zeroed().assume_init() };
    attr.send_cq = init.send_cq;
    attr.recv_cq = init.recv_cq;
    attr.cap = init.cap;
    attr.qp_type = init.qp_type;
    attr.sq_sig_all = init.sq_sig_all;
    attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    attr.pd = pd;
    attr.send_ops_flags = u64::from(operations);
    attr
}

pub(crate) fn init_attr(cq: *mut ibv_cq, setup: &Setup) -> ibv_qp_init_attr {
    ibv_qp_init_attr {
        qp_context: ptr::null_mut(),
        send_cq: cq,
        recv_cq: cq,
        srq: ptr::null_mut(),
        cap: ibv_qp_cap {
            max_send_wr: setup.depth,
            max_recv_wr: setup.depth,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline_data: 128,
        },
        qp_type: setup.qp_type,
        sq_sig_all: c_int::from(setup.sig_all),
    }
}

pub(crate) fn attr() -> ibv_qp_attr {
    // SAFETY: integers only.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// A signaled request; [`Side::post`] sets its SGE list.
pub(crate) fn request(wr_id: u64, opcode: ibv_wr_opcode) -> ibv_send_wr {
    // SAFETY: integers and null pointers.
    let mut wr: ibv_send_wr = unsafe { MaybeUninit::zeroed().assume_init() };
    wr.wr_id = wr_id;
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr
}

pub(crate) fn rdma(wr_id: u64, opcode: ibv_wr_opcode, remote_addr: u64, rkey: u32) -> ibv_send_wr {
    let mut wr = request(wr_id, opcode);
    wr.wr.rdma = ibv_send_wr_rdma { remote_addr, rkey };
    wr
}

pub(crate) fn pair(names: (&str, &str), setup: &Setup) -> (Side, Side) {
    let (a, b) = (Side::new(names.0, setup), Side::new(names.1, setup));
    connect(&a, &b, setup);
    (a, b)
}

pub(crate) fn connect(a: &Side, b: &Side, setup: &Setup) {
    a.init(setup);
    b.init(setup);
    // PSNs that wrap soon.
    let (from_a, from_b) = (0xff_fff0, 0x12_3456);
    a.connect_to(setup, b.gid(), b.qpn(), (from_a, from_b));
    b.connect_to(setup, a.gid(), a.qpn(), (from_b, from_a));
}

pub(crate) fn pattern(len: usize, seed: u32) -> Vec<u8> {
    (0..len as u32)
        .map(|index| (index.wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(0x9e37)).to_be_bytes()[1])
        .collect()
}

/// The next asynchronous event of a context, acknowledged.
pub(crate) fn async_event(context: *mut ibv_context) -> ibv_async_event {
    let mut event = MaybeUninit::uninit();
    // SAFETY: live; filled on success.
    unsafe {
        assert_eq!((api().get_async_event)(context, event.as_mut_ptr()), 0);
        (api().ack_async_event)(event.as_mut_ptr());
        event.assume_init()
    }
}
