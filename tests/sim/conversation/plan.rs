//! The plan of a conversation: generated from its seed before it runs, with expected results.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use doorbell_roce_proto::memory::AtomicOp;
use doorbell_roce_proto::{EndpointConfig, Instant, Mtu, Psn};
use doorbell_softroce::links::udp::fault::FaultConfig;
use fastrand::Rng;

use crate::memory::apply;
use crate::net::{Idents, LinkConfig};

/// Memory of an end, by user; ranges in it never touch, so that stray writes hit the gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Area {
    /// Sources of SENDs and WRITEs; never written.
    Source,
    /// Destinations of READs and atomics.
    Landing,
    Receive,
    Exposed,
    /// Words for the peer's atomics.
    Words,
}

impl Area {
    pub(crate) const ALL: [Self; 5] = [Self::Source, Self::Landing, Self::Receive, Self::Exposed, Self::Words];
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) area: Area,
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

impl Range {
    pub(crate) fn of<'a>(&self, areas: &'a Areas) -> &'a [u8] {
        &areas.0[self.area as usize][self.offset..self.offset + self.len]
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Areas(pub(crate) [Vec<u8>; 5]);

impl Areas {
    pub(crate) fn write(&mut self, range: &Range, data: &[u8]) {
        self.0[range.area as usize][range.offset..range.offset + data.len()].copy_from_slice(data);
    }

    /// Writes `data` over the ranges in order, until it ends.
    pub(crate) fn scatter(&mut self, ranges: &[Range], mut data: &[u8]) {
        for range in ranges {
            let (now, later) = data.split_at(range.len.min(data.len()));
            self.write(range, now);
            data = later;
        }
    }

    pub(crate) fn gather(&self, ranges: &[Range]) -> Vec<u8> {
        ranges.iter().flat_map(|range| range.of(self)).copied().collect()
    }

    /// Reserves a range with a gap after it. Atomics' words need `align` 8.
    fn reserve(&mut self, rng: &mut Rng, area: Area, len: usize, align: usize) -> Range {
        let bytes = &mut self.0[area as usize];
        let offset = bytes.len().next_multiple_of(align);
        let end = offset + len + rng.usize(8..32);
        while bytes.len() < end {
            bytes.extend_from_slice(&rng.u64(..).to_le_bytes());
        }
        Range { area, offset, len }
    }

    fn reserve_pieces(&mut self, rng: &mut Rng, area: Area, len: usize, most: usize) -> Vec<Range> {
        let mut left = len;
        let mut ranges = Vec::new();
        for rest in (0..rng.usize(1..=most)).rev() {
            let part = if rest == 0 { left } else { rng.usize(0..=left) };
            left -= part;
            ranges.push(self.reserve(rng, area, part, 1));
        }
        ranges
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Send { imm: Option<u32> },
    Write { target: Range, imm: Option<u32> },
    Read { source: Range },
    Atomic { word: Range, op: AtomicOp },
}

#[derive(Clone, Debug)]
pub(crate) struct Op {
    pub(crate) action: Action,
    pub(crate) local: Vec<Range>,
    /// The bytes transferred in either direction.
    pub(crate) data: Vec<u8>,
    pub(crate) inline: bool,
    pub(crate) signaled: bool,
    pub(crate) fence: bool,
    pub(crate) solicited: bool,
    /// The earliest time to post it.
    pub(crate) not_before: Instant,
    /// The index of the peer's receive that it consumes.
    pub(crate) receive: Option<usize>,
}

impl Op {
    pub(crate) fn fetches(&self) -> bool {
        matches!(self.action, Action::Read { .. } | Action::Atomic { .. })
    }

    pub(crate) fn imm(&self) -> Option<u32> {
        match self.action {
            Action::Send { imm } | Action::Write { imm, .. } => imm,
            _ => None,
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Receive {
    pub(crate) local: Vec<Range>,
    pub(crate) not_before: Instant,
}

#[derive(Clone, Debug)]
// fields: the attributes of ibv_modify_qp and ibv_create_qp, one each
pub(crate) struct End {
    pub(crate) node: usize,
    pub(crate) sq_psn: Psn,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_inline: u32,
    pub(crate) signal_all: bool,
    pub(crate) ops: Vec<Op>,
    pub(crate) receives: Vec<Receive>,
    pub(crate) areas: Areas,
}

#[derive(Clone, Debug)]
pub(crate) struct Connection {
    pub(crate) mtu: Mtu,
    pub(crate) ends: [End; 2],
}

#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) link: LinkConfig,
    /// Every endpoint's window, in packets.
    pub(crate) window: u32,
    pub(crate) connections: Vec<Connection>,
}

pub(crate) const MAX_SGE: usize = 4;

impl Plan {
    pub(crate) fn generate(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let nodes = if rng.u8(..4) == 0 { 3 } else { 2 };
        let v6 = rng.bool();
        let addresses = (1..=nodes)
            .map(|i| {
                if v6 {
                    Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, i).into()
                } else {
                    Ipv4Addr::new(10, 9, 0, i as u8).into()
                }
            })
            .collect();
        let faults = generate_faults(&mut rng);
        let link = LinkConfig {
            bits_per_second: [10, 25, 100, 400][rng.usize(..4)] * 1_000_000_000,
            latency: Duration::from_nanos(rng.u64(200..20_000)),
            backlog: Duration::from_nanos(rng.u64(0..10_000)),
            faults,
            idents: match rng.u8(..3) {
                0 => Idents::Known,
                // A predictable Identification reduces the ICRC to 16 bits: an undetected
                // corruption is then not the engine's fault.
                1 if faults.corrupt == 0.0 => Idents::Counting,
                _ => Idents::Zero,
            },
            socket: None,
        };
        let window = if rng.bool() {
            EndpointConfig::DEFAULT_WINDOW
        } else {
            rng.u32(1..=512)
        };
        let connections = (0..rng.usize(1..=4))
            .map(|_| generate_connection(&mut rng, nodes.into()))
            .collect();
        Self {
            addresses,
            link,
            window,
            connections,
        }
    }
}

/// A fifth without faults, a fifth with every fault at its maximum, the others in between.
fn generate_faults(rng: &mut Rng) -> FaultConfig {
    let kind = rng.u8(..5);
    let mut fraction = || match kind {
        0 => 0.0,
        1 => 0.2,
        _ if rng.bool() => 0.0,
        _ => rng.f64() * 0.2,
    };
    let (drop, duplicate, reorder, corrupt) = (fraction(), fraction(), fraction(), fraction());
    let delay = Duration::from_nanos(if kind > 1 && rng.bool() { rng.u64(..50_000) } else { 0 });
    FaultConfig {
        drop,
        duplicate,
        reorder,
        corrupt,
        delay,
        seed: rng.u64(..),
        ..FaultConfig::default()
    }
}

fn generate_connection(rng: &mut Rng, nodes: usize) -> Connection {
    let mtu = Mtu::from_code(rng.u32(1..=5)).expect("1 to 5 are codes");
    let first = rng.usize(..nodes);
    let second = (first + rng.usize(1..nodes)) % nodes;
    let mut ends = [generate_end(rng, first), generate_end(rng, second)];
    for i in 0..2 {
        ends[i].max_dest_rd_atomic = (ends[1 - i].max_rd_atomic + rng.u8(..4)).min(16);
    }
    let [a, b] = &mut ends;
    generate_program(rng, mtu, a, b);
    generate_program(rng, mtu, b, a);
    Connection { mtu, ends }
}

fn generate_end(rng: &mut Rng, node: usize) -> End {
    End {
        node,
        // Every second one wraps within a conversation.
        sq_psn: if rng.bool() {
            Psn::new(rng.u32(..))
        } else {
            Psn::new(rng.u32(0xff_ff80..0x100_0000))
        },
        // Mostly well over a round trip; sometimes so short that it expires without a loss.
        timeout: if rng.u8(..8) == 0 { rng.u8(4..8) } else { rng.u8(10..13) },
        retry_cnt: if rng.u8(..4) == 0 { rng.u8(..7) } else { 7 },
        rnr_retry: if rng.u8(..4) == 0 { rng.u8(..7) } else { 7 },
        min_rnr_timer: rng.u8(1..14),
        max_rd_atomic: rng.u8(1..=8),
        max_dest_rd_atomic: 0,
        max_send_wr: rng.u32(1..=32),
        max_recv_wr: rng.u32(1..=32),
        max_inline: rng.u32(..=256),
        signal_all: rng.u8(..4) == 0,
        ops: Vec::new(),
        receives: Vec::new(),
        areas: Areas::default(),
    }
}

/// Generates `from`'s requests to `to`, by running them on a copy of the memory of both.
fn generate_program(rng: &mut Rng, mtu: Mtu, from: &mut End, to: &mut End) {
    let words = [
        to.areas.reserve(rng, Area::Words, 8, 8),
        to.areas.reserve(rng, Area::Words, 8, 8),
    ];
    let mut values = words.map(|word| u64::from_ne_bytes(word.of(&to.areas).try_into().expect("words have 8 bytes")));
    let pace = if rng.bool() { 0 } else { rng.u64(1..20_000) };
    let lateness = if rng.bool() { 0 } else { rng.u64(1..200_000) };
    let (mut send_at, mut receive_at) = (Instant::ZERO, Instant::ZERO);
    let mut written: Option<(Range, Vec<u8>)> = None;
    let mut unsignaled = 0;
    for _ in 0..rng.usize(..=24) {
        let len = match from.ops.last() {
            Some(op) if op.fetches() && rng.bool() => op.data.len(),
            _ => generate_len(rng, mtu.bytes()),
        };
        let imm = rng.bool().then(|| rng.u32(..));
        let mut op = match rng.u8(..10) {
            0..4 => generate_source(rng, from, Action::Send { imm }, len),
            4..7 => {
                // Sometimes over the range written last, which is then not read again.
                let target = match written.take() {
                    Some((target, _)) if target.len == len || rng.u8(..3) == 0 => Range {
                        len: len.min(target.len),
                        ..target
                    },
                    _ => to.areas.reserve(rng, Area::Exposed, len, 1),
                };
                let op = generate_source(rng, from, Action::Write { target, imm }, target.len);
                written = Some((target, op.data.clone()));
                op
            }
            7..9 => {
                // Sometimes the data written last: the responder executes requests in order.
                let (source, data) = match written.clone() {
                    Some(last) if rng.bool() => last,
                    _ => {
                        let source = to.areas.reserve(rng, Area::Exposed, len, 1);
                        (source, source.of(&to.areas).to_vec())
                    }
                };
                // A duplicate READ may read its source again, so nothing may write it again.
                written = None;
                let local = from.areas.reserve_pieces(rng, Area::Landing, source.len, MAX_SGE);
                new_op(Action::Read { source }, local, data)
            }
            _ => {
                let which = rng.usize(..2);
                let op = match rng.u8(..3) {
                    0 => AtomicOp::FetchAdd { add: rng.u64(..) },
                    1 => AtomicOp::CompareSwap {
                        compare: values[which],
                        swap: rng.u64(..),
                    },
                    _ => AtomicOp::CompareSwap {
                        compare: rng.u64(..),
                        swap: rng.u64(..),
                    },
                };
                let before = values[which];
                values[which] = apply(op, before);
                let local = vec![from.areas.reserve(rng, Area::Landing, 8, 8)];
                new_op(
                    Action::Atomic { word: words[which], op },
                    local,
                    before.to_ne_bytes().to_vec(),
                )
            }
        };
        if matches!(op.action, Action::Send { .. }) || op.imm().is_some() {
            op.receive = Some(to.receives.len());
            receive_at = receive_at + Duration::from_nanos(rng.u64(..=lateness));
            let room = if matches!(op.action, Action::Send { .. }) {
                op.data.len() + rng.usize(..64)
            } else {
                rng.usize(..64)
            };
            let local = to.areas.reserve_pieces(rng, Area::Receive, room, MAX_SGE);
            to.receives.push(Receive {
                local,
                not_before: receive_at,
            });
        }
        send_at = send_at + Duration::from_nanos(rng.u64(..=pace));
        op.not_before = send_at;
        op.fence |= rng.u8(..8) == 0;
        op.solicited = rng.bool();
        // In a queue full of unsignaled requests no slot would ever be retired.
        op.signaled = unsignaled + 1 >= from.max_send_wr || rng.bool();
        unsignaled = if op.signaled || from.signal_all {
            0
        } else {
            unsignaled + 1
        };
        from.ops.push(op);
    }
    if let Some(last) = from.ops.last_mut() {
        last.signaled = true;
    }
}

fn new_op(action: Action, local: Vec<Range>, data: Vec<u8>) -> Op {
    Op {
        action,
        local,
        data,
        inline: false,
        signaled: false,
        fence: false,
        solicited: false,
        not_before: Instant::ZERO,
        receive: None,
    }
}

/// From the source area, inline, or from the destination of a preceding READ (behind a fence).
fn generate_source(rng: &mut Rng, from: &mut End, action: Action, len: usize) -> Op {
    let fetched = from.ops.last().filter(|op| op.fetches() && op.data.len() == len);
    if let Some(fetched) = fetched {
        let mut op = new_op(action, fetched.local.clone(), fetched.data.clone());
        op.fence = true;
        return op;
    }
    let local = from.areas.reserve_pieces(rng, Area::Source, len, MAX_SGE);
    let data = from.areas.gather(&local);
    let mut op = new_op(action, local, data);
    op.inline = len <= from.max_inline as usize && rng.bool();
    op
}

/// 0 B to about 40 KiB: many small ones, and the sizes around a multiple of the path MTU.
fn generate_len(rng: &mut Rng, mtu: usize) -> usize {
    match rng.u8(..20) {
        0 => 0,
        1..8 => rng.usize(..=64),
        8..12 => rng.usize(..=4096),
        12..17 => (mtu * rng.usize(1..=4) + rng.usize(..3)).saturating_sub(1),
        17..19 => rng.usize(..=16384),
        _ => rng.usize(..=40960),
    }
}
