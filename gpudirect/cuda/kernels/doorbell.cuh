// Puts by kernels: what a kernel is given of a queue, and what it can do with it. The host's side is gpudirect/src/proxy, which posts what is asked for here.
//
//   bool put(queue, peer, to, from, bytes)                       bytes of the own memory, at offset `from`, go to offset `to` of the peer's
//   bool put_signal(queue, peer, to, from, bytes, signal, kind, value)   the same; then the peer's signal is SET to the value, or the value is ADDed to it
//   bool get(queue, peer, into, from, bytes)                     bytes of the peer's memory, at offset `from`, come to offset `into` of the own
//   bool signal(queue, peer, signal, kind, value)                a signal alone, behind what was put to that peer before
//   bool quiet(queue)                                            waits until all that the queue was asked for is done: what was put is there and may be changed here, what was got is here
//   bool wait_until(queue, signal, value)                        waits until a signal of this rank is the value or beyond it; what was put before that signal is there
//   uint64_t signal_now(queue, signal)                           what a signal of this rank is
//
// A thread calls them for itself: what it wrote before is what is put. Of each there is one with `_block` behind its name, which all threads of a block call together: what any of them wrote before is put, by one request, and all of them go on when it is asked for, or waited for.
// Any number of threads, blocks and kernels may use a queue at once.
//
// `false` says that something the queue was asked for has failed, or that nobody serves it any more: what, the host's KernelQueue::failure tells. Nothing waits for ever then.
//
// What one queue asks of one peer takes effect there in the order in which it was asked; there is no fence to call. Memory may be put from as soon as the call has returned only if it is not changed before `quiet`.
#pragma once

#include "memory.cuh"

namespace doorbell {

// Given by value: `DeviceQueue` in gpudirect/src/proxy/queue.rs.
struct Queue {
    // In the host's memory: descriptors; how many the host has taken, and how many of those are done; what has failed first, and behind it whether nobody serves the queue.
    uint64_t slots;
    uint64_t consumed;
    uint64_t completed;
    uint64_t failed;
    // In the memory of the device: how many were asked for, and what `consumed` was when somebody last looked.
    uint64_t head;
    uint64_t seen;
    // Where the own part of the heap begins, and the own signals.
    uint64_t heap;
    uint64_t signals;
    uint32_t mask;
    uint32_t shift;
    uint32_t rank;
    uint32_t ranks;
};

// What becomes of a signal.
enum Kind : uint32_t { NOTHING = 0, SET = 1, ADD = 2 };

namespace queue {

enum Operation : uint32_t { PUT = 1, GET = 2, SIGNAL = 3 };

// Two words at once, neither of which is torn.
DOORBELL_EVERYWHERE void store_two(uint64_t into, uint64_t first, uint64_t second) {
#ifdef __CUDA_ARCH__
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" : : "l"(into), "l"(first), "l"(second) : "memory");
#else
    store_relaxed(into + 8, second);
    store_relaxed(into, first);
#endif
}

// What this thread wrote, or was told that others wrote, is there for the host's devices before what it stores from now on.
DOORBELL_EVERYWHERE void publish() {
#ifdef __CUDA_ARCH__
    asm volatile("fence.acq_rel.sys;" : : : "memory");
#else
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
#endif
}

DOORBELL_EVERYWHERE bool has_failed(const Queue &queue) {
    return load_acquire<uint64_t>(queue.failed) != 0;
}

DOORBELL_EVERYWHERE bool is_stopped(const Queue &queue) {
    return load_acquire<uint64_t>(queue.failed + 8) != 0;
}

// Waits until a slot is free, and writes into it.
DOORBELL_EVERYWHERE bool ask(const Queue &queue, Operation operation, Kind kind, uint32_t peer, uint64_t bytes, uint64_t local, uint64_t remote, uint64_t signal, uint64_t value) {
    publish();
    const uint64_t index = fetch_add<uint64_t>(queue.head, 1);
    if (index - load_acquire<uint64_t>(queue.seen) > queue.mask) {
        uint64_t consumed = load_acquire<uint64_t>(queue.consumed);
        while (index - consumed > queue.mask) {
            if (is_stopped(queue)) return false;
            relax();
            consumed = load_acquire<uint64_t>(queue.consumed);
        }
        // Another thread's may be newer: then somebody looks once more.
        store_release<uint64_t>(queue.seen, consumed);
    }
    const uint64_t turn = (index >> queue.shift) % 255 + 1;
    const uint64_t slot = queue.slots + (index & queue.mask) * 64;
    store_two(slot, (operation | kind << 8 | static_cast<uint64_t>(peer) << 16) << 8 | turn, bytes << 8 | turn);
    store_two(slot + 16, local << 8 | turn, remote << 8 | turn);
    store_two(slot + 32, signal << 8 | turn, value << 8 | turn);
    store_two(slot + 48, value >> 56 << 8 | turn, index << 8 | turn);
    return true;
}

// What one thread of the block finds, all of them are told.
template <class Work>
DOORBELL_EVERYWHERE bool by_one(Work work) {
    __shared__ bool done;
    __syncthreads();
    if (threadIdx.x == 0) done = work();
    __syncthreads();
    return done;
}

}  // namespace queue

DOORBELL_EVERYWHERE bool put(const Queue &queue, uint32_t peer, uint64_t to, uint64_t from, uint64_t bytes) {
    return queue::ask(queue, queue::PUT, NOTHING, peer, bytes, from, to, 0, 0);
}

DOORBELL_EVERYWHERE bool put_signal(const Queue &queue, uint32_t peer, uint64_t to, uint64_t from, uint64_t bytes, uint64_t signal, Kind kind, uint64_t value) {
    return queue::ask(queue, queue::PUT, kind, peer, bytes, from, to, signal, value);
}

DOORBELL_EVERYWHERE bool get(const Queue &queue, uint32_t peer, uint64_t into, uint64_t from, uint64_t bytes) {
    return queue::ask(queue, queue::GET, NOTHING, peer, bytes, into, from, 0, 0);
}

DOORBELL_EVERYWHERE bool signal(const Queue &queue, uint32_t peer, uint64_t signal, Kind kind, uint64_t value) {
    return queue::ask(queue, queue::SIGNAL, kind, peer, 0, 0, 0, signal, value);
}

DOORBELL_EVERYWHERE bool quiet(const Queue &queue) {
    const uint64_t until = load_acquire<uint64_t>(queue.head);
    while (static_cast<int64_t>(load_acquire<uint64_t>(queue.completed) - until) < 0) {
        if (queue::is_stopped(queue)) return false;
        relax();
    }
    return !queue::has_failed(queue);
}

DOORBELL_EVERYWHERE uint64_t signal_now(const Queue &queue, uint64_t signal) {
    return load_acquire<uint64_t>(queue.signals + signal * 8);
}

DOORBELL_EVERYWHERE bool wait_until(const Queue &queue, uint64_t signal, uint64_t value) {
    // The host's memory is far: the word of failure is looked at now and then.
    for (uint32_t looks = 1; static_cast<int64_t>(signal_now(queue, signal) - value) < 0; looks++) {
        if (looks % 16 == 0 && queue::has_failed(queue)) return false;
        relax();
    }
    return true;
}

DOORBELL_EVERYWHERE bool put_block(const Queue &queue, uint32_t peer, uint64_t to, uint64_t from, uint64_t bytes) {
    return queue::by_one([&] { return put(queue, peer, to, from, bytes); });
}

DOORBELL_EVERYWHERE bool put_signal_block(const Queue &queue, uint32_t peer, uint64_t to, uint64_t from, uint64_t bytes, uint64_t signal, Kind kind, uint64_t value) {
    return queue::by_one([&] { return put_signal(queue, peer, to, from, bytes, signal, kind, value); });
}

DOORBELL_EVERYWHERE bool get_block(const Queue &queue, uint32_t peer, uint64_t into, uint64_t from, uint64_t bytes) {
    return queue::by_one([&] { return get(queue, peer, into, from, bytes); });
}

DOORBELL_EVERYWHERE bool signal_block(const Queue &queue, uint32_t peer, uint64_t of, Kind kind, uint64_t value) {
    return queue::by_one([&] { return signal(queue, peer, of, kind, value); });
}

DOORBELL_EVERYWHERE bool quiet_block(const Queue &queue) {
    return queue::by_one([&] { return quiet(queue); });
}

DOORBELL_EVERYWHERE bool wait_until_block(const Queue &queue, uint64_t signal, uint64_t value) {
    return queue::by_one([&] { return wait_until(queue, signal, value); });
}

}  // namespace doorbell
