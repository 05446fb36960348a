// Conversions between 16- and 8-bit floats and binary32, with the results of
// collectives/src/kernel/convert.rs: to nearest, ties to even; every NaN becomes the quiet NaN
// without a sign; 8 bits saturate.
//
// Conversion instructions are used where they exist, two values at a time: 16 bits from sm_80, 8
// bits from sm_89. The arithmetic serves older GPUs, and the host, where tests run it.
#pragma once

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define DOORBELL_EVERYWHERE __host__ __device__ __forceinline__
#else
#define DOORBELL_EVERYWHERE inline
#endif

namespace doorbell {

template <class To, class From>
DOORBELL_EVERYWHERE To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}

constexpr uint32_t MAGNITUDE = 0x7fffffff;
// The bits of infinity; greater magnitudes are NaN.
constexpr uint32_t INFINITE = 0x7f800000;

DOORBELL_EVERYWHERE constexpr uint32_t exponent(int power) {
    return static_cast<uint32_t>(127 + power) << 23;
}

// Widens a finite magnitude, already shifted to binary32's exponent and fraction, of this bias.
DOORBELL_EVERYWHERE uint32_t widen(uint32_t shifted, int bias) {
    const uint32_t least = exponent(1 - bias);
    const uint32_t denormal = bits_as<uint32_t>(bits_as<float>(shifted + least) - bits_as<float>(least));
    return shifted < 1u << 23 ? denormal : shifted + exponent(-bias);
}

// Rounds a magnitude to `fraction` bits and this exponent bias. Overflow carries into the exponent.
DOORBELL_EVERYWHERE uint32_t narrow(uint32_t magnitude, int bias, int fraction) {
    const int shift = 23 - fraction;
    const uint32_t odd = magnitude >> shift & 1;
    const uint32_t normal = (magnitude - exponent(-bias) + (1u << (shift - 1)) - 1 + odd) >> shift;
    // The power of two whose last bit is a denormal's: the addition rounds there.
    const uint32_t unit = exponent(1 - bias + shift);
    const uint32_t denormal = bits_as<uint32_t>(bits_as<float>(magnitude) + bits_as<float>(unit)) - unit;
    return magnitude < exponent(1 - bias) ? denormal : normal;
}

DOORBELL_EVERYWHERE uint32_t least_of(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

// Formats: the bits, the NaN that is stored, and conversion of one value. The upper bits of `bits`
// are zero.

struct F16 {
    using Raw = uint16_t;
    static constexpr uint32_t NAN_BITS = 0x7e00;
    static constexpr int EXPONENT_BITS = 5;

    DOORBELL_EVERYWHERE static float decode(uint32_t bits) {
        const uint32_t shifted = (bits & 0x7fff) << 13;
        const uint32_t magnitude = shifted >= 0x7c00u << 13 ? shifted + 2 * exponent(-15) : widen(shifted, 15);
        return bits_as<float>(magnitude | (bits & 0x8000) << 16);
    }

    DOORBELL_EVERYWHERE static uint32_t encode(float value) {
        const uint32_t magnitude = bits_as<uint32_t>(value) & MAGNITUDE, sign = bits_as<uint32_t>(value) >> 16 & 0x8000;
        return sign | (magnitude >= exponent(16) ? 0x7c00 : narrow(magnitude, 15, 10));
    }
};

struct Bf16 {
    using Raw = uint16_t;
    static constexpr uint32_t NAN_BITS = 0x7fc0;
    static constexpr int EXPONENT_BITS = 8;

    DOORBELL_EVERYWHERE static float decode(uint32_t bits) {
        return bits_as<float>(bits << 16);
    }

    DOORBELL_EVERYWHERE static uint32_t encode(float value) {
        const uint32_t bits = bits_as<uint32_t>(value);
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
};

struct F8E4M3 {
    using Raw = uint8_t;
    static constexpr uint32_t NAN_BITS = 0x7f;
    static constexpr int EXPONENT_BITS = 4;

    DOORBELL_EVERYWHERE static float decode(uint32_t bits) {
        const uint32_t shifted = (bits & 0x7f) << 20;
        return bits_as<float>(shifted == 0x7fu << 20 ? 0x7fc00000 : widen(shifted, 7) | (bits & 0x80) << 24);
    }

    DOORBELL_EVERYWHERE static uint32_t encode(float value) {
        const uint32_t magnitude = bits_as<uint32_t>(value) & MAGNITUDE, sign = bits_as<uint32_t>(value) >> 24 & 0x80;
        return sign | narrow(least_of(magnitude, bits_as<uint32_t>(448.0f)), 7, 3);
    }
};

struct F8E5M2 {
    using Raw = uint8_t;
    static constexpr uint32_t NAN_BITS = 0x7f;
    static constexpr int EXPONENT_BITS = 5;

    // The upper byte of a binary16.
    DOORBELL_EVERYWHERE static float decode(uint32_t bits) {
        return F16::decode(bits << 8);
    }

    DOORBELL_EVERYWHERE static uint32_t encode(float value) {
        const uint32_t magnitude = bits_as<uint32_t>(value) & MAGNITUDE, sign = bits_as<uint32_t>(value) >> 24 & 0x80;
        return sign | narrow(least_of(magnitude, bits_as<uint32_t>(57344.0f)), 15, 2);
    }
};

struct Pair {
    float low, high;
};

template <class F>
DOORBELL_EVERYWHERE Pair decode_pair(uint32_t bits) {
    constexpr int width = 8 * sizeof(typename F::Raw);
    constexpr uint32_t mask = (1u << width) - 1;
    return {F::decode(bits & mask), F::decode(bits >> width & mask)};
}

// Rounds, with the canonical NaN.
template <class F>
DOORBELL_EVERYWHERE uint32_t encode_pair(Pair pair) {
    const uint32_t low = pair.low != pair.low ? F::NAN_BITS : F::encode(pair.low);
    const uint32_t high = pair.high != pair.high ? F::NAN_BITS : F::encode(pair.high);
    return low | high << 8 * sizeof(typename F::Raw);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <>
DOORBELL_EVERYWHERE Pair decode_pair<F16>(uint32_t bits) {
    Pair pair;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(pair.low), "=f"(pair.high) : "r"(bits));
    return pair;
}

template <>
DOORBELL_EVERYWHERE Pair decode_pair<Bf16>(uint32_t bits) {
    return {bits_as<float>(bits << 16), bits_as<float>(bits & 0xffff0000)};
}

// The conversion stores a NaN as 0x7fff; both halves are compared at once.
template <>
DOORBELL_EVERYWHERE uint32_t encode_pair<F16>(Pair pair) {
    uint32_t bits, nans;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(pair.high), "f"(pair.low));
    asm("set.nan.u32.f16x2 %0, %1, %1;" : "=r"(nans) : "r"(bits));
    return (bits & ~nans) | (nans & F16::NAN_BITS * 0x10001);
}

// The upper byte of a binary16, whose infinities and NaNs are E5M2's.
template <>
DOORBELL_EVERYWHERE Pair decode_pair<F8E5M2>(uint32_t bits) {
    return decode_pair<F16>((bits & 0xff) << 8 | (bits & 0xff00) << 16);
}
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
template <>
DOORBELL_EVERYWHERE uint32_t encode_pair<Bf16>(Pair pair) {
    uint32_t bits, nans;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(pair.high), "f"(pair.low));
    asm("set.nan.u32.bf16x2 %0, %1, %1;" : "=r"(nans) : "r"(bits));
    return (bits & ~nans) | (nans & Bf16::NAN_BITS * 0x10001);
}
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
template <>
DOORBELL_EVERYWHERE Pair decode_pair<F8E4M3>(uint32_t bits) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(bits)));
    return decode_pair<F16>(halves);
}

// These conversions store a NaN as 0x7f.
template <>
DOORBELL_EVERYWHERE uint32_t encode_pair<F8E4M3>(Pair pair) {
    uint16_t bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(pair.high), "f"(pair.low));
    return bits;
}

template <>
DOORBELL_EVERYWHERE uint32_t encode_pair<F8E5M2>(Pair pair) {
    uint16_t bits;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(pair.high), "f"(pair.low));
    return bits;
}
#endif

}  // namespace doorbell
