// Loads and stores of global memory. Loads see what a peer, the processor or a copy engine wrote before what the kernel waited for: they are relaxed at the scope of the system, never through the read-only cache.
//
// On the host, where the kernels are run to be compared with the CPU's, they are plain copies.
#pragma once

#include "arithmetic.cuh"

namespace doorbell {

#ifdef __CUDA_ARCH__

// 16, 8 or 4 bytes, if `really`; else anything.
template <int BYTES>
__device__ __forceinline__ Words load_words(uint64_t from, bool really) {
    Words words;
    if constexpr (BYTES == 16) {
        asm volatile("{ .reg .pred p; setp.ne.s32 p, %5, 0; @p ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4]; }"
                     : "=r"(words.word[0]), "=r"(words.word[1]), "=r"(words.word[2]), "=r"(words.word[3])
                     : "l"(from), "r"(static_cast<int>(really)));
    } else if constexpr (BYTES == 8) {
        asm volatile("{ .reg .pred p; setp.ne.s32 p, %3, 0; @p ld.relaxed.sys.global.v2.b32 {%0, %1}, [%2]; }"
                     : "=r"(words.word[0]), "=r"(words.word[1])
                     : "l"(from), "r"(static_cast<int>(really)));
    } else {
        asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; @p ld.relaxed.sys.global.b32 %0, [%1]; }"
                     : "=r"(words.word[0])
                     : "l"(from), "r"(static_cast<int>(really)));
    }
    return words;
}

template <int BYTES>
__device__ __forceinline__ void store_words(uint64_t into, const Words &words, bool really) {
    if constexpr (BYTES == 16) {
        asm volatile("{ .reg .pred p; setp.ne.s32 p, %5, 0; @p st.global.v4.b32 [%4], {%0, %1, %2, %3}; }"
                     :
                     : "r"(words.word[0]), "r"(words.word[1]), "r"(words.word[2]), "r"(words.word[3]), "l"(into), "r"(static_cast<int>(really))
                     : "memory");
    } else if constexpr (BYTES == 8) {
        asm volatile("{ .reg .pred p; setp.ne.s32 p, %3, 0; @p st.global.v2.b32 [%2], {%0, %1}; }"
                     :
                     : "r"(words.word[0]), "r"(words.word[1]), "l"(into), "r"(static_cast<int>(really))
                     : "memory");
    } else {
        asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; @p st.global.b32 [%1], %0; }"
                     :
                     : "r"(words.word[0]), "l"(into), "r"(static_cast<int>(really))
                     : "memory");
    }
}

template <class Raw>
__device__ __forceinline__ Raw load_raw(uint64_t from) {
    if constexpr (sizeof(Raw) == 8) {
        uint64_t raw;
        asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(raw) : "l"(from));
        return raw;
    } else if constexpr (sizeof(Raw) == 4) {
        uint32_t raw;
        asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(raw) : "l"(from));
        return raw;
    } else if constexpr (sizeof(Raw) == 2) {
        uint16_t raw;
        asm volatile("ld.relaxed.sys.global.b16 %0, [%1];" : "=h"(raw) : "l"(from));
        return raw;
    } else {
        uint32_t raw;
        asm volatile("ld.relaxed.sys.global.u8 %0, [%1];" : "=r"(raw) : "l"(from));
        return static_cast<Raw>(raw);
    }
}

template <class Raw>
__device__ __forceinline__ void store_raw(uint64_t into, Raw raw) {
    *reinterpret_cast<Raw *>(into) = raw;
}

#else

template <int BYTES>
DOORBELL_EVERYWHERE Words load_words(uint64_t from, bool really) {
    Words words = {};
    if (really) memcpy(&words, reinterpret_cast<const void *>(from), BYTES);
    return words;
}

template <int BYTES>
DOORBELL_EVERYWHERE void store_words(uint64_t into, const Words &words, bool really) {
    if (really) memcpy(reinterpret_cast<void *>(into), &words, BYTES);
}

template <class Raw>
DOORBELL_EVERYWHERE Raw load_raw(uint64_t from) {
    Raw raw;
    memcpy(&raw, reinterpret_cast<const void *>(from), sizeof(raw));
    return raw;
}

template <class Raw>
DOORBELL_EVERYWHERE void store_raw(uint64_t into, Raw raw) {
    memcpy(reinterpret_cast<void *>(into), &raw, sizeof(raw));
}

#endif

}  // namespace doorbell
