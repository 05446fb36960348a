// The test kernels of doorbell-cuda (gpudirect/cuda/tests/suite/kernels.ptx), for the CPU.
#define DOORBELL_THREADS_APART
#include "memory.cuh"

extern "C" void doorbell_spin(uint64_t nanoseconds);

extern "C" __global__ void add_one(uint64_t words, uint32_t count) {
    const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < count) doorbell::store_raw<uint32_t>(words + 4 * uint64_t(index), doorbell::load_raw<uint32_t>(words + 4 * uint64_t(index)) + 1);
}

extern "C" __global__ void spin(uint64_t nanoseconds) {
    doorbell_spin(nanoseconds);
}
