// Loads and stores of global memory. Loads are relaxed at system scope and never use the read-only
// cache, so they see what a peer, the CPU or a copy engine wrote before an awaited flag.
//
// Flags are loaded with acquire and stored with release at system scope; wait loops call `relax`.
//
// Kernels dereference global addresses only by these functions: on the CPU an address is mapped
// elsewhere (host.cuh).
#pragma once

#include "arithmetic.cuh"
#include "host.cuh"

namespace doorbell {

#ifdef __CUDA_ARCH__

// 16, 8 or 4 bytes, undefined if not `really`.
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

template <class T>
__device__ __forceinline__ T *at(uint64_t address) {
    return reinterpret_cast<T *>(address);
}

template <class Word>
__device__ __forceinline__ Word load_acquire(uint64_t from) {
    Word word;
    if constexpr (sizeof(Word) == 8) {
        asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    } else {
        static_assert(sizeof(Word) == 4, "a flag has 32 or 64 bits");
        asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    }
    return word;
}

template <class Word>
__device__ __forceinline__ void store_release(uint64_t into, Word word) {
    if constexpr (sizeof(Word) == 8) {
        asm volatile("st.release.sys.global.b64 [%0], %1;" : : "l"(into), "l"(word) : "memory");
    } else {
        static_assert(sizeof(Word) == 4, "a flag has 32 or 64 bits");
        asm volatile("st.release.sys.global.b32 [%0], %1;" : : "l"(into), "r"(word) : "memory");
    }
}

// Unordered but never torn: for words that carry their own flag.
template <class Word>
__device__ __forceinline__ void store_relaxed(uint64_t into, Word word) {
    if constexpr (sizeof(Word) == 8) {
        asm volatile("st.relaxed.sys.global.b64 [%0], %1;" : : "l"(into), "l"(word) : "memory");
    } else {
        static_assert(sizeof(Word) == 4, "a flag has 32 or 64 bits");
        asm volatile("st.relaxed.sys.global.b32 [%0], %1;" : : "l"(into), "r"(word) : "memory");
    }
}

// Returns the previous value.
template <class Word>
__device__ __forceinline__ Word fetch_add(uint64_t into, Word word) {
    Word before;
    if constexpr (sizeof(Word) == 8) {
        asm volatile("atom.add.acq_rel.sys.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(into), "l"(word) : "memory");
    } else {
        static_assert(sizeof(Word) == 4, "a word has 32 or 64 bits");
        asm volatile("atom.add.acq_rel.sys.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(into), "r"(word) : "memory");
    }
    return before;
}

__device__ __forceinline__ void relax() {}

#else

// The CPU's pointer for a device address.
template <class T>
DOORBELL_EVERYWHERE T *at(uint64_t address) {
#ifndef __CUDACC__
    if (address - doorbell_window.first < doorbell_window.bytes) address += doorbell_window.shift;
#endif
    return reinterpret_cast<T *>(address);
}

template <int BYTES>
DOORBELL_EVERYWHERE Words load_words(uint64_t from, bool really) {
    Words words = {};
    if (!really) return words;
    if constexpr (BYTES == 4) {
        words.word[0] = __atomic_load_n(at<uint32_t>(from), __ATOMIC_RELAXED);
    } else {
        // Never torn below 8 bytes, as on a GPU.
        for (int i = 0; i < BYTES / 8; i++) {
            const uint64_t two = __atomic_load_n(at<uint64_t>(from) + i, __ATOMIC_RELAXED);
            memcpy(&words.word[2 * i], &two, sizeof(two));
        }
    }
    return words;
}

template <int BYTES>
DOORBELL_EVERYWHERE void store_words(uint64_t into, const Words &words, bool really) {
    if (!really) return;
    if constexpr (BYTES == 4) {
        __atomic_store_n(at<uint32_t>(into), words.word[0], __ATOMIC_RELAXED);
    } else {
        for (int i = 0; i < BYTES / 8; i++) {
            uint64_t two;
            memcpy(&two, &words.word[2 * i], sizeof(two));
            __atomic_store_n(at<uint64_t>(into) + i, two, __ATOMIC_RELAXED);
        }
    }
}

template <class Raw>
DOORBELL_EVERYWHERE Raw load_raw(uint64_t from) {
    return __atomic_load_n(at<Raw>(from), __ATOMIC_RELAXED);
}

template <class Raw>
DOORBELL_EVERYWHERE void store_raw(uint64_t into, Raw raw) {
    __atomic_store_n(at<Raw>(into), raw, __ATOMIC_RELAXED);
}

template <class Word>
DOORBELL_EVERYWHERE Word load_acquire(uint64_t from) {
    return __atomic_load_n(at<Word>(from), __ATOMIC_ACQUIRE);
}

template <class Word>
DOORBELL_EVERYWHERE void store_release(uint64_t into, Word word) {
    __atomic_store_n(at<Word>(into), word, __ATOMIC_RELEASE);
}

template <class Word>
DOORBELL_EVERYWHERE void store_relaxed(uint64_t into, Word word) {
    __atomic_store_n(at<Word>(into), word, __ATOMIC_RELAXED);
}

template <class Word>
DOORBELL_EVERYWHERE Word fetch_add(uint64_t into, Word word) {
    return __atomic_fetch_add(at<Word>(into), word, __ATOMIC_ACQ_REL);
}

DOORBELL_EVERYWHERE void relax() {
#ifndef __CUDACC__
    doorbell_relax();
#endif
}

#endif

}  // namespace doorbell
