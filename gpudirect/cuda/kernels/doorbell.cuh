// Puts by kernels; gpudirect/src/proxy is the host's side, which posts them.
//
//   bool put(queue, peer, to, from, bytes)         local bytes at offset `from` to the peer's `to`
//   bool put_signal(queue, peer, to, from, bytes, signal, kind, value)
//                                                  then SETs the peer's signal, or ADDs to it
//   bool get(queue, peer, into, from, bytes)       the peer's bytes at `from` to local `into`
//   bool signal(queue, peer, signal, kind, value)  a signal alone, behind earlier puts to the peer
//   bool quiet(queue)                              waits until all earlier requests are complete
//   bool wait_until(queue, signal, value)          waits until a local signal is at least value:
//                                                  data put before it has arrived
//   uint64_t signal_now(queue, signal)             the value of a local signal
//
// Called by single threads, whose earlier writes are put. All threads of a block call the variants
// with `_block` together: one request covers the writes of them all. Any number of threads, blocks
// and kernels may use a queue concurrently.
//
// `false`: a request has failed or the proxy has stopped (KernelQueue::failure reports the cause);
// no wait is endless then.
//
// Requests of one queue to one peer take effect in order, without fences. The source of a put must
// not change before `quiet`.
#pragma once

#include "memory.cuh"
#include "queue_arguments.cuh"

namespace doorbell {

enum Kind : uint32_t { NOTHING = 0, SET = 1, ADD = 2 };

namespace queue {

enum Operation : uint32_t { PUT = 1, GET = 2, SIGNAL = 3 };

// Stores two words at once, neither of which is torn.
DOORBELL_EVERYWHERE void store_two(uint64_t into, uint64_t first, uint64_t second) {
#ifdef __CUDA_ARCH__
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" : : "l"(into), "l"(first), "l"(second) : "memory");
#else
    store_relaxed(into + 8, second);
    store_relaxed(into, first);
#endif
}

// Orders earlier writes, this thread's and those it observed, before its later stores.
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

// Waits for a free slot and writes the descriptor.
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
        // May overwrite another thread's newer value, which costs one more read.
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

// One thread works; its result is returned to the whole block.
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
    // Host memory is slow to read, so the failure word is polled only now and then.
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
