// What a launch of a collective's kernel is given, and what its blocks of threads share: among themselves, and with those of other ranks.
#pragma once

#include "lines.cuh"

namespace doorbell {

// Of what a launch is given. A change of meaning is a change of this number: `VERSION` in collectives/src/gpu/program.rs.
constexpr uint64_t PROGRAM_VERSION = 2;
constexpr int MOST_RANKS = 16;
constexpr int MOST_WORDS = 400;
constexpr int MOST_OPERANDS = 64;
constexpr int MOST_BODIES = 24;
constexpr int MOST_BLOCK = 512;

// What a launch is given: `Arguments` in collectives/src/gpu/program.rs.
struct Operation {
    uint64_t version;
    uint64_t input;
    uint64_t output;
    // A word that is not 0 from when all who wait are to give up.
    uint64_t stop;
    // By rank: its arena, and its output if that is mapped.
    uint64_t arenas[MOST_RANKS];
    uint64_t outputs[MOST_RANKS];
    // Where in an arena are flags, counts, FIFOs and a rank's own memory.
    uint64_t flags;
    uint64_t counts;
    uint64_t fifos;
    uint64_t scratch;
    // Elements of a slice, and of the longest data block.
    uint64_t slice;
    uint64_t longest;
    // The bits of the scalar that input is multiplied with, in the type that accumulates.
    uint64_t scalar;
    uint32_t rank;
    uint32_t ranks;
    uint32_t strands;
    // Slots of a FIFO, a power of two; bytes of one; and blocks of threads that have FIFOs.
    uint32_t slots;
    uint32_t slot_bytes;
    uint32_t blocks;
    // Bytes of a block of own memory, and how many of these a block of threads has.
    uint32_t scratch_bytes;
    uint32_t scratch_blocks;
    // Shares of data blocks begin at multiples of so many elements.
    uint32_t granule;
    uint32_t divisor;
    // Which of `Operator`, and nothing.
    uint32_t function;
    uint32_t reserved;
    uint64_t program[MOST_WORDS];
};

// What a peer tells a block of threads.
struct Flags {
    uint32_t direct;
    uint32_t staged;
    uint32_t credit;
    uint32_t ready;
    uint32_t unused[12];
};

// How far a block of threads has come with a peer.
struct Counts {
    uint32_t sent_direct;
    uint32_t sent_staged;
    uint32_t received_direct;
    uint32_t received_staged;
    // How often the peer was told that the output may be written, and the peer's was.
    uint32_t readied;
    uint32_t written;
};
constexpr uint64_t COUNTS = 32;

// Of a word that is told in the last slice alone, of one that is a slice behind, and of a body that is.
constexpr uint64_t LAST = 1 << 4;
constexpr uint64_t WORD_LATE = 1 << 5;
constexpr int BODY_LATE = 63;
// Of a group: something in it is not a slice behind, and something is.
constexpr int GROUP_EARLY = 48;
constexpr int GROUP_LATE = 49;

enum Operator : uint32_t { SUM, PROD, MIN, MAX, AVG, PREMULSUM };
enum Kind : uint32_t { DIRECT, STAGED, CREDIT, READY };
enum Place : uint32_t { INPUT, OUTPUT, SCRATCH, RECEIVED, THEIR_OUTPUT, THEIR_SLOT };

// Shared by the threads of a block.
struct Block {
    Counts counts[MOST_RANKS];
    // The flags as they were when they were last looked at.
    uint32_t seen[4][MOST_RANKS];
    uint64_t addresses[MOST_OPERANDS];
    // Of lines: the flag, and a bit above it.
    uint64_t lines[MOST_OPERANDS];
    uint32_t elements[MOST_BODIES];
    uint32_t stopped;
};

// Groups in flight of a thread that copies, and that reduces.
#ifndef DOORBELL_MOVES
#define DOORBELL_MOVES 4
#endif
#ifndef DOORBELL_UNROLL
#define DOORBELL_UNROLL 2
#endif
// Copies that a thread begins before what it reduces; the others follow it. Three are no faster.
#ifndef DOORBELL_BESIDE
#define DOORBELL_BESIDE 1
#endif

// Blocks of MOST_BLOCK threads that have registers enough to run beside one another.
#ifndef DOORBELL_BLOCKS
#define DOORBELL_BLOCKS 1
#endif

// A body's part of a program.
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
