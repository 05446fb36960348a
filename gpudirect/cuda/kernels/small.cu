// Short copies without a launch each: one block that stays for a while, takes commands from memory of the host, and copies by loads and stores.
//
// The host puts a command into the ring, its number last, and waits for the word `done`. The block leaves when nothing came for a while, and after some time anyway, lest a program that waits for its device waits for ever;
// it says so by the word `left`. It never leaves a command half done: whoever launches it anew finds it go on behind `done`.
#include "memory.cuh"

namespace doorbell {

struct SmallCopies {
    // Commands of 32 bytes: where to, where from, how many bytes, its number from 1 on.
    uint64_t commands;
    // The words `done`, the number of the last command that was carried out, and `left`, the number of the last launch that has ended.
    uint64_t words;
    // How many commands there is room for: a power of two.
    uint32_t slots;
    // Looks for a command before it leaves, in a row and in all.
    uint32_t patience, life;
    // The number of this launch, from 1 on.
    uint32_t launch;
};

// All threads take their shares.
DOORBELL_EVERYWHERE void copy_share(uint64_t into, uint64_t from, uint32_t bytes, uint32_t thread, uint32_t threads) {
    if (((into | from | bytes) & 7) == 0) {
        for (uint32_t at = thread; at < bytes / 8; at += threads) {
            store_raw<uint64_t>(into + 8 * at, load_raw<uint64_t>(from + 8 * at));
        }
    } else {
        for (uint32_t at = thread; at < bytes; at += threads) {
            store_raw<uint8_t>(into + at, load_raw<uint8_t>(from + at));
        }
    }
}

}  // namespace doorbell

extern "C" __global__ void __launch_bounds__(256) small_copies(doorbell::SmallCopies copies) {
    using namespace doorbell;
    __shared__ uint64_t into, from;
    __shared__ uint32_t bytes, leaving;
    uint64_t next = load_acquire<uint64_t>(copies.words);
    uint32_t looks = 0;
    for (;;) {
        if (threadIdx.x == 0) {
            const uint64_t command = copies.commands + 32 * (next & (copies.slots - 1));
            bool there = false;
            for (uint32_t idle = 0; looks < copies.life && idle < copies.patience; idle++) {
                looks++;
                there = load_acquire<uint64_t>(command + 24) == next + 1;
                if (there) break;
                relax();
            }
            if (there) {
                into = load_raw<uint64_t>(command);
                from = load_raw<uint64_t>(command + 8);
                bytes = static_cast<uint32_t>(load_raw<uint64_t>(command + 16));
            }
            leaving = !there;
        }
        __syncthreads();
        if (leaving) break;
        copy_share(into, from, bytes, threadIdx.x, blockDim.x);
        // What every thread has stored is there for all before the word says so.
        __threadfence_system();
        __syncthreads();
        next++;
        if (threadIdx.x == 0) store_release<uint64_t>(copies.words, next);
    }
    if (threadIdx.x == 0) store_release<uint64_t>(copies.words + 8, copies.launch);
}
