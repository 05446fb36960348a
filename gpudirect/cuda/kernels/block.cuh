// What the threads of a block do together: copies, signals, and waits for counts that peers write.
#pragma once

#include "lines.cuh"

namespace doorbell {

constexpr int MOST_RANKS = 16;
// Threads of a block.
constexpr int MOST_BLOCK = 512;
// Of a block of so many threads those that copy and reduce; the last warp signals for them.
constexpr int WORKERS = MOST_BLOCK - 32;

// Groups in flight per thread.
#ifndef DOORBELL_MOVES
#define DOORBELL_MOVES 8
#endif

DOORBELL_INSIDE uint32_t workers() {
    return blockDim.x == MOST_BLOCK ? WORKERS : blockDim.x;
}

// Synchronizes so many threads of a block, a multiple of 32.
DOORBELL_INSIDE void sync(uint32_t threads) {
#ifdef __CUDA_ARCH__
    asm volatile("bar.sync 1, %0;" : : "r"(threads) : "memory");
#endif
}

// The signals of a block's workers, which its last warp sends in order: a release waits until all
// stores of the multiprocessor have arrived, microseconds in which the workers go on. Workers of a
// smaller block, and so those of the CPU's, signal themselves.
struct Signals {
    // What may be unsent.
    static constexpr uint32_t RING = 4;
    volatile uint32_t given;
    volatile uint32_t sent;
    volatile uint32_t ended;
    uint64_t entries[RING][2];

    DOORBELL_INSIDE static bool have_warp() { return blockDim.x == MOST_BLOCK; }

    // By one thread, before all synchronize.
    DOORBELL_INSIDE void begin() {
        given = 0;
        sent = 0;
        ended = 0;
    }

    // By one worker, after all have synchronized.
    DOORBELL_INSIDE void give(uint64_t first, uint64_t second) {
        const uint32_t number = given;
        while (number - sent >= RING) relax();
        entries[number % RING][0] = first;
        entries[number % RING][1] = second;
        __threadfence_block();
        given = number + 1;
    }

    // By the same worker, when there will be no more.
    DOORBELL_INSIDE void end() { ended = 1; }

    // By the last warp: `send(first, second, lane)` for each signal.
    template <class Send>
    DOORBELL_INSIDE void serve(Send send) {
        #pragma unroll 1
        for (uint32_t number = 0;; number++) {
            #pragma unroll 1
            while (given == number) {
                if (ended && given == number) return;
                __nanosleep(20);
            }
            __threadfence_block();
            __syncwarp();
            send(entries[number % RING][0], entries[number % RING][1], threadIdx.x - WORKERS);
            __syncwarp();
            if (threadIdx.x == WORKERS) sent = number + 1;
        }
    }
};

// Whether the word at `stop` ends all waits; 0: there is none.
DOORBELL_INSIDE bool must_stop(uint64_t stop) {
    return stop != 0 && load_raw<uint32_t>(stop) != 0;
}

// Waits until the count is reached, of which `seen` is the last known value; false if stopped.
DOORBELL_INSIDE bool await_count(uint64_t word, uint32_t until, uint32_t &seen, uint64_t stop) {
    uint32_t known = seen;
    #pragma unroll 1
    for (uint32_t looks = 1; static_cast<int32_t>(known - until) < 0; looks++) {
        known = load_acquire<uint32_t>(word);
        if (looks % 1024 == 0 && must_stop(stop)) return false;
        relax();
    }
    seen = known;
    return true;
}

template <int BYTES, class Targets>
DOORBELL_INSIDE void move_units(uint64_t from, const Targets &targets, uint32_t count, uint64_t offset, uint32_t units) {
    const uint32_t stride = workers(), thread = threadIdx.x;
    #pragma unroll 1
    for (uint32_t first = 0; first < units; first += DOORBELL_MOVES * stride) {
        const uint32_t at = first + thread;
        Words words[DOORBELL_MOVES];
        #pragma unroll
        for (int u = 0; u < DOORBELL_MOVES; u++) words[u] = load_or_zero<BYTES>(from + offset + uint64_t(at + u * stride) * BYTES, at + u * stride < units);
        #pragma unroll 1
        for (uint32_t target = 0; target < count; target++) {
            const uint64_t into = targets[target] + offset;
            #pragma unroll
            for (int u = 0; u < DOORBELL_MOVES; u++) store_words<BYTES>(into + uint64_t(at + u * stride) * BYTES, words[u], at + u * stride < units);
        }
    }
}

// Copies to all targets, by the widest unit in which all addresses are aligned alike.
template <class Targets>
DOORBELL_INSIDE void move_bytes(uint64_t from, const Targets &targets, uint32_t count, uint32_t bytes) {
    uint64_t differing = 0;
    #pragma unroll 1
    for (uint32_t target = 0; target < count; target++) differing |= from ^ targets[target];
    const uint32_t unit = (differing & 15) == 0 ? 16 : (differing & 3) == 0 ? 4 : 1;
    uint32_t head = static_cast<uint32_t>(-from) & (unit - 1);
    if (head > bytes) head = bytes;
    const uint32_t units = (bytes - head) / unit, middle = units * unit;
    if (unit == 16) {
        move_units<16>(from, targets, count, head, units);
    } else if (unit == 4) {
        move_units<4>(from, targets, count, head, units);
    } else {
        head = bytes;
    }
    const uint32_t single = head == bytes ? bytes : bytes - middle;
    #pragma unroll 1
    for (uint32_t i = threadIdx.x; i < single; i += workers()) {
        const uint32_t at = i < head ? i : i + middle;
        const uint8_t byte = load_raw<uint8_t>(from + at);
        #pragma unroll 1
        for (uint32_t target = 0; target < count; target++) store_raw<uint8_t>(targets[target] + at, byte);
    }
}

}  // namespace doorbell
