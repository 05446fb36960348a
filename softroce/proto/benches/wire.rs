//! Cost of parsing and writing a packet's headers.

use core::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use doorbell_roce_proto::wire::{Aeth, Bth, Credits, Extension, Opcode, Packet, Reth, Syndrome, packet_len, write};
use doorbell_roce_proto::{Psn, Qpn, RKey};

fn headers(c: &mut Criterion) {
    let bth = |opcode| Bth::new(opcode, Qpn::new(17), Psn::new(0xff_fff0));
    let reth = Reth {
        va: 0x7f00_0000_1000,
        rkey: RKey(0x1234),
        len: 1 << 20,
    };
    let aeth = Aeth {
        syndrome: Syndrome::Ack(Credits::UNLIMITED),
        msn: 9,
    };
    let cases = [
        ("write middle", bth(Opcode::RcWriteMiddle), Extension::Bare, 4096),
        ("write only", bth(Opcode::RcWriteOnly), Extension::Reth(reth), 13),
        ("acknowledge", bth(Opcode::RcAcknowledge), Extension::Aeth(aeth), 0),
    ];
    for (name, bth, extension, len) in cases {
        let mut buf = vec![0; 8192];
        c.bench_function(&format!("emit/{name}"), |b| {
            b.iter(|| write(&mut buf, black_box(&bth), black_box(&extension), black_box(len)));
        });
        let packet = &buf[..packet_len(bth.opcode, len)];
        c.bench_function(&format!("parse/{name}"), |b| {
            b.iter(|| Packet::parse(black_box(packet)).is_ok())
        });
    }
}

criterion_group!(benches, headers);
criterion_main!(benches);
