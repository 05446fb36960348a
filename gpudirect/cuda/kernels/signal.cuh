// Words that ranks tell each other by, and lines, in which data tell of themselves.
//
// On the host, where kernels run with a thread of the system for each block and one thread in it, they are the compiler's atomics, and who waits lets others run.
#pragma once

#include "memory.cuh"

#ifdef __CUDACC__
#define DOORBELL_INSIDE __device__ __forceinline__
#else
#include <sched.h>
#define DOORBELL_INSIDE inline
#endif

namespace doorbell {

// 8 bytes of data, each half beside a flag: a half and its flag are stored and loaded as one.
struct Line {
    uint32_t data[2];
    uint32_t flag[2];
};

#ifdef __CUDA_ARCH__

// A word that another device, or the processor, writes: what it wrote before is seen after.
__device__ __forceinline__ uint32_t load_acquire(uint64_t from) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ uint32_t load_relaxed(uint64_t from) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// Tells of all that this block wrote before its last barrier.
__device__ __forceinline__ void store_release(uint64_t into, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(into), "r"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed(uint64_t into, uint32_t value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(into), "r"(value) : "memory");
}

__device__ __forceinline__ Line load_line(uint64_t from) {
    uint64_t first, second;
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
    return {{static_cast<uint32_t>(first), static_cast<uint32_t>(second)},
            {static_cast<uint32_t>(first >> 32), static_cast<uint32_t>(second >> 32)}};
}

__device__ __forceinline__ void store_line(uint64_t into, const uint32_t (&data)[2], uint32_t flag) {
    const uint64_t first = data[0] | static_cast<uint64_t>(flag) << 32, second = data[1] | static_cast<uint64_t>(flag) << 32;
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" : : "l"(into), "l"(first), "l"(second) : "memory");
}

__device__ __forceinline__ void let_others_run() {}

#else

DOORBELL_EVERYWHERE uint32_t load_acquire(uint64_t from) {
    return __atomic_load_n(reinterpret_cast<const uint32_t *>(from), __ATOMIC_ACQUIRE);
}

DOORBELL_EVERYWHERE uint32_t load_relaxed(uint64_t from) {
    return __atomic_load_n(reinterpret_cast<const uint32_t *>(from), __ATOMIC_RELAXED);
}

DOORBELL_EVERYWHERE void store_release(uint64_t into, uint32_t value) {
    __atomic_store_n(reinterpret_cast<uint32_t *>(into), value, __ATOMIC_RELEASE);
}

DOORBELL_EVERYWHERE void store_relaxed(uint64_t into, uint32_t value) {
    __atomic_store_n(reinterpret_cast<uint32_t *>(into), value, __ATOMIC_RELEASE);
}

DOORBELL_EVERYWHERE Line load_line(uint64_t from) {
    const uint64_t *words = reinterpret_cast<const uint64_t *>(from);
    const uint64_t first = __atomic_load_n(words, __ATOMIC_ACQUIRE), second = __atomic_load_n(words + 1, __ATOMIC_ACQUIRE);
    return {{static_cast<uint32_t>(first), static_cast<uint32_t>(second)},
            {static_cast<uint32_t>(first >> 32), static_cast<uint32_t>(second >> 32)}};
}

DOORBELL_EVERYWHERE void store_line(uint64_t into, const uint32_t (&data)[2], uint32_t flag) {
    uint64_t *words = reinterpret_cast<uint64_t *>(into);
    __atomic_store_n(words, data[0] | static_cast<uint64_t>(flag) << 32, __ATOMIC_RELEASE);
    __atomic_store_n(words + 1, data[1] | static_cast<uint64_t>(flag) << 32, __ATOMIC_RELEASE);
}

DOORBELL_EVERYWHERE void let_others_run() {
#ifndef __CUDACC__
    sched_yield();
#endif
}

#endif

}  // namespace doorbell
