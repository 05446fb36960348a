// Lines (LL protocol): each half of the data has a flag beside it, stored and loaded with it.
#pragma once

#include "memory.cuh"

#ifdef __CUDACC__
#define DOORBELL_INSIDE __device__ __forceinline__
#else
#define DOORBELL_INSIDE inline
#endif

namespace doorbell {

// 16, 8 or 4 bytes, or zeros if not `really`. A defined value in any case: otherwise old
// registers stay live, and kernels with many such loads spill.
template <int BYTES>
DOORBELL_INSIDE Words load_or_zero(uint64_t from, bool really) {
#ifdef __CUDA_ARCH__
    Words words = {};
    if constexpr (BYTES == 16) {
        asm volatile("{ .reg .pred p; setp.ne.s32 p, %5, 0; @p ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4]; }"
                     : "+r"(words.word[0]), "+r"(words.word[1]), "+r"(words.word[2]), "+r"(words.word[3])
                     : "l"(from), "r"(static_cast<int>(really)));
    } else if constexpr (BYTES == 8) {
        asm volatile("{ .reg .pred p; setp.ne.s32 p, %3, 0; @p ld.relaxed.sys.global.v2.b32 {%0, %1}, [%2]; }"
                     : "+r"(words.word[0]), "+r"(words.word[1])
                     : "l"(from), "r"(static_cast<int>(really)));
    } else {
        asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; @p ld.relaxed.sys.global.b32 %0, [%1]; }"
                     : "+r"(words.word[0])
                     : "l"(from), "r"(static_cast<int>(really)));
    }
    return words;
#else
    return load_words<BYTES>(from, really);
#endif
}

// 8 bytes of data and two flags; a half and its flag are one store and one load.
struct Line {
    uint32_t data[2];
    uint32_t flag[2];
};

DOORBELL_EVERYWHERE Line line_of(uint64_t first, uint64_t second) {
    return {{static_cast<uint32_t>(first), static_cast<uint32_t>(second)}, {static_cast<uint32_t>(first >> 32), static_cast<uint32_t>(second >> 32)}};
}

#ifdef __CUDA_ARCH__

__device__ __forceinline__ Line load_line(uint64_t from) {
    uint64_t first, second;
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
    return line_of(first, second);
}

__device__ __forceinline__ void store_line(uint64_t into, const uint32_t (&data)[2], uint32_t flag) {
    const uint64_t first = data[0] | static_cast<uint64_t>(flag) << 32, second = data[1] | static_cast<uint64_t>(flag) << 32;
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" : : "l"(into), "l"(first), "l"(second) : "memory");
}

#else

DOORBELL_EVERYWHERE Line load_line(uint64_t from) {
    const uint64_t first = load_acquire<uint64_t>(from);
    return line_of(first, load_acquire<uint64_t>(from + 8));
}

DOORBELL_EVERYWHERE void store_line(uint64_t into, const uint32_t (&data)[2], uint32_t flag) {
    store_relaxed<uint64_t>(into, data[0] | static_cast<uint64_t>(flag) << 32);
    store_relaxed<uint64_t>(into + 8, data[1] | static_cast<uint64_t>(flag) << 32);
}

#endif

}  // namespace doorbell
