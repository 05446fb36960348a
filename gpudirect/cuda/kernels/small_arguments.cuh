// Written from collectives/src/gpu/small.rs, which describes this (DOORBELL_WRITE_HEADERS=1 and its tests).
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace doorbell {

constexpr uint64_t SMALL_VERSION = 1;
// Slots of a block per other rank: a power of two.
constexpr uint32_t DEPTH = 4;
// Bytes of data of a line.
constexpr uint32_t LINE_BYTES = 8;

// The launch argument of a short collective.
struct Small {
    uint64_t version;
    uint64_t input;
    uint64_t output;
    // The address of a word that is set to nonzero to end all waits.
    uint64_t stop;
    uint64_t arenas[16];
    // Offsets in an arena: the blocks' states, and their slots.
    uint64_t states;
    uint64_t slots;
    // Bytes from the data for, and from, one rank to that of the next.
    uint64_t input_step;
    uint64_t output_step;
    // The bits of the scalar by which input is multiplied, in the accumulator type.
    uint64_t scalar;
    // Bytes of a message, or with `part`, of the whole.
    uint32_t bytes;
    uint32_t rank;
    uint32_t ranks;
    // Bit sets of the ranks that this one sends to, and uses data of (possibly its own).
    uint32_t sends;
    uint32_t gets;
    // Bit set of the ranks to which this one forwards its part, and whose parts it receives.
    uint32_t forwards;
    // Whether this rank receives from every other one.
    uint32_t receives_from_all;
    uint32_t slot_bytes;
    // Lines per block, and of each rank's part if there are two exchanges.
    uint32_t share;
    uint32_t part;
    // The rank without a part, as it has the whole (none if beyond all ranks); whether it
    // copies.
    uint32_t without;
    uint32_t copies;
    uint32_t divisor;
    // An `Operator`, numbered as `ReduceOp`.
    uint32_t function;
};

static_assert(sizeof(Small) == 256, "Small");
static_assert(offsetof(Small, version) == 0, "version");
static_assert(offsetof(Small, input) == 8, "input");
static_assert(offsetof(Small, output) == 16, "output");
static_assert(offsetof(Small, stop) == 24, "stop");
static_assert(offsetof(Small, arenas) == 32, "arenas");
static_assert(offsetof(Small, states) == 160, "states");
static_assert(offsetof(Small, slots) == 168, "slots");
static_assert(offsetof(Small, input_step) == 176, "input_step");
static_assert(offsetof(Small, output_step) == 184, "output_step");
static_assert(offsetof(Small, scalar) == 192, "scalar");
static_assert(offsetof(Small, bytes) == 200, "bytes");
static_assert(offsetof(Small, rank) == 204, "rank");
static_assert(offsetof(Small, ranks) == 208, "ranks");
static_assert(offsetof(Small, sends) == 212, "sends");
static_assert(offsetof(Small, gets) == 216, "gets");
static_assert(offsetof(Small, forwards) == 220, "forwards");
static_assert(offsetof(Small, receives_from_all) == 224, "receives_from_all");
static_assert(offsetof(Small, slot_bytes) == 228, "slot_bytes");
static_assert(offsetof(Small, share) == 232, "share");
static_assert(offsetof(Small, part) == 236, "part");
static_assert(offsetof(Small, without) == 240, "without");
static_assert(offsetof(Small, copies) == 244, "copies");
static_assert(offsetof(Small, divisor) == 248, "divisor");
static_assert(offsetof(Small, function) == 252, "function");

}  // namespace doorbell
