// Rows of dispatch and combine, moved by groups of threads, and sums over a thread block.
#pragma once

#include "block.cuh"
#include "moe_arguments.cuh"

namespace doorbell {

// Threads that move a row together.
constexpr uint32_t GROUP = 128;
// Units of 16 bytes in flight per thread.
constexpr uint32_t UNITS = 8;
// Of them, when they are quantised, which takes more registers.
constexpr uint32_t TURNS = 4;
// Experts whose pairs are listed at once.
constexpr uint32_t COLUMNS = 8;
constexpr uint32_t UNIT = 16;

// Lanes that quantise a block of elements together, each by 16 bytes of it at a time.
#ifdef __CUDA_ARCH__
constexpr uint32_t QUANTUM = SCALED / 8;
#else
constexpr uint32_t QUANTUM = 1;
#endif
constexpr uint32_t PARTS = SCALED / 8 / QUANTUM;

constexpr float FP8_MAX = 448.0f, LEAST_AMAX = 1e-4f;

DOORBELL_INSIDE float greatest(float value) {
#ifdef __CUDA_ARCH__
    #pragma unroll
    for (uint32_t mask = QUANTUM / 2; mask > 0; mask /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, mask));
#endif
    return value;
}

// `a` if `b` is NaN.
DOORBELL_INSIDE float larger(float a, float b) {
    return a < b ? b : a;
}

DOORBELL_INSIDE void count_one(uint32_t &shared) {
#ifdef __CUDA_ARCH__
    atomicAdd(&shared, 1);
#else
    shared++;
#endif
}

// In place, the sums up to and with each thread's value.
DOORBELL_INSIDE void scan_threads(uint32_t *values) {
    #pragma unroll 1
    for (uint32_t step = 1; step < blockDim.x; step *= 2) {
        __syncthreads();
        const uint32_t before = threadIdx.x >= step ? values[threadIdx.x - step] : 0;
        __syncthreads();
        values[threadIdx.x] += before;
    }
    __syncthreads();
}

// In place, the sums up to and with each of the values.
DOORBELL_INSIDE void scan_values(uint32_t *values, uint32_t count) {
    __shared__ uint32_t sums[MOST_BLOCK];
    const uint32_t each = (count + blockDim.x - 1) / blockDim.x, first = threadIdx.x * each;
    __syncthreads();
    uint32_t sum = 0;
    #pragma unroll 1
    for (uint32_t i = first; i < first + each && i < count; i++) values[i] = sum += values[i];
    sums[threadIdx.x] = sum;
    scan_threads(sums);
    const uint32_t before = sums[threadIdx.x] - sum;
    #pragma unroll 1
    for (uint32_t i = first; i < first + each && i < count; i++) values[i] += before;
    __syncthreads();
}

// A thread's place in the group that moves a row, and that group's among all.
struct Lanes {
    uint32_t lane, lanes, group, groups;

    DOORBELL_INSIDE Lanes() : lanes(blockDim.x < GROUP ? blockDim.x : GROUP) {
        lane = threadIdx.x % lanes;
        group = threadIdx.x / lanes;
        groups = blockDim.x / lanes;
    }
};

DOORBELL_INSIDE void copy_row(uint64_t from, uint64_t into, uint32_t units, const Lanes &at) {
    #pragma unroll 1
    for (uint32_t first = at.lane; first < units; first += UNITS * at.lanes) {
        Words words[UNITS];
        #pragma unroll
        for (uint32_t u = 0; u < UNITS; u++) {
            const uint32_t unit = first + u * at.lanes;
            words[u] = load_or_zero<UNIT>(from + uint64_t(unit) * UNIT, unit < units);
        }
        #pragma unroll
        for (uint32_t u = 0; u < UNITS; u++) {
            const uint32_t unit = first + u * at.lanes;
            store_words<UNIT>(into + uint64_t(unit) * UNIT, words[u], unit < units);
        }
    }
}

// This lane's part of a block: `left` units of the row are there.
DOORBELL_INSIDE void quantise(const Words (&words)[PARTS], uint64_t into, uint64_t scale, uint32_t left, bool is_first) {
    float magnitude = LEAST_AMAX;
    #pragma unroll
    for (uint32_t part = 0; part < PARTS; part++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const Pair pair = decode_pair<Bf16>(words[part].word[i] & 0x7fff7fff);
            magnitude = larger(larger(magnitude, pair.low), pair.high);
        }
    }
    const float largest = greatest(magnitude), factor = FP8_MAX / largest;
    #pragma unroll
    for (uint32_t part = 0; part < PARTS; part++) {
        Words eight = {};
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const Pair pair = decode_pair<Bf16>(words[part].word[i]);
            eight.word[i / 2] |= encode_pair<F8E4M3>({pair.low * factor, pair.high * factor}) << 16 * (i % 2);
        }
        store_words<8>(into + uint64_t(part) * 8, eight, part < left);
    }
    if (is_first && left > 0) store_raw<uint32_t>(scale, bits_as<uint32_t>(largest * (1.0f / FP8_MAX)));
}

// From bf16 to E4M3, with a scale for each block of SCALED elements behind them, and zeros as padding.
DOORBELL_INSIDE void quantise_row(uint64_t from, uint64_t into, uint32_t units, uint32_t bytes, const Lanes &at) {
    const uint64_t scales = into + uint64_t(units) * 8;
    #pragma unroll 1
    for (uint32_t word = units * 2 + units * 8 / SCALED + at.lane; word < bytes / 4; word += at.lanes) {
        store_raw<uint32_t>(into + uint64_t(word) * 4, 0);
    }
    // The same number of turns for all lanes, as they exchange values.
    #pragma unroll 1
    for (uint32_t start = 0; start < units; start += TURNS * at.lanes * PARTS) {
        Words words[TURNS][PARTS];
        #pragma unroll
        for (uint32_t u = 0; u < TURNS; u++) {
            const uint32_t first = start + (u * at.lanes + at.lane) * PARTS;
            #pragma unroll
            for (uint32_t part = 0; part < PARTS; part++) {
                words[u][part] = load_or_zero<UNIT>(from + uint64_t(first + part) * UNIT, first + part < units);
            }
        }
        #pragma unroll
        for (uint32_t u = 0; u < TURNS; u++) {
            const uint32_t first = start + (u * at.lanes + at.lane) * PARTS;
            quantise(words[u], into + uint64_t(first) * 8, scales + first / (SCALED / 8) * 4, first < units ? units - first : 0, first % (SCALED / 8) == 0);
        }
    }
}

}  // namespace doorbell
