// Short copies: one block that copies what it finds when it begins, stays for a moment, takes further commands from memory of the host, and copies those by loads and stores.
//
// The host puts a command into the ring and waits for the word `done`. The block leaves when nothing came for a while, and after some time anyway, lest a program that waits for its device waits for long; it says so by the
// word `left`. It never leaves a command half done: whoever launches it anew has it go on behind `done`.
//
// All that differs from launch to launch lies in memory of the host, so that a launch is that of a graph, which takes half as long. A look there goes over the bus, which takes a microsecond: so one look brings all of a command,
// and every word of it says by itself whether it is there.
#include "memory.cuh"

namespace doorbell {

// Words of a command, in the ring each with its turn in the uppermost 8 bits: where to, where from, how many bytes, and where it is from nowhere the bytes themselves, four in a word.
enum Part : uint32_t { INTO, FROM, BYTES, INLINE, PARTS = 8 };
constexpr uint64_t VALUE = (uint64_t(1) << 56) - 1;

// What a launch begins with: whether it was taken back; the number of the first command; how often the block looks for another before it leaves, in a row and in all; the number of the launch, from 1 on; and the first command, of no
// bytes where there is none, without a turn.
enum Beginning : uint32_t { REVOKED, NUMBER, PATIENCE, LIFE, LAUNCH, FIRST, BEGINNING = FIRST + PARTS };

struct Small {
    // Of 64 bytes each.
    uint64_t commands;
    uint64_t beginning;
    // The word `done`, the number of the last command that was carried out; 8 bytes on `left`, the number of the last launch that has ended; and 16 bytes on `begun`, which is set when a launch begins.
    uint64_t words;
    // How many commands there is room for: a power of two.
    uint64_t slots;
};

// The turns of the ring are counted from 1 to 255, as memory is 0 at first; numbers of commands from 1 on.
DOORBELL_EVERYWHERE uint64_t turn_of(uint64_t number, uint64_t slots) {
    return (number - 1) / slots % 255 + 1;
}

template <class Unit>
DOORBELL_EVERYWHERE void copy_units(uint64_t into, uint64_t from, uint32_t bytes) {
    for (uint32_t at = threadIdx.x * sizeof(Unit); at < bytes; at += blockDim.x * sizeof(Unit)) store_raw<Unit>(into + at, load_raw<Unit>(from + at));
}

// All threads take their shares.
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

// What a command brings along: the first thread has it all.
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

// Loads words of the host's memory, with all that was written before they were.
DOORBELL_EVERYWHERE void look(uint64_t *words, uint64_t from, uint32_t count) {
    for (uint32_t word = threadIdx.x; word < count; word += blockDim.x) words[word] = load_acquire<uint64_t>(from + 8 * word);
}

}  // namespace doorbell

extern "C" __global__ void __launch_bounds__(256) small_copies(doorbell::Small small) {
    using namespace doorbell;
    __shared__ uint64_t beginning[BEGINNING], command[PARTS];
    // Whoever takes the launch back sets REVOKED and then looks for `begun`: one of the two sees the other's word. The first thread is the one that loads REVOKED.
    if (threadIdx.x == 0) {
        store_relaxed<uint64_t>(small.words + 16, 1);
        __threadfence_system();
    }
    look(beginning, small.beginning, BEGINNING);
    __syncthreads();
    uint64_t number = beginning[NUMBER];
    if (beginning[BYTES + FIRST] && !beginning[REVOKED]) {
        carry_out(beginning + FIRST);
        // What every thread has stored is there for all before the word says so: the barrier hands it to the first thread, whose release covers it.
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
        // The next look writes to `command`, and the word is for what all threads have stored.
        __syncthreads();
        if (there == PARTS) {
            if (threadIdx.x == 0) store_release<uint64_t>(small.words, number);
            number++;
        }
    }
    if (threadIdx.x == 0) store_release<uint64_t>(small.words + 8, beginning[LAUNCH]);
}
