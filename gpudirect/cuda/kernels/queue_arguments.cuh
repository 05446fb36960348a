// Written from gpudirect/src/proxy/queue.rs, which describes this (DOORBELL_WRITE_HEADERS=1 and its tests).
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace doorbell {

// A kernel's parameter for a queue of puts, passed by value.
struct Queue {
    // In host memory: descriptors; counts of consumed and completed ones; the first failure,
    // followed by whether the proxy has stopped.
    uint64_t slots;
    uint64_t consumed;
    uint64_t completed;
    uint64_t failed;
    // In device memory: the number of requests, and the last value read of `consumed`.
    uint64_t head;
    uint64_t seen;
    // The local part of the heap, and the local signals.
    uint64_t heap;
    uint64_t signals;
    uint32_t mask;
    uint32_t shift;
    uint32_t rank;
    uint32_t ranks;
};

static_assert(sizeof(Queue) == 80, "Queue");
static_assert(offsetof(Queue, slots) == 0, "slots");
static_assert(offsetof(Queue, consumed) == 8, "consumed");
static_assert(offsetof(Queue, completed) == 16, "completed");
static_assert(offsetof(Queue, failed) == 24, "failed");
static_assert(offsetof(Queue, head) == 32, "head");
static_assert(offsetof(Queue, seen) == 40, "seen");
static_assert(offsetof(Queue, heap) == 48, "heap");
static_assert(offsetof(Queue, signals) == 56, "signals");
static_assert(offsetof(Queue, mask) == 64, "mask");
static_assert(offsetof(Queue, shift) == 68, "shift");
static_assert(offsetof(Queue, rank) == 72, "rank");
static_assert(offsetof(Queue, ranks) == 76, "ranks");

}  // namespace doorbell
