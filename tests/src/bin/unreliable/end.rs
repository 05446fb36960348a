//! A UC or UD queue pair and its memory, by the C verbs. Nothing is destroyed before the exit.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use doorbell_tests::raw::{Base, Cq, Qp, QpAddress};
use doorbell_verbs_sys::*;

use crate::{Config, Transport};

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
pub(crate) struct End {
    transport: Transport,
    size: usize,
    base: Base,
    cq: Cq,
    qp: Qp,
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
        let options = &config.options;
        let len = (config.size + GRH) * (DEPTH + 2);
        let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
        let base = Base::open(api, &options.device, options.address, len, access)?;
        let kind = match config.transport {
            Transport::Uc => IBV_QPT_UC,
            Transport::Ud => IBV_QPT_UD,
        };
        let cq = base.create_cq(4 * DEPTH)?;
        let qp = base.create_qp(kind, (4, DEPTH as u32), &cq, None, IBV_ACCESS_REMOTE_WRITE)?;
        let end = Self {
            transport: config.transport,
            size: config.size,
            base,
            cq,
            qp,
            received: 0,
            sent: true,
        };
        for number in 0..DEPTH as u64 {
            end.post_receive(number)?;
        }
        Ok(end)
    }

    pub(crate) fn address(&self) -> QpAddress {
        self.base.address(&self.qp)
    }

    pub(crate) fn target(&self) -> Target {
        Target {
            addr: self.base.addr(self.slot(1)),
            rkey: self.base.rkey(),
        }
    }

    /// Brings the queue pair to RTS, towards the peer.
    pub(crate) fn connect(&mut self, peer: &QpAddress) -> Result<()> {
        self.base.connect(&mut self.qp, peer)
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
        self.base.fill(0, bytes);
        let mut wr = self.qp.request(SEND);
        if let Some(target) = target {
            wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
            wr.wr.rdma = ibv_send_wr_rdma {
                remote_addr: target.addr,
                rkey: target.rkey,
            };
        }
        self.sent = false;
        // SAFETY: the address handle is the queue pair's, which is never destroyed.
        unsafe { self.qp.send(wr, Some(self.base.element(0, bytes.len()))) }
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
        let Some(wc) = self.cq.poll()? else {
            return Ok(None);
        };
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
                ensure!(wc.src_qp == self.qp.peer(), "a datagram of queue pair {:#x}", wc.src_qp);
                (wc.wr_id as usize + 2, GRH)
            }
            (Transport::Uc, IBV_WC_RECV) => (wc.wr_id as usize + 2, 0),
            (Transport::Uc, IBV_WC_RECV_RDMA_WITH_IMM) => (1, 0),
            (_, other) => bail!("a completion of opcode {other}"),
        };
        let end = wc.byte_len as usize;
        ensure!((grh..=self.size + GRH).contains(&end), "{end} bytes received");
        let bytes = self.base.bytes(self.slot(slot) + grh, end - grh);
        self.post_receive(wc.wr_id)?;
        Ok(Some(bytes))
    }

    fn post_receive(&self, number: u64) -> Result<()> {
        let at = self.slot(number as usize + 2);
        self.qp.receive(number, self.base.element(at, self.size + GRH))
    }

    fn slot(&self, number: usize) -> usize {
        number * (self.size + GRH)
    }
}
