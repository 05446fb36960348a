// Dispatch of tokens to the ranks that have their experts, and combine of what the experts made.
// collectives/src/moe defines both, and where rows are.
//
// A pair is a token and one of its choices, numbered token * top_k + k; its position is that in the
// send order, by expert and token. Every block counts this rank's pairs by expert, which gives the
// first position of each; then each lists the pairs of its own experts, in order. Rows are stored
// directly in the receiver's memory: in slots that follow from the sender's counts alone (low
// latency), or consecutively, once all ranks' counts are known (high throughput). The experts'
// outputs return to the positions of their pairs, and are added in the order of a token's choices.
//
// Each rank writes words of its own in the memory of every other:
//   ready     by kind, the epoch for which its own memory may be written
//   counts    its pairs of each expert, with the epoch in the upper half
//   arrived   by thread block, the epoch of the dispatch whose rows are stored
//   returned  the same of a combine
// Epochs count up from words in the rank's own memory, so a captured launch can be repeated.
//
// What is read in a routing or from a peer is compared with its limit before it is part of an
// address; what exceeds it is reported, and nothing is written for it.
//
// Built by `cargo xtask kernels`; for the host as in host.cuh.
#include "moe.cuh"

namespace doorbell {

static_assert(sizeof(Moe::memories) == MOST_RANKS * sizeof(uint64_t), "the ranks of the argument");

enum Kind : uint32_t { DISPATCH, COMBINE, KINDS };

// What a rank receives.
enum Table : uint32_t { COUNTS, FIRST_ROWS, POSITIONS };

// Words of the state: the last epochs; the pairs of a dispatch.
constexpr uint32_t PAIRS = 4 * KINDS;

// What all kernels of a layer have in common.
struct Layer {
    const Moe &op;

    DOORBELL_INSIDE uint64_t own() const {
        return op.memories[op.rank];
    }

    DOORBELL_INSIDE uint32_t local() const {
        return op.experts / op.ranks;
    }

    DOORBELL_INSIDE uint32_t epoch(uint32_t kind) const {
        return load_raw<uint32_t>(op.state + kind * 4) + 1;
    }

    DOORBELL_INSIDE uint64_t ready(uint32_t of, uint32_t kind, uint32_t from) const {
        return op.memories[of] + op.ready + (kind * MOST_RANKS + from) * 4;
    }

    DOORBELL_INSIDE uint64_t counts(uint32_t of, uint32_t from) const {
        return op.memories[of] + op.counts + uint64_t(from) * op.experts * 8;
    }

    DOORBELL_INSIDE uint64_t finished(uint32_t of, uint32_t kind, uint32_t from) const {
        return op.memories[of] + (kind == DISPATCH ? op.arrived : op.returned) + from * MOST_BLOCKS * 4;
    }

    // One of the failures in the upper 8 bits, and a number in the lower 32. What a failure leads to
    // later is not reported.
    DOORBELL_INSIDE void report(uint64_t failure, uint32_t number) const {
        if (load_acquire<uint64_t>(op.report) == 0) store_relaxed<uint64_t>(op.report, failure << 56 | number);
    }

    // Of a pair; op.experts if it has none.
    DOORBELL_INSIDE uint32_t expert(uint32_t pair, bool reports) const {
        const int64_t index = op.index_bytes == 8 ? at<const int64_t>(op.indices)[pair] : at<const int32_t>(op.indices)[pair];
        if (index >= 0 && index < op.experts) return static_cast<uint32_t>(index);
        if (index != -1 && reports) report(NO_EXPERT, pair / op.top_k);
        return op.experts;
    }

    // By the first block: this rank's memory may be written for the epoch.
    DOORBELL_INSIDE void announce(uint32_t kind, uint32_t epoch) const {
        if (blockIdx.x != 0) return;
        #pragma unroll 1
        for (uint32_t rank = threadIdx.x; rank < op.ranks; rank += blockDim.x) store_release<uint32_t>(ready(rank, kind, op.rank), epoch);
    }

    // Waits for a word of each rank; false if stopped.
    DOORBELL_INSIDE bool await_ready(uint32_t kind, uint32_t epoch) const {
        return await_words(ready(op.rank, kind, 0), op.ranks, op.ranks, MOST_RANKS, epoch);
    }

    // Waits until all blocks of all ranks have finished.
    DOORBELL_INSIDE bool await_finished(uint32_t kind, uint32_t epoch) const {
        return await_words(finished(op.rank, kind, 0), op.ranks * op.blocks, op.blocks, MOST_BLOCKS, epoch);
    }

    // Waits for `count` words, in rows of `row` that are `stride` apart.
    DOORBELL_INSIDE bool await_words(uint64_t words, uint32_t count, uint32_t row, uint32_t stride, uint32_t epoch) const {
        __shared__ uint32_t stopped;
        __syncthreads();
        if (threadIdx.x == 0) stopped = 0;
        __syncthreads();
        #pragma unroll 1
        for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
            uint32_t seen = epoch - 1;
            if (!await_count(words + (uint64_t(i / row) * stride + i % row) * 4, epoch, seen, op.stop)) {
                stopped = 1;
                break;
            }
        }
        __syncthreads();
        return stopped == 0;
    }

    // This block has stored all that it stores.
    DOORBELL_INSIDE void finish(uint32_t kind, uint32_t epoch) const {
        __syncthreads();
        #pragma unroll 1
        for (uint32_t rank = threadIdx.x; rank < op.ranks; rank += blockDim.x) {
            store_release<uint32_t>(finished(rank, kind, op.rank) + blockIdx.x * 4, epoch);
        }
    }

    // The address in a table, of a local expert and a source: expert * ranks + source.
    DOORBELL_INSIDE uint64_t table(uint32_t which, uint32_t cell) const {
        return op.tables + (uint64_t(which) * op.experts + cell) * 4;
    }
};

struct Sender : Layer {
    // The positions after the last pair of each expert.
    uint32_t *const ends;

    DOORBELL_INSIDE uint32_t begin(uint32_t expert) const {
        return expert == 0 ? 0 : ends[expert - 1];
    }

    DOORBELL_INSIDE void count() const {
        const uint32_t pairs = op.tokens * op.top_k;
        #pragma unroll 1
        for (uint32_t i = threadIdx.x; i < op.experts; i += blockDim.x) ends[i] = 0;
        __syncthreads();
        #pragma unroll 1
        for (uint32_t pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
            const uint32_t expert = this->expert(pair, blockIdx.x == 0);
            if (expert < op.experts) count_one(ends[expert]);
        }
        scan_values(ends, op.experts);
    }

    // The pairs of every gridDim.x-th expert, in order.
    DOORBELL_INSIDE void list() const {
        __shared__ uint32_t sums[COLUMNS][MOST_BLOCK];
        const uint32_t pairs = op.tokens * op.top_k, each = (pairs + blockDim.x - 1) / blockDim.x;
        const uint32_t first = threadIdx.x * each, end = first + each < pairs ? first + each : pairs;
        #pragma unroll 1
        for (uint32_t start = blockIdx.x; start < op.experts; start += COLUMNS * gridDim.x) {
            #pragma unroll
            for (uint32_t c = 0; c < COLUMNS; c++) sums[c][threadIdx.x] = 0;
            #pragma unroll 1
            for (uint32_t pair = first; pair < end; pair++) {
                const uint32_t column = this->column(expert(pair, false), start);
                if (column < COLUMNS) sums[column][threadIdx.x]++;
            }
            uint32_t own[COLUMNS];
            #pragma unroll
            for (uint32_t c = 0; c < COLUMNS; c++) own[c] = sums[c][threadIdx.x];
            #pragma unroll 1
            for (uint32_t step = 1; step < blockDim.x; step *= 2) {
                __syncthreads();
                uint32_t before[COLUMNS];
                #pragma unroll
                for (uint32_t c = 0; c < COLUMNS; c++) before[c] = threadIdx.x >= step ? sums[c][threadIdx.x - step] : 0;
                __syncthreads();
                #pragma unroll
                for (uint32_t c = 0; c < COLUMNS; c++) sums[c][threadIdx.x] += before[c];
            }
            #pragma unroll
            for (uint32_t c = 0; c < COLUMNS; c++) sums[c][threadIdx.x] -= own[c];
            #pragma unroll 1
            for (uint32_t pair = first; pair < end; pair++) {
                const uint32_t expert = this->expert(pair, false), column = this->column(expert, start);
                if (column >= COLUMNS) continue;
                const uint32_t position = begin(expert) + sums[column][threadIdx.x]++;
                // Unless the routing has changed since it was counted.
                if (position >= pairs) break;
                store_raw<uint32_t>(op.order + uint64_t(position) * 4, pair);
                store_raw<uint32_t>(op.positions + uint64_t(pair) * 4, position);
            }
            __syncthreads();
        }
    }

    DOORBELL_INSIDE uint32_t column(uint32_t expert, uint32_t start) const {
        return expert < op.experts && expert >= start && (expert - start) % gridDim.x == 0 ? (expert - start) / gridDim.x : COLUMNS;
    }

    // To all ranks: they derive the positions from it.
    DOORBELL_INSIDE void publish(uint32_t epoch) const {
        #pragma unroll 1
        for (uint32_t rank = blockIdx.x; rank < op.ranks; rank += gridDim.x) {
            #pragma unroll 1
            for (uint32_t i = threadIdx.x; i < op.experts; i += blockDim.x) {
                store_relaxed<uint64_t>(counts(rank, op.rank) + i * 8, uint64_t(epoch) << 32 | (ends[i] - begin(i)));
            }
        }
    }

    // Of a token, to rows of the ranks' memory; 0: none.
    template <bool FP8, uint32_t N>
    DOORBELL_INSIDE void rows(uint32_t token, const uint64_t (&into)[N], const Lanes &at) const {
        const uint64_t from = op.input + uint64_t(token) * op.hidden * 2;
        if constexpr (FP8) {
            quantise_row(from, into, op.hidden / 8, op.row_bytes, at);
        } else {
            copy_row(from, into, op.hidden / 8, at);
        }
    }

    // 0 if it is not there.
    DOORBELL_INSIDE uint64_t row(uint32_t rank, uint32_t index) const {
        return index < op.capacity ? op.memories[rank] + op.rows + uint64_t(index) * op.row_bytes : 0;
    }

    // By the first block.
    DOORBELL_INSIDE void check() const {
        if (blockIdx.x != 0) return;
        #pragma unroll 1
        for (uint32_t rank = threadIdx.x; rank < op.ranks; rank += blockDim.x) {
            if (ends[(rank + 1) * local() - 1] - begin(rank * local()) > op.slots) report(TOO_MANY_PAIRS, rank);
        }
    }

    // Counts, and waits until the other ranks' memory may be written; false if stopped.
    DOORBELL_INSIDE bool start(uint32_t epoch) const {
        announce(DISPATCH, epoch);
        announce(COMBINE, this->epoch(COMBINE));
        count();
        check();
        list();
        if (!await_ready(DISPATCH, epoch)) return false;
        publish(epoch);
        return true;
    }

    // The pair at a position; any where there is none.
    DOORBELL_INSIDE uint32_t pair_at(uint32_t position) const {
        return position < op.pairs ? load_raw<uint32_t>(op.order + uint64_t(position) * 4) : 0;
    }

    // The rows of this block's experts, by turns of its groups: their pairs are loaded one row ahead.
    template <bool FP8>
    DOORBELL_INSIDE void send() const {
        const uint32_t epoch = this->epoch(DISPATCH);
        if (!start(epoch)) return;
        const Lanes at;
        uint32_t expert = blockIdx.x, position = expert < op.experts ? begin(expert) + at.group : 0;
        bool is_more = advance(expert, position);
        uint32_t pair = is_more ? pair_at(position) : 0;
        #pragma unroll 1
        while (is_more) {
            const uint32_t rank = expert / local(), slot = position - begin(rank * local()), current = pair;
            position += at.groups;
            is_more = advance(expert, position);
            if (is_more) pair = pair_at(position);
            if (slot >= op.slots || current >= op.tokens * op.top_k) continue;
            const uint64_t into[] = {row(rank, op.rank * op.slots + slot)};
            rows<FP8>(current / op.top_k, into, at);
        }
        finish(DISPATCH, epoch);
    }

    // A position beyond an expert's pairs becomes one of this block's next expert that has some.
    DOORBELL_INSIDE bool advance(uint32_t &expert, uint32_t &position) const {
        #pragma unroll 1
        while (expert < op.experts && position >= ends[expert]) {
            const uint32_t beyond = position - ends[expert];
            expert += gridDim.x;
            if (expert < op.experts) position = begin(expert) + beyond;
        }
        return expert < op.experts;
    }

    // Only counts.
    DOORBELL_INSIDE void prepare() const {
        if (start(epoch(DISPATCH)) && blockIdx.x == 0 && threadIdx.x == 0) store_raw<uint32_t>(op.state + PAIRS, ends[op.experts - 1]);
    }

    // What was counted, by token: each is read, and quantised, once.
    template <bool FP8>
    DOORBELL_INSIDE void write() const {
        __shared__ uint32_t bases[MOST_EXPERTS];
        #pragma unroll 1
        for (uint32_t i = threadIdx.x; i < op.experts; i += blockDim.x) bases[i] = load_raw<uint32_t>(op.bases + uint64_t(i) * 4);
        __syncthreads();
        const uint32_t pairs = load_raw<uint32_t>(op.state + PAIRS);
        const Lanes at;
        #pragma unroll 1
        for (uint32_t token = blockIdx.x * at.groups + at.group; token < op.tokens; token += gridDim.x * at.groups) {
            #pragma unroll 1
            for (uint32_t k = 0; k < op.top_k; k += TOGETHER) {
                uint64_t into[TOGETHER];
                #pragma unroll
                for (uint32_t i = 0; i < TOGETHER; i++) into[i] = k + i < op.top_k ? counted(token * op.top_k + k + i, pairs, bases) : 0;
                rows<FP8>(token, into, at);
            }
        }
        finish(DISPATCH, epoch(DISPATCH));
    }

    // The row of one of the first `pairs` positions; 0 if the pair has none.
    DOORBELL_INSIDE uint64_t counted(uint32_t pair, uint32_t pairs, const uint32_t *bases) const {
        const uint32_t expert = this->expert(pair, false), position = load_raw<uint32_t>(op.positions + uint64_t(pair) * 4);
        return expert < op.experts && position < pairs ? row(expert / local(), bases[expert] + position) : 0;
    }
};

// Of one block.
struct Receiver : Layer {
    uint32_t *const ends;
    // By source and expert: the sum of all counts up to and with that one.
    uint32_t *const sums;

    DOORBELL_INSIDE uint32_t before(uint32_t cell) const {
        return cell == 0 ? 0 : sums[cell - 1];
    }

    // The first position of a source's pairs for an expert.
    DOORBELL_INSIDE uint32_t position(uint32_t from, uint32_t expert) const {
        return before(from * op.experts + expert) - before(from * op.experts);
    }

    DOORBELL_INSIDE uint32_t count(uint32_t from, uint32_t expert) const {
        return sums[from * op.experts + expert] - before(from * op.experts + expert);
    }

    // Waits for a rank's count of pairs of an expert; false if stopped.
    DOORBELL_INSIDE bool take(uint64_t word, uint32_t epoch, uint32_t &count) const {
        uint64_t seen = load_acquire<uint64_t>(word);
        #pragma unroll 1
        for (uint32_t looks = 1; seen >> 32 != epoch; looks++) {
            if (looks % 1024 == 0 && must_stop(op.stop)) return false;
            relax();
            seen = load_acquire<uint64_t>(word);
        }
        count = static_cast<uint32_t>(seen);
        return true;
    }

    // Waits for all counts, and derives where rows are; false if stopped.
    DOORBELL_INSIDE bool place(uint32_t epoch) const {
        __shared__ uint32_t stopped;
        if (threadIdx.x == 0) stopped = 0;
        __syncthreads();
        #pragma unroll 1
        for (uint32_t i = threadIdx.x; i < op.ranks * op.experts; i += blockDim.x) {
            if (!take(counts(op.rank, 0) + uint64_t(i) * 8, epoch, sums[i])) {
                stopped = 1;
                break;
            }
        }
        __syncthreads();
        if (stopped) return false;
        scan_values(sums, op.ranks * op.experts);
        // First: false counts also exceed the capacity.
        receives();
        // Both use the ends.
        __syncthreads();
        if (op.contiguous) bases();
        return true;
    }

    // By expert: what is added to a position of this rank to make a row of the expert's.
    DOORBELL_INSIDE void bases() const {
        #pragma unroll 1
        for (uint32_t i = threadIdx.x; i < op.experts; i += blockDim.x) {
            ends[i] = 0;
            #pragma unroll 1
            for (uint32_t from = 0; from < op.ranks; from++) ends[i] += count(from, i);
        }
        scan_values(ends, op.experts);
        // All ranks find the same, and then none sends anything.
        #pragma unroll 1
        for (uint32_t rank = threadIdx.x; rank < op.ranks; rank += blockDim.x) {
            if (ends[(rank + 1) * local() - 1] - (rank == 0 ? 0 : ends[rank * local() - 1]) <= op.capacity) continue;
            report(NO_MEMORY, rank);
            store_raw<uint32_t>(op.state + PAIRS, 0);
        }
        #pragma unroll 1
        for (uint32_t i = threadIdx.x; i < op.experts; i += blockDim.x) {
            const uint32_t first = i / local() * local();
            uint32_t row = (i == 0 ? 0 : ends[i - 1]) - (first == 0 ? 0 : ends[first - 1]);
            #pragma unroll 1
            for (uint32_t from = 0; from < op.rank; from++) row += count(from, i);
            store_raw<uint32_t>(op.bases + uint64_t(i) * 4, row - position(op.rank, i));
        }
    }

    // The tables of what this rank receives.
    DOORBELL_INSIDE void receives() const {
        const uint32_t first = op.rank * local();
        #pragma unroll 1
        for (uint32_t i = threadIdx.x; i < op.experts; i += blockDim.x) {
            const uint32_t from = i % op.ranks, expert = first + i / op.ranks;
            const uint32_t position = this->position(from, expert), row = position - this->position(from, first);
            uint32_t count = this->count(from, expert);
            const bool fits = row <= op.slots && count <= op.slots - row && position <= op.pairs && count <= op.pairs - position;
            if (!fits) {
                report(FALSE_COUNTS, from);
                count = 0;
            }
            ends[i] = count;
            store_raw<uint32_t>(table(COUNTS, i), count);
            store_raw<uint32_t>(table(FIRST_ROWS, i), from * op.slots + row);
            store_raw<uint32_t>(table(POSITIONS, i), position);
        }
        if (!op.contiguous) return;
        scan_values(ends, op.experts);
        #pragma unroll 1
        for (uint32_t i = threadIdx.x; i < op.experts; i += blockDim.x) store_raw<uint32_t>(table(FIRST_ROWS, i), i == 0 ? 0 : ends[i - 1]);
    }

    DOORBELL_INSIDE void place_rows() const {
        place(epoch(DISPATCH));
    }

    DOORBELL_INSIDE void receive() const {
        const uint32_t epoch = this->epoch(DISPATCH);
        if (!op.contiguous && !place(epoch)) return;
        if (await_finished(DISPATCH, epoch) && threadIdx.x == 0) store_raw<uint32_t>(op.state + DISPATCH * 4, epoch);
    }
};

struct Combiner : Layer {
    uint32_t *const ends;

    // The experts' outputs, in the order of rows, beginning with those of the next rank.
    DOORBELL_INSIDE void send() const {
        const uint32_t epoch = this->epoch(COMBINE);
        announce(COMBINE, epoch);
        if (!await_ready(COMBINE, epoch)) return;
        #pragma unroll 1
        for (uint32_t i = threadIdx.x; i < op.experts; i += blockDim.x) ends[i] = load_raw<uint32_t>(table(COUNTS, cell(i)));
        __shared__ uint32_t rows[MOST_EXPERTS], positions[MOST_EXPERTS];
        #pragma unroll 1
        for (uint32_t i = threadIdx.x; i < op.experts; i += blockDim.x) {
            rows[i] = load_raw<uint32_t>(table(FIRST_ROWS, cell(i)));
            positions[i] = load_raw<uint32_t>(table(POSITIONS, cell(i)));
        }
        scan_values(ends, op.experts);
        const Lanes at;
        const uint64_t bytes = op.hidden * 2;
        uint32_t place = 0;
        #pragma unroll 1
        for (uint32_t i = blockIdx.x * at.groups + at.group; i < ends[op.experts - 1]; i += gridDim.x * at.groups) {
            #pragma unroll 1
            while (ends[place] <= i) place++;
            const uint32_t index = i - (place == 0 ? 0 : ends[place - 1]), row = rows[place] + index;
            if (row >= op.given) {
                report(NO_OUTPUT, row);
                break;
            }
            const uint64_t into = op.memories[cell(place) % op.ranks] + op.outputs;
            const uint64_t position[] = {into + (positions[place] + index) * bytes};
            copy_row(op.input + row * bytes, position, op.hidden / 8, at);
        }
        finish(COMBINE, epoch);
    }

    DOORBELL_INSIDE uint32_t cell(uint32_t place) const {
        return place / op.ranks * op.ranks + (place + op.rank + 1) % op.ranks;
    }

    // Of one block. What dispatch has received may be overwritten from now on.
    DOORBELL_INSIDE void receive() const {
        const uint32_t epoch = this->epoch(COMBINE);
        announce(DISPATCH, this->epoch(DISPATCH));
        if (await_finished(COMBINE, epoch) && threadIdx.x == 0) store_raw<uint32_t>(op.state + COMBINE * 4, epoch);
    }

    // By parts of tokens, each of a unit for each lane.
    DOORBELL_INSIDE void reduce() const {
        const Lanes at;
        const uint32_t units = op.hidden / 8, parts = (units + LANES - 1) / LANES;
        #pragma unroll 1
        for (uint64_t i = blockIdx.x * at.groups + at.group; i < uint64_t(op.tokens) * parts; i += gridDim.x * at.groups) {
            const uint32_t token = static_cast<uint32_t>(i / parts), unit = static_cast<uint32_t>(i % parts) * LANES + at.lane;
            if (unit < units) add(token, unit);
        }
    }

    DOORBELL_INSIDE void add(uint32_t token, uint32_t unit) const {
        float sums[8] = {};
        const uint64_t from = own() + op.outputs + uint64_t(unit) * UNIT, bytes = op.hidden * 2;
        #pragma unroll 1
        for (uint32_t k = 0; k < op.top_k; k += TOGETHER) {
            Words words[TOGETHER];
            bool chosen[TOGETHER];
            #pragma unroll
            for (uint32_t i = 0; i < TOGETHER; i++) {
                const uint32_t pair = token * op.top_k + k + i;
                chosen[i] = k + i < op.top_k && expert(pair, false) < op.experts;
                const uint32_t position = chosen[i] ? at<const uint32_t>(op.positions)[pair] : 0;
                words[i] = load_or_zero<UNIT>(from + position * bytes, chosen[i]);
            }
            #pragma unroll
            for (uint32_t i = 0; i < TOGETHER; i++) {
                if (!chosen[i]) continue;
                const float weight = at<const float>(op.weights)[token * op.top_k + k + i];
                #pragma unroll
                for (uint32_t w = 0; w < 4; w++) {
                    const Pair pair = decode_pair<Bf16>(words[i].word[w]);
                    sums[2 * w] = sums[2 * w] + weight * pair.low;
                    sums[2 * w + 1] = sums[2 * w + 1] + weight * pair.high;
                }
            }
        }
        Words words;
        #pragma unroll
        for (uint32_t w = 0; w < 4; w++) words.word[w] = encode_pair<Bf16>({sums[2 * w], sums[2 * w + 1]});
        store_words<UNIT>(op.output + (uint64_t(token) * op.hidden + unit * 8) * 2, words, true);
    }
};

}  // namespace doorbell

// Of two blocks beside one another, so that two layers can be executed at once.
#define DOORBELL_MOE(name, ...) \
    extern "C" __global__ void __launch_bounds__(doorbell::MOST_BLOCK, 2) name(const __grid_constant__ doorbell::Moe layer) { \
        [[maybe_unused]] __shared__ uint32_t ends[doorbell::MOST_EXPERTS]; \
        if (layer.version == doorbell::MOE_VERSION) doorbell::__VA_ARGS__; \
    }

#define DOORBELL_MOE_RECEIVER(name, call) \
    extern "C" __global__ void __launch_bounds__(doorbell::MOST_BLOCK, 1) name(const __grid_constant__ doorbell::Moe layer) { \
        __shared__ uint32_t ends[doorbell::MOST_EXPERTS]; \
        __shared__ uint32_t sums[doorbell::MOST_CELLS]; \
        if (layer.version == doorbell::MOE_VERSION) doorbell::Receiver{{layer}, ends, sums}.call; \
    }

// Dispatch of low latency.
DOORBELL_MOE(moe_send_bf16, Sender{{layer}, ends}.send<false>())
DOORBELL_MOE(moe_send_fp8, Sender{{layer}, ends}.send<true>())
// Of high throughput: one after another.
DOORBELL_MOE(moe_count, Sender{{layer}, ends}.prepare())
DOORBELL_MOE_RECEIVER(moe_place, place_rows())
DOORBELL_MOE(moe_write_bf16, Sender{{layer}, ends}.write<false>())
DOORBELL_MOE(moe_write_fp8, Sender{{layer}, ends}.write<true>())
// Of both: the receiving part.
DOORBELL_MOE_RECEIVER(moe_receive, receive())
// Combine, and its receiving part: one after another.
DOORBELL_MOE(moe_return, Combiner{{layer}, ends}.send())
DOORBELL_MOE(moe_await, Combiner{{layer}, ends}.receive())
DOORBELL_MOE(moe_reduce, Combiner{{layer}, ends}.reduce())
