// Short copies by a resident block: it executes the command passed at launch, then polls further
// commands in host memory (docs/decisions/038).
//
// The host writes commands into a ring and polls `done`. The block exits when idle, and after a
// maximum lifetime, so as not to delay programs that synchronize their device; it then writes
// `left`. No command is left half done: the next launch continues after `done`.
//
// Everything that differs between launches is in host memory, so that a launch is that of a graph,
// at half the cost. A poll over the bus takes a microsecond, so one poll reads a whole command, of
// which each word is validated by its lap number (`turn`).
#include "copy_arguments.cuh"
#include "memory.cuh"

namespace doorbell {

// Words of a command: target, source, length, and without a source, the data, four bytes per word.
// In the ring the upper 8 bits are the lap number.
enum Part : uint32_t { INTO, FROM, BYTES, INLINE, PARTS = 8 };
constexpr uint64_t VALUE = (uint64_t(1) << 56) - 1;

// The launch header: whether it was cancelled; the number of the first command; maximum polls
// without a command, and in total; the number of the launch, from 1; and the first command without
// lap numbers, of length 0 if there is none.
enum Beginning : uint32_t { REVOKED, NUMBER, PATIENCE, LIFE, LAUNCH, FIRST, BEGINNING = FIRST + PARTS };

// Laps run from 1 to 255, as memory is initially 0; command numbers start at 1.
DOORBELL_EVERYWHERE uint64_t turn_of(uint64_t number, uint64_t slots) {
    return (number - 1) / slots % 255 + 1;
}

template <class Unit>
DOORBELL_EVERYWHERE void copy_units(uint64_t into, uint64_t from, uint32_t bytes) {
    for (uint32_t at = threadIdx.x * sizeof(Unit); at < bytes; at += blockDim.x * sizeof(Unit)) store_raw<Unit>(into + at, load_raw<Unit>(from + at));
}

DOORBELL_EVERYWHERE void copy_share(uint64_t into, uint64_t from, uint32_t bytes) {
    const uint64_t ends = into | from | bytes;
    if ((ends & 7) == 0) {
        copy_units<uint64_t>(into, from, bytes);
    } else if ((ends & 3) == 0) {
        copy_units<uint32_t>(into, from, bytes);
    } else {
        copy_units<uint8_t>(into, from, bytes);
    }
}

// Inline data, stored by the first thread alone.
DOORBELL_EVERYWHERE void store_inline(uint64_t into, uint32_t bytes, const uint64_t *words) {
    if (threadIdx.x != 0) return;
    if (((into | bytes) & 7) == 0) {
        for (uint32_t at = 0; at < bytes / 8; at++) store_raw<uint64_t>(into + 8 * at, (words[2 * at] & 0xffffffff) | words[2 * at + 1] << 32);
    } else {
        for (uint32_t at = 0; at < bytes; at++) store_raw<uint8_t>(into + at, static_cast<uint8_t>(words[at / 4] >> (at % 4 * 8)));
    }
}

DOORBELL_EVERYWHERE void carry_out(const uint64_t *command) {
    const uint64_t into = command[INTO] & VALUE, from = command[FROM] & VALUE;
    const uint32_t bytes = static_cast<uint32_t>(command[BYTES]);
    if (from) {
        copy_share(into, from, bytes);
    } else {
        store_inline(into, bytes, command + INLINE);
    }
}

// Polls words of host memory; acquire: earlier writes of the host are visible.
DOORBELL_EVERYWHERE void look(uint64_t *words, uint64_t from, uint32_t count) {
    for (uint32_t word = threadIdx.x; word < count; word += blockDim.x) words[word] = load_acquire<uint64_t>(from + 8 * word);
}

}  // namespace doorbell

extern "C" __global__ void __launch_bounds__(256) small_copies(doorbell::Small small) {
    using namespace doorbell;
    __shared__ uint64_t beginning[BEGINNING], command[PARTS];
    // The canceller sets REVOKED and then reads `begun`: one side sees the other's word. The first
    // thread is the one that loads REVOKED.
    if (threadIdx.x == 0) {
        store_relaxed<uint64_t>(small.words + 16, 1);
        __threadfence_system();
    }
    look(beginning, small.beginning, BEGINNING);
    __syncthreads();
    uint64_t number = beginning[NUMBER];
    if (beginning[BYTES + FIRST] && !beginning[REVOKED]) {
        carry_out(beginning + FIRST);
        // The barrier orders all threads' stores before the first thread's release.
        __syncthreads();
        if (threadIdx.x == 0) store_release<uint64_t>(small.words, number);
        number++;
    }
    uint64_t looks = 0, idle = 0;
    while (!beginning[REVOKED] && idle < beginning[PATIENCE] && looks < beginning[LIFE]) {
        look(command, small.commands + ((number - 1) & (small.slots - 1)) * (8 * PARTS), PARTS);
        __syncthreads();
        const uint64_t turn = turn_of(number, small.slots);
        uint32_t there = 0;
        for (uint32_t part = 0; part < PARTS; part++) there += command[part] >> 56 == turn;
        looks++;
        if (there == PARTS) {
            carry_out(command);
            idle = 0;
        } else {
            idle++;
            relax();
        }
        // The next poll overwrites `command`; `done` covers all threads' stores.
        __syncthreads();
        if (there == PARTS) {
            if (threadIdx.x == 0) store_release<uint64_t>(small.words, number);
            number++;
        }
    }
    if (threadIdx.x == 0) store_release<uint64_t>(small.words + 8, beginning[LAUNCH]);
}
