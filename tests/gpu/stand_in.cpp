// The reduction kernels, compiled for the processor: what a thread knows of itself are variables here, and a launch is a loop over all threads. That is the same, as no thread waits for another one or reads what it wrote.
#include <stdint.h>

#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

namespace {
struct Dimension {
    uint32_t x;
};
thread_local Dimension blockIdx, threadIdx, blockDim, gridDim;
}  // namespace

#include "reduce.cu"

// Runs a kernel, the threads from the last to the first, so that a result which depends on their order differs from that of a GPU.
extern "C" void launch(void (*kernel)(doorbell::Arguments), uint32_t blocks, uint32_t threads, const doorbell::Arguments *arguments) {
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = blocks; blockIdx.x-- > 0;) {
        for (threadIdx.x = threads; threadIdx.x-- > 0;) kernel(*arguments);
    }
}
