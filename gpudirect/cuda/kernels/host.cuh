// The kernels' sources compiled for the CPU: the stand-in for a GPU (gpudirect/standin) runs them
// instead of PTX. The convention for every kernel of this folder:
//
// - The PTX of NAME.cu determines which kernels exist: every `.visible .entry` of it is `extern "C"
//   __global__` in NAME.cu. A source without PTX is searched for such functions instead.
// - Each source is a translation unit with the namespace `doorbell_NAME`; arguments are plain data,
//   passed by value.
// - Global addresses are uint64_t, and dereferenced only by memory.cuh (or `at<T>(address)`): the
//   CPU finds device memory at other addresses.
// - A block is one OS thread: threadIdx.x is 0, blockDim.x is 1, `__syncthreads` does nothing, and
//   `__shared__` is thread-local. So kernels loop over threadIdx.x and blockDim.x, and threads of a
//   block share only `__shared__` and global memory. All blocks of a launch run concurrently, and
//   may wait for each other and for other ranks.
// - Wait loops call `relax()`, and read flags by `load_acquire`.
// - A source whose threads neither wait nor read what others write may define
//   DOORBELL_THREADS_APART before all includes: blocks and threads are then as launched, and
//   run one after another from the last to the first.
#pragma once

#include <stdint.h>

#ifndef __CUDACC__

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local

namespace doorbell_host {

struct Dimension {
    uint32_t x, y, z;
};
inline thread_local Dimension block_index, thread_index, block_size, grid_size;

// Device addresses from `first`, `bytes` long, are mapped at `shift` beyond.
struct Window {
    uint64_t first, bytes, shift;
};

}  // namespace doorbell_host

// Defined by the stand-in.
extern "C" doorbell_host::Window doorbell_window;
extern "C" void doorbell_relax();

#define blockIdx doorbell_host::block_index
#define threadIdx doorbell_host::thread_index
#define blockDim doorbell_host::block_size
#define gridDim doorbell_host::grid_size

inline void __syncthreads() {}
inline void __syncwarp(uint32_t = ~0u) {}
inline void __nanosleep(uint32_t) {
    doorbell_relax();
}
inline void __threadfence_system() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
inline void __threadfence_block() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
inline void __threadfence() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

#endif
