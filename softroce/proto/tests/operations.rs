//! Every operation at boundary sizes, lossless and with each packet lost, repeated or delayed.

mod util;

use doorbell_roce_proto::Mtu;
use doorbell_roce_proto::memory::{AtomicOp, Sge};
use doorbell_roce_proto::work::{CompletionOpcode, Payload, SendRequest, Status};

use util::{
    Fate, Pair, RECV_CQ, SEND_CQ, Setup, atomic_on, atomic_write_to, flush_of, pattern, read_from, receive_of, request,
    send, write_operation, write_to,
};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Send,
    SendImm,
    Write,
    WriteImm,
    Read,
    CompareSwap,
    FetchAdd,
    AtomicWrite,
    Flush,
}

const KINDS: [Kind; 9] = [
    Kind::Send,
    Kind::SendImm,
    Kind::Write,
    Kind::WriteImm,
    Kind::Read,
    Kind::CompareSwap,
    Kind::FetchAdd,
    Kind::AtomicWrite,
    Kind::Flush,
];

fn sizes(mtu: Mtu) -> [usize; 6] {
    let mtu = mtu.bytes();
    [0, 1, mtu - 1, mtu, mtu + 1, 3 * mtu + 5]
}

struct Conversation {
    pair: Pair,
    kind: Kind,
    size: usize,
    local: Sge,
    remote: Sge,
    inboxes: [Sge; 3],
    before: Vec<u8>,
}

impl Conversation {
    fn new(kind: Kind, size: usize, setup: Setup) -> Self {
        let mut pair = Pair::connected(setup);
        let size = if matches!(kind, Kind::CompareSwap | Kind::FetchAdd | Kind::AtomicWrite) {
            8
        } else {
            size
        };
        let (ours, theirs) = (pattern(size, 1), pattern(size, 2));
        let local = pair.region(0, ours);
        let remote = pair.region(1, theirs.clone());
        let inboxes = [10, 11, 12].map(|wr_id| {
            let inbox = pair.region(1, vec![0; size.max(20)]);
            // In three SGEs, the second one empty.
            let (head, tail) = (Sge { len: 7, ..inbox }, inbox.len - 7);
            let (none, rest) = (
                Sge { len: 0, ..inbox },
                Sge {
                    addr: inbox.addr + 7,
                    len: tail,
                    ..inbox
                },
            );
            pair.receive(1, wr_id, &[head, none, rest]);
            inbox
        });
        Self {
            pair,
            kind,
            size,
            local,
            remote,
            inboxes,
            before: theirs,
        }
    }

    fn operation<'a>(&self, local: &'a [Sge]) -> SendRequest<'a> {
        let remote = self.remote;
        match self.kind {
            Kind::Send => send(2, local),
            Kind::SendImm => request(
                2,
                doorbell_roce_proto::work::Operation::Send { imm: Some(0xdead_beef) },
                local,
            ),
            Kind::Write => write_to(2, local, remote),
            Kind::WriteImm => request(2, write_operation(remote, Some(0xfeed)), local),
            Kind::Read => read_from(2, local, remote),
            Kind::CompareSwap => atomic_on(
                2,
                local,
                remote,
                AtomicOp::CompareSwap {
                    compare: self.word(),
                    swap: 99,
                },
            ),
            Kind::FetchAdd => atomic_on(2, local, remote, AtomicOp::FetchAdd { add: u64::MAX }),
            Kind::AtomicWrite => atomic_write_to(2, remote, 77u64.to_ne_bytes()),
            Kind::Flush => flush_of(2, remote),
        }
    }

    fn word(&self) -> u64 {
        u64::from_ne_bytes(self.before[..8].try_into().unwrap())
    }

    fn run(&mut self, fate: impl FnMut(usize, &util::Sent) -> Fate) {
        let inline = |wr_id, bytes| SendRequest {
            payload: Payload::Inline(bytes),
            ..send(wr_id, &[])
        };
        let local = [self.local];
        let operation = self.operation(&local);
        let node = &mut self.pair.nodes[0];
        for request in [inline(1, b"before it"), operation, inline(3, b"and after it")] {
            node.endpoint.post_send(self.pair.now, node.qpn, &request).unwrap();
        }
        self.pair.run_with(fate);
        self.check();
    }

    fn check(&self) {
        let Self { pair, kind, size, .. } = self;
        let context = format!("{kind:?} of {size} bytes, {:?}", pair.setup);
        let ok = |wr_ids: &[u64]| wr_ids.iter().map(|id| (*id, Status::Success)).collect::<Vec<_>>();
        assert_eq!(pair.completed(0, SEND_CQ), ok(&[1, 2, 3]), "{context}");
        let sends = matches!(kind, Kind::Send | Kind::SendImm);
        let receives = sends || *kind == Kind::WriteImm;
        assert_eq!(
            pair.completed(1, RECV_CQ),
            if receives { ok(&[10, 11, 12]) } else { ok(&[10, 11]) },
            "{context}"
        );
        assert_eq!(&pair.bytes(1, self.inboxes[0])[..9], b"before it", "{context}");
        let last = if receives { 2 } else { 1 };
        assert_eq!(&pair.bytes(1, self.inboxes[last])[..12], b"and after it", "{context}");

        let ours = pattern(*size, 1);
        if sends {
            assert_eq!(&pair.bytes(1, self.inboxes[1])[..*size], ours, "{context}");
        }
        let received = &pair.nodes[1].completions[1].1;
        let len = *size as u32;
        match kind {
            Kind::Send => assert_eq!(
                receive_of(received),
                (CompletionOpcode::Receive, len, None),
                "{context}"
            ),
            Kind::SendImm => {
                assert_eq!(
                    receive_of(received),
                    (CompletionOpcode::Receive, len, Some(0xdead_beef)),
                    "{context}"
                );
            }
            Kind::WriteImm => {
                assert_eq!(
                    receive_of(received),
                    (CompletionOpcode::ReceiveWriteImm, len, Some(0xfeed)),
                    "{context}"
                );
            }
            _ => {}
        }
        let (at_home, away) = match kind {
            Kind::Send | Kind::SendImm => (ours, self.before.clone()),
            Kind::Write | Kind::WriteImm => (ours.clone(), ours),
            Kind::Read => (self.before.clone(), self.before.clone()),
            Kind::CompareSwap => (self.before.clone(), 99u64.to_ne_bytes().to_vec()),
            Kind::FetchAdd => (self.before.clone(), self.word().wrapping_sub(1).to_ne_bytes().to_vec()),
            Kind::AtomicWrite => (ours, 77u64.to_ne_bytes().to_vec()),
            Kind::Flush => (ours, self.before.clone()),
        };
        assert_eq!(pair.bytes(0, self.local), at_home, "{context}");
        assert_eq!(pair.bytes(1, self.remote), away, "{context}");
        let flushes = usize::from(*kind == Kind::Flush);
        assert_eq!(pair.nodes[1].memory.flushed.len(), flushes, "{context}");
    }
}

#[test]
fn every_size_and_mtu_over_both_families() {
    for mtu in [Mtu::Mtu256, Mtu::Mtu512, Mtu::Mtu1024, Mtu::Mtu2048, Mtu::Mtu4096] {
        for kind in KINDS {
            for size in sizes(mtu) {
                for v6 in [false, true] {
                    let mut conversation = Conversation::new(
                        kind,
                        size,
                        Setup {
                            mtu,
                            v6,
                            ..Setup::default()
                        },
                    );
                    conversation.run(|_, _| Fate::Deliver);
                    let counters = conversation.pair.nodes[0].endpoint.counters();
                    assert_eq!((counters.retransmits, counters.duplicates), (0, 0));
                }
            }
        }
    }
}

/// Runs each conversation once per packet of it, which meets `fate`.
fn each_packet(fate: Fate, setup: Setup) {
    for kind in KINDS {
        for size in sizes(setup.mtu) {
            let mut victim = 0;
            loop {
                let mut conversation = Conversation::new(kind, size, setup);
                conversation.run(|number, _| if number == victim { fate } else { Fate::Deliver });
                victim += 1;
                if victim >= conversation.pair.log.len() {
                    break;
                }
            }
        }
    }
}

#[test]
fn each_packet_lost() {
    each_packet(Fate::Drop, Setup::default());
    each_packet(
        Fate::Drop,
        Setup {
            batch: 1,
            ..Setup::default()
        },
    );
}

#[test]
fn each_packet_lost_in_a_window_of_one() {
    each_packet(
        Fate::Drop,
        Setup {
            window: 1,
            ..Setup::default()
        },
    );
}

#[test]
fn each_packet_twice() {
    each_packet(Fate::Duplicate, Setup::default());
}

#[test]
fn each_packet_late() {
    each_packet(Fate::Delay(1), Setup::default());
    each_packet(Fate::Delay(4), Setup::default());
    each_packet(
        Fate::Delay(1),
        Setup {
            batch: 1,
            ..Setup::default()
        },
    );
    each_packet(
        Fate::Delay(4),
        Setup {
            batch: 2,
            ..Setup::default()
        },
    );
}

#[test]
fn each_pair_of_packets_lost() {
    for kind in KINDS {
        let size = 3 * 256 + 5;
        for first in 0..10 {
            for second in first + 1..16 {
                let mut conversation = Conversation::new(kind, size, Setup::default());
                conversation.run(|number, _| {
                    if number == first || number == second {
                        Fate::Drop
                    } else {
                        Fate::Deliver
                    }
                });
            }
        }
    }
}

#[test]
fn each_packet_lost_where_the_psn_wraps() {
    for start in [0xff_ffff, 0xff_fffe, 0xff_fffd, 0xff_fffb] {
        each_packet(
            Fate::Drop,
            Setup {
                psns: [start, start],
                ..Setup::default()
            },
        );
    }
}
