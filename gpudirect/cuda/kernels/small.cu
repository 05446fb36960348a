// Short copies: one block that copies what its launch names, stays for a moment, takes further commands from memory of the host, and copies those by loads and stores.
//
// The host puts a command into the ring and waits for the word `done`. The block leaves when nothing came for a while, and after some time anyway, lest a program that waits for its device waits for long; it says so by the
// word `left`. It never leaves a command half done: whoever launches it anew has it go on behind `done`.
//
// A look at the ring goes over the bus, which takes a microsecond: so one look brings all of a command, and every word of it says by itself whether it is there.
#include "memory.cuh"

namespace doorbell {

// Words of a command, each with the turn of the ring in its uppermost 8 bits: where to, where from, how many bytes, and if there are any, the bytes themselves, four in a word.
enum Part : uint32_t { INTO, FROM, BYTES, INLINE, PARTS = 8 };
constexpr uint64_t VALUE = (uint64_t(1) << 56) - 1;

struct Small {
    // Of 64 bytes each.
    uint64_t commands;
    // The word `done`, the number of the last command that was carried out, and 8 bytes on `left`, the number of the last launch that has ended.
    uint64_t words;
    // The number of the first command that is not done, from 1 on, and what the ring has of it: nothing where it is not there yet, or brings its bytes along.
    uint64_t number, into, from;
    uint32_t bytes;
    // How many commands there is room for: a power of two.
    uint32_t slots;
    // Looks for a command before it leaves, in a row and in all.
    uint32_t patience, life;
    // The number of this launch, from 1 on.
    uint64_t launch;
};

// The turns of the ring are counted from 1 to 255, as memory is 0 at first.
DOORBELL_EVERYWHERE uint64_t turn_of(uint64_t number, uint32_t slots) {
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

}  // namespace doorbell

extern "C" __global__ void __launch_bounds__(256) small_copies(doorbell::Small small) {
    using namespace doorbell;
    __shared__ uint64_t command[PARTS];
    uint64_t number = small.number;
    uint32_t looks = 0, idle = 0;
    if (small.from) {
        copy_share(small.into, small.from, small.bytes);
        // What every thread has stored is there for all before the word says so: the barrier hands it to the first thread, whose release covers it.
        __syncthreads();
        if (threadIdx.x == 0) store_release<uint64_t>(small.words, number);
        number++;
    }
    while (idle < small.patience && looks < small.life) {
        const uint64_t line = small.commands + ((number - 1) & (small.slots - 1)) * (8 * PARTS);
        for (uint32_t part = threadIdx.x; part < PARTS; part += blockDim.x) command[part] = load_acquire<uint64_t>(line + 8 * part);
        __syncthreads();
        const uint64_t turn = turn_of(number, small.slots);
        uint32_t there = 0;
        for (uint32_t part = 0; part < PARTS; part++) there += command[part] >> 56 == turn;
        looks++;
        idle++;
        if (there == PARTS) {
            const uint64_t into = command[INTO] & VALUE, from = command[FROM] & VALUE;
            const uint32_t bytes = static_cast<uint32_t>(command[BYTES]);
            if (from) {
                copy_share(into, from, bytes);
            } else {
                store_inline(into, bytes, command + INLINE);
            }
            idle = 0;
        } else {
            relax();
        }
        // The next look writes to `command`, and the word is for what all threads have stored.
        __syncthreads();
        if (there == PARTS) {
            if (threadIdx.x == 0) store_release<uint64_t>(small.words, number);
            number++;
        }
    }
    if (threadIdx.x == 0) store_release<uint64_t>(small.words + 8, small.launch);
}
