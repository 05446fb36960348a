//! One end: a region that allows windows but no direct remote access, and a connection per case.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::ptr;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use doorbell_tests::interop::Channel;
use doorbell_tests::raw::{self, PSN, QpAddress, check_errno, find_gid, non_null, open_device, zeroed};
use doorbell_verbs_sys::*;

pub(crate) const LEN: usize = 16 << 10;
const TIMEOUT: Duration = Duration::from_secs(30);

/// Objects shared by all cases. None is destroyed: the process exits with them.
pub(crate) struct End {
    api: &'static Api,
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    mr: *mut ibv_mr,
    buffer: *mut u8,
    gid: ibv_gid,
    gid_index: u8,
    pub(crate) channel: Channel,
}

pub(crate) struct Connection {
    api: &'static Api,
    cq: *mut ibv_cq,
    qp: *mut ibv_qp,
}

pub(crate) struct Window(*mut ibv_mw);

impl End {
    pub(crate) fn open(api: &'static Api, device: &str, address: IpAddr, channel: Channel) -> Result<Self> {
        let buffer = Box::leak(vec![0_u64; LEN / 8].into_boxed_slice());
        let buffer = buffer.as_mut_ptr().cast::<u8>();
        let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND;
        // SAFETY: each object was returned by the call before and lives to the end of the process,
        // as does the buffer.
        unsafe {
            let context = open_device(api, device)?;
            let (gid_index, gid) = find_gid(api, context, address)?;
            let pd = non_null((api.alloc_pd)(context), "ibv_alloc_pd")?;
            let mr = non_null((api.reg_mr)(pd, buffer.cast(), LEN, access as c_int), "ibv_reg_mr")?;
            Ok(Self {
                api,
                context,
                pd,
                mr,
                buffer,
                gid,
                gid_index,
                channel,
            })
        }
    }

    /// Brings it to RTS, towards one that the peer creates at the same time.
    pub(crate) fn connect(&mut self) -> Result<Connection> {
        // SAFETY: live objects; attributes are read in the calls.
        let connection = unsafe {
            let cq = (self.api.create_cq)(self.context, 64, ptr::null_mut(), ptr::null_mut(), 0);
            let cq = non_null(cq, "ibv_create_cq")?;
            let mut init: ibv_qp_init_attr = zeroed();
            init.send_cq = cq;
            init.recv_cq = cq;
            init.cap.max_send_wr = 16;
            init.cap.max_recv_wr = 4;
            init.cap.max_send_sge = 1;
            init.cap.max_recv_sge = 1;
            init.qp_type = IBV_QPT_RC;
            let qp = non_null((self.api.create_qp)(self.pd, &mut init), "ibv_create_qp")?;
            Connection { api: self.api, cq, qp }
        };
        let mut attr: ibv_qp_attr = zeroed();
        attr.qp_state = IBV_QPS_INIT;
        attr.port_num = 1;
        attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
        let init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        connection.modify(&mut attr, init)?;
        // SAFETY: live; a GID is 16 bytes whichever member was written.
        let (number, gid) = unsafe { ((*connection.qp).qp_num, self.gid.raw) };
        let peer = self.channel.exchange(number.to_be_bytes())?;
        let peer = QpAddress {
            qpn: u32::from_be_bytes(peer),
            psn: PSN,
            gid: self.channel.exchange(gid)?,
        };
        // SAFETY: live.
        unsafe { raw::connect(self.api, connection.qp, self.gid_index, &peer)? };
        self.channel.barrier()?;
        Ok(connection)
    }

    pub(crate) fn window(&self, kind: ibv_mw_type) -> Result<Window> {
        // SAFETY: live.
        non_null(unsafe { inline::alloc_mw(self.pd, kind) }, "ibv_alloc_mw").map(Window)
    }

    pub(crate) fn addr(&self) -> u64 {
        self.buffer.expose_provenance() as u64
    }

    pub(crate) fn rkey(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.mr).rkey }
    }

    pub(crate) fn fill(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= LEN);
        // SAFETY: in the buffer, which no request uses meanwhile.
        unsafe {
            self.buffer
                .add(at)
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
        };
    }

    /// The buffer's bytes, by volatile reads.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        // SAFETY: in the buffer.
        (0..LEN)
            .map(|at| unsafe { self.buffer.add(at).read_volatile() })
            .collect()
    }

    pub(crate) fn element(&self, at: usize, len: usize) -> ibv_sge {
        ibv_sge {
            addr: self.addr() + at as u64,
            length: len as u32,
            // SAFETY: live.
            lkey: unsafe { (*self.mr).lkey },
        }
    }

    /// `len` bytes at `at` of the region, as bind info.
    pub(crate) fn range(&self, at: usize, len: usize, access: u32) -> ibv_mw_bind_info {
        ibv_mw_bind_info {
            mr: self.mr,
            addr: self.addr() + at as u64,
            length: len as u64,
            mw_access_flags: access,
        }
    }
}

impl Connection {
    fn modify(&self, attr: &mut ibv_qp_attr, mask: u32) -> Result<()> {
        // SAFETY: live.
        let result = unsafe { (self.api.modify_qp)(self.qp, attr, mask as c_int) };
        check_errno(result, "ibv_modify_qp")
    }

    pub(crate) fn complete(&self, mut wr: ibv_send_wr, mut element: ibv_sge) -> Result<ibv_wc> {
        wr.wr_id = 1;
        wr.send_flags = IBV_SEND_SIGNALED;
        wr.sg_list = &mut element;
        wr.num_sge = c_int::from(element.length > 0);
        let mut bad = ptr::null_mut();
        // SAFETY: live; a list of one, whose element is in registered memory.
        let result = unsafe { inline::post_send(self.qp, &mut wr, &mut bad) };
        check_errno(result, "ibv_post_send")?;
        self.wait(1)
    }

    pub(crate) fn receive(&self, mut element: ibv_sge) -> Result<()> {
        let mut wr = ibv_recv_wr {
            wr_id: 2,
            next: ptr::null_mut(),
            sg_list: &mut element,
            num_sge: 1,
        };
        let mut bad = ptr::null_mut();
        // SAFETY: live; a list of one, whose element is in registered memory.
        let result = unsafe { inline::post_recv(self.qp, &mut wr, &mut bad) };
        check_errno(result, "ibv_post_recv")
    }

    pub(crate) fn received(&self) -> Result<ibv_wc> {
        self.wait(2)
    }

    fn wait(&self, wr_id: u64) -> Result<ibv_wc> {
        let since = Instant::now();
        let mut wc = MaybeUninit::<ibv_wc>::uninit();
        loop {
            // SAFETY: live, room for one.
            let count = unsafe { inline::poll_cq(self.cq, 1, wc.as_mut_ptr()) };
            ensure!(count >= 0, "ibv_poll_cq: {count}");
            if count == 1 {
                // SAFETY: filled, as it says.
                let wc = unsafe { wc.assume_init() };
                ensure!(wc.wr_id == wr_id, "a completion of request {}", wc.wr_id);
                return Ok(wc);
            }
            ensure!(since.elapsed() < TIMEOUT, "no completion after {TIMEOUT:?}");
        }
    }

    /// Binds a window, which gets its next key, and returns the completion.
    pub(crate) fn bind(&self, window: &Window, bind_info: ibv_mw_bind_info) -> Result<ibv_wc> {
        let mw = window.0;
        // SAFETY: all live; the program must update the key of a type 2 window (ibv_bind_mw(3)).
        unsafe {
            let rkey = inline::inc_rkey((*mw).rkey);
            if (*mw).type_ == IBV_MW_TYPE_1 {
                let mut bind = ibv_mw_bind {
                    wr_id: 1,
                    send_flags: IBV_SEND_SIGNALED,
                    bind_info,
                };
                check_errno(inline::bind_mw(self.qp, mw, &mut bind), "ibv_bind_mw")?;
                ensure!((*mw).rkey == rkey, "the window's key is {:#x}", (*mw).rkey);
                return self.wait(1);
            }
            let mut wr = request(IBV_WR_BIND_MW);
            wr.anon_2.bind_mw = ibv_send_wr_bind_mw { mw, rkey, bind_info };
            let wc = self.complete(wr, zeroed())?;
            if wc.status == IBV_WC_SUCCESS {
                (*mw).rkey = rkey;
            }
            Ok(wc)
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: live, each destroyed once.
        let destroyed = unsafe { ((self.api.destroy_qp)(self.qp), (self.api.destroy_cq)(self.cq)) };
        if destroyed != (0, 0) {
            eprintln!("ibv_destroy_qp, ibv_destroy_cq: {destroyed:?}");
        }
    }
}

impl Window {
    pub(crate) fn rkey(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.0).rkey }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: live, and not used again.
        let result = unsafe { inline::dealloc_mw(self.0) };
        if result != 0 {
            eprintln!("ibv_dealloc_mw: {result}");
        }
    }
}

pub(crate) fn request(opcode: ibv_wr_opcode) -> ibv_send_wr {
    let mut wr: ibv_send_wr = zeroed();
    wr.opcode = opcode;
    wr
}
