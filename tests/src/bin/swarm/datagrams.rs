//! A member's datagrams to all others: each that arrives is verified, some are lost.

use anyhow::{Context as _, Result, ensure};
use doorbell_verbs::{
    AddressHandle, Buffer, Buffers, CompletionQueue, GRH_BYTES, Local, ProtectionDomain, QKey, Qpn, QueuePair,
    UnreliableDatagram,
};

use crate::{Pattern, Plan};

/// The queue pair's tag, which no peer has.
pub(crate) const TAG: u64 = u64::MAX;
const SENDS: u32 = 8;
const RECEIVES: u32 = 32;
pub(crate) const ENTRIES: u32 = SENDS + RECEIVES;
const QKEY: QKey = QKey(0x1111_1111);
/// The sender's index, the number, and the pattern.
const LEN: usize = 512;
const HEADER: usize = 16;

pub(crate) struct Datagrams {
    seed: u64,
    index: usize,
    qp: QueuePair<UnreliableDatagram>,
    /// To this address, on which all members are.
    ah: AddressHandle,
    /// By member.
    peers: Vec<Option<Qpn>>,
    free: Vec<Buffer<Local>>,
    /// Sent and received.
    pub(crate) counts: [u64; 2],
}

impl Datagrams {
    pub(crate) fn new(plan: &Plan, index: usize, pd: &ProtectionDomain, cq: &CompletionQueue) -> Result<Self> {
        let builder = pd.queue_pair(cq).max_send_wr(SENDS).max_recv_wr(RECEIVES).tag(TAG);
        let mut qp = builder.qkey(QKEY).ud()?;
        for _ in 0..RECEIVES {
            qp.receive(pd.register(vec![0; GRH_BYTES + LEN], Local)?)?;
        }
        let free = (0..SENDS).map(|_| pd.register(vec![0; LEN], Local));
        Ok(Self {
            seed: plan.seed,
            index,
            ah: pd.address_handle().to(&qp.endpoint())?,
            qp,
            peers: vec![None; plan.processes],
            free: free.collect::<Result<_, _>>()?,
            counts: [0; 2],
        })
    }

    pub(crate) fn qpn(&self) -> u32 {
        self.qp.endpoint().qpn.get()
    }

    pub(crate) fn set_peer(&mut self, peer: usize, qpn: u32) {
        self.peers[peer] = Qpn::new(qpn);
    }

    /// One to each of as many peers as there are free buffers, round-robin.
    pub(crate) fn send(&mut self) -> Result<()> {
        while let Some(mut buffer) = self.free.pop() {
            let number = self.counts[0];
            let peer = number as usize % self.peers.len();
            self.counts[0] += 1;
            let Some(qpn) = self.peers[peer] else {
                self.free.push(buffer);
                continue;
            };
            buffer[..8].copy_from_slice(&(self.index as u64).to_le_bytes());
            buffer[8..HEADER].copy_from_slice(&number.to_le_bytes());
            Pattern::new(self.seed, self.index, peer, number << 2 | 3).fill(&mut buffer[HEADER..]);
            self.qp
                .post(|batch| drop(batch.send_to(buffer, &self.ah, qpn, QKEY).signaled()))?;
        }
        Ok(())
    }

    pub(crate) fn sent(&mut self, mut buffers: Buffers) -> Result<()> {
        self.free
            .push(buffers.take::<Local>().context("a datagram without its buffer")?);
        Ok(())
    }

    pub(crate) fn received(&mut self, payload: std::ops::Range<usize>, mut buffers: Buffers) -> Result<()> {
        let buffer = buffers.take::<Local>().context("a receive without its buffer")?;
        let bytes = buffer.get(payload).context("a datagram outside its buffer")?;
        let (header, rest) = bytes.split_at_checked(HEADER).context("a short datagram")?;
        let word = |at: usize| header[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
        let pattern = Pattern::new(self.seed, word(0) as usize, self.index, word(8) << 2 | 3);
        let wrong = pattern.find_wrong(rest);
        ensure!(
            wrong.is_none() && bytes.len() == LEN,
            "a datagram of member {} is wrong from byte {wrong:?} on",
            word(0)
        );
        self.counts[1] += 1;
        self.qp.receive(buffer)?;
        Ok(())
    }
}
