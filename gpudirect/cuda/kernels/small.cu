// Short collectives of GPUs that map each other's memory, in one exchange (LL protocol): each rank
// sends lines (lines.cuh) to the others and computes its result from theirs. `small_TYPE` reduces
// in rank order, `small_move` does not reduce. Who sends what to whom is in the launch argument:
// interpreting a plan would take half of the few microseconds.
//
// With `part` there are two exchanges: each rank reduces its part, or receives it from the root of
// a broadcast, and forwards it to all others.
//
// Each block has a share of each message with slots of its own, and communicates only with the same
// block of other ranks. Each thread sends its lines and waits for the same lines of the others;
// threads synchronize only to read the block's state.
//
// A block counts its operations. The count is the flag of the lines, selects one of DEPTH slots,
// and is in memory, so that a captured launch can be repeated. A slot is free once its rank has
// begun an operation later than the one DEPTH before. A rank that receives from every other knows
// that implicitly; otherwise each rank reports to all others what it has begun.
//
// Built by `cargo xtask kernels`; for the host as in host.cuh.
#include "operation.cuh"
#include "small_arguments.cuh"

namespace doorbell {

static_assert(sizeof(Small::arenas) == MOST_RANKS * sizeof(uint64_t), "the ranks of the argument");

// State of a block, in each arena.
struct State {
    // Operations of this block.
    uint32_t count;
    // An operation that all other ranks have begun.
    uint32_t begun_by_all;
    uint32_t unused[14];
    // What each other rank has reported as begun.
    uint32_t begun[MOST_RANKS];
};
constexpr uint32_t BEGUN = 64;
static_assert(sizeof(State) == BEGUN + MOST_RANKS * sizeof(uint32_t), "begins with what is this rank's own");

// Up to 8 bytes, aligned to Unit. All loads are issued before the first is used.
template <class Unit>
DOORBELL_INSIDE void load_units(uint32_t (&data)[2], uint64_t from, uint32_t bytes) {
    constexpr uint32_t UNITS = LINE_BYTES / sizeof(Unit);
    const uint32_t count = bytes / sizeof(Unit);
    Unit units[UNITS];
    #pragma unroll
    for (uint32_t i = 0; i < UNITS; i++) units[i] = load_raw<Unit>(from + (i < count ? i : count - 1) * sizeof(Unit));
    uint64_t bits = 0;
    #pragma unroll
    for (uint32_t i = 0; i < UNITS; i++) bits |= i < count ? static_cast<uint64_t>(units[i]) << 8 * sizeof(Unit) * i : 0;
    data[0] = static_cast<uint32_t>(bits);
    data[1] = static_cast<uint32_t>(bits >> 32);
}

template <class Unit>
DOORBELL_INSIDE void store_units(uint64_t into, const uint32_t (&data)[2], uint32_t bytes) {
    const uint64_t bits = data[0] | static_cast<uint64_t>(data[1]) << 32;
    #pragma unroll
    for (uint32_t i = 0; i < LINE_BYTES / sizeof(Unit); i++) {
        if (i < bytes / sizeof(Unit)) store_raw<Unit>(into + i * sizeof(Unit), static_cast<Unit>(bits >> 8 * sizeof(Unit) * i));
    }
}

template <class T, bool REDUCES>
struct Exchange {
    using Raw = typename T::Raw;
    using Wide = typename T::Wide;
    // Elements of a line, and ranks sent to, or awaited, at once.
    static constexpr int LINE = LINE_BYTES / sizeof(Raw);
    static constexpr int BATCH = 4;

    const Small &op;
    // Offset in an arena of this operation's slots.
    uint64_t slots;
    uint32_t count;

    DOORBELL_INSIDE explicit Exchange(const Small &op) : op(op) {}

    DOORBELL_INSIDE uint64_t state(uint32_t of) const {
        return op.arenas[of] + op.states + blockIdx.x * sizeof(State);
    }

    DOORBELL_INSIDE uint64_t slot(uint32_t of, uint32_t from) const {
        return op.arenas[of] + slots + uint64_t(from < of ? from : from - 1) * op.slot_bytes;
    }

    // Offset in a message of a line of this block.
    DOORBELL_INSIDE uint32_t place(uint32_t line) const {
        return (blockIdx.x * op.share + line) * LINE_BYTES;
    }

    // The index of a rank's part.
    DOORBELL_INSIDE uint32_t index(uint32_t rank) const {
        return rank - (rank > op.without ? 1 : 0);
    }

    // Offset in the whole of a rank's part, or 0.
    DOORBELL_INSIDE uint32_t part(uint32_t of) const {
        return index(of) * op.part * LINE_BYTES;
    }

    // Bytes of a line, 0 or less beyond the end; of a rank's part, if there are parts.
    DOORBELL_INSIDE int32_t length(uint32_t of, uint32_t at) const {
        const uint32_t part = op.part * LINE_BYTES, begin = index(of) * part;
        const uint32_t end = part == 0 || op.bytes - begin < part ? op.bytes - begin : part;
        const int32_t rest = static_cast<int32_t>(end - at);
        return rest < static_cast<int32_t>(LINE_BYTES) ? rest : static_cast<int32_t>(LINE_BYTES);
    }

    // An empty message is one empty line.
    DOORBELL_INSIDE static bool is_there(int32_t bytes, uint32_t at) {
        return bytes > 0 || at == 0;
    }

    // Zero if accesses can be of 8 bytes; the lower bits give the alignment.
    DOORBELL_INSIDE static uint32_t ragged(uint64_t address, int32_t bytes) {
        return (static_cast<uint32_t>(address) | static_cast<uint32_t>(bytes)) & 7;
    }

    DOORBELL_INSIDE static void load_ragged(uint32_t (&data)[2], uint64_t from, int32_t bytes) {
        const uint32_t by = ragged(from, bytes);
        if (sizeof(Raw) >= 4 || (by & 3) == 0) {
            load_units<uint32_t>(data, from, bytes);
        } else if (sizeof(Raw) == 2 || (by & 1) == 0) {
            load_units<uint16_t>(data, from, bytes);
        } else {
            load_units<uint8_t>(data, from, bytes);
        }
    }

    DOORBELL_INSIDE static void store(uint64_t into, const uint32_t (&data)[2], int32_t bytes) {
        if (bytes <= 0) return;
        const uint32_t by = ragged(into, bytes);
        if (by == 0) {
            store_words<8>(into, {{data[0], data[1], 0, 0}}, true);
        } else if (sizeof(Raw) >= 4 || (by & 3) == 0) {
            store_units<uint32_t>(into, data, bytes);
        } else if (sizeof(Raw) == 2 || (by & 1) == 0) {
            store_units<uint16_t>(into, data, bytes);
        } else {
            store_units<uint8_t>(into, data, bytes);
        }
    }

    DOORBELL_INSIDE void scale(uint32_t (&data)[2]) const {
        Wide factor;
        if constexpr (sizeof(Wide) == 8) {
            factor = bits_as<Wide>(op.scalar);
        } else {
            factor = bits_as<Wide>(static_cast<uint32_t>(op.scalar));
        }
        Wide values[LINE];
        Group<T>::decode({{data[0], data[1], 0, 0}}, values);
        #pragma unroll
        for (int i = 0; i < LINE; i++) values[i] = multiply(values[i], factor);
        const Words words = Group<T>::encode(values);
        data[0] = words.word[0];
        data[1] = words.word[1];
    }

    // Picks one of a batch by a run-time index, so that rare work is in the code once, while
    // frequent work is unrolled over the batch and no line waits for another.
    DOORBELL_INSIDE static void pick(uint32_t (&one)[2], const uint32_t (&data)[BATCH][2], int number) {
        one[0] = data[0][0];
        one[1] = data[0][1];
        #pragma unroll
        for (int k = 1; k < BATCH; k++) {
            one[0] = number == k ? data[k][0] : one[0];
            one[1] = number == k ? data[k][1] : one[1];
        }
    }

    DOORBELL_INSIDE static void put_back(const uint32_t (&one)[2], uint32_t (&data)[BATCH][2], int number) {
        #pragma unroll
        for (int k = 0; k < BATCH; k++) {
            data[k][0] = number == k ? one[0] : data[k][0];
            data[k][1] = number == k ? one[1] : data[k][1];
        }
    }

    // Rare cases of `send`: loads partial or unaligned lines (bits of `ragged`), and scales.
    DOORBELL_INSIDE void amend(uint32_t (&data)[BATCH][2], uint32_t ragged, bool scaled, uint32_t first, uint32_t at) const {
        #pragma unroll 1
        for (int k = 0; k < BATCH; k++) {
            uint32_t one[2];
            pick(one, data, k);
            if ((ragged >> k & 1) != 0) load_ragged(one, op.input + index(first + k) * op.input_step + at, length(first + k, at));
            if constexpr (REDUCES) {
                if (scaled) scale(one);
            }
            put_back(one, data, k);
        }
    }

    DOORBELL_INSIDE void send() const {
        const bool scaled = REDUCES && op.function == PREMULSUM;
        // The same data to all, or each its own.
        const bool alike = op.input_step == 0;
        #pragma unroll 1
        for (uint32_t line = threadIdx.x; line < op.share; line += blockDim.x) {
            const uint32_t at = place(line);
            #pragma unroll 1
            for (uint32_t first = 0; first < op.ranks; first += BATCH) {
                uint32_t data[BATCH][2], by = 0;
                #pragma unroll
                for (int k = 0; k < BATCH; k++) {
                    const uint32_t peer = first + k;
                    const int32_t bytes = length(peer, at);
                    const uint64_t from = op.input + index(peer) * op.input_step + at;
                    const bool goes = bytes > 0 && (alike ? k == 0 : (op.sends >> peer & 1) != 0);
                    const bool is_whole = ragged(from, bytes) == 0;
                    const Words words = load_or_zero<8>(from, goes && is_whole);
                    data[k][0] = words.word[0];
                    data[k][1] = words.word[1];
                    by |= goes && !is_whole ? 1u << k : 0;
                }
                if (by != 0 || scaled) amend(data, by, scaled, first, at);
                #pragma unroll
                for (int k = 0; k < BATCH; k++) {
                    const uint32_t peer = first + k;
                    const int32_t bytes = length(peer, at);
                    if ((op.sends >> peer & 1) == 0 || !is_there(bytes, at)) continue;
                    const uint32_t one[2] = {alike ? data[0][0] : data[k][0], alike ? data[0][1] : data[k][1]};
                    store_line(slot(peer, op.rank) + line * sizeof(Line), one, count);
                }
                if constexpr (!REDUCES) {
                    if (op.copies) copy(data, first, at);
                }
            }
        }
    }

    // The root's own copy of what it broadcasts in parts.
    DOORBELL_INSIDE void copy(const uint32_t (&data)[BATCH][2], uint32_t first, uint32_t at) const {
        #pragma unroll 1
        for (int k = 0; k < BATCH; k++) {
            uint32_t one[2];
            pick(one, data, k);
            if ((op.sends >> (first + k) & 1) != 0) store(op.output + part(first + k) + at, one, length(first + k, at));
        }
    }

    DOORBELL_INSIDE void load_own(uint32_t (&own)[2], uint32_t at, int32_t bytes) const {
        const uint64_t from = op.input + index(op.rank) * op.input_step + at;
        const Words words = load_or_zero<8>(from, bytes > 0 && ragged(from, bytes) == 0);
        own[0] = words.word[0];
        own[1] = words.word[1];
        if (bytes > 0 && ragged(from, bytes) != 0) load_ragged(own, from, bytes);
        if constexpr (REDUCES) {
            if (op.function == PREMULSUM) scale(own);
        }
    }

    // Waits for a line of each rank in `from`: of their parts, or of this rank's. False if stopped.
    DOORBELL_INSIDE bool gather(uint32_t (&data)[BATCH][2], uint32_t from, uint32_t first, uint32_t line, uint32_t at, bool of_theirs) const {
        bool is_here[BATCH];
        #pragma unroll
        for (int k = 0; k < BATCH; k++) {
            const uint32_t source = first + k;
            is_here[k] = (from >> source & 1) == 0 || source == op.rank || !is_there(length(of_theirs ? source : op.rank, at), at);
            data[k][0] = data[k][1] = 0;
        }
        #pragma unroll 1
        for (uint32_t looks = 1;; looks++) {
            bool all = true;
            Line found[BATCH];
            #pragma unroll
            for (int k = 0; k < BATCH; k++) {
                if (!is_here[k]) found[k] = load_line(slot(op.rank, first + k) + line * sizeof(Line));
            }
            #pragma unroll
            for (int k = 0; k < BATCH; k++) {
                if (is_here[k]) continue;
                is_here[k] = found[k].flag[0] == count && found[k].flag[1] == count;
                all &= is_here[k];
                data[k][0] = found[k].data[0];
                data[k][1] = found[k].data[1];
            }
            if (all) return true;
            if (looks % 1024 == 0 && must_stop(op.stop)) return false;
            relax();
        }
    }

    // Sends a line of this rank's part to the others.
    DOORBELL_INSIDE void forward(const uint32_t (&data)[2], uint32_t line) const {
        #pragma unroll 1
        for (uint32_t peer = 0; peer < op.ranks; peer++) {
            if ((op.forwards >> peer & 1) != 0) store_line(slot(peer, op.rank) + (op.share + line) * sizeof(Line), data, count);
        }
    }

    // Stores incoming data and this rank's own, or forwarded parts.
    DOORBELL_INSIDE void deliver(uint32_t from, bool is_forwarded) const {
        #pragma unroll 1
        for (uint32_t line = threadIdx.x; line < op.share; line += blockDim.x) {
            const uint32_t at = place(line);
            uint32_t own[2] = {0, 0};
            if constexpr (!REDUCES) {
                if ((from >> op.rank & 1) != 0) load_own(own, at, length(op.rank, at));
            }
            #pragma unroll 1
            for (uint32_t first = 0; first < op.ranks; first += BATCH) {
                uint32_t data[BATCH][2];
                if (!gather(data, from, first, is_forwarded ? op.share + line : line, at, is_forwarded)) return;
                uint32_t by = 0;
                #pragma unroll
                for (int k = 0; k < BATCH; k++) {
                    const uint32_t source = first + k;
                    data[k][0] = source == op.rank ? own[0] : data[k][0];
                    data[k][1] = source == op.rank ? own[1] : data[k][1];
                    const uint32_t whose = is_forwarded ? source : op.rank;
                    const int32_t bytes = length(whose, at);
                    const uint64_t into = op.output + source * op.output_step + part(whose) + at;
                    const bool comes = (from >> source & 1) != 0 && bytes > 0, is_whole = ragged(into, bytes) == 0;
                    store_words<8>(into, {{data[k][0], data[k][1], 0, 0}}, comes && is_whole);
                    by |= comes && !is_whole ? 1u << k : 0;
                    if constexpr (!REDUCES) {
                        if (comes && !is_forwarded && op.forwards != 0) forward(data[k], line);
                    }
                }
                if (by == 0) continue;
                #pragma unroll 1
                for (int k = 0; k < BATCH; k++) {
                    const uint32_t source = first + k, whose = is_forwarded ? source : op.rank;
                    uint32_t one[2];
                    pick(one, data, k);
                    if ((by >> k & 1) != 0) store(op.output + source * op.output_step + part(whose) + at, one, length(whose, at));
                }
            }
        }
    }

    template <class Op>
    DOORBELL_INSIDE void combine(Wide (&sums)[LINE], const uint32_t (&data)[BATCH][2], const uint32_t (&own)[2], uint32_t first) const {
        #pragma unroll
        for (int k = 0; k < BATCH; k++) {
            if ((op.gets >> (first + k) & 1) == 0) continue;
            const bool is_own = first + k == op.rank;
            Wide values[LINE];
            Group<T>::decode({{is_own ? own[0] : data[k][0], is_own ? own[1] : data[k][1], 0, 0}}, values);
            #pragma unroll
            for (int i = 0; i < LINE; i++) sums[i] = Op::apply(sums[i], values[i]);
        }
    }

    // PREMULSUM is a sum here: its data was multiplied before.
    template <class Then>
    DOORBELL_INSIDE void by_operator(Then then) const {
        switch (op.function) {
        case PROD: return then(Prod());
        case MIN: return then(Min());
        case MAX: return then(Max());
        default: return then(Sum());
        }
    }

    // Reduces incoming data; with two exchanges, forwards the result.
    DOORBELL_INSIDE void reduce() const {
        #pragma unroll 1
        for (uint32_t line = threadIdx.x; line < op.share; line += blockDim.x) {
            const uint32_t at = place(line);
            const int32_t bytes = length(op.rank, at);
            if (bytes <= 0) return;
            uint32_t own[2];
            load_own(own, at, bytes);
            Wide sums[LINE];
            by_operator([&](auto kind) {
                #pragma unroll
                for (int i = 0; i < LINE; i++) sums[i] = decltype(kind)::template neutral<T>();
            });
            #pragma unroll 1
            for (uint32_t first = 0; first < op.ranks; first += BATCH) {
                uint32_t data[BATCH][2];
                if (!gather(data, op.gets, first, line, at, false)) return;
                by_operator([&](auto kind) { combine<decltype(kind)>(sums, data, own, first); });
            }
            if (op.function == AVG) {
                #pragma unroll
                for (int i = 0; i < LINE; i++) sums[i] = T::divide(sums[i], op.divisor);
            }
            const Words words = Group<T>::encode(sums);
            const uint32_t result[2] = {words.word[0], words.word[1]};
            store(op.output + part(op.rank) + at, result, bytes);
            forward(result, line);
        }
    }

    // Waits until other ranks have slots free for this operation. False if stopped.
    DOORBELL_INSIDE bool await_room() const {
        const uint32_t wanted = op.sends | op.forwards;
        #pragma unroll 1
        for (uint32_t first = 0; first < op.ranks; first += BATCH) {
            #pragma unroll 1
            for (uint32_t looks = 1;; looks++) {
                const uint64_t begun = state(op.rank) + BEGUN + first * sizeof(uint32_t);
                const Words words = load_or_zero<16>(begun, true);
                bool all = true;
                #pragma unroll
                for (int k = 0; k < BATCH; k++) {
                    if ((wanted >> (first + k) & 1) != 0) all &= static_cast<int32_t>(words.word[k] - (count - DEPTH + 1)) >= 0;
                }
                if (all) break;
                if (looks % 1024 == 0 && must_stop(op.stop)) return false;
                relax();
            }
        }
        return true;
    }

    DOORBELL_INSIDE void run() {
        const Words known = load_or_zero<8>(state(op.rank), true);
        count = known.word[0] + 1;
        uint32_t begun_by_all = known.word[1];
        slots = op.slots + uint64_t(blockIdx.x * DEPTH + count % DEPTH) * (op.ranks - 1) * op.slot_bytes;
        const bool has_room = count - begun_by_all < DEPTH || await_room();
        if (has_room && op.sends != 0) send();
        #pragma unroll 1
        for (uint32_t peer = threadIdx.x; peer < op.ranks; peer += blockDim.x) {
            if (peer != op.rank) store_relaxed<uint32_t>(state(peer) + BEGUN + op.rank * sizeof(uint32_t), count);
        }
        // All threads have read the state by now.
        __syncthreads();
        if (threadIdx.x == 0) {
            if (op.receives_from_all) begun_by_all = count;
            // Remains true, and never so far back that wrapping would make it seem ahead.
            if (count - begun_by_all > 1u << 30) begun_by_all = count - (1u << 30);
            store_words<8>(state(op.rank), {{count, begun_by_all, 0, 0}}, true);
        }
        if (!has_room) return;
        if constexpr (REDUCES) {
            if (op.gets != 0) reduce();
        } else {
            if (op.gets != 0) deliver(op.gets, false);
        }
        if (op.forwards != 0) deliver(op.forwards, true);
    }
};

template <class T, bool REDUCES>
DOORBELL_INSIDE void small(const Small &operation) {
    if (operation.version != SMALL_VERSION) return;
    Exchange<T, REDUCES>(operation).run();
}

}  // namespace doorbell

#define DOORBELL_SMALL(name, Type, reduces) \
    extern "C" __global__ void __launch_bounds__(doorbell::MOST_BLOCK, 1) small_##name(const __grid_constant__ doorbell::Small operation) { \
        doorbell::small<Type, reduces>(operation); \
    }

DOORBELL_SMALL(move, doorbell::U8, false)
DOORBELL_SMALL(i8, doorbell::I8, true)
DOORBELL_SMALL(u8, doorbell::U8, true)
DOORBELL_SMALL(i32, doorbell::I32, true)
DOORBELL_SMALL(u32, doorbell::U32, true)
DOORBELL_SMALL(i64, doorbell::I64, true)
DOORBELL_SMALL(u64, doorbell::U64, true)
DOORBELL_SMALL(f16, doorbell::Narrow<doorbell::F16>, true)
DOORBELL_SMALL(bf16, doorbell::Narrow<doorbell::Bf16>, true)
DOORBELL_SMALL(f32, doorbell::F32, true)
DOORBELL_SMALL(f64, doorbell::F64, true)
DOORBELL_SMALL(f8e4m3, doorbell::Narrow<doorbell::F8E4M3>, true)
DOORBELL_SMALL(f8e5m2, doorbell::Narrow<doorbell::F8E5M2>, true)
