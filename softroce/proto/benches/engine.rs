//! Cost of the engine per packet sent and received: 4096-byte WRITE packets, and 16-byte SENDs.
//!
//! Each side runs against recorded packets of the other. Receiving includes the ICRC check, sending
//! excludes it, as the link seals. Copies to a vector are included, a device's checks are not.

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant as Clock};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use doorbell_roce_proto::icrc::Flow;
use doorbell_roce_proto::memory::{
    AccessContext, AccessError, AtomicOp, Bind, Invalidator, Memory, PdId, RemoteRight, Sge,
};
use doorbell_roce_proto::qp::{Modify, Path, QpInit, RemoteAccess, State};
use doorbell_roce_proto::wire::Transport;
use doorbell_roce_proto::work::{CqId, Operation, Payload, ReceiveRequest, SendRequest};
use doorbell_roce_proto::{Datagram, Endpoint, EndpointConfig, Ident, Instant, LKey, Mtu, Psn, Qpn, RKey};

const PORT: u16 = 4791;
const ADDRESSES: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1)),
    IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2)),
];
const MESSAGE: usize = 1 << 20;

/// One region at address 0 with all rights.
struct Flat(Vec<u8>);

impl Flat {
    fn range(&mut self, addr: u64, len: usize) -> Result<&mut [u8], AccessError> {
        let start = usize::try_from(addr).map_err(|_| AccessError)?;
        let end = start.checked_add(len).ok_or(AccessError)?;
        self.0.get_mut(start..end).ok_or(AccessError)
    }
}

impl Memory for Flat {
    fn gather(&mut self, _: PdId, _: LKey, addr: u64, dst: &mut [u8]) -> Result<(), AccessError> {
        dst.copy_from_slice(self.range(addr, dst.len())?);
        Ok(())
    }

    fn check_local(&mut self, _: PdId, sge: &Sge, _: bool) -> Result<(), AccessError> {
        self.range(sge.addr, sge.len as usize).map(drop)
    }

    fn scatter(&mut self, _: PdId, _: LKey, addr: u64, src: &[u8]) -> Result<(), AccessError> {
        self.range(addr, src.len())?.copy_from_slice(src);
        Ok(())
    }

    fn check_remote(
        &mut self,
        _: AccessContext,
        _: RKey,
        addr: u64,
        len: u64,
        _: RemoteRight,
    ) -> Result<(), AccessError> {
        self.range(addr, usize::try_from(len).map_err(|_| AccessError)?)
            .map(drop)
    }

    fn remote_read(&mut self, _: AccessContext, _: RKey, addr: u64, dst: &mut [u8]) -> Result<(), AccessError> {
        dst.copy_from_slice(self.range(addr, dst.len())?);
        Ok(())
    }

    fn remote_write(&mut self, _: AccessContext, _: RKey, addr: u64, src: &[u8]) -> Result<(), AccessError> {
        self.range(addr, src.len())?.copy_from_slice(src);
        Ok(())
    }

    fn remote_atomic(&mut self, _: AccessContext, _: RKey, _: u64, _: AtomicOp) -> Result<u64, AccessError> {
        Err(AccessError)
    }

    fn bind(&mut self, _: AccessContext, _: &Bind) -> Result<(), AccessError> {
        Err(AccessError)
    }

    fn invalidate(&mut self, _: AccessContext, _: RKey, _: Invalidator) -> Result<(), AccessError> {
        Err(AccessError)
    }
}

struct Node {
    endpoint: Endpoint,
    memory: Flat,
    qpn: Qpn,
}

fn node(seed: u64) -> Node {
    let mut endpoint = Endpoint::with_config(EndpointConfig {
        key: seed.into(),
        window: 1024,
        ..EndpointConfig::default()
    });
    let qpn = endpoint.create_qp(QpInit {
        transport: Transport::Rc,
        pd: PdId(0),
        send_cq: CqId(0),
        recv_cq: CqId(1),
        max_send_wr: 512,
        max_recv_wr: 512,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline: 64,
        signal_all: false,
        srq: None,
        xrc_domain: None,
        ack_before_requests: false,
    });
    Node {
        endpoint,
        memory: Flat(vec![1; MESSAGE]),
        qpn,
    }
}

fn connected() -> [Node; 2] {
    let mut nodes = [node(1), node(2)];
    let qpns = [nodes[0].qpn, nodes[1].qpn];
    for (at, node) in nodes.iter_mut().enumerate() {
        let all = RemoteAccess {
            read: true,
            write: true,
            atomic: true,
            ..RemoteAccess::default()
        };
        let path = Path::new(ADDRESSES[at], ADDRESSES[1 - at]);
        let steps = [
            Modify {
                state: Some(State::Init),
                pkey_index: Some(0),
                port: Some(1),
                access: Some(all),
                ..Modify::default()
            },
            Modify {
                state: Some(State::Rtr),
                path: Some(path),
                path_mtu: Some(Mtu::Mtu4096),
                dest_qpn: Some(qpns[1 - at]),
                rq_psn: Some(Psn::new(0)),
                max_dest_rd_atomic: Some(4),
                min_rnr_timer: Some(1),
                ..Modify::default()
            },
            Modify {
                state: Some(State::Rts),
                sq_psn: Some(Psn::new(0)),
                timeout: Some(14),
                retry_cnt: Some(7),
                rnr_retry: Some(7),
                max_rd_atomic: Some(4),
                ..Modify::default()
            },
        ];
        for step in &steps {
            node.endpoint
                .modify_qp(Instant::ZERO, node.qpn, step)
                .expect("a valid transition");
        }
    }
    nodes
}

/// The load: one WRITE of a megabyte, or 256 SENDs of 16 bytes.
#[derive(Clone, Copy, Debug)]
enum Load {
    Write,
    Sends,
}

impl Load {
    const fn packets(self) -> usize {
        256
    }

    fn post(self, node: &mut Node) {
        let (operation, len, count) = match self {
            Self::Write => (
                Operation::Write {
                    addr: 0,
                    rkey: RKey(0),
                    imm: None,
                },
                MESSAGE,
                1,
            ),
            Self::Sends => (Operation::Send { imm: None }, 16, 256),
        };
        let list = [Sge {
            addr: 0,
            len: len as u32,
            lkey: LKey(0),
        }];
        for wr_id in 0..count {
            let request = SendRequest {
                wr_id,
                operation,
                payload: Payload::Gather(&list),
                signaled: wr_id + 1 == count,
                fence: false,
                solicited: false,
            };
            node.endpoint
                .post_send(Instant::ZERO, node.qpn, &request)
                .expect("room in the queue");
        }
    }

    fn post_receives(self, node: &mut Node) {
        if matches!(self, Self::Sends) {
            let list = [Sge {
                addr: 0,
                len: 16,
                lkey: LKey(0),
            }];
            for wr_id in 0..256 {
                node.endpoint
                    .post_receive(node.qpn, &ReceiveRequest { wr_id, sges: &list })
                    .expect("room in the queue");
            }
        }
    }
}

struct Batch {
    arena: Vec<u8>,
    lens: Vec<usize>,
}

impl Batch {
    fn new() -> Self {
        Self {
            arena: vec![0; 2 << 20],
            lens: Vec::with_capacity(512),
        }
    }

    fn fill(&mut self, node: &mut Node) {
        self.lens.clear();
        let mut at = 0;
        while let Some(transmit) = node
            .endpoint
            .poll_transmit(Instant::ZERO, &mut node.memory, &mut self.arena[at..])
        {
            at += transmit.len;
            self.lens.push(transmit.len);
        }
    }

    fn seal(&mut self, from: usize) {
        let flow = Flow::new(ADDRESSES[from], ADDRESSES[1 - from], PORT, PORT);
        let mut rest = &mut self.arena[..];
        for len in &self.lens {
            let (packet, after) = rest.split_at_mut(*len);
            flow.seal(0, packet);
            rest = after;
        }
    }

    fn deliver(&self, from: usize, to: &mut Node) {
        let mut rest = &self.arena[..];
        for len in &self.lens {
            let (payload, after) = rest.split_at(*len);
            rest = after;
            let datagram = Datagram {
                src: ADDRESSES[from],
                dst: ADDRESSES[1 - from],
                src_port: PORT,
                dst_port: PORT,
                ident: Ident::Unknown { segment: 0 },
                traffic_class: 0,
                payload,
            };
            to.endpoint.handle_datagram(Instant::ZERO, &datagram, &mut to.memory);
        }
        while let Some(completion) = to.endpoint.poll_completion() {
            black_box(completion);
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Part {
    Send,
    Receive,
    Acknowledge,
}

fn rounds(load: Load, part: Part, rounds: u64) -> Duration {
    let [mut left, mut right] = connected();
    let (mut there, mut back) = (Batch::new(), Batch::new());
    let mut spent = Duration::ZERO;
    for _ in 0..rounds {
        load.post_receives(&mut right);
        load.post(&mut left);
        let start = Clock::now();
        there.fill(&mut left);
        let sent = Clock::now();
        assert_eq!(there.lens.len(), load.packets());
        there.seal(0);
        let sealed = Clock::now();
        there.deliver(0, &mut right);
        let received = Clock::now();
        back.fill(&mut right);
        back.seal(1);
        back.deliver(1, &mut left);
        let acknowledged = Clock::now();
        spent += match part {
            Part::Send => sent - start,
            Part::Receive => received - sealed,
            Part::Acknowledge => acknowledged - received,
        };
    }
    assert_eq!(left.endpoint.counters().retransmits, 0);
    spent
}

fn engine(criterion: &mut Criterion) {
    for (name, load) in [("write_4096", Load::Write), ("send_16", Load::Sends)] {
        let mut group = criterion.benchmark_group(name);
        group.throughput(Throughput::Elements(load.packets() as u64));
        for (name, part) in [
            ("sent", Part::Send),
            ("received", Part::Receive),
            ("acknowledged", Part::Acknowledge),
        ] {
            group.bench_function(name, |bencher| bencher.iter_custom(|count| rounds(load, part, count)));
        }
        group.finish();
    }
}

criterion_group!(benches, engine);
criterion_main!(benches);
