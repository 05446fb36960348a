//! Round trips of every header, known packets byte by byte, and arbitrary bytes.

use core::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::{Psn, Qpn, RKey};

fn reth() -> impl Strategy<Value = Reth> {
    any::<(u64, u32, u32)>().prop_map(|(va, rkey, len)| Reth {
        va,
        rkey: RKey(rkey),
        len,
    })
}

fn aeth() -> impl Strategy<Value = Aeth> {
    let syndromes = prop_oneof![
        (0u8..32).prop_map(|code| Syndrome::Ack(Credits::from_code(code))),
        (0u8..32).prop_map(|code| Syndrome::RnrNak(RnrTimer::from_code(code))),
        prop::sample::select(vec![
            Nak::PsnSequence,
            Nak::InvalidRequest,
            Nak::RemoteAccess,
            Nak::RemoteOperational,
            Nak::InvalidRd
        ])
        .prop_map(Syndrome::Nak),
    ];
    (syndromes, 0u32..1 << 24).prop_map(|(syndrome, msn)| Aeth { syndrome, msn })
}

fn imm() -> impl Strategy<Value = ImmDt> {
    any::<u32>().prop_map(ImmDt)
}

fn deth() -> impl Strategy<Value = Deth> {
    any::<(u32, u32)>().prop_map(|(qkey, src_qp)| Deth {
        qkey,
        src_qp: Qpn::new(src_qp),
    })
}

fn extension(layout: Layout) -> BoxedStrategy<Extension> {
    match layout {
        Layout::Bare => Just(Extension::Bare).boxed(),
        Layout::Reth => reth().prop_map(Extension::Reth).boxed(),
        Layout::RethImm => (reth(), imm())
            .prop_map(|(reth, imm)| Extension::RethImm(reth, imm))
            .boxed(),
        Layout::Imm => imm().prop_map(Extension::Imm).boxed(),
        Layout::Ieth => any::<u32>()
            .prop_map(|rkey| Extension::Ieth(Ieth { rkey: RKey(rkey) }))
            .boxed(),
        Layout::Aeth => aeth().prop_map(Extension::Aeth).boxed(),
        Layout::AethAtomic => (aeth(), any::<u64>())
            .prop_map(|(aeth, original)| Extension::AethAtomic(aeth, AtomicAckEth { original }))
            .boxed(),
        Layout::Atomic => any::<(u64, u32, u64, u64)>()
            .prop_map(|(va, rkey, swap_add, compare)| {
                Extension::Atomic(AtomicEth {
                    va,
                    rkey: RKey(rkey),
                    swap_add,
                    compare,
                })
            })
            .boxed(),
        Layout::Deth => deth().prop_map(Extension::Deth).boxed(),
        Layout::DethImm => (deth(), imm())
            .prop_map(|(deth, imm)| Extension::DethImm(deth, imm))
            .boxed(),
        Layout::FethReth => (0u8..16, 0u8..4, reth())
            .prop_map(|(plt, sel, reth)| Extension::FethReth(Feth { plt, sel }, reth))
            .boxed(),
        Layout::Selective => any::<[u8; SelectiveEth::LEN]>()
            .prop_map(|bytes| Extension::Selective(SelectiveEth::from_bytes(&bytes)))
            .boxed(),
    }
}

fn headers() -> impl Strategy<Value = (Bth, Extension)> {
    (
        prop::sample::select(Opcode::ALL),
        any::<[bool; 6]>(),
        any::<bool>(),
        any::<(u32, u32)>(),
    )
        .prop_flat_map(
            |(opcode, [solicited, migrated, fecn, becn, ack_req, selective], full, (dest_qp, psn))| {
                let bth = Bth {
                    opcode,
                    solicited,
                    migrated,
                    pkey: if full { 0xffff } else { 0x7fff },
                    fecn,
                    becn,
                    dest_qp: Qpn::new(dest_qp),
                    ack_req,
                    selective,
                    psn: Psn::new(psn),
                    xrc: opcode.has_xrc_eth().then_some(XrcEth {
                        srq: dest_qp & 0x00ff_ffff,
                    }),
                };
                extension(opcode.layout()).prop_map(move |extension| (bth, extension))
            },
        )
}

/// Bytes resembling a packet: a known opcode and version 0, then anything.
fn packet_like() -> impl Strategy<Value = Vec<u8>> {
    (
        prop::sample::select(Opcode::ALL),
        0u8..16,
        prop::collection::vec(any::<u8>(), 16..120),
    )
        .prop_map(|(opcode, flags, mut bytes)| {
            bytes[..4].copy_from_slice(&[opcode.code(), flags << 4, 0xff, 0xff]);
            bytes
        })
}

/// Parses; an accepted packet is written again, and must be equal except for ignored bits.
fn check_bytes(bytes: &[u8]) -> Result<(), TestCaseError> {
    let Ok(packet) = Packet::parse(bytes) else {
        return Ok(());
    };
    let mut written = bytes.to_vec();
    let start = write(&mut written, &packet.bth, &packet.extension, packet.payload.len()).unwrap();
    prop_assert_eq!(
        start + packet.payload.len() + pad_len(packet.payload.len()) + 4,
        bytes.len()
    );
    prop_assert_eq!(&written[start..start + packet.payload.len()], packet.payload);
    prop_assert_eq!(Packet::parse(&written), Ok(packet));
    let mut expected = bytes.to_vec();
    expected[4] &= 0xc0;
    expected[8] &= if packet.bth.selective { 0xff } else { 0x80 };
    if matches!(packet.bth.opcode.layout(), Layout::Deth | Layout::DethImm) {
        expected[16] = 0;
    }
    if packet.bth.xrc.is_some() {
        expected[12] = 0;
    }
    if packet.bth.opcode.layout() == Layout::FethReth {
        let feth = if packet.bth.xrc.is_some() { 16 } else { 12 };
        expected[feth..feth + 3].fill(0);
        expected[feth + 3] &= 0x3f;
    }
    expected[start + packet.payload.len()..bytes.len() - 4].fill(0);
    prop_assert_eq!(written, expected);
    Ok(())
}

proptest! {
    #[test]
    fn write_and_parse_are_inverse((bth, extension) in headers(), body in prop::collection::vec(any::<u8>(), 0..300), spare in 0usize..9) {
        let payload = if bth.opcode.has_payload() { &body[..] } else { &[] };
        let len = packet_len(bth.opcode, payload.len());
        let mut buf = vec![0xee; len + spare];
        let start = write(&mut buf, &bth, &extension, payload.len()).unwrap();
        prop_assert_eq!(start, header_len(bth.opcode));
        prop_assert_eq!(&buf[len - 4..], &vec![0xee; 4 + spare][..], "the ICRC and what follows are the caller's");
        buf[start..start + payload.len()].copy_from_slice(payload);
        prop_assert_eq!(Packet::parse(&buf[..len]), Ok(Packet { bth, extension, payload }));

        for short in 0..len {
            let before = buf.clone();
            let needed = WriteError::TooLong { needed: len, len: short };
            prop_assert_eq!(write(&mut buf[..short], &bth, &extension, payload.len()), Err(needed));
            prop_assert_eq!(&buf, &before);
            // Cut to a multiple of 4 it may still be a packet, but not if cut into the headers.
            let parsed = Packet::parse(&buf[..short]);
            prop_assert!(parsed.is_err() || short % 4 == 0 && short >= start + 4);
        }
    }

    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..120)) {
        check_bytes(&bytes)?;
    }

    #[test]
    fn bytes_like_packets(bytes in packet_like()) {
        check_bytes(&bytes)?;
    }

    #[test]
    fn only_matching_headers_are_written((bth, _) in headers(), (other, extension) in headers()) {
        prop_assume!(bth.opcode.layout() != other.opcode.layout());
        prop_assert_eq!(write(&mut [0; 64], &bth, &extension, 0), Err(WriteError::Layout(bth.opcode)));
    }
}

/// The layout by hand from the standard's figures, independently of both directions.
#[test]
fn a_write_only_byte_by_byte() {
    let mut bth = Bth::new(Opcode::RcWriteOnlyImm, Qpn::new(0x12_3456), Psn::new(0xab_cdef));
    bth.ack_req = true;
    bth.solicited = true;
    let reth = Reth {
        va: 0x0102_0304_0506_0708,
        rkey: RKey(0x1112_1314),
        len: 5,
    };
    let mut buf = [0xaa; 64];
    let start = write(&mut buf, &bth, &Extension::RethImm(reth, ImmDt(0x2122_2324)), 5).unwrap();
    assert_eq!(start, 32);
    buf[start..start + 5].copy_from_slice(b"hello");
    #[rustfmt::skip]
    let expected = [
        0x0b, 0x80 | 0x40 | 0x30, 0xff, 0xff, 0x00, 0x12, 0x34, 0x56, 0x80, 0xab, 0xcd, 0xef,
        1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x12, 0x13, 0x14, 0, 0, 0, 5, 0x21, 0x22, 0x23, 0x24,
        b'h', b'e', b'l', b'l', b'o', 0, 0, 0,
    ];
    assert_eq!(buf[..40], expected);
    assert_eq!(packet_len(Opcode::RcWriteOnlyImm, 5), 44);
}

#[test]
fn acknowledgements_and_atomics_byte_by_byte() {
    let mut buf = [0; 64];
    let bth = |opcode| Bth::new(opcode, Qpn::new(7), Psn::new(9));
    let aeth = |code| Aeth {
        syndrome: Syndrome::from_code(code).unwrap(),
        msn: 0x01_0203,
    };
    write(&mut buf, &bth(Opcode::RcAcknowledge), &Extension::Aeth(aeth(0x1f)), 0).unwrap();
    assert_eq!(buf[12..16], [0x1f, 1, 2, 3]);
    let extension = Extension::AethAtomic(
        aeth(0x2c),
        AtomicAckEth {
            original: 0x0102_0304_0506_0708,
        },
    );
    write(&mut buf, &bth(Opcode::RcAtomicAcknowledge), &extension, 0).unwrap();
    assert_eq!(buf[12..24], [0x2c, 1, 2, 3, 1, 2, 3, 4, 5, 6, 7, 8]);
    let atomic = AtomicEth {
        va: 1,
        rkey: RKey(2),
        swap_add: 3,
        compare: 4,
    };
    write(&mut buf, &bth(Opcode::RcCompareSwap), &Extension::Atomic(atomic), 0).unwrap();
    let expected = [
        0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 4,
    ];
    assert_eq!(buf[12..40], expected);
    let reth = Reth {
        va: 1,
        rkey: RKey(2),
        len: 3,
    };
    let flush = Extension::FethReth(Feth { plt: 3, sel: 1 }, reth);
    write(&mut buf, &bth(Opcode::RcFlush), &flush, 0).unwrap();
    let expected = [0, 0, 0, 0x13, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3];
    assert_eq!((buf[0], &buf[12..32]), (0x1c, &expected[..]));
    let extension = Extension::DethImm(
        Deth {
            qkey: 0x8001_0000,
            src_qp: Qpn::new(0x01_0203),
        },
        ImmDt(1),
    );
    let mut named = bth(Opcode::XrcSendOnlyImm);
    named.xrc = Some(XrcEth { srq: 0x01_0203 });
    write(&mut buf, &named, &Extension::Imm(ImmDt(4)), 0).unwrap();
    assert_eq!((buf[0], &buf[12..20]), (0xa5, &[0, 1, 2, 3, 0, 0, 0, 4][..]));
    let unnamed = write(&mut buf, &bth(Opcode::XrcSendOnlyImm), &Extension::Imm(ImmDt(4)), 0);
    assert_eq!(unnamed, Err(WriteError::Layout(Opcode::XrcSendOnlyImm)));
    write(&mut buf, &bth(Opcode::UdSendOnlyImm), &extension, 0).unwrap();
    assert_eq!(buf[12..24], [0x80, 1, 0, 0, 0, 1, 2, 3, 0, 0, 0, 1]);
}

#[test]
fn parse_errors_name_the_fault() {
    let mut buf = [0; 64];
    let bth = Bth::new(Opcode::RcSendOnly, Qpn::new(7), Psn::new(9));
    let good = {
        write(&mut buf, &bth, &Extension::Bare, 6).unwrap();
        buf[..packet_len(Opcode::RcSendOnly, 6)].to_vec()
    };
    let with = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] = value;
        Packet::parse(&bytes).map(|packet| packet.payload.len())
    };
    assert_eq!(Packet::parse(&good).unwrap().payload.len(), 6);
    assert_eq!(with(0, 0x15), Err(ParseError::Opcode(0x15)));
    assert_eq!(with(0, 0x81), Err(ParseError::Opcode(0x81)));
    assert_eq!(with(1, 0x61), Err(ParseError::Version(1)));
    assert_eq!(with(2, 0x00), Err(ParseError::Pkey(0x00ff)));
    assert_eq!(with(2, 0x7f), Ok(6));
    assert_eq!(with(0, 0x0a), Err(ParseError::Truncated(8)));
    assert_eq!(
        with(0, 0x11),
        Err(ParseError::Payload {
            opcode: Opcode::RcAcknowledge,
            len: 4
        })
    );
    assert_eq!(Packet::parse(&good[..23]), Err(ParseError::Unaligned(23)));
    assert_eq!(Packet::parse(&good[..16]), Err(ParseError::Pad { pad: 2, len: 0 }));
    assert_eq!(Packet::parse(&good[..15]), Err(ParseError::Truncated(11)));
    assert_eq!(Packet::parse(&[]), Err(ParseError::Truncated(0)));
    write(
        &mut buf,
        &Bth {
            opcode: Opcode::RcAcknowledge,
            ..bth
        },
        &Extension::Aeth(Aeth::from_bytes(&[0; 4]).unwrap()),
        0,
    )
    .unwrap();
    for code in (0x40..0x60).chain(0x65..=0xff) {
        buf[12] = code;
        assert_eq!(Packet::parse(&buf[..20]), Err(ParseError::Syndrome(code)));
    }
    let error = write(
        &mut buf,
        &Bth {
            opcode: Opcode::RcReadRequest,
            ..bth
        },
        &Extension::Bare,
        0,
    );
    assert_eq!(error, Err(WriteError::Layout(Opcode::RcReadRequest)));
}

#[test]
fn opcodes() {
    assert_eq!(Opcode::ALL.len(), 25 + 12 + 2 + 25 + 1);
    for code in 0..=u8::MAX {
        assert_eq!(
            Opcode::from_code(code).map(Opcode::code),
            Opcode::ALL.iter().map(|op| op.code()).find(|&c| c == code)
        );
    }
    for &opcode in Opcode::ALL {
        let service = match opcode.code() >> 5 {
            // And manufacturers'.
            0 | 6 => Transport::Rc,
            1 => Transport::Uc,
            5 => Transport::Xrc,
            _ => Transport::Ud,
        };
        assert_eq!(opcode.transport(), service);
        // The names encode the same properties.
        let name = format!("{opcode:?}");
        assert_eq!(opcode.has_imm(), name.ends_with("Imm"), "{name}");
        assert_eq!(opcode.has_invalidate(), name.ends_with("Invalidate"), "{name}");
        assert_eq!(
            opcode.is_response(),
            name.contains("Response") || name.contains("Acknowledge"),
            "{name}"
        );
        assert_eq!(opcode.position() == Position::First, name.contains("First"), "{name}");
        assert_eq!(opcode.position() == Position::Middle, name.contains("Middle"), "{name}");
        assert_eq!(opcode.position() == Position::Last, name.contains("Last"), "{name}");
        assert_eq!(opcode.operation() == Operation::Send, name.contains("Send"), "{name}");
        let writes = name.contains("Write") && !name.contains("Atomic");
        assert_eq!(opcode.operation() == Operation::Write, writes, "{name}");
        assert_eq!(
            opcode.needs_receive(),
            name.contains("Send") || name.contains("Imm"),
            "{name}"
        );
        let moves_data = name.contains("Send") || name.contains("Write") || name.contains("ReadResponse");
        assert_eq!(opcode.has_payload(), moves_data, "{name}");
        let over = opcode.over(Transport::Xrc);
        assert_eq!(over.is_some(), opcode.code() < 0x20);
        assert!(over.is_none_or(|over| format!("{over:?}")[3..] == name[2..] && over.layout() == opcode.layout()));
        let is_made = !opcode.has_invalidate() && opcode.operation() != Operation::AtomicWrite;
        if opcode.transport() != Transport::Rc || !is_made || !opcode.has_payload() {
            continue;
        }
        let made = match opcode.operation() {
            Operation::Send => Opcode::rc_send(opcode.position(), opcode.has_imm()),
            Operation::Write => Opcode::rc_write(opcode.position(), opcode.has_imm()),
            _ => Opcode::rc_read_response(opcode.position()),
        };
        assert_eq!(made, opcode);
        let position = opcode.position();
        assert_eq!(Position::of(position.starts(), position.ends()), position);
    }
    assert_eq!(Opcode::rc_send(Position::First, true), Opcode::RcSendFirst);
    assert_eq!(Opcode::rc_write(Position::Middle, true), Opcode::RcWriteMiddle);
}

#[test]
fn syndromes() {
    for code in 0..=u8::MAX {
        match Syndrome::from_code(code) {
            Ok(syndrome) => assert_eq!(syndrome.code(), code),
            Err(error) => assert_eq!(error, ParseError::Syndrome(code)),
        }
    }
    assert_eq!(Syndrome::from_code(0x1f), Ok(Syndrome::Ack(Credits::UNLIMITED)));
    assert_eq!(Syndrome::from_code(0x60), Ok(Syndrome::Nak(Nak::PsnSequence)));
    assert_eq!(Syndrome::from_code(0x62), Ok(Syndrome::Nak(Nak::RemoteAccess)));
}

#[test]
fn credits() {
    let counts: Vec<_> = (0..32).map(|code| Credits::from_code(code).count()).collect();
    let first: Vec<_> = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64].map(Some).into();
    assert_eq!(counts[..13], first);
    assert_eq!(counts[29..], [Some(24576), Some(32768), None]);
}

#[test]
fn rnr_timers() {
    let micros = |code| RnrTimer::from_code(code).duration().as_micros();
    assert_eq!(micros(0), 655_360);
    assert_eq!([1, 2, 5, 12, 14, 31].map(micros), [10, 20, 60, 640, 1280, 491_520]);
    assert!((2..32).all(|code| micros(code) > micros(code - 1)));
    assert_eq!(RnrTimer::at_least(Duration::ZERO).code(), 1);
    assert_eq!(RnrTimer::at_least(Duration::from_micros(640)).code(), 12);
    assert_eq!(RnrTimer::at_least(Duration::from_micros(641)).code(), 13);
    assert_eq!(RnrTimer::at_least(Duration::from_secs(1)).code(), 0);
    for code in 0..32 {
        let timer = RnrTimer::from_code(code);
        assert_eq!(RnrTimer::at_least(timer.duration()), timer);
    }
}
