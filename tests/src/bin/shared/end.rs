//! Queue pairs on a shared receive queue, by the C verbs. Nothing is destroyed before the exit.

use std::mem::MaybeUninit;
use std::ptr;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use doorbell_tests::raw::{Base, Cq, Qp, QpAddress, Srq, zeroed};
use doorbell_verbs_sys::*;

use crate::{Config, Transport};

pub(crate) const DEPTH: usize = 32;
/// The longest message; that of the stock ping-pongs.
pub(crate) const SIZE: usize = 4096;

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
pub(crate) struct End {
    transport: Transport,
    base: Base,
    cq: Cq,
    srq: Srq,
    qps: Vec<Qp>,
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
        let options = &config.options;
        let len = (SIZE + GRH) * (config.qps + DEPTH);
        let base = Base::open(api, &options.device, options.address, len, IBV_ACCESS_LOCAL_WRITE)?;
        let kind = match config.transport {
            Transport::Rc => IBV_QPT_RC,
            Transport::Ud => IBV_QPT_UD,
        };
        let cq = base.create_cq(DEPTH + config.qps)?;
        let srq = base.create_srq(DEPTH as u32)?;
        let qps = (0..config.qps)
            .map(|_| base.create_qp(kind, (4, 0), &cq, Some(&srq), 0))
            .collect::<Result<Vec<_>>>()?;
        Ok(Self {
            transport: config.transport,
            cq,
            srq,
            qps,
            sending: vec![false; config.qps],
            kept: Vec::new(),
            events: events(api, base.context()),
            is_soft: options.device.starts_with("soft"),
            base,
        })
    }

    pub(crate) fn addresses(&self) -> Vec<QpAddress> {
        self.qps.iter().map(|qp| self.base.address(qp)).collect()
    }

    /// Brings each queue pair to RTS towards its peer.
    pub(crate) fn connect(&mut self, peers: &[QpAddress]) -> Result<()> {
        let mut pairs = self.qps.iter_mut().zip(peers);
        pairs.try_for_each(|(qp, peer)| self.base.connect(qp, peer))
    }

    pub(crate) fn arm(&self, limit: u32) -> Result<()> {
        self.srq.arm(limit)
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
        self.qps[qp].modify(&mut attr, IBV_QP_STATE)?;
        // The kernel's rxe has no such event.
        if self.is_soft {
            let wanted = Event::LastWqe(self.qps[qp].number());
            let event = self.event()?;
            ensure!(event == Some(wanted), "{event:?} instead of {wanted:?}");
        }
        ensure!(self.poll()?.is_none(), "something was flushed");
        Ok(())
    }

    /// Posts the receive of a slot to the shared receive queue.
    pub(crate) fn post_receive(&mut self, slot: usize) -> Result<()> {
        let element = self.base.element(self.receive_slot(slot), SIZE + GRH);
        self.srq.receive(slot as u64, element)
    }

    /// Sends a message once the queue pair's last send is complete.
    pub(crate) fn send(&mut self, qp: usize, bytes: &[u8]) -> Result<()> {
        self.wait_until(|end| !end.sending[qp])?;
        let at = qp * (SIZE + GRH);
        self.base.fill(at, bytes);
        self.sending[qp] = true;
        let wr = self.qps[qp].request(SEND | qp as u64);
        // SAFETY: the address handle is the queue pair's, which is never destroyed.
        unsafe { self.qps[qp].send(wr, Some(self.base.element(at, bytes.len()))) }
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
        let Some(wc) = self.cq.poll()? else {
            return Ok(());
        };
        let qp = self.qps.iter().position(|qp| qp.number() == wc.qp_num);
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
            wc.src_qp == self.qps[qp].peer() || grh == 0,
            "a datagram of queue pair {:#x}",
            wc.src_qp
        );
        let bytes = self.base.bytes(self.receive_slot(slot) + grh, end - grh);
        self.kept.push(Received { qp, bytes });
        Ok(())
    }

    fn receive_slot(&self, number: usize) -> usize {
        (self.qps.len() + number) * (SIZE + GRH)
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
