// Rows of dispatch and combine, moved by groups of threads, and sums over a thread block.
#pragma once

#include "block.cuh"
#include "moe_arguments.cuh"

namespace doorbell {

// Units of 16 bytes in flight per thread, for N addresses, which take registers too. 7: a row of 7168
// elements of bf16 by one turn of a group.
template <uint32_t N>
constexpr uint32_t UNITS = N == 1 ? 7 : 4;
// Experts whose pairs are listed at once.
constexpr uint32_t COLUMNS = 8;
constexpr uint32_t UNIT = 16;
// Choices of a token that are handled at once.
constexpr uint32_t TOGETHER = 8;

// Threads that move a row together, of which a block has a multiple; of them, those that quantise a
// block of elements together, each by 16 bytes of it at a time.
#ifdef __CUDA_ARCH__
constexpr uint32_t LANES = 128, QUANTUM = SCALED / 8;
#else
constexpr uint32_t LANES = 1, QUANTUM = 1;
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
    const uint32_t lane = threadIdx.x % LANES, group = threadIdx.x / LANES, groups = blockDim.x / LANES;
};

// A row to all addresses but those that are 0.
template <uint32_t N>
DOORBELL_INSIDE void copy_row(uint64_t from, const uint64_t (&into)[N], uint32_t units, const Lanes &at) {
    #pragma unroll 1
    for (uint32_t first = at.lane; first < units; first += UNITS<N> * LANES) {
        Words words[UNITS<N>];
        #pragma unroll
        for (uint32_t u = 0; u < UNITS<N>; u++) {
            const uint32_t unit = first + u * LANES;
            words[u] = load_or_zero<UNIT>(from + uint64_t(unit) * UNIT, unit < units);
        }
        #pragma unroll
        for (uint32_t n = 0; n < N; n++) {
            #pragma unroll
            for (uint32_t u = 0; u < UNITS<N>; u++) {
                const uint32_t unit = first + u * LANES;
                store_words<UNIT>(into[n] + uint64_t(unit) * UNIT, words[u], unit < units && into[n] != 0);
            }
        }
    }
}

// In place, this lane's part of a block; the scale is returned.
DOORBELL_INSIDE float quantise(Words (&words)[PARTS]) {
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
        words[part] = eight;
    }
    return largest * (1.0f / FP8_MAX);
}

// From bf16 to E4M3, with a scale for each block of SCALED elements behind them, and zeros as
// padding, to all addresses but those that are 0.
template <uint32_t N>
DOORBELL_INSIDE void quantise_row(uint64_t from, const uint64_t (&into)[N], uint32_t units, uint32_t bytes, const Lanes &at) {
    const uint32_t scales = units * 8;
    #pragma unroll 1
    for (uint32_t word = scales / 4 + units * 8 / SCALED + at.lane; word < bytes / 4; word += LANES) {
        #pragma unroll
        for (uint32_t n = 0; n < N; n++) {
            if (into[n] != 0) store_raw<uint32_t>(into[n] + uint64_t(word) * 4, 0);
        }
    }
    // The same number of turns for all lanes, as they exchange values.
    #pragma unroll 1
    for (uint32_t start = 0; start < units; start += UNITS<N> * LANES * PARTS) {
        Words words[UNITS<N>][PARTS];
        #pragma unroll
        for (uint32_t u = 0; u < UNITS<N>; u++) {
            const uint32_t first = start + (u * LANES + at.lane) * PARTS;
            #pragma unroll
            for (uint32_t part = 0; part < PARTS; part++) {
                words[u][part] = load_or_zero<UNIT>(from + uint64_t(first + part) * UNIT, first + part < units);
            }
        }
        #pragma unroll
        for (uint32_t u = 0; u < UNITS<N>; u++) {
            const uint32_t first = start + (u * LANES + at.lane) * PARTS;
            const float scale = quantise(words[u]);
            #pragma unroll
            for (uint32_t n = 0; n < N; n++) {
                if (into[n] == 0 || first >= units) continue;
                #pragma unroll
                for (uint32_t part = 0; part < PARTS; part++) {
                    store_words<8>(into[n] + uint64_t(first + part) * 8, words[u][part], first + part < units);
                }
                if (first % (SCALED / 8) == 0) store_raw<uint32_t>(into[n] + scales + first / (SCALED / 8) * 4, bits_as<uint32_t>(scale));
            }
        }
    }
}

}  // namespace doorbell
