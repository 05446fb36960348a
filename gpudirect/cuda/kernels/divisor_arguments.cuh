// Written from gpudirect/cuda/src/reduce/plan.rs, which describes this (DOORBELL_WRITE_HEADERS=1 and its tests).
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace doorbell {

// A number of ranks to divide by, with its reciprocal: for narrow floats, `high` is the
// greatest binary32 below it, and `low` the rest; for 8-bit integers `high` is the least
// multiple of 2^-16 above it.
struct Divisor {
    uint32_t ranks;
    uint32_t high;
    uint32_t low;
};

static_assert(sizeof(Divisor) == 12, "Divisor");
static_assert(offsetof(Divisor, ranks) == 0, "ranks");
static_assert(offsetof(Divisor, high) == 4, "high");
static_assert(offsetof(Divisor, low) == 8, "low");

}  // namespace doorbell
