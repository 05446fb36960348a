//! Packets that no requester may send: each gets one NAK "invalid request" with its own PSN, the
//! queue pair fails, and no byte of memory changes.

use doorbell_roce_proto::qp::State;
use doorbell_roce_proto::wire::{AtomicEth, Extension, Nak, Opcode, Packet, Reth, Syndrome};
use doorbell_roce_proto::{AsyncEvent, Psn};

use super::victim::{BASE, FIRST_PSN, MTU, Victim, packet};

type Step = (Opcode, Extension, usize);

const BARE: Extension = Extension::Bare;

fn reth(victim: &Victim, at: u64, len: u32) -> Extension {
    Extension::Reth(Reth {
        va: BASE + at,
        rkey: victim.rkey(),
        len,
    })
}

fn atomic(victim: &Victim, at: u64) -> Extension {
    Extension::Atomic(AtomicEth {
        va: BASE + at,
        rkey: victim.rkey(),
        swap_add: 1,
        compare: 0,
    })
}

fn answers(victim: &Victim) -> Vec<(Syndrome, Psn)> {
    let parsed = victim
        .sent
        .iter()
        .map(|(_, bytes)| Packet::parse(bytes).expect("it sends packets"));
    parsed
        .filter_map(|packet| Some((packet.extension.aeth()?.syndrome, packet.bth.psn)))
        .collect()
}

/// Sends the packets with consecutive PSNs, 0xab as payload; the last must be refused.
fn assert_invalid(what: &str, steps: impl Fn(&Victim) -> Vec<Step>) {
    let mut victim = Victim::new(1);
    let steps = steps(&victim);
    let last = steps.len() as u32 - 1;
    let mut before = victim.memory.clone();
    for (i, (opcode, extension, len)) in (0..).zip(&steps) {
        let bytes = packet(*opcode, victim.qpn, FIRST_PSN.add(i), extension, &vec![0xab; *len]);
        if i == last {
            before = victim.memory.clone();
        }
        victim.attack(&bytes);
        victim.drain(8);
    }
    assert_refused(what, &victim, last, &before);
}

fn assert_refused(what: &str, victim: &Victim, last: u32, before: &crate::memory::SimMemory) {
    let answers = answers(victim);
    assert_eq!(
        answers.last(),
        Some(&(Syndrome::Nak(Nak::InvalidRequest), FIRST_PSN.add(last))),
        "{what}: {answers:?}"
    );
    let naks = answers
        .iter()
        .filter(|(syndrome, _)| matches!(syndrome, Syndrome::Nak(_)))
        .count();
    assert_eq!(naks, 1, "{what}: {answers:?}");
    assert_eq!(
        victim.endpoint.query_qp(victim.qpn).map(|attributes| attributes.state),
        Some(State::Err),
        "{what}"
    );
    assert!(
        victim.events.contains(&AsyncEvent::QpRequestError(victim.qpn)),
        "{what}: {:?}",
        victim.events
    );
    assert!(victim.memory == *before, "{what}: memory changed");
}

#[test]
fn a_write_must_not_be_interrupted() {
    let mtu = MTU.bytes();
    assert_invalid("SEND last within a WRITE", |v| {
        vec![
            (Opcode::RcWriteFirst, reth(v, 4096, 2048), mtu),
            (Opcode::RcSendLast, BARE, 8),
        ]
    });
    assert_invalid("atomic within a WRITE", |v| {
        vec![
            (Opcode::RcWriteFirst, reth(v, 4096, 2048), mtu),
            (Opcode::RcFetchAdd, atomic(v, 0), 0),
        ]
    });
}

/// The victim accepts two outstanding READs or atomics; it may not send before the third arrives.
#[test]
fn the_limit_of_reads_and_atomics_is_enforced() {
    for last in [Opcode::RcReadRequest, Opcode::RcFetchAdd] {
        let mut victim = Victim::new(1);
        let before = victim.memory.clone();
        for (i, opcode) in (0..).zip([Opcode::RcReadRequest, Opcode::RcReadRequest, last]) {
            let extension = if opcode == Opcode::RcFetchAdd {
                atomic(&victim, 0)
            } else {
                reth(&victim, 0, 8)
            };
            let bytes = packet(opcode, victim.qpn, FIRST_PSN.add(i), &extension, &[]);
            victim.attack(&bytes);
        }
        victim.drain(8);
        assert_refused("a third one", &victim, 2, &before);
    }
}
