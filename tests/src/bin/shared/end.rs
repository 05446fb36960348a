//! Queue pairs on a shared receive queue, by the C verbs. Nothing is destroyed before the exit.

use std::mem::MaybeUninit;
use std::ptr;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use doorbell_tests::raw::{self, PSN, QpAddress, check_errno, find_gid, non_null, open_device, zeroed};
use doorbell_verbs_sys::*;

use crate::{Config, Transport};

pub(crate) const DEPTH: usize = 32;
/// The longest message; that of the stock ping-pongs.
pub(crate) const SIZE: usize = 4096;

const QKEY: u32 = 0x1111_1111;
const GRH: usize = 40;
const TIMEOUT: Duration = Duration::from_secs(20);
/// Flag in the wr_id of a send; the low bits are the queue pair's index.
const SEND: u64 = 1 << 32;

pub(crate) struct Received {
    pub(crate) qp: usize,
    pub(crate) bytes: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    Limit,
    LastWqe(u32),
    Other(u32),
}

/// One end. Its buffer: a send slot per queue pair, then the receive slots.
// fields: raw verbs objects of one process, without owners
pub(crate) struct End {
    transport: Transport,
    api: &'static Api,
    pd: *mut ibv_pd,
    cq: *mut ibv_cq,
    srq: *mut ibv_srq,
    qps: Vec<*mut ibv_qp>,
    mr: *mut ibv_mr,
    buffer: *mut u8,
    gid: ibv_gid,
    gid_index: u8,
    peers: Vec<(u32, *mut ibv_ah)>,
    /// By queue pair: whether a send is in flight.
    sending: Vec<bool>,
    /// Messages received while waiting for something else.
    kept: Vec<Received>,
    events: Receiver<Event>,
    is_soft: bool,
}

impl End {
    /// Creates queue pairs in INIT; no receive is posted.
    pub(crate) fn open(api: &'static Api, config: &Config) -> Result<Self> {
        let buffer = Box::leak(vec![0_u8; (SIZE + GRH) * (config.qps + DEPTH)].into_boxed_slice());
        let len = buffer.len();
        let buffer = buffer.as_mut_ptr();
        let create_srq = api.create_srq.context("the library has no ibv_create_srq")?;
        // SAFETY: each object was returned by the call before and lives to the end of the process,
        // as does the buffer; attributes are read and written in the calls.
        unsafe {
            let context = open_device(api, &config.options.device)?;
            let (gid_index, gid) = find_gid(api, context, config.options.address)?;
            let pd = non_null((api.alloc_pd)(context), "ibv_alloc_pd")?;
            let access = IBV_ACCESS_LOCAL_WRITE as i32;
            let mr = non_null((api.reg_mr)(pd, buffer.cast(), len, access), "ibv_reg_mr")?;
            let entries = (DEPTH + config.qps) as i32;
            let cq = (api.create_cq)(context, entries, ptr::null_mut(), ptr::null_mut(), 0);
            let cq = non_null(cq, "ibv_create_cq")?;
            let mut init: ibv_srq_init_attr = zeroed();
            init.attr.max_wr = DEPTH as u32;
            init.attr.max_sge = 1;
            let srq = non_null(create_srq(pd, &mut init), "ibv_create_srq")?;
            let mut init: ibv_qp_init_attr = zeroed();
            init.send_cq = cq;
            init.recv_cq = cq;
            init.srq = srq;
            init.cap.max_send_wr = 4;
            init.cap.max_send_sge = 1;
            init.qp_type = match config.transport {
                Transport::Rc => IBV_QPT_RC,
                Transport::Ud => IBV_QPT_UD,
            };
            let qps = (0..config.qps)
                .map(|_| non_null((api.create_qp)(pd, &mut init), "ibv_create_qp"))
                .collect::<Result<Vec<_>>>()?;
            let end = Self {
                transport: config.transport,
                api,
                pd,
                cq,
                srq,
                qps,
                mr,
                buffer,
                gid,
                gid_index,
                peers: Vec::new(),
                sending: vec![false; config.qps],
                kept: Vec::new(),
                events: events(api, context),
                is_soft: config.options.device.starts_with("soft"),
            };
            let mut attr: ibv_qp_attr = zeroed();
            attr.qp_state = IBV_QPS_INIT;
            attr.port_num = 1;
            attr.qkey = QKEY;
            let own = match config.transport {
                Transport::Rc => IBV_QP_ACCESS_FLAGS,
                Transport::Ud => IBV_QP_QKEY,
            };
            for qp in 0..config.qps {
                end.modify(qp, &mut attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | own)?;
            }
            Ok(end)
        }
    }

    pub(crate) fn addresses(&self) -> Vec<QpAddress> {
        let one = |&qp: &*mut ibv_qp| QpAddress {
            // SAFETY: live.
            qpn: unsafe { (*qp).qp_num },
            psn: PSN,
            // SAFETY: a GID is 16 bytes whichever member was written.
            gid: unsafe { self.gid.raw },
        };
        self.qps.iter().map(one).collect()
    }

    /// Brings each queue pair to RTS towards its peer.
    pub(crate) fn connect(&mut self, peers: &[QpAddress]) -> Result<()> {
        for (qp, peer) in peers.iter().enumerate() {
            // SAFETY: live.
            let mut address = unsafe { raw::connect(self.api, self.qps[qp], self.gid_index, peer)? };
            let mut ah = ptr::null_mut();
            if self.transport == Transport::Ud {
                let create = self.api.create_ah.context("the library has no ibv_create_ah")?;
                // SAFETY: the PD is live.
                ah = non_null(unsafe { create(self.pd, &mut address) }, "ibv_create_ah")?;
            }
            self.peers.push((peer.qpn, ah));
        }
        Ok(())
    }

    pub(crate) fn arm(&self, limit: u32) -> Result<()> {
        let modify = self.api.modify_srq.context("the library has no ibv_modify_srq")?;
        let mut attr = ibv_srq_attr {
            max_wr: 0,
            max_sge: 0,
            srq_limit: limit,
        };
        // SAFETY: live.
        check_errno(
            unsafe { modify(self.srq, &mut attr, IBV_SRQ_LIMIT as i32) },
            "ibv_modify_srq",
        )
    }

    pub(crate) fn event(&self) -> Result<Option<Event>> {
        match self.events.recv_timeout(TIMEOUT) {
            Ok(event) => Ok(Some(event)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => bail!("ibv_get_async_event fails"),
        }
    }

    /// Moves a queue pair without receives to ERR; a soft device reports its last WQE reached.
    pub(crate) fn fail(&mut self, qp: usize) -> Result<()> {
        let mut attr: ibv_qp_attr = zeroed();
        attr.qp_state = IBV_QPS_ERR;
        self.modify(qp, &mut attr, IBV_QP_STATE)?;
        // The kernel's rxe has no such event.
        if self.is_soft {
            // SAFETY: live.
            let wanted = Event::LastWqe(unsafe { (*self.qps[qp]).qp_num });
            let event = self.event()?;
            ensure!(event == Some(wanted), "{event:?} instead of {wanted:?}");
        }
        ensure!(self.poll()?.is_none(), "something was flushed");
        Ok(())
    }

    /// Posts the receive of a slot to the shared receive queue.
    pub(crate) fn post_receive(&mut self, slot: usize) -> Result<()> {
        let mut element = self.element(self.qps.len() + slot, SIZE + GRH);
        let mut wr = ibv_recv_wr {
            wr_id: slot as u64,
            next: ptr::null_mut(),
            sg_list: &mut element,
            num_sge: 1,
        };
        let mut bad = ptr::null_mut();
        // SAFETY: live; a list of one, whose element is in registered memory.
        let result = unsafe { inline::post_srq_recv(self.srq, &mut wr, &mut bad) };
        check_errno(result, "ibv_post_srq_recv")
    }

    /// Sends a message once the queue pair's last send is complete.
    pub(crate) fn send(&mut self, qp: usize, bytes: &[u8]) -> Result<()> {
        self.wait_until(|end| !end.sending[qp])?;
        // SAFETY: the slot holds the longest message, and no request uses it.
        unsafe {
            let slot = self.buffer.add(qp * (SIZE + GRH));
            slot.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len().min(SIZE));
        }
        let mut element = self.element(qp, bytes.len());
        let mut wr: ibv_send_wr = zeroed();
        wr.wr_id = SEND | qp as u64;
        wr.sg_list = &mut element;
        wr.num_sge = 1;
        wr.send_flags = IBV_SEND_SIGNALED;
        wr.opcode = IBV_WR_SEND;
        if self.transport == Transport::Ud {
            let (remote_qpn, ah) = self.peers[qp];
            wr.wr.ud = ibv_send_wr_ud {
                ah,
                remote_qpn,
                remote_qkey: QKEY,
            };
        }
        let mut bad = ptr::null_mut();
        self.sending[qp] = true;
        // SAFETY: live; a list of one, whose element is in registered memory.
        check_errno(
            unsafe { inline::post_send(self.qps[qp], &mut wr, &mut bad) },
            "ibv_post_send",
        )
    }

    pub(crate) fn receive(&mut self) -> Result<Received> {
        self.wait_until(|end| !end.kept.is_empty())?;
        Ok(self.kept.remove(0))
    }

    pub(crate) fn poll(&mut self) -> Result<Option<Received>> {
        self.take_completion()?;
        Ok((!self.kept.is_empty()).then(|| self.kept.remove(0)))
    }

    fn wait_until(&mut self, done: impl Fn(&Self) -> bool) -> Result<()> {
        let since = Instant::now();
        while !done(self) {
            self.take_completion()?;
            ensure!(since.elapsed() < TIMEOUT, "nothing after {TIMEOUT:?}");
        }
        Ok(())
    }

    /// Polls a completion, and stores a received message in `kept`.
    fn take_completion(&mut self) -> Result<()> {
        let mut wc = MaybeUninit::<ibv_wc>::uninit();
        // SAFETY: live, room for one.
        let count = unsafe { inline::poll_cq(self.cq, 1, wc.as_mut_ptr()) };
        ensure!(count >= 0, "ibv_poll_cq: {count}");
        if count == 0 {
            return Ok(());
        }
        // SAFETY: filled, as it says.
        let wc = unsafe { wc.assume_init() };
        // SAFETY: live.
        let qp = self.qps.iter().position(|&qp| unsafe { (*qp).qp_num } == wc.qp_num);
        let qp = qp.with_context(|| format!("a completion of queue pair {:#x}", wc.qp_num))?;
        let is_send = wc.wr_id == SEND | qp as u64;
        ensure!(
            wc.status == IBV_WC_SUCCESS,
            "queue pair {qp}: a completion with status {}",
            wc.status
        );
        if is_send {
            self.sending[qp] = false;
            return Ok(());
        }
        let (slot, end) = (wc.wr_id as usize, wc.byte_len as usize);
        let grh = match self.transport {
            Transport::Rc => 0,
            Transport::Ud => GRH,
        };
        ensure!(
            wc.opcode == IBV_WC_RECV && slot < DEPTH,
            "opcode {}, request {slot}",
            wc.opcode
        );
        ensure!((grh..=SIZE + GRH).contains(&end), "{end} bytes received");
        ensure!(
            wc.src_qp == self.peers[qp].0 || grh == 0,
            "a datagram of queue pair {:#x}",
            wc.src_qp
        );
        let start = (self.qps.len() + slot) * (SIZE + GRH) + grh;
        // SAFETY: in the buffer, and the device has done with it.
        let bytes = unsafe { std::slice::from_raw_parts(self.buffer.add(start), end - grh) }.to_vec();
        self.kept.push(Received { qp, bytes });
        Ok(())
    }

    fn element(&self, slot: usize, len: usize) -> ibv_sge {
        ibv_sge {
            addr: (self.buffer.expose_provenance() + slot * (SIZE + GRH)) as u64,
            length: len as u32,
            // SAFETY: live.
            lkey: unsafe { (*self.mr).lkey },
        }
    }

    fn modify(&self, qp: usize, attr: &mut ibv_qp_attr, mask: u32) -> Result<()> {
        // SAFETY: live.
        let result = unsafe { (self.api.modify_qp)(self.qps[qp], attr, mask as i32) };
        check_errno(result, "ibv_modify_qp")
    }
}

/// Reads events in a thread of its own, which ends with the process or the device.
fn events(api: &'static Api, context: *mut ibv_context) -> Receiver<Event> {
    let (sender, receiver) = channel();
    let context = context.expose_provenance();
    thread::spawn(move || {
        loop {
            let mut raw = MaybeUninit::<ibv_async_event>::uninit();
            // SAFETY: the context is never closed; the event is filled on return of 0, and
            // acknowledged once, after its element was read.
            let event = unsafe {
                let context = ptr::with_exposed_provenance_mut(context);
                if (api.get_async_event)(context, raw.as_mut_ptr()) != 0 {
                    return;
                }
                let what = raw.assume_init_ref();
                let event = match what.event_type {
                    IBV_EVENT_SRQ_LIMIT_REACHED => Event::Limit,
                    IBV_EVENT_QP_LAST_WQE_REACHED => Event::LastWqe((*what.element.qp).qp_num),
                    other => Event::Other(other),
                };
                (api.ack_async_event)(raw.as_mut_ptr());
                event
            };
            if sender.send(event).is_err() {
                return;
            }
        }
    });
    receiver
}
