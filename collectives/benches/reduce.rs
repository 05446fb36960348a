//! The reduction of two sources beside a copy of as many bytes; bytes read and written count once
//! each. `cargo bench -p doorbell-collectives --bench reduce`; results are in docs/RESULTS.md.

use core::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use doorbell_collectives::kernel::{Function, lines};
use doorbell_collectives::plan::BlockForm::{Element, Partial};
use doorbell_collectives::{DataType, ReduceOp};

/// Page-aligned memory, touched, with bytes that are ordinary numbers in every type.
struct Memory {
    bytes: Vec<u8>,
    offset: usize,
}

impl Memory {
    const PAGE: usize = 4096;

    fn new(len: usize) -> Self {
        let bytes: Vec<u8> = [0x11, 0x22, 0x33, 0x3c]
            .into_iter()
            .cycle()
            .take(len + Self::PAGE)
            .collect();
        let offset = bytes.as_ptr().align_offset(Self::PAGE);
        Self { bytes, offset }
    }

    fn at(&mut self) -> *mut u8 {
        self.bytes[self.offset..].as_mut_ptr()
    }
}

fn sizes() -> [(&'static str, usize); 2] {
    [("256KiB", 256 << 10), ("64MiB", 64 << 20)]
}

fn copies(c: &mut Criterion) {
    let mut group = c.benchmark_group("memcpy");
    for (name, size) in sizes() {
        // A reduction of two sources accesses three memories of `size`, a copy two.
        let len = size / 2 * 3;
        let (mut from, mut into) = (Memory::new(len), Memory::new(len));
        group.throughput(Throughput::Bytes(2 * len as u64));
        group.bench_function(name, |b| {
            b.iter(|| {
                // SAFETY: both memories are that long.
                unsafe { core::ptr::copy_nonoverlapping(black_box(from.at()), black_box(into.at()), len) };
            });
        });
    }
    group.finish();
}

fn reductions(c: &mut Criterion) {
    let cases = [
        (DataType::F32, ReduceOp::Sum),
        (DataType::F64, ReduceOp::Sum),
        (DataType::I32, ReduceOp::Sum),
        (DataType::Bf16, ReduceOp::Sum),
        (DataType::F16, ReduceOp::Sum),
        (DataType::F8E4M3, ReduceOp::Sum),
        (DataType::F8E5M2, ReduceOp::Sum),
        (DataType::U8, ReduceOp::Max),
        (DataType::F32, ReduceOp::Avg),
        (DataType::F32, ReduceOp::Max),
        (DataType::Bf16, ReduceOp::Max),
        (DataType::I64, ReduceOp::Avg),
    ];
    for (name, size) in sizes() {
        let mut group = c.benchmark_group(format!("two sources/{name}"));
        let (mut a, mut b, mut into) = (Memory::new(size), Memory::new(size), Memory::new(size));
        for (data, op) in cases {
            let function = Function::new(data, op, 2).expect("built-in operators fit");
            group.throughput(Throughput::Bytes(3 * size as u64));
            group.bench_function(BenchmarkId::new(data.name(), op), |bench| {
                bench.iter(|| {
                    let sources = [
                        (Element, black_box(a.at()).cast_const()),
                        (Element, black_box(b.at()).cast_const()),
                    ];
                    // SAFETY: all memories are that long and disjoint.
                    unsafe { function.reduce(&sources, (Element, black_box(into.at())), size / data.bytes()) };
                });
            });
        }
        group.finish();
    }
}

fn partial(c: &mut Criterion) {
    let mut group = c.benchmark_group("partial and element to partial");
    for (name, size) in sizes() {
        let (mut a, mut b) = (Memory::new(size), Memory::new(size / 2));
        let function = Function::new(DataType::Bf16, ReduceOp::Sum, 2).expect("built-in operators fit");
        group.throughput(Throughput::Bytes((2 * size + size / 2) as u64));
        group.bench_function(BenchmarkId::new("bf16", name), |bench| {
            bench.iter(|| {
                let sources = [
                    (Partial, black_box(a.at()).cast_const()),
                    (Element, black_box(b.at()).cast_const()),
                ];
                // SAFETY: both memories hold that many elements, and the result is exactly the
                // first source.
                unsafe { function.reduce(&sources, (Partial, black_box(a.at())), size / 4) };
            });
        });
    }
    group.finish();
}

fn many(c: &mut Criterion) {
    let size = 256 << 10;
    let mut group = c.benchmark_group("f32 sum of sources/256KiB");
    let function = Function::new(DataType::F32, ReduceOp::Sum, 8).expect("built-in operators fit");
    for count in [3, 4, 8] {
        let mut memories: Vec<Memory> = (0..count).map(|_| Memory::new(size)).collect();
        let mut into = Memory::new(size);
        group.throughput(Throughput::Bytes(((count + 1) * size) as u64));
        group.bench_function(BenchmarkId::from_parameter(count), |bench| {
            let sources: Vec<_> = memories
                .iter_mut()
                .map(|memory| (Element, memory.at().cast_const()))
                .collect();
            bench.iter(|| {
                // SAFETY: all memories are that long and disjoint.
                unsafe { function.reduce(black_box(&sources), (Element, black_box(into.at())), size / 4) };
            });
        });
    }
    group.finish();
}

fn slots(c: &mut Criterion) {
    let size = 32 << 10;
    let mut group = c.benchmark_group("slots of 32KiB");
    let (mut plain, mut slot) = (Memory::new(size), Memory::new(lines::ll_bytes(size)));
    group.throughput(Throughput::Bytes(size as u64));
    // SAFETY (all): `plain` has the size, and `slot` the larger length of the layouts,
    // page-aligned.
    group.bench_function("pack LL", |b| {
        // SAFETY: see above.
        b.iter(|| unsafe { lines::pack_ll(7, black_box(plain.at()), size, black_box(slot.at())) });
    });
    group.bench_function("unpack LL", |b| {
        // SAFETY: see above.
        b.iter(|| assert!(unsafe { lines::try_unpack_ll(7, black_box(slot.at()), size, black_box(plain.at())) }));
    });
    group.bench_function("pack LL128", |b| {
        // SAFETY: see above.
        b.iter(|| unsafe { lines::pack_ll128(7, black_box(plain.at()), size, black_box(slot.at())) });
    });
    group.bench_function("unpack LL128", |b| {
        // SAFETY: see above.
        b.iter(|| assert!(unsafe { lines::try_unpack_ll128(7, black_box(slot.at()), size, black_box(plain.at())) }));
    });
    group.bench_function("memcpy", |b| {
        // SAFETY: see above.
        b.iter(|| unsafe { core::ptr::copy_nonoverlapping(black_box(plain.at()), black_box(slot.at()), size) });
    });
    group.finish();
}

criterion_group!(benches, copies, reductions, partial, many, slots);
criterion_main!(benches);
