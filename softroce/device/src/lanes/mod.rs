//! The same-host path of a device: its lanes to the other processes on its address, and to itself.
//!
//! The rules are the engine's, as over UDP: packets, acknowledgements, retries. What differs is what a packet's payload is: [`local`](crate::local) tells how it is referred to and copied. Here is
//! what connects the two: [`Outgoing`], under the engine's lock, turns what the engine writes into records, and what they refer to into what the receiver can reach;
//! [`Incoming`], under the lock of the receiving half, hands records to the engine, with a [`Reach`] that finds their payloads.
//!
//! **Who is local.** A connection takes a lane when both ends have the device's own address, the peer's queue pair number belongs to a living member of the [`host`](crate::host) group, and
//! neither is on UDP only. Both ends decide when they enter RTR, by the registry that they share. A UD queue pair decides for each datagram.
//!
//! **The life of a lane.** It is made when the first queue pair of this process needs it, and its descriptor sent over the connection to the member. When that member dies, what it has sent is
//! still received; what is sent to it from then on vanishes, and the transport's retries run out.
//!
//! Whoever holds the address's UDP port also gets the datagrams of other hosts for the rest of the group, and hands them on by the same lanes ([`Forwarded`]).

mod forward;
mod incoming;
mod joined;
mod outgoing;
mod reach;

use std::fs;
use std::io::IoSliceMut;

use doorbell_roce_proto::qp::LaneId;
use doorbell_roce_proto::wire::Opcode;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

use crate::host::MemberId;

pub(crate) use forward::Forwarded;
pub(crate) use incoming::{Incoming, Taken, Verdict};
pub(crate) use joined::Joined;
pub(crate) use outgoing::{NoLane, Outgoing, Wake};
pub(crate) use reach::{Payload, Reach};

/// How a packet's payload gets to a process of the same host, when it is too long to go along with the packet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Mover {
    /// The receiver copies from shared memory that both have mapped.
    Shared,
    /// The receiver copies by process_vm_readv(2).
    Vm,
    /// The sender copies into the lane, and the receiver out of it.
    Ring,
}

impl Mover {
    /// Its name, as `DOORBELL_COPY` and `doorbell devices` have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shared => "shared",
            Self::Vm => "vm",
            Self::Ring => "ring",
        }
    }

    /// Whether this machine has it: process_vm_readv(2) may be taken away from all processes, or from those that are not asked for by name (Yama's `ptrace_scope`).
    pub(crate) fn is_possible(self) -> bool {
        if self != Self::Vm {
            return true;
        }
        let open = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").map_or(true, |scope| scope.trim() == "0");
        let (from, mut to) = ([1_u8], [0_u8]);
        let there = RemoteIoVec {
            base: from.as_ptr().addr(),
            len: 1,
        };
        let read = process_vm_readv(Pid::this(), &mut [IoSliceMut::new(&mut to)], &[there]);
        open && read == Ok(1) && to == from
    }

    /// All of them, the best first.
    pub const ALL: [Self; 3] = [Self::Shared, Self::Vm, Self::Ring];
}

/// Bits of a [`LaneId`] that are the member's slot; the rest are of its generation, so that packets for a dead member never reach the next one in its slot.
const SLOT_BITS: u32 = 10;

/// What the engine calls the lanes between this process and a member.
pub(crate) fn lane_of(member: MemberId) -> LaneId {
    LaneId(member.generation() << SLOT_BITS | u32::from(member.slot()))
}

/// Whether a packet with this opcode is of a reliable connection.
fn is_reliable(opcode: u8) -> bool {
    opcode < Opcode::UcSendFirst.code()
}

/// Whether it is an answer: of a READ or an atomic, or an acknowledgement (IBTA vol 1, 9.2, table 35).
pub(crate) fn is_response(opcode: u8) -> bool {
    (Opcode::RcReadResponseFirst.code()..=Opcode::RcAtomicAcknowledge.code()).contains(&opcode)
}

/// Whether it is carried out at once, on memory as it is then: a READ or an atomic.
pub(crate) fn is_immediate(opcode: u8) -> bool {
    let immediate = [Opcode::RcReadRequest, Opcode::RcCompareSwap, Opcode::RcFetchAdd];
    immediate.iter().any(|one| one.code() == opcode)
}

fn slot_of(lane: LaneId) -> usize {
    (lane.0 & ((1 << SLOT_BITS) - 1)) as usize
}
