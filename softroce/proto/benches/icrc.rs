//! Cost of the ICRC, compared with a plain CRC-32, and of solving for the Identification.

use core::hint::black_box;
use core::net::{IpAddr, Ipv4Addr};
use core::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use doorbell_roce_proto::icrc::{Flow, FlowCache, solve_ident};
use doorbell_roce_proto::ident::IdentTracker;
use doorbell_roce_proto::{Datagram, Ident, Instant};

const SRC: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1));
const DST: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 2));

fn packet(payload: usize) -> Vec<u8> {
    let mut packet: Vec<u8> = (0..28 + payload).map(|n| n as u8).collect();
    packet[0] = 0x0a;
    packet
}

fn compute(c: &mut Criterion) {
    let mut group = c.benchmark_group("icrc");
    for payload in [16, 64, 256, 1024, 4080, 4096] {
        let bytes = packet(payload);
        let flow = Flow::new(SRC, DST, 49152, 4791);
        group.throughput(Throughput::Bytes(bytes.len() as u64));
        group.bench_with_input(BenchmarkId::new("crc32fast", payload), &bytes[..], |b, bytes| {
            b.iter(|| crc32fast::hash(black_box(bytes)));
        });
        group.bench_with_input(BenchmarkId::new("compute", payload), &bytes[..], |b, bytes| {
            b.iter(|| flow.compute(black_box(0), black_box(bytes)));
        });
        group.bench_with_input(
            BenchmarkId::new("compute segment 9", payload),
            &bytes[..],
            |b, bytes| {
                b.iter(|| flow.compute(black_box(9), black_box(bytes)));
            },
        );
    }
    group.finish();
}

fn parts(c: &mut Criterion) {
    let mut group = c.benchmark_group("icrc parts");
    group.bench_function("flow", |b| b.iter(|| Flow::new(black_box(SRC), DST, 49152, 4791)));
    group.bench_function("cached flow", |b| {
        let mut cache = FlowCache::default();
        b.iter(|| cache.flow(black_box(SRC), DST, 49152, 4791));
    });
    group.bench_function("solve", |b| {
        b.iter(|| solve_ident(black_box(0x1234_5678), black_box(1040)))
    });
    group.finish();
}

fn check(c: &mut Criterion) {
    let mut group = c.benchmark_group("check");
    for payload in [16, 4096] {
        let flow = Flow::new(SRC, DST, 49152, 4791);
        let sealed = |ident: u16| {
            let mut bytes = packet(payload);
            bytes.extend([0; 4]);
            flow.seal(ident, &mut bytes);
            bytes
        };
        let mut run = |name: &str, packets: &[Vec<u8>]| {
            let mut tracker = IdentTracker::default();
            let mut now = Instant::ZERO;
            let mut next = packets.iter().cycle();
            group.bench_function(BenchmarkId::new(name, payload), |b| {
                b.iter(|| {
                    // So far apart that a counting source may be anywhere: the packets can repeat.
                    now = now + Duration::from_secs(100);
                    let payload = next.next().expect("a cycle has no end");
                    let ident = Ident::Unknown { segment: 0 };
                    let datagram = Datagram {
                        src: SRC,
                        dst: DST,
                        src_port: 49152,
                        dst_port: 4791,
                        ident,
                        traffic_class: 0,
                        payload,
                    };
                    tracker.check(now, &datagram)
                });
            });
        };
        run("exact", &[sealed(0)]);
        // Few enough to stay in the L1 cache.
        let steps = |step: u16| (0..4).map(|n| sealed(1000 + n * step)).collect::<Vec<_>>();
        run("counting, solved one in four", &steps(1));
        run("counting, solved always", &steps(2));
    }
    group.finish();
}

criterion_group!(benches, compute, parts, check);
criterion_main!(benches);
