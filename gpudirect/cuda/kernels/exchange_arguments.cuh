// Written from collectives/src/gpu/exchange.rs, which describes this (DOORBELL_WRITE_HEADERS=1 and its tests).
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace doorbell {

constexpr uint64_t EXCHANGE_VERSION = 2;
// Slots of a FIFO: a power of two.
constexpr uint32_t SLOTS = 4;
// Shares of messages begin at multiples of this many bytes.
constexpr uint64_t GRANULE = 4096;

// The launch argument of a group.
struct Exchange {
    uint64_t version;
    // The address of a word that is set to nonzero to end all waits.
    uint64_t stop;
    // The address of a `Mismatch` per rank.
    uint64_t mismatches;
    uint64_t arenas[16];
    // Offsets in an arena: flags, counts, slots.
    uint64_t flags;
    uint64_t counts;
    uint64_t slots;
    uint32_t rank;
    // Channels of a queue, the same on all ranks.
    uint32_t channels;
    uint32_t slot_bytes;
    uint32_t reserved;
    // The direction, the peer, the blocks, the channels that have messages, the first message
    // and the number of messages: 4, 12, 8, 8, 16 and 16 bits.
    uint64_t queues[32];
    // Address and length. Of a copy the target follows the source.
    uint64_t messages[224][2];
};

static_assert(sizeof(Exchange) == 4032, "Exchange");
static_assert(offsetof(Exchange, version) == 0, "version");
static_assert(offsetof(Exchange, stop) == 8, "stop");
static_assert(offsetof(Exchange, mismatches) == 16, "mismatches");
static_assert(offsetof(Exchange, arenas) == 24, "arenas");
static_assert(offsetof(Exchange, flags) == 152, "flags");
static_assert(offsetof(Exchange, counts) == 160, "counts");
static_assert(offsetof(Exchange, slots) == 168, "slots");
static_assert(offsetof(Exchange, rank) == 176, "rank");
static_assert(offsetof(Exchange, channels) == 180, "channels");
static_assert(offsetof(Exchange, slot_bytes) == 184, "slot_bytes");
static_assert(offsetof(Exchange, reserved) == 188, "reserved");
static_assert(offsetof(Exchange, queues) == 192, "queues");
static_assert(offsetof(Exchange, messages) == 448, "messages");

}  // namespace doorbell
