// The kernels' source as code of the processor: what the CPU stand-in for a GPU (gpudirect/standin) runs instead of PTX.
//
// The convention, for every kernel of this folder:
// - The PTX that NAME.cu was compiled to says which kernels there are: every `.visible .entry` of it is `extern "C" __global__` of that name in NAME.cu. A source without PTX is looked through for `extern "C" __global__ void NAME(`.
// - Each source is a translation unit of its own, in which the namespace `doorbell` has the source's name behind its own; arguments go by value and are plain data.
// - Addresses of global memory are uint64_t, and are followed only by the functions of memory.cuh (or as `at<T>(address)`): an address of the device is none of the processor's, which finds what is there elsewhere.
// - A block is one thread of the operating system: threadIdx.x is 0, blockDim.x is 1, `__syncthreads` does nothing, `__shared__` is that thread's own. So a kernel takes its work by loops over threadIdx.x and blockDim.x, and a block's threads share nothing but by
//   `__shared__` and global memory. All blocks of a launch run at once, and may wait for one another and for other ranks.
// - What waits calls `relax()` in its loop, and reads flags by `load_acquire`.
// - A source whose threads wait for nobody and read nothing that others write may say so by `#define DOORBELL_THREADS_APART` before it includes anything: its blocks and threads are as launched then, one after another from the last to the first.
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
// What a thread knows of itself.
inline thread_local Dimension block_index, thread_index, block_size, grid_size;

// Device addresses from `first` on, so many bytes, are `shift` further for the processor.
struct Window {
    uint64_t first, bytes, shift;
};

}  // namespace doorbell_host

// Of the stand-in.
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
inline void __threadfence() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

#endif
