// Written from collectives/src/gpu/program.rs, which describes this (DOORBELL_WRITE_HEADERS=1 and its tests).
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace doorbell {

constexpr uint64_t PROGRAM_VERSION = 3;
// Bits of words signaled only in the last slice, and only without one that covers it.
constexpr uint64_t LAST = 16;
constexpr uint64_t COVERED = 32;
// Positions of the slices by which a word is late, and the latest of staged messages.
constexpr uint32_t WORD_LATE = 6;
constexpr uint32_t TRAFFIC_LATE = 14;

// The launch argument of a collective.
struct Operation {
    uint64_t version;
    uint64_t input;
    uint64_t output;
    // The address of a word that is set to nonzero to end all waits.
    uint64_t stop;
    // By rank: its arena, and its output if mapped.
    uint64_t arenas[16];
    uint64_t outputs[16];
    // Offsets in an arena: flags, counts, FIFOs, scratch memory.
    uint64_t flags;
    uint64_t counts;
    uint64_t fifos;
    uint64_t scratch;
    // Elements of a slice, and of the longest data block.
    uint64_t slice;
    uint64_t longest;
    // The bits of the scalar by which input is multiplied, in the accumulator type.
    uint64_t scalar;
    uint32_t rank;
    uint32_t ranks;
    uint32_t strands;
    // Slots per FIFO, a power of two; bytes per slot; thread blocks with FIFOs.
    uint32_t slots;
    uint32_t slot_bytes;
    uint32_t blocks;
    // Bytes of a scratch block, and scratch blocks per thread block.
    uint32_t scratch_bytes;
    uint32_t scratch_blocks;
    // Shares of data blocks begin at multiples of 2 to this power elements.
    uint32_t granule_log2;
    uint32_t divisor;
    // An `Operator`, numbered as `ReduceOp`; and padding.
    uint32_t function;
    uint32_t reserved;
    uint64_t program[400];
};

static_assert(sizeof(Operation) == 3592, "Operation");
static_assert(offsetof(Operation, version) == 0, "version");
static_assert(offsetof(Operation, input) == 8, "input");
static_assert(offsetof(Operation, output) == 16, "output");
static_assert(offsetof(Operation, stop) == 24, "stop");
static_assert(offsetof(Operation, arenas) == 32, "arenas");
static_assert(offsetof(Operation, outputs) == 160, "outputs");
static_assert(offsetof(Operation, flags) == 288, "flags");
static_assert(offsetof(Operation, counts) == 296, "counts");
static_assert(offsetof(Operation, fifos) == 304, "fifos");
static_assert(offsetof(Operation, scratch) == 312, "scratch");
static_assert(offsetof(Operation, slice) == 320, "slice");
static_assert(offsetof(Operation, longest) == 328, "longest");
static_assert(offsetof(Operation, scalar) == 336, "scalar");
static_assert(offsetof(Operation, rank) == 344, "rank");
static_assert(offsetof(Operation, ranks) == 348, "ranks");
static_assert(offsetof(Operation, strands) == 352, "strands");
static_assert(offsetof(Operation, slots) == 356, "slots");
static_assert(offsetof(Operation, slot_bytes) == 360, "slot_bytes");
static_assert(offsetof(Operation, blocks) == 364, "blocks");
static_assert(offsetof(Operation, scratch_bytes) == 368, "scratch_bytes");
static_assert(offsetof(Operation, scratch_blocks) == 372, "scratch_blocks");
static_assert(offsetof(Operation, granule_log2) == 376, "granule_log2");
static_assert(offsetof(Operation, divisor) == 380, "divisor");
static_assert(offsetof(Operation, function) == 384, "function");
static_assert(offsetof(Operation, reserved) == 388, "reserved");
static_assert(offsetof(Operation, program) == 392, "program");

}  // namespace doorbell
