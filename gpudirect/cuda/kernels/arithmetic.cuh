// Element types, their accumulator types and the operators, with the same bits as
// collectives/src/kernel.
//
// `Raw` is an unsigned integer with the bits of the type, `Wide` its accumulator type. 8-bit
// integers accumulate in 32 bits and are truncated when stored or divided, which equals wrapping
// at each step. Nothing may be fused: -fmad=false, and on the host -ffp-contract=off.
#pragma once

#include "convert.cuh"
#include "divisor_arguments.cuh"

namespace doorbell {

// 16 bytes, as loaded and stored.
struct Words {
    uint32_t word[4];
};

template <class R, class W>
struct Integer {
    using Raw = R;
    using Wide = W;
    static constexpr bool NARROW = false;

    DOORBELL_EVERYWHERE static Wide decode(Raw raw) {
        return static_cast<Wide>(raw);
    }

    DOORBELL_EVERYWHERE static Raw encode(Wide wide) {
        return static_cast<Raw>(wide);
    }

    DOORBELL_EVERYWHERE static Wide divide(Wide value, uint32_t ranks) {
        return value / ranks;
    }
};

// Division truncates towards zero, and is unsigned, as the number of ranks uses all 32 bits.
template <class R, class S, class W, class U>
struct Signed {
    using Raw = R;
    using Wide = W;
    static constexpr bool NARROW = false;

    DOORBELL_EVERYWHERE static Wide decode(Raw raw) {
        return static_cast<S>(raw);
    }

    DOORBELL_EVERYWHERE static Raw encode(Wide wide) {
        return static_cast<Raw>(wide);
    }

    DOORBELL_EVERYWHERE static Wide truncate(Wide sum) {
        return static_cast<S>(sum);
    }

    DOORBELL_EVERYWHERE static Wide divide(Wide sum, uint32_t ranks) {
        const Wide value = truncate(sum);
        const U magnitude = value < 0 ? U(0) - static_cast<U>(value) : static_cast<U>(value);
        const U quotient = magnitude / ranks;
        return static_cast<Wide>(value < 0 ? U(0) - quotient : quotient);
    }
};

struct I8 : Signed<uint8_t, int8_t, int32_t, uint32_t> {};
struct I32 : Signed<uint32_t, int32_t, int32_t, uint32_t> {};
struct I64 : Signed<uint64_t, int64_t, int64_t, uint64_t> {};
struct U32 : Integer<uint32_t, uint32_t> {};
struct U64 : Integer<uint64_t, uint64_t> {};
struct U8 : Integer<uint8_t, uint32_t> {
    DOORBELL_EVERYWHERE static Wide truncate(Wide sum) {
        return sum & 0xff;
    }

    DOORBELL_EVERYWHERE static Wide divide(Wide sum, uint32_t ranks) {
        return truncate(sum) / ranks;
    }
};

template <class R, class W, R NAN_BITS>
struct Float {
    using Raw = R;
    using Wide = W;
    static constexpr bool NARROW = false;

    DOORBELL_EVERYWHERE static Wide decode(Raw raw) {
        return bits_as<Wide>(raw);
    }

    DOORBELL_EVERYWHERE static Raw encode(Wide wide) {
        return wide != wide ? NAN_BITS : bits_as<Raw>(wide);
    }

    DOORBELL_EVERYWHERE static Wide divide(Wide sum, uint32_t ranks) {
        return sum / static_cast<Wide>(ranks);
    }
};

struct F32 : Float<uint32_t, float, 0x7fc00000> {};
struct F64 : Float<uint64_t, double, 0x7ff8000000000000> {};

// Floats that accumulate in binary32.
template <class F>
struct Narrow {
    using Raw = typename F::Raw;
    using Wide = float;
    using Format = F;
    static constexpr bool NARROW = true;

    DOORBELL_EVERYWHERE static Wide decode(Raw raw) {
        return decode_pair<F>(raw).low;
    }

    DOORBELL_EVERYWHERE static Raw encode(Wide wide) {
        return static_cast<Raw>(encode_pair<F>({wide, 0.0f}));
    }

    DOORBELL_EVERYWHERE static Wide divide(Wide sum, uint32_t ranks) {
        return sum / static_cast<float>(ranks);
    }
};

// Conversion of up to 16 bytes of elements, the first at the lowest address.
template <class T, bool NARROW = T::NARROW>
struct Group {
    using Raw = typename T::Raw;
    static constexpr int ELEMENTS = 16 / sizeof(Raw);

    template <int COUNT>
    DOORBELL_EVERYWHERE static void decode(const Words &words, typename T::Wide (&wide)[COUNT]) {
        #pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if constexpr (sizeof(Raw) == 8) {
                wide[i] = T::decode(words.word[2 * i] | static_cast<uint64_t>(words.word[2 * i + 1]) << 32);
            } else {
                constexpr int each = 4 / sizeof(Raw);
                wide[i] = T::decode(static_cast<Raw>(words.word[i / each] >> i % each * 8 * sizeof(Raw)));
            }
        }
    }

    template <int COUNT>
    DOORBELL_EVERYWHERE static Words encode(const typename T::Wide (&wide)[COUNT]) {
        Words words = {};
        #pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if constexpr (sizeof(Raw) == 8) {
                const uint64_t raw = T::encode(wide[i]);
                words.word[2 * i] = static_cast<uint32_t>(raw);
                words.word[2 * i + 1] = static_cast<uint32_t>(raw >> 32);
            } else {
                constexpr int each = 4 / sizeof(Raw);
                words.word[i / each] |= static_cast<uint32_t>(T::encode(wide[i])) << i % each * 8 * sizeof(Raw);
            }
        }
        return words;
    }
};

template <class T>
struct Group<T, true> {
    using Format = typename T::Format;
    static constexpr int ELEMENTS = 16 / sizeof(typename T::Raw);
    // Per word.
    static constexpr int PAIRS = ELEMENTS / 8;
    static constexpr int BITS = 32 / PAIRS;

    template <int COUNT>
    DOORBELL_EVERYWHERE static void decode(const Words &words, float (&wide)[COUNT]) {
        #pragma unroll
        for (int i = 0; i < COUNT / 2; i++) {
            const Pair pair = decode_pair<Format>(words.word[i / PAIRS] >> i % PAIRS * BITS);
            wide[2 * i] = pair.low;
            wide[2 * i + 1] = pair.high;
        }
    }

    template <int COUNT>
    DOORBELL_EVERYWHERE static Words encode(const float (&wide)[COUNT]) {
        Words words = {};
        #pragma unroll
        for (int i = 0; i < COUNT / 2; i++) {
            words.word[i / PAIRS] |= encode_pair<Format>({wide[2 * i], wide[2 * i + 1]}) << i % PAIRS * BITS;
        }
        return words;
    }
};

template <class T, int GROUPS, int COUNT>
DOORBELL_EVERYWHERE void divide_each(typename T::Wide (&sums)[GROUPS][COUNT], uint32_t ranks) {
    #pragma unroll
    for (int u = 0; u < GROUPS; u++) {
        #pragma unroll
        for (int i = 0; i < COUNT; i++) sums[u][i] = T::divide(sums[u][i], ranks);
    }
}

// Division of the sums of a thread, with the bits of `divide_each`.
template <class T, bool NARROW = T::NARROW, int BYTES = sizeof(typename T::Raw)>
struct Division {
    template <int GROUPS, int COUNT>
    DOORBELL_EVERYWHERE static void all(typename T::Wide (&sums)[GROUPS][COUNT], const Divisor &divisor) {
        divide_each<T>(sums, divisor.ranks);
    }
};

// The product of an integer of 8 bits rounds down to the quotient; one is added below zero.
template <class T>
struct Division<T, false, 1> {
    template <int GROUPS, int COUNT>
    DOORBELL_EVERYWHERE static void all(typename T::Wide (&sums)[GROUPS][COUNT], const Divisor &divisor) {
        #pragma unroll
        for (int u = 0; u < GROUPS; u++) {
            #pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const int32_t value = T::truncate(sums[u][i]);
                sums[u][i] = (value * static_cast<int32_t>(divisor.high) >> 16) + (value < 0);
            }
        }
    }
};

DOORBELL_EVERYWHERE float fused(float a, float b, float c) {
#ifdef __CUDA_ARCH__
    return __fmaf_rn(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
}

// By two operations per element. As `high` is less than the reciprocal, infinities and the signs of
// zeros are kept. A quotient is at least 1 / (2 * ranks) units in the last place from the middle
// between two floats, and the error of the product is less than 2^-22 of them unless `sum * low` is
// subnormal. That matters for quotients that are not stored as zero, so for bf16 alone.
template <class T, int BYTES>
struct Division<T, true, BYTES> {
    static constexpr uint32_t MOST_RANKS = 1 << 20;
    // The bits of 2^-64.
    static constexpr uint32_t LEAST = exponent(-64);
    static constexpr bool IS_WIDE = T::Format::EXPONENT_BITS == 8;

    template <int GROUPS, int COUNT>
    DOORBELL_EVERYWHERE static bool is_product(const float (&sums)[GROUPS][COUNT], uint32_t ranks) {
        bool is_product = ranks <= MOST_RANKS;
        if constexpr (IS_WIDE) {
            // Zero wraps to the greatest.
            uint32_t least = ~0u;
            #pragma unroll
            for (int u = 0; u < GROUPS; u++) {
                #pragma unroll
                for (int i = 0; i < COUNT; i++) least = least_of(least, 2 * bits_as<uint32_t>(sums[u][i]) - 1);
            }
            is_product = is_product && least >= 2 * LEAST - 1;
        }
        return is_product;
    }

    template <int GROUPS, int COUNT>
    DOORBELL_EVERYWHERE static void all(float (&sums)[GROUPS][COUNT], const Divisor &divisor) {
        const float high = bits_as<float>(divisor.high), low = bits_as<float>(divisor.low);
        if (!is_product(sums, divisor.ranks)) {
            return divide_each<T>(sums, divisor.ranks);
        }
        #pragma unroll
        for (int u = 0; u < GROUPS; u++) {
            #pragma unroll
            for (int i = 0; i < COUNT; i++) sums[u][i] = fused(sums[u][i], high, sums[u][i] * low);
        }
    }
};

// Integers wrap, so they are added and multiplied as unsigned.
DOORBELL_EVERYWHERE int32_t add(int32_t a, int32_t b) { return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b)); }
DOORBELL_EVERYWHERE int64_t add(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b)); }
template <class W>
DOORBELL_EVERYWHERE W add(W a, W b) { return a + b; }

DOORBELL_EVERYWHERE int32_t multiply(int32_t a, int32_t b) { return static_cast<int32_t>(static_cast<uint32_t>(a) * static_cast<uint32_t>(b)); }
DOORBELL_EVERYWHERE int64_t multiply(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b)); }
template <class W>
DOORBELL_EVERYWHERE W multiply(W a, W b) { return a * b; }

// Minimum and maximum of IEEE 754-2019: NaN propagates, and -0 is less than +0. NaN payloads do not
// matter, as none is stored.
DOORBELL_EVERYWHERE bool signbit_of(float value) { return bits_as<uint32_t>(value) >> 31; }
DOORBELL_EVERYWHERE bool signbit_of(double value) { return bits_as<uint64_t>(value) >> 63; }
DOORBELL_EVERYWHERE double lesser(double a, double b) { return (a < b || (a == b && signbit_of(a)) || a != a) ? a : b; }
DOORBELL_EVERYWHERE double greater(double a, double b) { return (a > b || (a == b && !signbit_of(a)) || a != a) ? a : b; }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
DOORBELL_EVERYWHERE float lesser(float a, float b) {
    float least;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
    return least;
}
DOORBELL_EVERYWHERE float greater(float a, float b) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
}
#else
DOORBELL_EVERYWHERE float lesser(float a, float b) { return (a < b || (a == b && signbit_of(a)) || a != a) ? a : b; }
DOORBELL_EVERYWHERE float greater(float a, float b) { return (a > b || (a == b && !signbit_of(a)) || a != a) ? a : b; }
#endif
template <class W>
DOORBELL_EVERYWHERE W lesser(W a, W b) { return a < b ? a : b; }
template <class W>
DOORBELL_EVERYWHERE W greater(W a, W b) { return a > b ? a : b; }

// SCALED: each source is multiplied by its own scalar first. DIVIDED: the result is divided.
// Accumulators start with the neutral element, so the first source is reduced like the others; for
// float sums that is -0, as 0 + -0 is 0.
struct Sum {
    static constexpr bool SCALED = false, DIVIDED = false;
    template <class T>
    DOORBELL_EVERYWHERE static typename T::Wide neutral() { return static_cast<typename T::Wide>(-0.0); }
    template <class W>
    DOORBELL_EVERYWHERE static W apply(W a, W b) { return add(a, b); }
};

struct ScaledSum : Sum {
    static constexpr bool SCALED = true;
};

struct Average : Sum {
    static constexpr bool DIVIDED = true;
};

struct Prod {
    static constexpr bool SCALED = false, DIVIDED = false;
    template <class T>
    DOORBELL_EVERYWHERE static typename T::Wide neutral() { return 1; }
    template <class W>
    DOORBELL_EVERYWHERE static W apply(W a, W b) { return multiply(a, b); }
};

// Least and greatest values of an accumulator type.
template <class W>
DOORBELL_EVERYWHERE W least() { return W(-1) < W(0) ? static_cast<W>(uint64_t(1) << (8 * sizeof(W) - 1)) : W(0); }
template <>
DOORBELL_EVERYWHERE float least<float>() { return bits_as<float>(0xff800000u); }
template <>
DOORBELL_EVERYWHERE double least<double>() { return bits_as<double>(uint64_t(0xfff) << 52); }
template <class W>
DOORBELL_EVERYWHERE W greatest() { return static_cast<W>(~least<W>()); }
template <>
DOORBELL_EVERYWHERE float greatest<float>() { return bits_as<float>(0x7f800000u); }
template <>
DOORBELL_EVERYWHERE double greatest<double>() { return bits_as<double>(uint64_t(0x7ff) << 52); }

struct Min {
    static constexpr bool SCALED = false, DIVIDED = false;
    template <class T>
    DOORBELL_EVERYWHERE static typename T::Wide neutral() { return greatest<typename T::Wide>(); }
    template <class W>
    DOORBELL_EVERYWHERE static W apply(W a, W b) { return lesser(a, b); }
};

struct Max {
    static constexpr bool SCALED = false, DIVIDED = false;
    template <class T>
    DOORBELL_EVERYWHERE static typename T::Wide neutral() { return least<typename T::Wide>(); }
    template <class W>
    DOORBELL_EVERYWHERE static W apply(W a, W b) { return greater(a, b); }
};

}  // namespace doorbell
