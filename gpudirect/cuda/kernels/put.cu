// Kernels that put, for tests and measurements of gpudirect/src/proxy; an example of doorbell.cuh.
//
// The data is a pattern of its round, so that it is known to be whole and of the right round.
#include "doorbell.cuh"

namespace doorbell {

DOORBELL_EVERYWHERE uint8_t pattern(uint64_t round, uint64_t at) {
    return static_cast<uint8_t>(round * 31 + at * 7 + (at >> 8));
}

struct Share {
    uint64_t first, bytes;
};

DOORBELL_EVERYWHERE Share share(uint64_t bytes) {
    const uint64_t each = (bytes + gridDim.x - 1) / gridDim.x;
    const uint64_t first = blockIdx.x * each < bytes ? blockIdx.x * each : bytes;
    return {first, bytes - first < each ? bytes - first : each};
}

DOORBELL_EVERYWHERE void report(uint64_t results, uint64_t word, uint64_t count) {
    if (count) fetch_add<uint64_t>(results + word * 8, count);
}

}  // namespace doorbell

using namespace doorbell;

// Each block fills its share of `bytes` at `from`, puts it to `to` on the peer, and adds 1 to the
// signal there. Word 0 of the results counts failures.
extern "C" __global__ void put_fill(Queue queue, uint32_t peer, uint64_t to, uint64_t from, uint64_t bytes, uint64_t round, uint64_t signal, uint64_t results) {
    const Share mine = share(bytes);
    for (uint64_t i = threadIdx.x; i < mine.bytes; i += blockDim.x) store_raw<uint8_t>(queue.heap + from + mine.first + i, pattern(round, mine.first + i));
    bool fine = put_signal_block(queue, peer, to + mine.first, from + mine.first, mine.bytes, signal, ADD, 1);
    fine = quiet_block(queue) && fine;
    if (threadIdx.x == 0) report(results, 0, !fine);
}

// Each block waits until the signal is `value`, and checks its share of `bytes` at `from`. Words of
// the results count 0: failures, 1: wrong bytes, 2: right bytes.
extern "C" __global__ void put_check(Queue queue, uint64_t from, uint64_t bytes, uint64_t round, uint64_t signal, uint64_t value, uint64_t results) {
    const Share mine = share(bytes);
    const bool fine = wait_until_block(queue, signal, value);
    if (threadIdx.x == 0) report(results, 0, !fine);
    uint64_t wrong = 0, right = 0;
    for (uint64_t i = threadIdx.x; i < mine.bytes; i += blockDim.x) {
        const bool same = load_raw<uint8_t>(queue.heap + from + mine.first + i) == pattern(round, mine.first + i);
        wrong += !same;
        right += same;
    }
    report(results, 1, wrong);
    report(results, 2, right);
}

// Each block gets its share of `bytes` at the peer's `from` to `into`.
extern "C" __global__ void put_get(Queue queue, uint32_t peer, uint64_t into, uint64_t from, uint64_t bytes, uint64_t results) {
    const Share mine = share(bytes);
    bool fine = get_block(queue, peer, into + mine.first, from + mine.first, mine.bytes);
    fine = quiet_block(queue) && fine;
    if (threadIdx.x == 0) report(results, 0, !fine);
}

// Two ranks alternately put `bytes` to each other (none: signals alone), for `rounds` from `first`;
// the one that begins has `serves` set.
extern "C" __global__ void put_pingpong(Queue queue, uint32_t peer, uint32_t serves, uint64_t to, uint64_t from, uint64_t bytes, uint64_t first, uint64_t rounds, uint64_t signal, uint64_t results) {
    if (threadIdx.x != 0 || blockIdx.x != 0) return;
    bool fine = true;
    for (uint64_t round = first; fine && round < first + rounds; round++) {
        if (!serves) fine = wait_until(queue, signal, round + 1);
        fine = fine && put_signal(queue, peer, to, from, bytes, signal, SET, round + 1);
        if (serves) fine = fine && wait_until(queue, signal, round + 1);
    }
    fine = fine && quiet(queue);
    report(results, 0, !fine);
}

// Every thread submits `count` puts of `bytes` at its own place, each adding 1 to the signal.
extern "C" __global__ void put_many(Queue queue, uint32_t peer, uint64_t to, uint64_t from, uint64_t bytes, uint64_t count, uint64_t signal, uint64_t results) {
    const uint64_t place = (static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * bytes;
    bool fine = true;
    for (uint64_t i = 0; fine && i < count; i++) fine = put_signal(queue, peer, to + place, from + place, bytes, signal, ADD, 1);
    fine = quiet(queue) && fine;
    report(results, 0, !fine);
}

// An invalid descriptor with any words, at the expected lap number (`turn`) or another.
extern "C" __global__ void put_raw(Queue queue, uint64_t first, uint64_t second, uint64_t turn_off) {
    if (threadIdx.x != 0 || blockIdx.x != 0) return;
    const uint64_t index = fetch_add<uint64_t>(queue.head, 1);
    const uint64_t turn = ((index >> queue.shift) % 255 + 1 + turn_off) & 0xff;
    const uint64_t slot = queue.slots + (index & queue.mask) * 64;
    for (int word = 7; word > 1; word--) store_relaxed<uint64_t>(slot + word * 8, turn);
    store_relaxed<uint64_t>(slot + 8, second << 8 | turn);
    store_relaxed<uint64_t>(slot, first << 8 | turn);
}
