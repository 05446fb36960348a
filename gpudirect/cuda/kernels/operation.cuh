// What the argument of a collective's launch encodes, and the state that its blocks share, with each
// other and with other ranks.
#pragma once

#include "block.cuh"
#include "collective_arguments.cuh"

namespace doorbell {

constexpr int MOST_OPERANDS = 64;
constexpr int MOST_BODIES = 24;

static_assert(sizeof(Operation::arenas) == MOST_RANKS * sizeof(uint64_t), "the ranks of the argument");

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
    // Of the FIFO when a message was last sent into it.
    uint32_t slots;
};
constexpr uint64_t COUNTS = 32;

// The first bit of groups with parts of slices that are late by 0, 1 and 2.
constexpr int GROUP_LATE = 48;

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
    Signals signals;
};

// Groups in flight per thread, for reductions.
#ifndef DOORBELL_UNROLL
#define DOORBELL_UNROLL 4
#endif
// Copies begun before the reduction beside them; the others follow it. Three are no faster.
#ifndef DOORBELL_BESIDE
#define DOORBELL_BESIDE 1
#endif

// Resident blocks of MOST_BLOCK threads for which registers must suffice.
#ifndef DOORBELL_BLOCKS
#define DOORBELL_BLOCKS 1
#endif

// Slices by which a body, or a word, is late.
DOORBELL_INSIDE uint32_t body_late(uint64_t body) {
    return static_cast<uint32_t>((body >> 45 & 1) | (body >> 63) << 1);
}

DOORBELL_INSIDE uint32_t word_late(uint64_t word) {
    return word >> WORD_LATE & 3;
}

// Messages of a slice, and slices by which the latest of them are late, of a field of a peer's traffic.
DOORBELL_INSIDE uint32_t messages_of(uint64_t field) {
    return field & ((1 << TRAFFIC_LATE) - 1);
}

DOORBELL_INSIDE uint32_t messages_late(uint64_t field) {
    return field >> TRAFFIC_LATE & 3;
}

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
        : sources(word >> 40 & 0x1f), targets(word >> 46 & 0x3f), first(word >> 52 & 0x7f), reduces(word >> 59 & 1), whole(word >> 60 & 1), mixed(word >> 61 & 1), partial(word >> 62 & 1) {}
};

}  // namespace doorbell
