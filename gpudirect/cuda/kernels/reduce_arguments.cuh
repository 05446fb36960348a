// Written from gpudirect/cuda/src/reduce/plan.rs, which describes this (DOORBELL_WRITE_HEADERS=1 and its tests).
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace doorbell {

constexpr int MOST_SOURCES = 8;
// Per block.
constexpr int MOST_THREADS = 512;

// The launch argument of a reduction.
struct Arguments {
    uint64_t sources[8];
    // For scaled sums: the bits of each source's scalar, in the accumulator type. Partial
    // results are not scaled.
    uint64_t scalars[8];
    uint64_t into;
    uint64_t elements;
    // Elements before the first group, and the number of groups.
    uint64_t head;
    uint64_t groups;
    uint32_t count;
    // A bit per source that is partial results, and one above them for the target.
    uint32_t partials;
    // For averages.
    Divisor divisor;
    // Bytes of a group in memories of elements.
    uint32_t group;
};

static_assert(sizeof(Arguments) == 184, "Arguments");
static_assert(offsetof(Arguments, sources) == 0, "sources");
static_assert(offsetof(Arguments, scalars) == 64, "scalars");
static_assert(offsetof(Arguments, into) == 128, "into");
static_assert(offsetof(Arguments, elements) == 136, "elements");
static_assert(offsetof(Arguments, head) == 144, "head");
static_assert(offsetof(Arguments, groups) == 152, "groups");
static_assert(offsetof(Arguments, count) == 160, "count");
static_assert(offsetof(Arguments, partials) == 164, "partials");
static_assert(offsetof(Arguments, divisor) == 168, "divisor");
static_assert(offsetof(Arguments, group) == 180, "group");

}  // namespace doorbell
