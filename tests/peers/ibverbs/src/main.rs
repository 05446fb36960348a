//! The column `ibverbs`: the accounting is the user's work. Release 0.9.2 posts SENDs, each
//! signaled, and single receives, and polls the classic completion queue; most rows have no such
//! call.

use std::error::Error;
use std::process::ExitCode;

use doorbell_peer_common::{BATCH, BYTES, DEPTH, Queue, RECEIVE};
use ibverbs::{CompletionQueue, Context, MemoryRegion, QueuePair, ibv_qp_type, ibv_wc};

type Offset = u32;

struct Peer {
    qp: QueuePair<'static>,
    cq: &'static CompletionQueue<'static>,
    region: MemoryRegion<u8>,
    receives: Queue<Offset>,
    pool: Vec<Offset>,
    completions: [ibv_wc; 32],
}

#[inline(never)]
fn measure_receive(peer: &mut Peer, buffer: Offset) -> bool {
    if !peer.receives.has_room(1) {
        return false;
    }
    let wr_id = RECEIVE | peer.receives.put(Some(buffer));
    let start = buffer as usize;
    // SAFETY: the region outlives the queue pair, and the range is not read before its completion.
    unsafe {
        peer.qp
            .post_receive(&mut peer.region, start..start + BYTES, wr_id)
            .is_ok()
    }
}

#[inline(never)]
fn measure_drain(peer: &mut Peer) -> bool {
    let Ok(completions) = peer.cq.poll(&mut peer.completions) else {
        return false;
    };
    for done in completions {
        if !done.is_valid() || done.wr_id() & RECEIVE == 0 {
            return false;
        }
        peer.receives.retire(done.wr_id() as u32, &mut peer.pool);
    }
    true
}

impl doorbell_peer_common::Peer for Peer {
    fn lacks(row: &str) -> Option<&'static str> {
        match row {
            "receive" | "drain" => None,
            "list" => Some("0.9.2 posts receives one by one"),
            "drain_ex" => Some("0.9.2 has no extended completion queue"),
            _ => Some("0.9.2 posts SEND only"),
        }
    }

    fn open(_row: &str) -> Result<Self, Box<dyn Error>> {
        let devices = ibverbs::devices()?;
        // Objects that others borrow live as long as the program.
        let context: &'static Context = Box::leak(Box::new(devices.get(0).ok_or("no device")?.open()?));
        let cq: &'static CompletionQueue<'static> = Box::leak(Box::new(context.create_cq(2 * DEPTH as i32, 0)?));
        let pd = Box::leak(Box::new(context.alloc_pd()?));
        let prepared = pd
            .create_qp(cq, cq, ibv_qp_type::IBV_QPT_RC)
            .set_max_send_wr(DEPTH)
            .set_max_recv_wr(DEPTH)
            .set_gid_index(0)
            .build()?;
        let itself = prepared.endpoint();
        Ok(Self {
            qp: prepared.handshake(itself)?,
            cq,
            region: pd.allocate(2 * DEPTH as usize * BYTES)?,
            receives: Queue::default(),
            pool: (0..2 * DEPTH).map(|n| n * BYTES as u32).collect(),
            completions: [ibv_wc::default(); 32],
        })
    }

    fn post(&mut self, row: &str) -> bool {
        let count = if row == "receive" { 1 } else { BATCH };
        (0..count).all(|_| self.pool.pop().is_some_and(|buffer| measure_receive(self, buffer)))
    }

    fn drain(&mut self) -> bool {
        measure_drain(self)
    }
}

fn main() -> ExitCode {
    doorbell_peer_common::main::<Peer>()
}
