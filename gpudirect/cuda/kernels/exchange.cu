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
    // Of its queue, as in `Exchange::queues`.
    uint64_t word;
    uint32_t direction;
    uint32_t peer;
    // The block serves this channel and every `blocks`th after it, below those with messages.
    uint32_t channel;
    uint32_t seen;
    Signals &signals;

    DOORBELL_INSIDE Exchanger(const Exchange &op, Signals &signals) : op(op), signals(signals) {
        uint32_t at = blockIdx.x, queue = 0;
        #pragma unroll 1
        while (at >= blocks_of(queue)) at -= blocks_of(queue++);
        word = op.queues[queue];
        direction = word & 0xf;
        peer = word >> 4 & 0xfff;
        channel = at;
    }

    DOORBELL_INSIDE uint32_t blocks() const { return word >> 16 & 0xff; }
    DOORBELL_INSIDE uint32_t active() const { return word >> 24 & 0xff; }
    DOORBELL_INSIDE uint32_t channels() const { return direction == COPY ? blocks() : op.channels; }
    DOORBELL_INSIDE uint32_t first() const { return word >> 32 & 0xffff; }
    DOORBELL_INSIDE uint32_t messages() const { return static_cast<uint32_t>(word >> 48); }

    DOORBELL_INSIDE uint32_t blocks_of(uint32_t queue) const {
        return op.queues[queue] >> 16 & 0xff;
    }

    // Start of a channel's share; `channel + 1` gives its end.
    DOORBELL_INSIDE uint64_t begin(uint64_t bytes, uint32_t channel) const {
        const uint64_t units = (bytes + GRANULE - 1) / GRANULE;
        const uint64_t each = units / channels(), more = units % channels();
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

    DOORBELL_INSIDE uint32_t part(uint64_t at, uint64_t end) const {
        return end - at < op.slot_bytes ? static_cast<uint32_t>(end - at) : op.slot_bytes;
    }

    DOORBELL_INSIDE void run() {
        if (threadIdx.x == 0) signals.begin();
        __syncthreads();
        if (Signals::have_warp() && threadIdx.x >= WORKERS) {
            signals.serve([&](uint64_t word, uint64_t bytes, uint32_t lane) {
                channel = word >> 32 & 0xffff;
                if (lane == 0) signal(static_cast<uint32_t>(word), word >> 63, bytes);
            });
            return;
        }
        const uint32_t end = direction == COPY ? blocks() : active();
        #pragma unroll 1
        for (; channel < end; channel += blocks()) {
            if (!serve()) break;
        }
        if (threadIdx.x == 0) signals.end();
    }

    // Sends, receives or copies the channel's share of all messages; false if stopped.
    DOORBELL_INSIDE bool serve() {
        __shared__ uint32_t stopped;
        const bool waits = direction != COPY;
        uint32_t count = waits ? load_raw<uint32_t>(counter()) : 0;
        seen = direction == SEND ? count - SLOTS : count;
        #pragma unroll 1
        for (uint32_t message = 0; message < messages(); message++) {
            const uint32_t own = first() + (waits ? message : 2 * message);
            const uint64_t bytes = op.messages[own][1], start = begin(bytes, channel), end = begin(bytes, channel + 1);
            const uint32_t slots = static_cast<uint32_t>((end - start + op.slot_bytes - 1) / op.slot_bytes);
            #pragma unroll 1
            for (uint32_t index = 0; index < (slots == 0 && channel == 0 ? 1 : slots); index++, count++) {
                const uint64_t at = start + uint64_t(index) * op.slot_bytes;
                if (waits) {
                    if (threadIdx.x == 0) stopped = !wait(count, index == 0, bytes);
                    sync(workers());
                    if (stopped) return false;
                }
                // The target of a copy follows its source.
                const uint64_t user = op.messages[own][0] + at, other = waits ? slot(count) : op.messages[own + 1][0] + at;
                move_bytes(direction == RECEIVE ? other : user, One{direction == RECEIVE ? user : other}, 1, part(at, end));
                if (!waits) continue;
                sync(workers());
                if (threadIdx.x != 0) continue;
                if (Signals::have_warp()) {
                    signals.give(uint64_t(index == 0) << 63 | uint64_t(channel) << 32 | count, bytes);
                } else {
                    signal(count, index == 0, bytes);
                }
            }
        }
        if (waits && threadIdx.x == 0) store_raw<uint32_t>(counter(), count);
        return true;
    }
};

}  // namespace doorbell

extern "C" __global__ void __launch_bounds__(doorbell::MOST_BLOCK) exchange(const __grid_constant__ doorbell::Exchange operation) {
    __shared__ doorbell::Signals signals;
    if (operation.version == doorbell::EXCHANGE_VERSION) doorbell::Exchanger(operation, signals).run();
}
