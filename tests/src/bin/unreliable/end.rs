//! A UC or UD queue pair and its memory, by the C verbs. Nothing is destroyed before the exit.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use doorbell_tests::raw::{self, PSN, QpAddress, check_errno, find_gid, non_null, open_device, zeroed};
use doorbell_verbs_sys::*;

use crate::{Config, Transport};

/// The Q_Key of the stock ping-pongs.
const QKEY: u32 = 0x1111_1111;
const GRH: usize = 40;
const DEPTH: usize = 16;
const TIMEOUT: Duration = Duration::from_secs(20);
/// The wr_id of a send.
const SEND: u64 = 1 << 32;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) addr: u64,
    pub(crate) rkey: u32,
}

/// One end. Its buffer: a send slot, the peer's WRITE target, and the receive slots.
// fields: raw verbs objects of one process, without owners
pub(crate) struct End {
    transport: Transport,
    size: usize,
    api: &'static Api,
    pd: *mut ibv_pd,
    cq: *mut ibv_cq,
    qp: *mut ibv_qp,
    mr: *mut ibv_mr,
    buffer: *mut u8,
    gid: ibv_gid,
    gid_index: u8,
    ah: *mut ibv_ah,
    peer: u32,
    received: u64,
    sent: bool,
}

impl Target {
    pub(crate) fn to_bytes(self) -> [u8; 12] {
        let mut bytes = [0; 12];
        bytes[..8].copy_from_slice(&self.addr.to_be_bytes());
        bytes[8..].copy_from_slice(&self.rkey.to_be_bytes());
        bytes
    }

    pub(crate) fn from_bytes(bytes: [u8; 12]) -> Self {
        let (mut addr, mut rkey) = ([0; 8], [0; 4]);
        addr.copy_from_slice(&bytes[..8]);
        rkey.copy_from_slice(&bytes[8..]);
        Self {
            addr: u64::from_be_bytes(addr),
            rkey: u32::from_be_bytes(rkey),
        }
    }
}

impl End {
    /// Creates a queue pair in INIT, with its receives posted.
    pub(crate) fn open(api: &'static Api, config: &Config) -> Result<Self> {
        let slot = config.size + GRH;
        let buffer = Box::leak(vec![0_u8; slot * (DEPTH + 2)].into_boxed_slice());
        let len = buffer.len();
        let buffer = buffer.as_mut_ptr();
        // SAFETY: each object was returned by the call before and lives to the end of the process,
        // as does the buffer; attributes are read and written in the calls.
        unsafe {
            let context = open_device(api, &config.options.device)?;
            let (gid_index, gid) = find_gid(api, context, config.options.address)?;
            let pd = non_null((api.alloc_pd)(context), "ibv_alloc_pd")?;
            let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
            let mr = non_null((api.reg_mr)(pd, buffer.cast(), len, access as c_int), "ibv_reg_mr")?;
            let cq = (api.create_cq)(context, 4 * DEPTH as c_int, ptr::null_mut(), ptr::null_mut(), 0);
            let cq = non_null(cq, "ibv_create_cq")?;
            let mut init: ibv_qp_init_attr = zeroed();
            init.send_cq = cq;
            init.recv_cq = cq;
            init.cap.max_send_wr = 4;
            init.cap.max_recv_wr = DEPTH as u32;
            init.cap.max_send_sge = 1;
            init.cap.max_recv_sge = 1;
            init.qp_type = match config.transport {
                Transport::Uc => IBV_QPT_UC,
                Transport::Ud => IBV_QPT_UD,
            };
            let qp = non_null((api.create_qp)(pd, &mut init), "ibv_create_qp")?;
            let end = Self {
                transport: config.transport,
                size: config.size,
                api,
                pd,
                cq,
                qp,
                mr,
                buffer,
                gid,
                gid_index,
                ah: ptr::null_mut(),
                peer: 0,
                received: 0,
                sent: true,
            };
            let mut attr: ibv_qp_attr = zeroed();
            attr.qp_state = IBV_QPS_INIT;
            attr.port_num = 1;
            attr.qkey = QKEY;
            attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
            let own = match config.transport {
                Transport::Uc => IBV_QP_ACCESS_FLAGS,
                Transport::Ud => IBV_QP_QKEY,
            };
            end.modify(&mut attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | own)?;
            for number in 0..DEPTH as u64 {
                end.post_receive(number)?;
            }
            Ok(end)
        }
    }

    pub(crate) fn address(&self) -> QpAddress {
        QpAddress {
            // SAFETY: live; a GID is 16 bytes whichever member was written.
            qpn: unsafe { (*self.qp).qp_num },
            psn: PSN,
            // SAFETY: as above.
            gid: unsafe { self.gid.raw },
        }
    }

    pub(crate) fn target(&self) -> Target {
        Target {
            addr: self.slot_address(1),
            // SAFETY: live.
            rkey: unsafe { (*self.mr).rkey },
        }
    }

    /// Brings the queue pair to RTS, towards the peer.
    pub(crate) fn connect(&mut self, peer: &QpAddress) -> Result<()> {
        self.peer = peer.qpn;
        // SAFETY: live.
        let mut address = unsafe { raw::connect(self.api, self.qp, self.gid_index, peer)? };
        if self.transport == Transport::Ud {
            let create = self.api.create_ah.context("the library has no ibv_create_ah")?;
            // SAFETY: the PD is live.
            self.ah = non_null(unsafe { create(self.pd, &mut address) }, "ibv_create_ah")?;
        }
        Ok(())
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Sends a message, to the peer's receive or its `target`.
    pub(crate) fn send(&mut self, bytes: &[u8], target: Option<Target>) -> Result<()> {
        ensure!(bytes.len() <= self.size, "{} bytes", bytes.len());
        while !self.sent {
            self.poll()?;
        }
        // SAFETY: the first slot holds a message, and no request uses it.
        unsafe { self.buffer.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        let mut element = self.element(0, bytes.len());
        let mut wr: ibv_send_wr = zeroed();
        wr.wr_id = SEND;
        wr.sg_list = &mut element;
        wr.num_sge = 1;
        wr.send_flags = IBV_SEND_SIGNALED;
        wr.opcode = IBV_WR_SEND;
        if let Some(target) = target {
            wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
            wr.wr.rdma = ibv_send_wr_rdma {
                remote_addr: target.addr,
                rkey: target.rkey,
            };
        }
        if self.transport == Transport::Ud {
            wr.wr.ud = ibv_send_wr_ud {
                ah: self.ah,
                remote_qpn: self.peer,
                remote_qkey: QKEY,
            };
        }
        let mut bad = ptr::null_mut();
        self.sent = false;
        // SAFETY: live; a list of one, whose element is in registered memory.
        check_errno(
            unsafe { inline::post_send(self.qp, &mut wr, &mut bad) },
            "ibv_post_send",
        )
    }

    pub(crate) fn receive(&mut self) -> Result<Vec<u8>> {
        let since = Instant::now();
        loop {
            if let Some(bytes) = self.poll()? {
                return Ok(bytes);
            }
            ensure!(since.elapsed() < TIMEOUT, "no message after {TIMEOUT:?}");
        }
    }

    /// Polls a completion; returns the message of a receive, and reposts it.
    fn poll(&mut self) -> Result<Option<Vec<u8>>> {
        let mut wc = MaybeUninit::<ibv_wc>::uninit();
        // SAFETY: live, room for one.
        let count = unsafe { inline::poll_cq(self.cq, 1, wc.as_mut_ptr()) };
        ensure!(count >= 0, "ibv_poll_cq: {count}");
        if count == 0 {
            return Ok(None);
        }
        // SAFETY: filled, as it says.
        let wc = unsafe { wc.assume_init() };
        ensure!(wc.status == IBV_WC_SUCCESS, "a completion with status {}", wc.status);
        if wc.wr_id == SEND {
            self.sent = true;
            return Ok(None);
        }
        ensure!(
            wc.wr_id == self.received % DEPTH as u64,
            "receive {} completed out of order",
            wc.wr_id
        );
        self.received += 1;
        let (slot, grh) = match (self.transport, wc.opcode) {
            (Transport::Ud, IBV_WC_RECV) => {
                ensure!(wc.wc_flags & IBV_WC_GRH != 0, "a datagram without its header");
                ensure!(wc.src_qp == self.peer, "a datagram of queue pair {:#x}", wc.src_qp);
                (wc.wr_id as usize + 2, GRH)
            }
            (Transport::Uc, IBV_WC_RECV) => (wc.wr_id as usize + 2, 0),
            (Transport::Uc, IBV_WC_RECV_RDMA_WITH_IMM) => (1, 0),
            (_, other) => bail!("a completion of opcode {other}"),
        };
        let end = wc.byte_len as usize;
        ensure!((grh..=self.size + GRH).contains(&end), "{end} bytes received");
        // SAFETY: in the buffer, and the device has done with it.
        let bytes = unsafe { std::slice::from_raw_parts(self.buffer.add(slot * (self.size + GRH) + grh), end - grh) };
        let bytes = bytes.to_vec();
        self.post_receive(wc.wr_id)?;
        Ok(Some(bytes))
    }

    fn post_receive(&self, number: u64) -> Result<()> {
        let mut element = self.element(number as usize + 2, self.size + GRH);
        let mut wr = ibv_recv_wr {
            wr_id: number,
            next: ptr::null_mut(),
            sg_list: &mut element,
            num_sge: 1,
        };
        let mut bad = ptr::null_mut();
        // SAFETY: live; a list of one, whose element is in registered memory.
        check_errno(
            unsafe { inline::post_recv(self.qp, &mut wr, &mut bad) },
            "ibv_post_recv",
        )
    }

    fn element(&self, slot: usize, len: usize) -> ibv_sge {
        ibv_sge {
            addr: self.slot_address(slot),
            length: len as u32,
            // SAFETY: live.
            lkey: unsafe { (*self.mr).lkey },
        }
    }

    fn slot_address(&self, number: usize) -> u64 {
        (self.buffer.expose_provenance() + number * (self.size + GRH)) as u64
    }

    fn modify(&self, attr: &mut ibv_qp_attr, mask: u32) -> Result<()> {
        // SAFETY: live.
        check_errno(
            unsafe { (self.api.modify_qp)(self.qp, attr, mask as c_int) },
            "ibv_modify_qp",
        )
    }
}
