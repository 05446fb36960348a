// Kernels of the stand-in's tests: blocks wait for each other, in a launch and between ranks.
#include "block.cuh"

// Each block signals each round to the same block of the peer, and waits for its signal. Flags are
// 32-bit words, one per block. In the end `result` has the rounds of each block.
extern "C" __global__ void meet(uint64_t own, uint64_t peer, uint64_t result, uint32_t rounds) {
    __shared__ uint32_t seen;
    const uint64_t flag = blockIdx.x * sizeof(uint32_t);
    for (uint32_t round = 1; round <= rounds; round++) {
        if (threadIdx.x == 0) {
            doorbell::store_release(peer + flag, round);
            while (doorbell::load_acquire<uint32_t>(own + flag) < round) doorbell::relax();
            seen = round;
        }
        __syncthreads();
    }
    for (uint32_t i = threadIdx.x; i < 1; i += blockDim.x) doorbell::store_raw(result + flag, seen);
}

// All blocks arrive at a counter, and continue when all have: so all are resident at once. Each
// writes the launch parameters it saw.
extern "C" __global__ void gather(uint64_t counter, uint64_t result) {
    doorbell::fetch_add<uint64_t>(counter, 1);
    while (doorbell::load_acquire<uint64_t>(counter) < gridDim.x) doorbell::relax();
    doorbell::store_raw<uint32_t>(result + blockIdx.x * sizeof(uint32_t), gridDim.x * 1000 + blockDim.x * 100 + blockIdx.x);
}

// A block's workers and the warp that signals for them, each as a block of its own: the first gives
// `count` signals, resting after each `give_rests`th, and the second sends them, resting alike.
// `result`: how many were sent, and how many of them were not the next one.
extern "C" __global__ void signals(uint64_t result, uint32_t count, uint32_t give_rests, uint32_t send_rests) {
    static doorbell::Signals shared;
    const auto rest = [](uint32_t number, uint32_t every) {
        for (uint32_t i = 0; every != 0 && number % every == 0 && i < 20; i++) doorbell::relax();
    };
    if (blockIdx.x == 0) {
        for (uint32_t number = 0; number < count; number++) {
            shared.give(number, ~uint64_t(number));
            rest(number, give_rests);
        }
        shared.end();
        return;
    }
    uint32_t sent = 0, wrong = 0;
    threadIdx.x = doorbell::WORKERS;
    shared.serve([&](uint64_t first, uint64_t second, uint32_t) {
        rest(sent, send_rests);
        wrong += first != sent || second != ~first;
        sent++;
    });
    threadIdx.x = 0;
    doorbell::store_raw<uint32_t>(result, sent);
    doorbell::store_raw<uint32_t>(result + sizeof(uint32_t), wrong);
    shared.begin();
}
