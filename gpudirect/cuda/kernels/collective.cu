// Collectives of GPUs that map each other's memory: an interpreter of the programs that
// collectives/src/gpu/lower makes of plans. One kernel per element type, `collective_TYPE`, and
// `collective_move_BYTES` without reduction; `lines_...` sends messages as lines (LL protocol).
//
// Each thread block runs the whole program of its strand on its share of each data block, slice by
// slice, and synchronizes only with the block of the same number on other ranks. A group of the
// program waits for its flag words, works, and signals its own. Parts of a group may be late (one
// slice behind), so that a slice is sent while the previous one is reduced. Flag words only count
// up, continuing from counts in memory, so a captured launch can be repeated.
//
// A line is 8 bytes of data with the message's number as flag, which repeats after 2^32 messages of
// a block.
//
// Built by `cargo xtask kernels`; for the host as in host.cuh.
#include "operation.cuh"

namespace doorbell {

template <class T, bool REDUCES, bool LINES>
struct Collective {
    using Raw = typename T::Raw;
    using Wide = typename T::Wide;
    static constexpr int ELEMENTS = Group<T>::ELEMENTS;
    static constexpr int UNROLL = sizeof(Raw) == 1 ? (DOORBELL_UNROLL + 1) / 2 : DOORBELL_UNROLL;
    static constexpr int QUADS = 2;
    // Elements of a line, and sources whose lines are awaited at once.
    static constexpr int LINE = 8 / sizeof(Raw);
    static constexpr int BATCH = 4;

    const Operation &op;
    Block &block;
    uint32_t strand;
    uint32_t share;
    uint32_t shares;
    uint32_t slices;

    DOORBELL_INSIDE Collective(const Operation &op, Block &block)
        : op(op), block(block), strand(blockIdx.x % op.strands), share(blockIdx.x / op.strands), shares(gridDim.x / op.strands), slices(0) {}

    // Those that execute the program. With lines there is nothing to signal.
    DOORBELL_INSIDE static uint32_t threads() {
        return LINES ? blockDim.x : workers();
    }

    // A thread's number, beginning with this warp: what different warps do takes no longer than one of it.
    DOORBELL_INSIDE static uint32_t from_warp(uint32_t warp) {
        const uint32_t first = 32 * warp, all = threads();
        return first >= all ? threadIdx.x : threadIdx.x >= first ? threadIdx.x - first : threadIdx.x + all - first;
    }

    // Start of the share of `elements`; `share + 1` gives its end.
    DOORBELL_INSIDE uint64_t begin(uint64_t elements, uint32_t share) const {
        const uint32_t units = static_cast<uint32_t>((elements + (uint64_t(1) << op.granule_log2) - 1) >> op.granule_log2);
        const uint32_t each = units / shares, more = units % shares;
        const uint64_t at = (uint64_t(share) * each + (share < more ? share : more)) << op.granule_log2;
        return at < elements ? at : elements;
    }

    DOORBELL_INSIDE uint64_t flags(uint32_t of, uint32_t from) const {
        return op.arenas[of] + op.flags + (blockIdx.x * MOST_RANKS + from) * sizeof(Flags);
    }

    DOORBELL_INSIDE uint64_t counts(uint32_t peer) const {
        return op.arenas[op.rank] + op.counts + (blockIdx.x * MOST_RANKS + peer) * COUNTS;
    }

    DOORBELL_INSIDE uint64_t slot(uint32_t of, uint32_t from, uint32_t number) const {
        const uint32_t fifo = (from < of ? from : from - 1) * op.blocks + blockIdx.x;
        return op.arenas[of] + op.fifos + (uint64_t(fifo) * op.slots + (number & (op.slots - 1))) * op.slot_bytes;
    }

    DOORBELL_INSIDE bool await(uint64_t word, uint32_t until, uint32_t &seen) {
        return await_count(word, until, seen, op.stop);
    }

    // Messages to and from a peer per slice.
    DOORBELL_INSIDE uint64_t traffic(uint32_t peer) const {
        return op.program[static_cast<uint32_t>(op.program[strand]) + 1 + peer];
    }

    // The slice of an item that may be late, and whether that slice exists.
    DOORBELL_INSIDE bool is_due(uint32_t late, uint32_t turn, uint32_t &slice) const {
        slice = turn - late;
        return slice < slices;
    }

    DOORBELL_INSIDE bool wait(uint64_t word, uint32_t turn) {
        uint32_t slice;
        if (!is_due(word_late(word), turn, slice)) return true;
        const uint32_t kind = word & 0xf, peer = word >> 8 & 0xff, number = static_cast<uint32_t>(word >> 16);
        const Counts &counts = block.counts[peer];
        // Of a slice, and of earlier operations.
        const uint32_t each = kind == READY ? 0 : messages_of(traffic(peer) >> (kind == DIRECT ? 32 : kind == STAGED ? 48 : 16));
        const uint32_t before = kind == DIRECT ? counts.received_direct : kind == STAGED ? counts.received_staged : kind == CREDIT ? counts.sent_staged : counts.written;
        uint32_t count = slice * each + number + 1;
        if (kind == CREDIT) {
            count -= op.slots;
            // Slots of another length are in other places: those are to be read first.
            if (counts.slots != op.slots && static_cast<int32_t>(count) < 0) count = 0;
        }
        return await(flags(op.rank, peer) + kind * 4, before + count, block.seen[kind][peer]);
    }

    // Signals a word of a group.
    DOORBELL_INSIDE void signal(uint64_t word, uint32_t turn) {
        uint32_t slice;
        if (!is_due(word_late(word), turn, slice) || ((word & LAST) != 0 && slice + 1 < slices)) return;
        // What covers a word is late by a slice more.
        if ((word & COVERED) != 0 && slice > 0) return;
        const uint32_t kind = word & 0xf, peer = word >> 8 & 0xff, number = static_cast<uint32_t>(word >> 16);
        const Counts &counts = block.counts[peer];
        const uint32_t each = messages_of(traffic(peer) >> (kind == DIRECT ? 0 : kind == STAGED ? 16 : 48));
        const uint32_t before = kind == DIRECT ? counts.sent_direct : kind == STAGED ? counts.sent_staged : counts.received_staged;
        const uint64_t at = flags(peer, op.rank) + kind * 4;
        const uint32_t value = before + slice * each + number + 1;
        // What was read has been stored elsewhere by now, so a credit needs no release.
        if (kind == CREDIT) {
            store_relaxed<uint32_t>(at, value);
        } else {
            store_release<uint32_t>(at, value);
        }
    }

    // By so many threads, of which each has the words for some peers: those for one are sent in order.
    DOORBELL_INSIDE void signal_all(uint32_t at, uint32_t count, uint32_t turn, uint32_t thread, uint32_t threads) {
        #pragma unroll 1
        for (uint32_t i = 0; i < count; i++) {
            const uint64_t word = op.program[at + i];
            if ((word >> 8 & 0xff) % threads == thread) signal(word, turn);
        }
    }

    // Resolves an operand's address in a slice.
    DOORBELL_INSIDE void locate(uint32_t index, uint64_t word, uint64_t body, uint32_t slice) {
        const uint32_t kind = static_cast<uint32_t>(word >> 60), peer = word >> 54 & 0x3f, number = word >> 46 & 0xff;
        const uint64_t offset = word & 0xffffffffff, elements = body & 0xffffffffff;
        const uint64_t at = offset + begin(elements, share) + slice * op.slice;
        uint64_t address;
        if (kind == RECEIVED || kind == THEIR_SLOT) {
            const bool received = kind == RECEIVED;
            const uint32_t each = messages_of(traffic(peer) >> (received ? 48 : 16));
            const uint32_t message = (received ? block.counts[peer].received_staged : block.counts[peer].sent_staged) + slice * each + number;
            address = slot(received ? op.rank : peer, received ? peer : op.rank, message);
            if (LINES) block.lines[index] = uint64_t(1) << 32 | (message + 1);
        } else if (kind == SCRATCH) {
            address = op.arenas[op.rank] + op.scratch + (uint64_t(blockIdx.x) * op.scratch_blocks + offset) * op.scratch_bytes;
        } else {
            address = (kind == INPUT ? op.input : kind == OUTPUT ? op.output : op.outputs[peer]) + at * sizeof(Raw);
        }
        block.addresses[index] = address;
        if (LINES && kind != RECEIVED && kind != THEIR_SLOT) block.lines[index] = 0;
    }

    DOORBELL_INSIDE void move(const Body &body, uint32_t elements) {
        const uint32_t bytes = elements * static_cast<uint32_t>(body.partial && T::NARROW ? 4 : sizeof(Raw));
        move_bytes(block.addresses[body.first], &block.addresses[body.first + 1], body.targets, bytes);
    }

    // Whether an operand is partial results, or scaled input.
    DOORBELL_INSIDE bool is_partial(uint32_t operands, uint32_t index) const {
        return T::NARROW && (op.program[operands + index] >> 45 & 1);
    }

    template <class Op>
    DOORBELL_INSIDE bool is_scaled(uint32_t operands, uint32_t index) const {
        return Op::SCALED && static_cast<uint32_t>(op.program[operands + index] >> 60) == INPUT;
    }

    DOORBELL_INSIDE Wide scalar() const {
        if constexpr (sizeof(Wide) == 8) {
            return bits_as<Wide>(op.scalar);
        } else {
            return bits_as<Wide>(static_cast<uint32_t>(op.scalar));
        }
    }

    template <class Op, int COUNT>
    DOORBELL_INSIDE void combine(Wide (&sum)[COUNT], const Words &words, bool scaled) const {
        Wide value[COUNT];
        Group<T>::decode(words, value);
        if constexpr (Op::SCALED) {
            if (scaled) {
                const Wide factor = scalar();
                #pragma unroll
                for (int i = 0; i < COUNT; i++) value[i] = multiply(value[i], factor);
                Group<T>::decode(Group<T>::encode(value), value);
            }
        }
        #pragma unroll
        for (int i = 0; i < COUNT; i++) sum[i] = Op::apply(sum[i], value[i]);
    }

    template <class Op, int COUNT>
    DOORBELL_INSIDE void finish(Wide (&sum)[COUNT], bool whole) const {
        if constexpr (Op::DIVIDED) {
            if (whole) {
                #pragma unroll
                for (int i = 0; i < COUNT; i++) sum[i] = T::divide(sum[i], op.divisor);
            }
        }
    }

    DOORBELL_INSIDE static void load(Words (&words)[UNROLL], uint64_t from, uint32_t at, uint32_t stride, uint32_t end) {
        #pragma unroll
        for (int u = 0; u < UNROLL; u++) words[u] = load_or_zero<16>(from + uint64_t(at + u * stride) * 16, at + u * stride < end);
    }

    // Copies overlapped with a reduction: the first bodies of a group, each with one source and one
    // aligned target.
    struct Beside {
        uint32_t count;
        uint32_t longest;
    };

    DOORBELL_INSIDE uint32_t units(uint32_t move) const {
        return block.elements[move] * static_cast<uint32_t>(sizeof(Raw)) / 16;
    }

    DOORBELL_INSIDE void load_move(Words (&words)[UNROLL], uint32_t move, uint32_t at) const {
        load(words, block.addresses[2 * move], at, threads(), units(move));
    }

    DOORBELL_INSIDE void store_move(const Words (&words)[UNROLL], uint32_t move, uint32_t at) const {
        const uint64_t into = block.addresses[2 * move + 1];
        const uint32_t end = units(move), stride = threads();
        #pragma unroll
        for (int u = 0; u < UNROLL; u++) store_words<16>(into + uint64_t(at + u * stride) * 16, words[u], at + u * stride < end);
    }

    // Groups of 16 bytes of elements. Loads of two sources and of some copies are issued before
    // the first is used.
    template <class Op>
    DOORBELL_INSIDE void groups(const Body &body, uint32_t operands, uint32_t offset, uint32_t count, const Beside &beside) {
        const uint64_t *sources = &block.addresses[body.first], *targets = sources + body.sources;
        const uint32_t stride = threads(), thread = threadIdx.x;
        const uint32_t end = count > beside.longest ? count : beside.longest;
        #pragma unroll 1
        for (uint32_t first = 0; first < end; first += UNROLL * stride) {
            const uint32_t at = first + thread;
            Words moved[DOORBELL_BESIDE][UNROLL];
            #pragma unroll
            for (uint32_t k = 0; k < DOORBELL_BESIDE; k++) {
                if (k < beside.count) load_move(moved[k], k, at);
            }
            Wide sums[UNROLL][ELEMENTS];
            #pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                #pragma unroll
                for (int i = 0; i < ELEMENTS; i++) sums[u][i] = Op::template neutral<T>();
            }
            #pragma unroll 1
            for (uint32_t source = 0; source < body.sources; source += 2) {
                const bool two = source + 1 < body.sources;
                Words one[UNROLL], other[UNROLL];
                load(one, sources[source] + offset, at, stride, count);
                load(other, sources[two ? source + 1 : source] + offset, at, stride, two ? count : 0);
                if (source == 0) {
                    #pragma unroll
                    for (uint32_t k = 0; k < DOORBELL_BESIDE; k++) {
                        if (k < beside.count) store_move(moved[k], k, at);
                    }
                }
                #pragma unroll
                for (int u = 0; u < UNROLL; u++) combine<Op>(sums[u], one[u], is_scaled<Op>(operands, body.first + source));
                if (two) {
                    #pragma unroll
                    for (int u = 0; u < UNROLL; u++) combine<Op>(sums[u], other[u], is_scaled<Op>(operands, body.first + source + 1));
                }
            }
            Words words[UNROLL];
            #pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                finish<Op>(sums[u], body.whole);
                words[u] = Group<T>::encode(sums[u]);
            }
            #pragma unroll 1
            for (uint32_t target = 0; target < body.targets; target++) {
                const uint64_t into = targets[target] + offset;
                #pragma unroll
                for (int u = 0; u < UNROLL; u++) store_words<16>(into + uint64_t(at + u * stride) * 16, words[u], at + u * stride < count);
            }
            #pragma unroll 1
            for (uint32_t move = DOORBELL_BESIDE; move < beside.count; move++) {
                load_move(moved[0], move, at);
                store_move(moved[0], move, at);
            }
        }
    }

    // Four elements at a time, where some operands are partial results.
    template <class Op>
    DOORBELL_INSIDE void quads(const Body &body, uint32_t operands, uint32_t count) {
        constexpr int BYTES = 4 * sizeof(Raw) < 16 ? 4 * sizeof(Raw) : 16;
        const uint64_t *sources = &block.addresses[body.first], *targets = sources + body.sources;
        const uint32_t stride = threads(), thread = threadIdx.x;
        #pragma unroll 1
        for (uint32_t first = 0; first < count; first += QUADS * stride) {
            const uint32_t at = first + thread;
            Wide sums[QUADS][4];
            #pragma unroll
            for (int u = 0; u < QUADS; u++) {
                #pragma unroll
                for (int i = 0; i < 4; i++) sums[u][i] = Op::template neutral<T>();
            }
            #pragma unroll 1
            for (uint32_t source = 0; source < body.sources; source++) {
                Words words[QUADS];
                if (is_partial(operands, body.first + source)) {
                    #pragma unroll
                    for (int u = 0; u < QUADS; u++) words[u] = load_or_zero<16>(sources[source] + uint64_t(at + u * stride) * 16, at + u * stride < count);
                    #pragma unroll
                    for (int u = 0; u < QUADS; u++) {
                        #pragma unroll
                        for (int i = 0; i < 4; i++) sums[u][i] = Op::apply(sums[u][i], static_cast<Wide>(bits_as<float>(words[u].word[i])));
                    }
                } else {
                    #pragma unroll
                    for (int u = 0; u < QUADS; u++) words[u] = load_or_zero<BYTES>(sources[source] + uint64_t(at + u * stride) * BYTES, at + u * stride < count);
                    #pragma unroll
                    for (int u = 0; u < QUADS; u++) combine<Op>(sums[u], words[u], is_scaled<Op>(operands, body.first + source));
                }
            }
            const bool partial = is_partial(operands, body.first + body.sources);
            if (!partial) {
                #pragma unroll
                for (int u = 0; u < QUADS; u++) finish<Op>(sums[u], body.whole);
            }
            #pragma unroll 1
            for (uint32_t target = 0; target < body.targets; target++) {
                #pragma unroll
                for (int u = 0; u < QUADS; u++) {
                    if (partial) {
                        Words words;
                        #pragma unroll
                        for (int i = 0; i < 4; i++) words.word[i] = bits_as<uint32_t>(static_cast<float>(sums[u][i]));
                        store_words<16>(targets[target] + uint64_t(at + u * stride) * 16, words, at + u * stride < count);
                    } else {
                        store_words<BYTES>(targets[target] + uint64_t(at + u * stride) * BYTES, Group<T>::encode(sums[u]), at + u * stride < count);
                    }
                }
            }
        }
    }

    template <class Op>
    DOORBELL_INSIDE void reduce(const Body &body, uint32_t operands, uint32_t elements, const Beside &beside) {
        const uint64_t *addresses = &block.addresses[body.first];
        const uint32_t all = body.sources + body.targets;
        uint32_t head = elements, middle = 0;
        if (T::NARROW && body.mixed) {
            uint64_t ragged = 0;
            #pragma unroll 1
            for (uint32_t i = 0; i < all; i++) ragged |= addresses[i] & (is_partial(operands, body.first + i) ? 15 : 4 * sizeof(Raw) - 1);
            if (ragged == 0) {
                head = 0;
                middle = elements & ~uint32_t(3);
                if constexpr (T::NARROW) quads<Op>(body, operands, middle / 4);
            }
        } else {
            uint64_t differing = 0;
            #pragma unroll 1
            for (uint32_t i = 1; i < all; i++) differing |= addresses[0] ^ addresses[i];
            if ((differing & 15) == 0) {
                head = (static_cast<uint32_t>(-addresses[0]) & 15) / static_cast<uint32_t>(sizeof(Raw));
                if (head > elements) head = elements;
                const uint32_t count = (elements - head) / ELEMENTS;
                middle = count * ELEMENTS;
                groups<Op>(body, operands, head * static_cast<uint32_t>(sizeof(Raw)), count, beside);
            }
        }
        // Unaligned elements, one by one.
        #pragma unroll 1
        for (uint32_t i = threadIdx.x; i < elements - middle; i += threads()) {
            const uint32_t at = i < head ? i : i + middle;
            Wide sum = Op::template neutral<T>();
            #pragma unroll 1
            for (uint32_t source = 0; source < body.sources; source++) {
                Wide value;
                if (is_partial(operands, body.first + source)) {
                    value = static_cast<Wide>(bits_as<float>(load_raw<uint32_t>(addresses[source] + at * sizeof(float))));
                } else {
                    value = T::decode(load_raw<Raw>(addresses[source] + at * sizeof(Raw)));
                    if (is_scaled<Op>(operands, body.first + source)) value = T::decode(T::encode(multiply(value, scalar())));
                }
                sum = Op::apply(sum, value);
            }
            const bool partial = is_partial(operands, body.first + body.sources);
            if constexpr (Op::DIVIDED) {
                if (body.whole && !partial) sum = T::divide(sum, op.divisor);
            }
            #pragma unroll 1
            for (uint32_t target = 0; target < body.targets; target++) {
                if (partial) {
                    store_raw(addresses[body.sources + target] + at * sizeof(float), bits_as<uint32_t>(static_cast<float>(sum)));
                } else {
                    store_raw(addresses[body.sources + target] + at * sizeof(Raw), T::encode(sum));
                }
            }
        }
    }

    // Loads `count` elements of a line, at any alignment.
    DOORBELL_INSIDE static void load_part(uint32_t (&data)[2], uint64_t from, uint32_t count) {
        if (count == LINE && (from & 7) == 0) {
            const Words words = load_or_zero<8>(from, true);
            data[0] = words.word[0];
            data[1] = words.word[1];
            return;
        }
        uint64_t bits = 0;
        #pragma unroll 1
        for (uint32_t i = 0; i < count; i++) bits |= static_cast<uint64_t>(load_raw<Raw>(from + i * sizeof(Raw))) << (8 * sizeof(Raw) * i & 63);
        data[0] = static_cast<uint32_t>(bits);
        data[1] = static_cast<uint32_t>(bits >> 32);
    }

    DOORBELL_INSIDE static void store_part(uint64_t into, const uint32_t (&data)[2], uint32_t count) {
        if (count == LINE && (into & 7) == 0) {
            const Words words = {{data[0], data[1], 0, 0}};
            store_words<8>(into, words, true);
            return;
        }
        const uint64_t bits = data[0] | static_cast<uint64_t>(data[1]) << 32;
        #pragma unroll 1
        for (uint32_t i = 0; i < count; i++) store_raw<Raw>(into + i * sizeof(Raw), static_cast<Raw>(bits >> (8 * sizeof(Raw) * i & 63)));
    }

    template <class Then>
    DOORBELL_INSIDE void by_operator(Then then) const {
        switch (op.function) {
        case SUM: return then(Sum());
        case PROD: return then(Prod());
        case MIN: return then(Min());
        case MAX: return then(Max());
        case AVG: return then(Average());
        default: return then(ScaledSum());
        }
    }

    // Waits for a line of each source that is lines, and loads a part of the others. False if stopped.
    DOORBELL_INSIDE bool gather(uint32_t (&data)[BATCH][2], const Body &body, uint32_t first, uint32_t line, uint32_t count) {
        const uint64_t *addresses = &block.addresses[body.first], *flags = &block.lines[body.first];
        bool is_here[BATCH];
        #pragma unroll
        for (int k = 0; k < BATCH; k++) {
            is_here[k] = first + k >= body.sources || flags[first + k] == 0;
            data[k][0] = data[k][1] = 0;
            if (first + k < body.sources && is_here[k]) load_part(data[k], addresses[first + k] + uint64_t(line) * LINE * sizeof(Raw), count);
        }
        #pragma unroll 1
        for (uint32_t looks = 1;; looks++) {
            bool all = true;
            Line found[BATCH];
            #pragma unroll
            for (int k = 0; k < BATCH; k++) {
                if (!is_here[k]) found[k] = load_line(addresses[first + k] + uint64_t(line) * sizeof(Line));
            }
            #pragma unroll
            for (int k = 0; k < BATCH; k++) {
                if (is_here[k]) continue;
                const uint32_t flag = static_cast<uint32_t>(flags[first + k]);
                is_here[k] = found[k].flag[0] == flag && found[k].flag[1] == flag;
                all &= is_here[k];
                data[k][0] = found[k].data[0];
                data[k][1] = found[k].data[1];
            }
            if (all) return true;
            if (looks % 1024 == 0 && must_stop(op.stop)) {
                block.stopped = 1;
                return false;
            }
            relax();
        }
    }

    // False if stopped.
    DOORBELL_INSIDE bool lines(const Body &body, uint32_t operands, uint32_t elements) {
        const uint64_t *addresses = &block.addresses[body.first], *flags = &block.lines[body.first];
        #pragma unroll 1
        for (uint32_t line = threadIdx.x; line * LINE < elements; line += threads()) {
            const uint32_t rest = elements - line * LINE, count = rest < LINE ? rest : LINE;
            uint32_t result[2] = {0, 0};
            Wide sums[LINE] = {};
            if (REDUCES && body.reduces) {
                by_operator([&](auto kind) {
                    #pragma unroll
                    for (int i = 0; i < LINE; i++) sums[i] = decltype(kind)::template neutral<T>();
                });
            }
            #pragma unroll 1
            for (uint32_t first = 0; first < body.sources; first += BATCH) {
                uint32_t data[BATCH][2];
                if (!gather(data, body, first, line, count)) return false;
                if (REDUCES && body.reduces) {
                    by_operator([&](auto kind) {
                        #pragma unroll
                        for (int k = 0; k < BATCH; k++) {
                            if (first + k < body.sources) combine<decltype(kind)>(sums, {{data[k][0], data[k][1], 0, 0}}, is_scaled<decltype(kind)>(operands, body.first + first + k));
                        }
                    });
                } else {
                    result[0] = data[0][0];
                    result[1] = data[0][1];
                }
            }
            if (REDUCES && body.reduces) {
                if (op.function == AVG) finish<Average>(sums, body.whole);
                const Words words = Group<T>::encode(sums);
                result[0] = words.word[0];
                result[1] = words.word[1];
            }
            #pragma unroll 1
            for (uint32_t target = body.sources; target < body.sources + body.targets; target++) {
                if (flags[target] == 0) {
                    store_part(addresses[target] + uint64_t(line) * LINE * sizeof(Raw), result, count);
                } else {
                    store_line(addresses[target] + uint64_t(line) * sizeof(Line), result, static_cast<uint32_t>(flags[target]));
                }
            }
        }
        return true;
    }

    // The first bodies of a group that can be copied beside the reduction that follows them.
    DOORBELL_INSIDE Beside beside(uint32_t body_at, uint32_t bodies) const {
        Beside found = {0, 0};
        #pragma unroll 1
        for (uint32_t i = 0; i < bodies; i++) {
            const Body body(op.program[body_at + i]);
            const uint64_t *addresses = &block.addresses[body.first];
            uint64_t differing = body.reduces ? 0 : addresses[0] & 15;
            #pragma unroll 1
            for (uint32_t k = 1; k < body.sources + body.targets; k++) differing |= addresses[0] ^ addresses[k];
            if ((differing & 15) != 0 || (T::NARROW && (body.partial || body.mixed))) break;
            if (body.reduces) return found;
            if (body.targets != 1) break;
            const uint32_t end = units(i);
            found.count++;
            if (end > found.longest) found.longest = end;
        }
        return {0, 0};
    }

    // The last bytes of copies beside a reduction, less than 16 each.
    DOORBELL_INSIDE void move_rest(const Beside &beside) const {
        #pragma unroll 1
        for (uint32_t i = threadIdx.x; i < beside.count * 16; i += threads()) {
            const uint32_t move = i / 16, at = units(move) * 16 + i % 16;
            if (at < block.elements[move] * sizeof(Raw)) store_raw<uint8_t>(block.addresses[2 * move + 1] + at, load_raw<uint8_t>(block.addresses[2 * move] + at));
        }
    }

    // Runs one group in this turn. Returns the position of the next one, or 0 if stopped.
    DOORBELL_INSIDE uint32_t group(uint32_t at, uint32_t turn) {
        const uint64_t header = op.program[at];
        const uint32_t waits = header & 0xff, bodies = header >> 8 & 0xff, operands = header >> 16 & 0xff, signals = header >> 24 & 0xff;
        const uint32_t wait_at = at + 1, body_at = wait_at + waits, operand_at = body_at + bodies, signal_at = operand_at + operands;
        #pragma unroll 1
        for (uint32_t i = threadIdx.x; i < operands; i += threads()) {
            const uint64_t word = op.program[operand_at + i];
            const uint64_t body = op.program[body_at + (word >> 40 & 0x1f)];
            locate(i, word, body, turn - body_late(body));
        }
        #pragma unroll 1
        for (uint32_t i = from_warp(1); i < bodies; i += threads()) {
            const uint64_t elements = op.program[body_at + i] & 0xffffffffff;
            uint32_t slice;
            const bool due = is_due(body_late(op.program[body_at + i]), turn, slice);
            const uint64_t from = begin(elements, share) + slice * op.slice, end = begin(elements, share + 1);
            block.elements[i] = !due || from >= end ? 0 : static_cast<uint32_t>(end - from < op.slice ? end - from : op.slice);
        }
        #pragma unroll 1
        for (uint32_t i = from_warp(2); i < waits; i += threads()) {
            if (!wait(op.program[wait_at + i], turn)) block.stopped = 1;
        }
        sync(threads());
        if (block.stopped) return 0;
        // The first and last turns have only one of early and late work.
        const bool both = (header >> GROUP_LATE & 3) == 3 && turn > 0 && turn < slices;
        const Beside together = REDUCES && !LINES && both ? beside(body_at, bodies) : Beside{0, 0};
        if (together.count > 0) move_rest(together);
        #pragma unroll 1
        for (uint32_t i = together.count; i < bodies; i++) {
            const Body body(op.program[body_at + i]);
            const uint32_t elements = block.elements[i];
            if (elements == 0 && together.count == 0) continue;
            const Beside beside = i == together.count ? together : Beside{0, 0};
            if constexpr (LINES) {
                if (!lines(body, operand_at, elements)) break;
            } else if (REDUCES && body.reduces) {
                if constexpr (REDUCES) {
                    by_operator([&](auto kind) { reduce<decltype(kind)>(body, operand_at, elements, beside); });
                }
            } else {
                move(body, elements);
            }
        }
        sync(threads());
        if (block.stopped) return 0;
        if (!LINES && Signals::have_warp()) {
            if (threadIdx.x == 0 && signals > 0) block.signals.give(uint64_t(signal_at) << 32 | signals, turn);
        } else {
            signal_all(signal_at, signals, turn, threadIdx.x, threads());
        }
        return signal_at + signals;
    }

    // Whether a part of a group has a slice in this turn.
    DOORBELL_INSIDE bool has_slice(uint64_t header, uint32_t turn) const {
        bool has = false;
        #pragma unroll
        for (uint32_t late = 0; late < 3; late++) has |= (header >> (GROUP_LATE + late) & 1) != 0 && turn - late < slices;
        return has;
    }

    // All turns of the program; false if stopped.
    DOORBELL_INSIDE bool turns() {
        const uint32_t program = static_cast<uint32_t>(op.program[strand]);
        const uint32_t groups = op.program[program] & 0xffff, latest = op.program[program] >> 16 & 3;
        #pragma unroll 1
        for (uint32_t turn = 0; turn < slices + latest && slices > 0; turn++) {
            uint32_t at = program + 1 + op.ranks;
            #pragma unroll 1
            for (uint32_t index = 0; index < groups; index++) {
                const uint64_t header = op.program[at];
                if (has_slice(header, turn)) {
                    at = group(at, turn);
                    if (at == 0) return false;
                } else {
                    at += static_cast<uint32_t>(header >> 32 & 0xffff);
                }
            }
        }
        return true;
    }

    DOORBELL_INSIDE void run() {
        const uint32_t program = static_cast<uint32_t>(op.program[strand]);
        #pragma unroll 1
        for (uint32_t peer = threadIdx.x; peer < op.ranks; peer += blockDim.x) {
            if (peer == op.rank) continue;
            const Words first = load_or_zero<16>(counts(peer), true), second = load_or_zero<16>(counts(peer) + 16, true);
            Counts known = {first.word[0], first.word[1], first.word[2], first.word[3], second.word[0], second.word[1], second.word[2]};
            const uint64_t traffic = op.program[program + 1 + peer], at = flags(op.rank, peer);
            block.seen[CREDIT][peer] = load_acquire<uint32_t>(at + 8);
            block.seen[DIRECT][peer] = known.received_direct;
            block.seen[STAGED][peer] = known.received_staged;
            block.seen[READY][peer] = known.written;
            // From here on the peer may write this rank's output.
            if ((traffic >> 32 & 0xffff) != 0) store_release<uint32_t>(flags(peer, op.rank) + 12, ++known.readied);
            block.counts[peer] = known;
        }
        if (threadIdx.x == 0) {
            block.stopped = 0;
            block.signals.begin();
        }
        __syncthreads();
        const uint64_t longest = begin(op.longest, share + 1) - begin(op.longest, share);
        slices = op.longest == 0 ? 1 : static_cast<uint32_t>((longest + op.slice - 1) / op.slice);
        if (!LINES && Signals::have_warp() && threadIdx.x >= WORKERS) {
            block.signals.serve([&](uint64_t range, uint64_t turn, uint32_t lane) {
                signal_all(static_cast<uint32_t>(range >> 32), static_cast<uint32_t>(range), static_cast<uint32_t>(turn), lane, MOST_BLOCK - WORKERS);
            });
            return;
        }
        const bool is_done = turns();
        if (threadIdx.x == 0) block.signals.end();
        if (!is_done) return;
        #pragma unroll 1
        for (uint32_t peer = threadIdx.x; peer < op.ranks; peer += threads()) {
            if (peer == op.rank) continue;
            const uint64_t traffic = op.program[program + 1 + peer];
            Counts known = block.counts[peer];
            known.sent_direct += slices * messages_of(traffic);
            known.sent_staged += (slices + messages_late(traffic >> 16)) * messages_of(traffic >> 16);
            known.received_direct += slices * messages_of(traffic >> 32);
            known.received_staged += (slices + messages_late(traffic >> 48)) * messages_of(traffic >> 48);
            if ((traffic & 0xffff) != 0) known.written++;
            // Writes to this rank's output have arrived when the kernel ends.
            if (!await(flags(op.rank, peer), known.received_direct, block.seen[DIRECT][peer])) continue;
            store_words<16>(counts(peer), {{known.sent_direct, known.sent_staged, known.received_direct, known.received_staged}}, true);
            if (messages_of(traffic >> 16) != 0) known.slots = op.slots;
            store_words<16>(counts(peer) + 16, {{known.readied, known.written, known.slots, 0}}, true);
        }
    }
};

template <class T, bool REDUCES, bool LINES>
DOORBELL_INSIDE void collective(const Operation &operation) {
    __shared__ Block block;
    if (operation.version != PROGRAM_VERSION) return;
    Collective<T, REDUCES, LINES>(operation, block).run();
}

}  // namespace doorbell

#define DOORBELL_COLLECTIVE(name, Type, reduces) \
    extern "C" __global__ void __launch_bounds__(doorbell::MOST_BLOCK, DOORBELL_BLOCKS) collective_##name(const __grid_constant__ doorbell::Operation operation) { \
        doorbell::collective<Type, reduces, false>(operation); \
    } \
    extern "C" __global__ void __launch_bounds__(doorbell::MOST_BLOCK, DOORBELL_BLOCKS) lines_##name(const __grid_constant__ doorbell::Operation operation) { \
        doorbell::collective<Type, reduces, true>(operation); \
    }

DOORBELL_COLLECTIVE(move_1, doorbell::U8, false)
DOORBELL_COLLECTIVE(move_2, doorbell::Narrow<doorbell::F16>, false)
DOORBELL_COLLECTIVE(move_4, doorbell::U32, false)
DOORBELL_COLLECTIVE(move_8, doorbell::U64, false)
DOORBELL_COLLECTIVE(i8, doorbell::I8, true)
DOORBELL_COLLECTIVE(u8, doorbell::U8, true)
DOORBELL_COLLECTIVE(i32, doorbell::I32, true)
DOORBELL_COLLECTIVE(u32, doorbell::U32, true)
DOORBELL_COLLECTIVE(i64, doorbell::I64, true)
DOORBELL_COLLECTIVE(u64, doorbell::U64, true)
DOORBELL_COLLECTIVE(f16, doorbell::Narrow<doorbell::F16>, true)
DOORBELL_COLLECTIVE(bf16, doorbell::Narrow<doorbell::Bf16>, true)
DOORBELL_COLLECTIVE(f32, doorbell::F32, true)
DOORBELL_COLLECTIVE(f64, doorbell::F64, true)
DOORBELL_COLLECTIVE(f8e4m3, doorbell::Narrow<doorbell::F8E4M3>, true)
DOORBELL_COLLECTIVE(f8e5m2, doorbell::Narrow<doorbell::F8E5M2>, true)
