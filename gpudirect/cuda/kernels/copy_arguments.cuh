// Written from gpudirect/cuda/src/small.rs, which describes this (DOORBELL_WRITE_HEADERS=1 and its tests).
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace doorbell {

// The launch argument of the resident block.
struct Small {
    // 64 bytes each.
    uint64_t commands;
    uint64_t beginning;
    // `done`, the last executed command; at 8, `left`, the last exited launch; at 16, `begun`,
    // set when a launch begins.
    uint64_t words;
    // Slots of the ring: a power of two.
    uint64_t slots;
};

static_assert(sizeof(Small) == 32, "Small");
static_assert(offsetof(Small, commands) == 0, "commands");
static_assert(offsetof(Small, beginning) == 8, "beginning");
static_assert(offsetof(Small, words) == 16, "words");
static_assert(offsetof(Small, slots) == 24, "slots");

}  // namespace doorbell
