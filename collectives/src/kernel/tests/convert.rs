//! Conversions, for all numbers of 16 and 8 bits, and the values around which `f32` is rounded to
//! them.

use half::{bf16, f16};

use super::Random;
use super::reference::{f8_code, f8_value};
use crate::DataType;
use crate::kernel::convert;
use crate::kernel::{F8E4M3, F8E5M2};

/// `f32`s to be rounded: every binary16, bfloat16 and float of 8 bits, the midpoints between
/// neighbours and their neighbours, and random ones.
fn samples() -> impl Iterator<Item = f32> {
    let step = if cfg!(miri) { 1023 } else { 1 };
    let halves = (0..=u16::MAX).step_by(step).flat_map(|bits| {
        let (here, next) = (
            f16::from_bits(bits).to_f32(),
            f16::from_bits(bits.wrapping_add(1)).to_f32(),
        );
        let middle = (here + next) / 2.0;
        [
            here,
            middle,
            f32::from_bits(middle.to_bits().wrapping_add(1)),
            f32::from_bits(middle.to_bits().wrapping_sub(1)),
        ]
    });
    let uppers = (0..=u16::MAX)
        .step_by(step)
        .flat_map(|bits| [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| f32::from_bits(u32::from(bits) << 16 | low)));
    let mut random = Random::new(7);
    halves
        .chain(uppers)
        .chain((0..200_000 / step).map(move |_| f32::from_bits(random.next() as u32)))
}

#[test]
fn every_f16_and_bf16_is_itself_as_f32() {
    for bits in 0..=u16::MAX {
        let (ours, theirs) = (convert::f16_to_f32(bits), f16::from_bits(bits).to_f32());
        assert!(
            ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()),
            "{bits:#06x}: {ours} is not {theirs}"
        );
        let (ours, theirs) = (convert::bf16_to_f32(bits), bf16::from_bits(bits).to_f32());
        assert!(
            ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()),
            "{bits:#06x}: {ours} is not {theirs}"
        );
    }
}

#[test]
fn every_f8_matches_its_definition() {
    for bits in 0..=u8::MAX {
        let value = F8E4M3::from_bits(bits).to_f32();
        if bits & 0x7f == 0x7f {
            assert!(value.is_nan());
        } else {
            assert_eq!(value.to_bits(), (f8_value(bits, 3, 7) as f32).to_bits(), "{bits:#04x}");
        }
        let value = F8E5M2::from_bits(bits).to_f32();
        match bits & 0x7f {
            0x7c => assert!(value.is_infinite() && value.is_sign_negative() == (bits & 0x80 != 0)),
            0x7d.. => assert!(value.is_nan()),
            _ => assert_eq!(value.to_bits(), (f8_value(bits, 2, 15) as f32).to_bits(), "{bits:#04x}"),
        }
    }
    assert_eq!(F8E4M3::from_bits(0x7e).to_f32(), 448.0);
    assert_eq!(F8E5M2::from_bits(0x7b).to_f32(), 57344.0);
}

#[test]
fn f32_is_rounded_to_the_nearest_of_16_bits() {
    for value in samples() {
        if value.is_nan() {
            assert_eq!(
                (convert::f32_to_f16(value), convert::f32_to_bf16(value)),
                (0x7e00, 0x7fc0)
            );
            continue;
        }
        assert_eq!(
            convert::f32_to_f16(value),
            f16::from_f32(value).to_bits(),
            "{value:e} as f16"
        );
        assert_eq!(
            convert::f32_to_bf16(value),
            bf16::from_f32(value).to_bits(),
            "{value:e} as bf16"
        );
    }
}

#[test]
fn f32_is_rounded_to_the_nearest_of_8_bits_and_saturates() {
    for value in samples() {
        assert_eq!(
            convert::f32_to_f8e4m3(value),
            f8_code(DataType::F8E4M3, value),
            "{value:e} as E4M3"
        );
        assert_eq!(
            convert::f32_to_f8e5m2(value),
            f8_code(DataType::F8E5M2, value),
            "{value:e} as E5M2"
        );
    }
    for (value, e4m3, e5m2) in [
        (f32::INFINITY, 448.0, 57344.0),
        (f32::NEG_INFINITY, -448.0, -57344.0),
        (464.1, 448.0, 448.0),
        (1e9, 448.0, 57344.0),
    ] {
        assert_eq!(F8E4M3::from_f32(value).to_f32(), e4m3);
        assert_eq!(F8E5M2::from_f32(value).to_f32(), e5m2);
    }
}

#[test]
fn magnitudes_are_rounded_to_e4m3_as_all_numbers() {
    let ties = (0..0x7e).flat_map(|code| {
        let middle = (f8_value(code, 3, 7) + f8_value(code + 1, 3, 7)) as f32 / 2.0;
        [-1, 0, 1].map(|ulp| f32::from_bits(middle.to_bits().wrapping_add_signed(ulp)))
    });
    let magnitudes = samples().map(f32::abs).filter(|magnitude| *magnitude < 464.0);
    for magnitude in magnitudes.chain(ties).chain([464f32.next_down()]) {
        assert_eq!(
            convert::magnitude_to_f8e4m3(magnitude) as u8,
            f8_code(DataType::F8E4M3, magnitude),
            "{magnitude:e}"
        );
    }
}

#[test]
fn every_f8_round_trips() {
    for bits in (0..=u8::MAX).filter(|bits| bits & 0x7f != 0x7f) {
        assert_eq!(F8E4M3::from_f32(F8E4M3::from_bits(bits).to_f32()).to_bits(), bits);
        if bits & 0x7f < 0x7c {
            assert_eq!(F8E5M2::from_f32(F8E5M2::from_bits(bits).to_f32()).to_bits(), bits);
        }
    }
}
