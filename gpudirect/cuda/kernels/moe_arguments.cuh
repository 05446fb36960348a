// Written from collectives/src/gpu/moe/arguments.rs, which describes this (DOORBELL_WRITE_HEADERS=1 and its tests).
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace doorbell {

constexpr uint64_t MOE_VERSION = 1;
// Elements with one scale.
constexpr uint32_t SCALED = 128;
// The most experts of all ranks, ranks times experts, and thread blocks.
constexpr uint32_t MOST_EXPERTS = 1024;
constexpr uint32_t MOST_CELLS = 8192;
constexpr uint32_t MOST_BLOCKS = 256;
// Of a token: an expert that it chooses does not exist.
constexpr uint64_t NO_EXPERT = 1;
// Of the rank that would receive it: more pairs than there are slots.
constexpr uint64_t TOO_MANY_PAIRS = 2;
// Of the rank that sent them: counts of more pairs than it can have.
constexpr uint64_t FALSE_COUNTS = 3;
// Of a received row: there is no output of its expert.
constexpr uint64_t NO_OUTPUT = 4;
// Of the rank that would receive them: more rows than it has memory for.
constexpr uint64_t NO_MEMORY = 5;

// The launch argument of dispatch and combine.
struct Moe {
    uint64_t version;
    // The address of a word that is set to nonzero to end all waits.
    uint64_t stop;
    // The address of a report of 8 bytes.
    uint64_t report;
    // By rank: the memory that its peers write.
    uint64_t memories[16];
    // Offsets in it: received rows, returned outputs, and the words.
    uint64_t rows;
    uint64_t outputs;
    uint64_t ready;
    uint64_t counts;
    uint64_t arrived;
    uint64_t returned;
    // Addresses in the rank's own memory: the state, the pairs by position, the positions by
    // pair, by expert the bases, and the tables of what is received.
    uint64_t state;
    uint64_t order;
    uint64_t positions;
    uint64_t bases;
    uint64_t tables;
    // Addresses of the routing; of tokens or the experts' outputs; and of combined tokens.
    uint64_t indices;
    uint64_t weights;
    uint64_t input;
    uint64_t output;
    uint32_t rank;
    uint32_t ranks;
    // Of all ranks.
    uint32_t experts;
    uint32_t top_k;
    uint32_t hidden;
    uint32_t tokens;
    // The most pairs of a rank, and those that it may have for one other.
    uint32_t pairs;
    uint32_t slots;
    // Bytes of a row of dispatch, and of an index of the routing (4 or 8).
    uint32_t row_bytes;
    uint32_t index_bytes;
    // Thread blocks of dispatch, and of combine, on every rank.
    uint32_t blocks;
    // Whether rows are consecutive, and not in slots.
    uint32_t contiguous;
    // The experts' outputs that there are, and the rows for which each rank has memory.
    uint32_t given;
    uint32_t capacity;
};

static_assert(sizeof(Moe) == 328, "Moe");
static_assert(offsetof(Moe, version) == 0, "version");
static_assert(offsetof(Moe, stop) == 8, "stop");
static_assert(offsetof(Moe, report) == 16, "report");
static_assert(offsetof(Moe, memories) == 24, "memories");
static_assert(offsetof(Moe, rows) == 152, "rows");
static_assert(offsetof(Moe, outputs) == 160, "outputs");
static_assert(offsetof(Moe, ready) == 168, "ready");
static_assert(offsetof(Moe, counts) == 176, "counts");
static_assert(offsetof(Moe, arrived) == 184, "arrived");
static_assert(offsetof(Moe, returned) == 192, "returned");
static_assert(offsetof(Moe, state) == 200, "state");
static_assert(offsetof(Moe, order) == 208, "order");
static_assert(offsetof(Moe, positions) == 216, "positions");
static_assert(offsetof(Moe, bases) == 224, "bases");
static_assert(offsetof(Moe, tables) == 232, "tables");
static_assert(offsetof(Moe, indices) == 240, "indices");
static_assert(offsetof(Moe, weights) == 248, "weights");
static_assert(offsetof(Moe, input) == 256, "input");
static_assert(offsetof(Moe, output) == 264, "output");
static_assert(offsetof(Moe, rank) == 272, "rank");
static_assert(offsetof(Moe, ranks) == 276, "ranks");
static_assert(offsetof(Moe, experts) == 280, "experts");
static_assert(offsetof(Moe, top_k) == 284, "top_k");
static_assert(offsetof(Moe, hidden) == 288, "hidden");
static_assert(offsetof(Moe, tokens) == 292, "tokens");
static_assert(offsetof(Moe, pairs) == 296, "pairs");
static_assert(offsetof(Moe, slots) == 300, "slots");
static_assert(offsetof(Moe, row_bytes) == 304, "row_bytes");
static_assert(offsetof(Moe, index_bytes) == 308, "index_bytes");
static_assert(offsetof(Moe, blocks) == 312, "blocks");
static_assert(offsetof(Moe, contiguous) == 316, "contiguous");
static_assert(offsetof(Moe, given) == 320, "given");
static_assert(offsetof(Moe, capacity) == 324, "capacity");

}  // namespace doorbell
