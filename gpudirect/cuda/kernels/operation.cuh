// The argument of a collective's launch, and the state that its blocks share, with each other and
// with other ranks.
#pragma once

#include "block.cuh"

namespace doorbell {

// Layout version of the argument: `VERSION` in collectives/src/gpu/program.rs.
constexpr uint64_t PROGRAM_VERSION = 2;
constexpr int MOST_WORDS = 400;
constexpr int MOST_OPERANDS = 64;
constexpr int MOST_BODIES = 24;

// The launch argument: `Arguments` in collectives/src/gpu/program.rs.
struct Operation {
    uint64_t version;
    uint64_t input;
    uint64_t output;
    // The address of a word that is set to nonzero to end all waits.
    uint64_t stop;
    // By rank: its arena, and its output if mapped.
    uint64_t arenas[MOST_RANKS];
    uint64_t outputs[MOST_RANKS];
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
    // Shares of data blocks begin at multiples of this many elements.
    uint32_t granule;
    uint32_t divisor;
    // An `Operator`, and padding.
    uint32_t function;
    uint32_t reserved;
    uint64_t program[MOST_WORDS];
};

// Written by a peer for a block.
struct Flags {
    uint32_t direct;
    uint32_t staged;
    uint32_t credit;
    uint32_t ready;
    uint32_t unused[12];
};

// A block's progress with a peer.
struct Counts {
    uint32_t sent_direct;
    uint32_t sent_staged;
    uint32_t received_direct;
    uint32_t received_staged;
    // How often this rank's output was released to the peer, and the peer's to this rank.
    uint32_t readied;
    uint32_t written;
};
constexpr uint64_t COUNTS = 32;

// Bits of words signaled only in the last slice, of late words, and of late bodies.
constexpr uint64_t LAST = 1 << 4;
constexpr uint64_t WORD_LATE = 1 << 5;
constexpr int BODY_LATE = 63;
// Bits of groups with early, and with late, parts.
constexpr int GROUP_EARLY = 48;
constexpr int GROUP_LATE = 49;

enum Operator : uint32_t { SUM, PROD, MIN, MAX, AVG, PREMULSUM };
enum Kind : uint32_t { DIRECT, STAGED, CREDIT, READY };
enum Place : uint32_t { INPUT, OUTPUT, SCRATCH, RECEIVED, THEIR_OUTPUT, THEIR_SLOT };

struct Block {
    Counts counts[MOST_RANKS];
    // Flags as last read.
    uint32_t seen[4][MOST_RANKS];
    uint64_t addresses[MOST_OPERANDS];
    // For lines: the flag, and a bit above it.
    uint64_t lines[MOST_OPERANDS];
    uint32_t elements[MOST_BODIES];
    uint32_t stopped;
};

// Groups in flight per thread, for reductions.
#ifndef DOORBELL_UNROLL
#define DOORBELL_UNROLL 2
#endif
// Copies begun before the reduction beside them; the others follow it. Three are no faster.
#ifndef DOORBELL_BESIDE
#define DOORBELL_BESIDE 1
#endif

// Resident blocks of MOST_BLOCK threads for which registers must suffice.
#ifndef DOORBELL_BLOCKS
#define DOORBELL_BLOCKS 1
#endif

// A body of a program, decoded.
struct Body {
    uint32_t sources;
    uint32_t targets;
    uint32_t first;
    bool reduces;
    bool whole;
    bool mixed;
    bool partial;

    DOORBELL_INSIDE explicit Body(uint64_t word)
        : sources(word >> 40 & 0x3f), targets(word >> 46 & 0x3f), first(word >> 52 & 0x7f), reduces(word >> 59 & 1), whole(word >> 60 & 1), mixed(word >> 61 & 1), partial(word >> 62 & 1) {}
};

}  // namespace doorbell
