//! The server of a verified `bw write`: looks at every byte of every message in its slot, spoils the slot, and gives it back.
//!
//! The client writes its count of messages after each list, on the same queue pair: when the count is there, so are the messages before it.
//! Spoiling means that a byte that is never written differs from what the next message has there.

use std::sync::atomic::Ordering;

use doorbell_verbs::{Buffer, Memory, Opaque, ProtectionDomain, RemoteWrite};

use super::super::gpu::{Cut, Messages};
use super::super::pattern::{Mismatch, Pattern};
use super::super::station::{Grants, Keys, Needs, Own, Station, Test, refused};
use super::super::watch::Watch;
use super::credit::{self, Credit, LastLook};
use crate::failure::Failure;

/// One lane's slots.
#[derive(Debug)]
pub(crate) struct Slots {
    memory: Place,
    notice: Buffer<RemoteWrite>,
    slots: u32,
}

/// Where they are.
#[derive(Debug)]
enum Place {
    Host(Buffer<RemoteWrite>),
    Gpu(Box<Messages>, Buffer<Opaque<RemoteWrite>>),
}

impl Own for Slots {
    fn needs(_test: &Test<'_>) -> Needs {
        Needs {
            send: credit::DEPTH,
            receive: 1,
            inline: 8,
            grants: Grants::Write,
        }
    }

    fn new(test: &Test<'_>, pd: &ProtectionDomain, lane: usize) -> Result<Self, Failure> {
        let (len, slots) = (test.len(), test.window());
        let spoil = |index, slot: &mut [u8]| Pattern::new(test.plan.seed, lane, index).fill_wrong(slot);
        let memory = if let Some(gpu) = &test.device.gpu {
            let (mut messages, mut memory) = Messages::new(gpu, pd, (len, slots as usize), Cut::Whole, RemoteWrite)?;
            let mut message = vec![0; len];
            for slot in 0..slots {
                spoil(slot.into(), &mut message);
                messages.write(slot as usize, &message)?;
            }
            let none = || Failure::test("a GPU's memory was registered as nothing");
            Place::Gpu(Box::new(messages), memory.pop().ok_or_else(none)?)
        } else {
            let mut memory = test.memory(len * slots as usize)?;
            for (index, slot) in (0..).zip(memory.chunks_exact_mut(len)) {
                spoil(index, slot);
            }
            Place::Host(pd.register(memory, RemoteWrite).map_err(refused)?)
        };
        Ok(Slots {
            memory,
            notice: pd.register(Memory::zeroed(8), RemoteWrite).map_err(refused)?,
            slots,
        })
    }

    fn keys(&self) -> Keys {
        Keys {
            slots: self.slots,
            data: Some(match &self.memory {
                Place::Host(memory) => memory.remote().to_bytes(),
                Place::Gpu(_, memory) => memory.remote().to_bytes(),
            }),
            counter: Some(self.notice.remote().to_bytes()),
        }
    }
}

/// Serves until the client has finished and every message has been looked at. Returns the messages per lane.
///
/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Test`] when data was wrong or the peer is lost.
pub(crate) fn serve(test: &Test<'_>, station: &mut Station<Slots>) -> Result<Vec<u64>, Failure> {
    let Station { cq, lanes } = station;
    let mut credits = lanes
        .iter()
        .map(|lane| Credit::new(&lane.theirs, lane.own.slots))
        .collect::<Result<Vec<_>, _>>()?;
    let mut watch = Watch::of_server(test.control);
    let mut message = vec![0; test.len()];
    let mut last_look = LastLook::default();
    loop {
        let mut idle = true;
        for done in cq.poll().map_err(refused)? {
            if let (Err(failure), Some(lane)) = (
                done.result(),
                usize::try_from(done.tag()).ok().and_then(|tag| lanes.get(tag)),
            ) {
                return Err(lane.theirs.failed(&failure));
            }
        }
        for (index, (lane, credit)) in lanes.iter_mut().zip(&mut credits).enumerate() {
            let there = u64::from_le(lane.own.notice.load_u64(0, Ordering::Acquire));
            // Beyond what the client may have written the count is nonsense; its test then fails by itself.
            let there = there.min(credit.done() + u64::from(lane.own.slots));
            while credit.done() < there {
                idle = false;
                if let Some(wrong) = look(test, &mut lane.own, index, credit.done(), &mut message)? {
                    return Err(Failure::test(format!("{}: {wrong}", lane.theirs)));
                }
                credit.add();
                credit.tell(&mut lane.qp, &lane.theirs, false)?;
            }
            credit.tell(&mut lane.qp, &lane.theirs, true)?;
        }
        if !idle {
            watch.turn()?;
            continue;
        }
        watch.idle()?;
        if let Some(sent) = watch.finished() {
            let missing = || format!("peer {}: not all it wrote has arrived", test.control.peer());
            if last_look.all(&credits, sent, missing)? {
                return Ok(sent.to_vec());
            }
        }
    }
}

/// Looks at one message and spoils its slot for the next one there.
fn look(
    test: &Test<'_>,
    own: &mut Slots,
    lane: usize,
    iteration: u64,
    message: &mut [u8],
) -> Result<Option<Mismatch>, Failure> {
    let slots = u64::from(own.slots);
    let slot = (iteration % slots) as usize;
    match &mut own.memory {
        Place::Host(memory) => memory.read_at(slot * message.len(), message),
        Place::Gpu(messages, _) => messages.read(slot, message)?,
    }
    if let Some(wrong) = Pattern::new(test.plan.seed, lane, iteration).check(message) {
        return Ok(Some(Mismatch::at(test.bytes, lane, iteration, wrong)));
    }
    Pattern::new(test.plan.seed, lane, iteration + slots).fill_wrong(message);
    match &mut own.memory {
        Place::Host(memory) => memory.write_at(slot * message.len(), message),
        Place::Gpu(messages, _) => messages.write(slot, message)?,
    }
    Ok(None)
}
