//! One end: a region that allows windows but no direct remote access, and a connection per case.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use doorbell_tests::interop::Channel;
use doorbell_tests::raw::{Base, Cq, Qp, QpAddress, check_errno, non_null, zeroed};
use doorbell_verbs_sys::*;

pub(crate) const LEN: usize = 16 << 10;
const TIMEOUT: Duration = Duration::from_secs(30);

/// Objects shared by all cases. None is destroyed: the process exits with them.
pub(crate) struct End {
    api: &'static Api,
    pub(crate) base: Base,
    pub(crate) channel: Channel,
}

pub(crate) struct Connection {
    api: &'static Api,
    cq: Cq,
    qp: Qp,
}

pub(crate) struct Window(*mut ibv_mw);

impl End {
    pub(crate) fn open(api: &'static Api, device: &str, address: IpAddr, channel: Channel) -> Result<Self> {
        let base = Base::open(api, device, address, LEN, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND)?;
        Ok(Self { api, base, channel })
    }

    /// Brings it to RTS, towards one that the peer creates at the same time.
    pub(crate) fn connect(&mut self) -> Result<Connection> {
        let (api, base) = (self.api, &self.base);
        let access = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
        let cq = base.create_cq(64)?;
        let qp = base.create_qp(IBV_QPT_RC, (16, 4), &cq, None, access)?;
        let mut connection = Connection { api, cq, qp };
        let ours = base.address(&connection.qp);
        let theirs = QpAddress {
            qpn: u32::from_be_bytes(self.channel.exchange(ours.qpn.to_be_bytes())?),
            gid: self.channel.exchange(ours.gid)?,
            ..ours
        };
        base.connect(&mut connection.qp, &theirs)?;
        self.channel.barrier()?;
        Ok(connection)
    }

    pub(crate) fn window(&self, kind: ibv_mw_type) -> Result<Window> {
        // SAFETY: live.
        non_null(unsafe { inline::alloc_mw(self.base.pd(), kind) }, "ibv_alloc_mw").map(Window)
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.base.bytes(0, LEN)
    }

    /// `len` bytes at `at` of the region, as bind info.
    pub(crate) fn range(&self, at: usize, len: usize, access: u32) -> ibv_mw_bind_info {
        ibv_mw_bind_info {
            mr: self.base.mr(),
            addr: self.base.addr(at),
            length: len as u64,
            mw_access_flags: access,
        }
    }
}

impl Connection {
    pub(crate) fn complete(&self, mut wr: ibv_send_wr, element: ibv_sge) -> Result<ibv_wc> {
        wr.wr_id = 1;
        // SAFETY: an RC queue pair has no address handle, and the cases name a window only between
        // its allocation and its deallocation.
        unsafe { self.qp.send(wr, (element.length > 0).then_some(element))? };
        self.wait(1)
    }

    pub(crate) fn receive(&self, element: ibv_sge) -> Result<()> {
        self.qp.receive(2, element)
    }

    pub(crate) fn received(&self) -> Result<ibv_wc> {
        self.wait(2)
    }

    fn wait(&self, wr_id: u64) -> Result<ibv_wc> {
        let since = Instant::now();
        loop {
            if let Some(wc) = self.cq.poll()? {
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
                check_errno(inline::bind_mw(self.qp.raw(), mw, &mut bind), "ibv_bind_mw")?;
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
        let destroyed = unsafe {
            (
                (self.api.destroy_qp)(self.qp.raw()),
                (self.api.destroy_cq)(self.cq.raw()),
            )
        };
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
