//! The server of tests that its processor takes no part in: it lends memory and waits. `bw write` without `--verify`, `bw` and `lat read`, `bw`
//! and `lat atomic`.

use std::sync::atomic::Ordering;

use doorbell_verbs::{Buffer, Memory, ProtectionDomain, RemoteAtomic, RemoteRead, RemoteWrite};

use super::super::pattern::Pattern;
use super::super::station::{Grants, Keys, Needs, Own, Test, refused};
use crate::failure::Failure;
use crate::plan::Verb;

/// The memory lent on one lane.
#[derive(Debug)]
pub(crate) enum Lent {
    /// To be written to: one slot.
    Target(Buffer<RemoteWrite>),
    /// To be read from: as many slots as there are patterns.
    Source(Buffer<RemoteRead>, u32),
    /// To be counted in.
    Counter(Buffer<RemoteAtomic>),
}

impl Own for Lent {
    fn needs(test: &Test<'_>) -> Needs {
        let grants = match test.plan.verb {
            Verb::Read => Grants::Read,
            Verb::Atomic(_) => Grants::Atomic,
            Verb::Write | Verb::Send => Grants::Write,
        };
        Needs {
            send: 1,
            receive: 1,
            inline: 0,
            grants,
        }
    }

    fn new(test: &Test<'_>, pd: &ProtectionDomain, lane: usize) -> Result<Self, Failure> {
        let len = test.len();
        match test.plan.verb {
            Verb::Read => {
                let slots = if test.plan.verify { test.window() } else { 1 };
                let mut memory = test.memory(len * slots as usize)?;
                if test.plan.verify {
                    for (slot, payload) in (0..).zip(memory.chunks_exact_mut(len)) {
                        Pattern::new(test.plan.seed, lane, slot).fill(payload);
                    }
                }
                Ok(Lent::Source(pd.register(memory, RemoteRead).map_err(refused)?, slots))
            }
            Verb::Atomic(_) => Ok(Lent::Counter(
                pd.register(Memory::zeroed(8), RemoteAtomic).map_err(refused)?,
            )),
            Verb::Write | Verb::Send => Ok(Lent::Target(
                pd.register(test.memory(len)?, RemoteWrite).map_err(refused)?,
            )),
        }
    }

    fn keys(&self) -> Keys {
        let (slots, data) = match self {
            Lent::Target(memory) => (1, memory.remote().to_bytes()),
            Lent::Source(memory, slots) => (*slots, memory.remote().to_bytes()),
            Lent::Counter(memory) => (1, memory.remote().to_bytes()),
        };
        Keys {
            slots,
            data: Some(data),
            counter: None,
        }
    }
}

impl Lent {
    /// What has been counted, where that is the test.
    pub(crate) fn counted(&self) -> Option<u64> {
        match self {
            Lent::Counter(word) => Some(word.load_u64(0, Ordering::Acquire)),
            Lent::Target(_) | Lent::Source(..) => None,
        }
    }
}
