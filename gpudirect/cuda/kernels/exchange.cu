// Messages between pairs of GPUs that map each other's memory: the sends and receives of a group,
// of any lengths.
//
// Messages to one peer, or from one, are a queue: they are sent and received in order, also across
// groups. A queue has channels, each with a FIFO of slots in the receiver's arena. Each block
// serves channels of one queue, one after another: no queue waits for another. A channel has a
// share of each message, and takes part in those that have bytes for it; channel 0 takes part in
// all.
//
// The numbers of blocks at the two ends of a queue need not be equal: each block serves its
// channels in ascending order, so the lowest channel that is not complete is served at both ends.
//
// The first slot of a message carries its length. If the receiver expects another one, it writes
// nothing, channel 0 reports both lengths, and all wait to be stopped.
//
// A block needs to know of its peer only that it has as many channels and slots: a rank's group
// need not match another's. Flag words only count up, continuing from counts in memory, so a
// captured launch can be repeated.
//
// Built by `cargo xtask kernels`; for the host as in host.cuh.
#include "block.cuh"
#include "exchange_arguments.cuh"

namespace doorbell {

static_assert(sizeof(Exchange::arenas) == MOST_RANKS * sizeof(uint64_t), "the ranks of the argument");

enum Direction : uint32_t { SEND, RECEIVE, COPY };

// Written by a peer for a channel.
struct Flags {
    // Slots that the peer has filled, and those that it has emptied, of all time.
    uint32_t filled;
    uint32_t emptied;
    uint32_t unused[6];
    // By slot: the length of the message that begins in it.
    uint64_t lengths[SLOTS];
};
constexpr uint32_t EMPTIED = 4;
constexpr uint32_t LENGTHS = 32;
static_assert(sizeof(Flags) == LENGTHS + 8 * SLOTS, "the lengths are last");

// In memory of the host: what a message from a peer has, and what was expected.
struct Mismatch {
    uint64_t sent;
    uint64_t expected;
    // Nonzero once both are written.
    uint64_t is_written;
    uint64_t unused;
};

struct One {
    uint64_t address;

    DOORBELL_INSIDE uint64_t operator[](uint32_t) const { return address; }
};

struct Exchanger {
    const Exchange &op;
    uint32_t direction;
    uint32_t peer;
    // The block serves this channel and every `blocks`th after it, below `active`.
    uint32_t channel;
    uint32_t blocks;
    uint32_t active;
    uint32_t channels;
    uint32_t first;
    uint32_t messages;
    uint32_t seen;

    DOORBELL_INSIDE explicit Exchanger(const Exchange &op) : op(op) {
        uint32_t at = blockIdx.x, queue = 0;
        #pragma unroll 1
        while (at >= blocks_of(queue)) at -= blocks_of(queue++);
        const uint64_t word = op.queues[queue];
        direction = word & 0xf;
        peer = word >> 4 & 0xfff;
        channel = at;
        blocks = blocks_of(queue);
        active = word >> 24 & 0xff;
        channels = direction == COPY ? blocks : op.channels;
        first = word >> 32 & 0xffff;
        messages = static_cast<uint32_t>(word >> 48);
    }

    DOORBELL_INSIDE uint32_t blocks_of(uint32_t queue) const {
        return op.queues[queue] >> 16 & 0xff;
    }

    // Start of a channel's share; `channel + 1` gives its end.
    DOORBELL_INSIDE uint64_t begin(uint64_t bytes, uint32_t channel) const {
        const uint64_t units = (bytes + GRANULE - 1) / GRANULE;
        const uint64_t each = units / channels, more = units % channels;
        const uint64_t at = (channel * each + (channel < more ? channel : more)) * GRANULE;
        return at < bytes ? at : bytes;
    }

    DOORBELL_INSIDE uint64_t flags(uint32_t of, uint32_t from) const {
        return op.arenas[of] + op.flags + (channel * MOST_RANKS + from) * sizeof(Flags);
    }

    DOORBELL_INSIDE uint64_t counter() const {
        return op.arenas[op.rank] + op.counts + ((channel * MOST_RANKS + peer) * 2 + direction) * sizeof(uint32_t);
    }

    DOORBELL_INSIDE uint64_t slot(uint32_t count) const {
        const uint32_t of = direction == SEND ? peer : op.rank, from = direction == SEND ? op.rank : peer;
        const uint32_t fifo = (from < of ? from : from - 1) * op.channels + channel;
        return op.arenas[of] + op.slots + (uint64_t(fifo) * SLOTS + count % SLOTS) * op.slot_bytes;
    }

    // Waits for a slot. Of a message's first one, checks the length; false if stopped.
    DOORBELL_INSIDE bool wait(uint32_t count, bool is_first, uint64_t bytes) {
        const uint64_t flags = this->flags(op.rank, peer);
        if (direction == SEND) return await_count(flags + EMPTIED, count + 1 - SLOTS, seen, op.stop);
        if (!await_count(flags, count + 1, seen, op.stop)) return false;
        if (!is_first) return true;
        const uint64_t sent = load_raw<uint64_t>(flags + LENGTHS + 8 * (count % SLOTS));
        if (sent == bytes) return true;
        if (channel == 0) {
            const uint64_t into = op.mismatches + peer * sizeof(Mismatch);
            store_relaxed<uint64_t>(into, sent);
            store_relaxed<uint64_t>(into + 8, bytes);
            store_release<uint64_t>(into + 16, 1);
        }
        #pragma unroll 1
        while (!must_stop(op.stop)) relax();
        return false;
    }

    DOORBELL_INSIDE void signal(uint32_t count, bool is_first, uint64_t bytes) {
        const uint64_t flags = this->flags(peer, op.rank);
        if (direction == RECEIVE) {
            // What was read has been stored elsewhere by now, so this needs no release.
            store_relaxed<uint32_t>(flags + EMPTIED, count + 1);
            return;
        }
        if (is_first) store_relaxed<uint64_t>(flags + LENGTHS + 8 * (count % SLOTS), bytes);
        store_release<uint32_t>(flags, count + 1);
    }

    DOORBELL_INSIDE void copy() {
        #pragma unroll 1
        for (uint32_t index = 0; index < messages; index++) {
            const uint64_t *from = op.messages[first + 2 * index], into = op.messages[first + 2 * index + 1][0];
            const uint64_t end = begin(from[1], channel + 1);
            #pragma unroll 1
            for (uint64_t at = begin(from[1], channel); at < end; at += op.slot_bytes) {
                move_bytes(from[0] + at, One{into + at}, 1, part(at, end));
            }
        }
    }

    DOORBELL_INSIDE uint32_t part(uint64_t at, uint64_t end) const {
        return end - at < op.slot_bytes ? static_cast<uint32_t>(end - at) : op.slot_bytes;
    }

    DOORBELL_INSIDE void run() {
        if (direction == COPY) return copy();
        #pragma unroll 1
        for (; channel < active; channel += blocks) {
            if (!serve()) return;
        }
    }

    // Sends or receives the channel's share of all messages; false if stopped.
    DOORBELL_INSIDE bool serve() {
        __shared__ uint32_t stopped;
        uint32_t count = load_raw<uint32_t>(counter());
        seen = direction == SEND ? count - SLOTS : count;
        #pragma unroll 1
        for (uint32_t message = 0; message < messages; message++) {
            const uint64_t address = op.messages[first + message][0], bytes = op.messages[first + message][1];
            const uint64_t start = begin(bytes, channel), end = begin(bytes, channel + 1);
            const uint32_t slots = static_cast<uint32_t>((end - start + op.slot_bytes - 1) / op.slot_bytes);
            #pragma unroll 1
            for (uint32_t index = 0; index < (slots == 0 && channel == 0 ? 1 : slots); index++, count++) {
                if (threadIdx.x == 0) stopped = !wait(count, index == 0, bytes);
                __syncthreads();
                if (stopped) return false;
                const uint64_t at = start + uint64_t(index) * op.slot_bytes, user = address + at, slot = this->slot(count);
                move_bytes(direction == SEND ? user : slot, One{direction == SEND ? slot : user}, 1, part(at, end));
                __syncthreads();
                if (threadIdx.x == 0) signal(count, index == 0, bytes);
            }
        }
        if (threadIdx.x == 0) store_raw<uint32_t>(counter(), count);
        return true;
    }
};

}  // namespace doorbell

// All blocks must be resident: two of them have registers enough beside one another.
extern "C" __global__ void __launch_bounds__(doorbell::MOST_BLOCK, 2) exchange(const __grid_constant__ doorbell::Exchange operation) {
    if (operation.version == doorbell::EXCHANGE_VERSION) doorbell::Exchanger(operation).run();
}
