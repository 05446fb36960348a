//! The objects of one end of a test. None is destroyed before the exit, unless its user does.

use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::ptr;

use anyhow::{Context, Result, bail, ensure};
use doorbell_verbs_sys::*;

use super::{QpAddress, check_errno, non_null, zeroed};

/// The Q_Key of the stock ping-pongs.
const QKEY: u32 = 0x1111_1111;
/// The first PSN of every queue pair, chosen to wrap soon.
const PSN: u32 = 0xff_fff0;

/// A device with its protection domain, and a buffer that is one memory region.
pub struct Base {
    api: &'static Api,
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    mr: *mut ibv_mr,
    buffer: *mut u8,
    len: usize,
    gid: ibv_gid,
    gid_index: u8,
}

/// A completion queue.
pub struct Cq(*mut ibv_cq);

/// A shared receive queue.
pub struct Srq {
    api: &'static Api,
    raw: *mut ibv_srq,
}

/// A queue pair, and once connected its peer.
pub struct Qp {
    api: &'static Api,
    raw: *mut ibv_qp,
    peer: u32,
    /// Null unless it is UD.
    ah: *mut ibv_ah,
}

impl Base {
    /// Opens the device, and registers a zeroed buffer; fails when a call does, or no GID is of the
    /// address.
    pub fn open(api: &'static Api, device: &str, address: IpAddr, len: usize, access: u32) -> Result<Self> {
        // Of words, which atomics need.
        let buffer = Box::leak(vec![0_u64; len.div_ceil(8)].into_boxed_slice());
        let buffer = buffer.as_mut_ptr().cast::<u8>();
        let context = open_device(api, device)?;
        // SAFETY: each object was returned by the call before and lives to the end of the process,
        // as does the buffer.
        unsafe {
            let (gid_index, gid) = find_gid(api, context, address)?;
            let pd = non_null((api.alloc_pd)(context), "ibv_alloc_pd")?;
            let mr = non_null((api.reg_mr)(pd, buffer.cast(), len, access as c_int), "ibv_reg_mr")?;
            Ok(Self {
                api,
                context,
                pd,
                mr,
                buffer,
                len,
                gid,
                gid_index,
            })
        }
    }

    /// The open device.
    pub fn context(&self) -> *mut ibv_context {
        self.context
    }

    /// The protection domain.
    pub fn pd(&self) -> *mut ibv_pd {
        self.pd
    }

    /// The memory region.
    pub fn mr(&self) -> *mut ibv_mr {
        self.mr
    }

    /// The remote key of the buffer.
    pub fn rkey(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.mr).rkey }
    }

    /// The address of a byte of the buffer.
    pub fn addr(&self, at: usize) -> u64 {
        (self.buffer.expose_provenance() + at) as u64
    }

    /// The scatter-gather element of a part of the buffer.
    pub fn element(&self, at: usize, len: usize) -> ibv_sge {
        ibv_sge {
            addr: self.addr(at),
            length: len as u32,
            // SAFETY: live.
            lkey: unsafe { (*self.mr).lkey },
        }
    }

    /// Writes to the buffer, where no request may be in progress.
    pub fn fill(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        // SAFETY: in the buffer, which no request uses meanwhile.
        unsafe {
            self.buffer
                .add(at)
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
        };
    }

    /// A part of the buffer, by volatile reads.
    pub fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.len);
        // SAFETY: in the buffer.
        (at..at + len)
            .map(|at| unsafe { self.buffer.add(at).read_volatile() })
            .collect()
    }

    /// Creates a completion queue; fails when the call does.
    pub fn create_cq(&self, entries: usize) -> Result<Cq> {
        // SAFETY: live.
        let cq = unsafe { (self.api.create_cq)(self.context, entries as c_int, ptr::null_mut(), ptr::null_mut(), 0) };
        non_null(cq, "ibv_create_cq").map(Cq)
    }

    /// Creates a shared receive queue; fails when the call does.
    pub fn create_srq(&self, entries: u32) -> Result<Srq> {
        let api = self.api;
        let create = api.create_srq.context("the library has no ibv_create_srq")?;
        let mut init: ibv_srq_init_attr = zeroed();
        init.attr.max_wr = entries;
        init.attr.max_sge = 1;
        // SAFETY: live; the attributes are read and written in the call.
        let raw = non_null(unsafe { create(self.pd, &mut init) }, "ibv_create_srq")?;
        Ok(Srq { api, raw })
    }

    /// Creates a queue pair in INIT that allows peers this access; fails when a call does.
    pub fn create_qp(
        &self,
        kind: ibv_qp_type,
        (sends, receives): (u32, u32),
        cq: &Cq,
        srq: Option<&Srq>,
        access: u32,
    ) -> Result<Qp> {
        let mut init: ibv_qp_init_attr = zeroed();
        init.send_cq = cq.0;
        init.recv_cq = cq.0;
        init.srq = srq.map_or(ptr::null_mut(), |srq| srq.raw);
        init.cap.max_send_wr = sends;
        init.cap.max_recv_wr = receives;
        init.cap.max_send_sge = 1;
        init.cap.max_recv_sge = u32::from(srq.is_none());
        init.qp_type = kind;
        // SAFETY: live, as are the queues; the attributes are read and written in the call.
        let raw = non_null(unsafe { (self.api.create_qp)(self.pd, &mut init) }, "ibv_create_qp")?;
        let qp = Qp {
            api: self.api,
            raw,
            peer: 0,
            ah: ptr::null_mut(),
        };
        let mut attr: ibv_qp_attr = zeroed();
        attr.qp_state = IBV_QPS_INIT;
        attr.port_num = 1;
        attr.qkey = QKEY;
        attr.qp_access_flags = access;
        let own = match kind {
            IBV_QPT_UD => IBV_QP_QKEY,
            _ => IBV_QP_ACCESS_FLAGS,
        };
        qp.modify(&mut attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | own)?;
        Ok(qp)
    }

    /// What the peer of a queue pair needs.
    pub fn address(&self, qp: &Qp) -> QpAddress {
        QpAddress {
            qpn: qp.number(),
            psn: PSN,
            // SAFETY: a GID is 16 bytes whichever member was written.
            gid: unsafe { self.gid.raw },
        }
    }

    /// Brings a queue pair from INIT to RTS, towards its peer; fails when a call does.
    pub fn connect(&self, qp: &mut Qp, peer: &QpAddress) -> Result<()> {
        let mut attr: ibv_qp_attr = zeroed();
        attr.path_mtu = IBV_MTU_1024;
        attr.dest_qp_num = peer.qpn;
        attr.rq_psn = peer.psn;
        attr.sq_psn = PSN;
        attr.max_dest_rd_atomic = 4;
        attr.max_rd_atomic = 4;
        attr.min_rnr_timer = 12;
        attr.timeout = 17;
        attr.retry_cnt = 7;
        attr.rnr_retry = 7;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = 1;
        attr.ah_attr.grh.dgid.raw = peer.gid;
        attr.ah_attr.grh.sgid_index = self.gid_index;
        attr.ah_attr.grh.hop_limit = 64;
        let path = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
        let responder = IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
        let requester = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
        // SAFETY: live.
        let kind = unsafe { (*qp.raw).qp_type };
        let (rtr, rts) = match kind {
            IBV_QPT_RC => (path | responder, requester),
            IBV_QPT_UC => (path, 0),
            _ => (0, 0),
        };
        for (state, mask) in [(IBV_QPS_RTR, rtr), (IBV_QPS_RTS, IBV_QP_SQ_PSN | rts)] {
            attr.qp_state = state;
            qp.modify(&mut attr, IBV_QP_STATE | mask)?;
        }
        qp.peer = peer.qpn;
        if kind == IBV_QPT_UD {
            let create = self.api.create_ah.context("the library has no ibv_create_ah")?;
            // SAFETY: the PD is live; the attributes are read in the call.
            qp.ah = non_null(unsafe { create(self.pd, &mut attr.ah_attr) }, "ibv_create_ah")?;
        }
        Ok(())
    }
}

impl Cq {
    /// The completion queue.
    pub fn raw(&self) -> *mut ibv_cq {
        self.0
    }

    /// A completion, if there is one; fails when the call does.
    pub fn poll(&self) -> Result<Option<ibv_wc>> {
        let mut wc = MaybeUninit::<ibv_wc>::uninit();
        // SAFETY: live, room for one.
        let count = unsafe { inline::poll_cq(self.0, 1, wc.as_mut_ptr()) };
        ensure!(count >= 0, "ibv_poll_cq: {count}");
        // SAFETY: filled, as it says.
        Ok((count > 0).then(|| unsafe { wc.assume_init() }))
    }
}

impl Srq {
    /// Arms the limit; fails when the call does.
    pub fn arm(&self, limit: u32) -> Result<()> {
        let modify = self.api.modify_srq.context("the library has no ibv_modify_srq")?;
        let mut attr = ibv_srq_attr {
            max_wr: 0,
            max_sge: 0,
            srq_limit: limit,
        };
        // SAFETY: live; the attributes are read in the call.
        let result = unsafe { modify(self.raw, &mut attr, IBV_SRQ_LIMIT as c_int) };
        check_errno(result, "ibv_modify_srq")
    }

    /// Posts a receive into registered memory; fails when the call does.
    pub fn receive(&self, wr_id: u64, mut element: ibv_sge) -> Result<()> {
        let (mut wr, mut bad) = (receive_request(wr_id, &mut element), ptr::null_mut());
        // SAFETY: live; a list of one, read in the call; the device checks the element's lkey.
        let result = unsafe { inline::post_srq_recv(self.raw, &mut wr, &mut bad) };
        check_errno(result, "ibv_post_srq_recv")
    }
}

impl Qp {
    /// The queue pair.
    pub fn raw(&self) -> *mut ibv_qp {
        self.raw
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.raw).qp_num }
    }

    /// The number of the peer's.
    pub fn peer(&self) -> u32 {
        self.peer
    }

    /// Modifies it; fails when the call does.
    pub fn modify(&self, attr: &mut ibv_qp_attr, mask: u32) -> Result<()> {
        // SAFETY: live; the attributes are read in the call.
        let result = unsafe { (self.api.modify_qp)(self.raw, attr, mask as c_int) };
        check_errno(result, "ibv_modify_qp")
    }

    /// A SEND to the peer.
    pub fn request(&self, wr_id: u64) -> ibv_send_wr {
        let mut wr: ibv_send_wr = zeroed();
        wr.wr_id = wr_id;
        wr.opcode = IBV_WR_SEND;
        if !self.ah.is_null() {
            wr.wr.ud = ibv_send_wr_ud {
                ah: self.ah,
                remote_qpn: self.peer,
                remote_qkey: QKEY,
            };
        }
        wr
    }

    /// Posts a signaled request; fails when the call does.
    ///
    /// # Safety
    /// An address handle or memory window that `wr` names is live.
    pub unsafe fn send(&self, mut wr: ibv_send_wr, mut element: Option<ibv_sge>) -> Result<()> {
        wr.next = ptr::null_mut();
        wr.send_flags = IBV_SEND_SIGNALED;
        wr.num_sge = c_int::from(element.is_some());
        wr.sg_list = element.as_mut().map_or(ptr::null_mut(), ptr::from_mut);
        let mut bad = ptr::null_mut();
        // SAFETY: live; a list of one, read in the call, with live objects by contract. The device
        // accesses no memory but the registered buffer: it checks the element's lkey.
        let result = unsafe { inline::post_send(self.raw, &mut wr, &mut bad) };
        check_errno(result, "ibv_post_send")
    }

    /// Posts a receive into registered memory; fails when the call does.
    pub fn receive(&self, wr_id: u64, mut element: ibv_sge) -> Result<()> {
        let (mut wr, mut bad) = (receive_request(wr_id, &mut element), ptr::null_mut());
        // SAFETY: live; a list of one, read in the call; the device checks the element's lkey.
        let result = unsafe { inline::post_recv(self.raw, &mut wr, &mut bad) };
        check_errno(result, "ibv_post_recv")
    }
}

fn receive_request(wr_id: u64, element: &mut ibv_sge) -> ibv_recv_wr {
    ibv_recv_wr {
        wr_id,
        next: ptr::null_mut(),
        sg_list: element,
        num_sge: 1,
    }
}

fn open_device(api: &Api, name: &str) -> Result<*mut ibv_context> {
    let mut count = 0;
    // SAFETY: an `Api` is a libibverbs; the list has `count` entries and is never freed, so the
    // devices stay valid.
    unsafe {
        let list = non_null((api.get_device_list)(&mut count), "ibv_get_device_list")?;
        for index in 0..count as usize {
            let device = *list.add(index);
            if CStr::from_ptr((api.get_device_name)(device)).to_str() == Ok(name) {
                return non_null((api.open_device)(device), "ibv_open_device");
            }
        }
    }
    bail!("no device {name}")
}

/// The GID of an address, and its index.
///
/// # Safety
/// `context` is live and of `api`.
unsafe fn find_gid(api: &Api, context: *mut ibv_context, address: IpAddr) -> Result<(u8, ibv_gid)> {
    let wanted = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    for index in 0..16 {
        let mut gid: ibv_gid = zeroed();
        // SAFETY: by contract; 16 bytes whichever member was written.
        unsafe {
            if (api.query_gid)(context, 1, index, &mut gid) == 0 && gid.raw == wanted {
                return Ok((index as u8, gid));
            }
        }
    }
    bail!("no GID for {address}")
}
