// Reductions of one to eight memories into one, in one pass: `reduce_TYPE_OPERATOR`.
//
// Sources are reduced in order, in the accumulator type, with one rounding: bit-identical to
// collectives/src/kernel. A source, or the target, may be partial results (binary32 for 16- and
// 8-bit floats). The target may be one of the sources, in the same form.
//
// The launch divides elements into a head up to 16-byte alignment of every memory, groups of 16
// bytes, and a tail. If nothing aligns every memory, groups are of 4 bytes (8 for elements of 8) and
// the target alone is aligned; with partial results all is head then. A block takes tiles of some
// groups per thread with the grid's stride, so the grid may have a block per tile or fewer.
//
// Built by `cargo xtask kernels`; for the CPU by the stand-in (host.cuh): threads neither wait nor
// read each other's writes.
#define DOORBELL_THREADS_APART
#include "memory.cuh"
#include "reduce_arguments.cuh"

namespace doorbell {

// Groups of a source in flight per thread, for types of 2 bytes and more; and resident blocks of
// MOST_THREADS for which registers must suffice. Other values: `cargo xtask kernels --unroll 4
// --blocks 1`.
#ifndef DOORBELL_UNROLL
#define DOORBELL_UNROLL 2
#endif
#ifndef DOORBELL_BLOCKS
#define DOORBELL_BLOCKS 2
#endif

template <class Wide>
DOORBELL_EVERYWHERE Wide scalar_of(uint64_t bits) {
    if constexpr (sizeof(Wide) == 8) {
        return bits_as<Wide>(bits);
    } else {
        return bits_as<Wide>(static_cast<uint32_t>(bits));
    }
}

template <class T, class Op>
struct Reduction {
    using Raw = typename T::Raw;
    using Wide = typename T::Wide;
    // Units of four elements, where some operands are partial results.
    static constexpr int QUADS = 4;

    // Groups of a source in flight per thread: `unroll` in gpudirect/cuda/src/reduce/plan.rs.
    // 16 elements of one byte take as many accumulator registers.
    template <int BYTES>
    static constexpr int UNROLLED = BYTES == 16 ? (sizeof(Raw) == 1 ? (DOORBELL_UNROLL + 1) / 2 : DOORBELL_UNROLL) : sizeof(Raw) == 4 ? 8 : 4;

    // Groups of a source, which begin in the middle of a word if elements are shorter: the word's
    // successor is loaded as well then, to `word[1]`.
    template <int BYTES>
    struct Source {
        static constexpr int UNROLL = UNROLLED<BYTES>;
        static constexpr bool SHIFTS = BYTES > sizeof(Raw) && BYTES < 16;
        Words words[UNROLL];
        uint32_t shift;

        DOORBELL_EVERYWHERE void load(uint64_t from, uint64_t at, uint32_t stride, uint64_t end) {
            shift = SHIFTS ? from % BYTES : 0;
            #pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                const uint64_t group = at + u * stride;
                const uint64_t address = from - shift + group * BYTES;
                words[u] = load_words<BYTES>(address, group < end);
                if constexpr (SHIFTS) words[u].word[1] = load_words<4>(address + 4, group < end && shift != 0).word[0];
            }
        }

        DOORBELL_EVERYWHERE Words group(int u) const {
            Words group = words[u];
            if constexpr (SHIFTS) group.word[0] = (static_cast<uint64_t>(group.word[1]) << 32 | group.word[0]) >> 8 * shift;
            return group;
        }
    };

    template <int COUNT>
    DOORBELL_EVERYWHERE static void combine(Wide (&sum)[COUNT], const Words &words, const Arguments &arguments, uint32_t source) {
        Wide value[COUNT];
        Group<T>::decode(words, value);
        if constexpr (Op::SCALED) {
            // Rounded after the multiplication, as if the rank had done it beforehand.
            const Wide scalar = scalar_of<Wide>(arguments.scalars[source]);
            #pragma unroll
            for (int i = 0; i < COUNT; i++) value[i] = multiply(value[i], scalar);
            Group<T>::decode(Group<T>::encode(value), value);
        }
        #pragma unroll
        for (int i = 0; i < COUNT; i++) sum[i] = Op::apply(sum[i], value[i]);
    }

    template <int GROUPS, int COUNT>
    DOORBELL_EVERYWHERE static void start(Wide (&sums)[GROUPS][COUNT]) {
        #pragma unroll
        for (int u = 0; u < GROUPS; u++) {
            #pragma unroll
            for (int i = 0; i < COUNT; i++) sums[u][i] = Op::template neutral<T>();
        }
    }

    // Groups of elements alone. Loads of two sources are all issued before the first is used; no
    // branch may lie between, as the assembler moves work before it that waits.
    template <int BYTES>
    DOORBELL_EVERYWHERE static void groups(const Arguments &arguments) {
        constexpr int UNROLL = UNROLLED<BYTES>, ELEMENTS = BYTES / sizeof(Raw);
        const uint64_t offset = arguments.head * sizeof(Raw);
        const uint32_t stride = blockDim.x;
        const uint64_t tile = uint64_t(UNROLL) * stride;
        for (uint64_t first = blockIdx.x * tile; first < arguments.groups; first += gridDim.x * tile) {
            const uint64_t at = first + threadIdx.x;
            Wide sums[UNROLL][ELEMENTS];
            start(sums);
            #pragma unroll 1
            for (uint32_t source = 0; source < arguments.count; source += 2) {
                const bool two = source + 1 < arguments.count;
                Source<BYTES> one, other;
                one.load(arguments.sources[source] + offset, at, stride, arguments.groups);
                other.load(arguments.sources[two ? source + 1 : source] + offset, at, stride, two ? arguments.groups : 0);
                #pragma unroll
                for (int u = 0; u < UNROLL; u++) combine(sums[u], one.group(u), arguments, source);
                if (two) {
                    #pragma unroll
                    for (int u = 0; u < UNROLL; u++) combine(sums[u], other.group(u), arguments, source + 1);
                }
            }
            if constexpr (Op::DIVIDED) Division<T>::all(sums, arguments.divisor);
            #pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                const uint64_t group = at + u * stride;
                store_words<BYTES>(arguments.into + offset + group * BYTES, Group<T>::encode(sums[u]), group < arguments.groups);
            }
        }
    }

    // Groups where some memories are partial results: four elements at a time, so that neighbouring
    // threads access neighbouring bytes of either form.
    DOORBELL_EVERYWHERE static void mixed_groups(const Arguments &arguments) {
        constexpr int BYTES = 4 * sizeof(Raw);
        const uint64_t quads = arguments.groups * (Group<T>::ELEMENTS / 4);
        const uint32_t stride = blockDim.x;
        const uint64_t tile = uint64_t(QUADS) * stride;
        for (uint64_t first = blockIdx.x * tile; first < quads; first += gridDim.x * tile) {
            const uint64_t at = first + threadIdx.x;
            Wide sums[QUADS][4];
            start(sums);
            #pragma unroll 1
            for (uint32_t source = 0; source < arguments.count; source++) {
                Words words[QUADS];
                if (arguments.partials >> source & 1) {
                    const uint64_t from = arguments.sources[source] + arguments.head * sizeof(float);
                    #pragma unroll
                    for (int u = 0; u < QUADS; u++) words[u] = load_words<16>(from + (at + u * stride) * 16, at + u * stride < quads);
                    #pragma unroll
                    for (int u = 0; u < QUADS; u++) {
                        #pragma unroll
                        for (int i = 0; i < 4; i++) sums[u][i] = Op::apply(sums[u][i], bits_as<float>(words[u].word[i]));
                    }
                } else {
                    const uint64_t from = arguments.sources[source] + arguments.head * sizeof(Raw);
                    #pragma unroll
                    for (int u = 0; u < QUADS; u++) words[u] = load_words<BYTES>(from + (at + u * stride) * BYTES, at + u * stride < quads);
                    #pragma unroll
                    for (int u = 0; u < QUADS; u++) combine(sums[u], words[u], arguments, source);
                }
            }
            if (arguments.partials >> MOST_SOURCES & 1) {
                const uint64_t into = arguments.into + arguments.head * sizeof(float);
                #pragma unroll
                for (int u = 0; u < QUADS; u++) {
                    Words words;
                    #pragma unroll
                    for (int i = 0; i < 4; i++) words.word[i] = bits_as<uint32_t>(sums[u][i]);
                    store_words<16>(into + (at + u * stride) * 16, words, at + u * stride < quads);
                }
            } else {
                if constexpr (Op::DIVIDED) Division<T>::all(sums, arguments.divisor);
                const uint64_t into = arguments.into + arguments.head * sizeof(Raw);
                #pragma unroll
                for (int u = 0; u < QUADS; u++) {
                    store_words<BYTES>(into + (at + u * stride) * BYTES, Group<T>::encode(sums[u]), at + u * stride < quads);
                }
            }
        }
    }

    DOORBELL_EVERYWHERE static void elements(const Arguments &arguments) {
        const uint64_t grouped = arguments.groups * (arguments.group / sizeof(Raw)), single = arguments.elements - grouped;
        const uint64_t total = uint64_t(gridDim.x) * blockDim.x;
        for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < single; i += total) {
            const uint64_t at = i < arguments.head ? i : i + grouped;
            Wide sum = Op::template neutral<T>();
            #pragma unroll 1
            for (uint32_t source = 0; source < arguments.count; source++) {
                Wide value;
                if (T::NARROW && arguments.partials >> source & 1) {
                    value = scalar_of<Wide>(load_raw<uint32_t>(arguments.sources[source] + at * sizeof(float)));
                } else {
                    value = T::decode(load_raw<Raw>(arguments.sources[source] + at * sizeof(Raw)));
                    if constexpr (Op::SCALED) value = T::decode(T::encode(multiply(value, scalar_of<Wide>(arguments.scalars[source]))));
                }
                sum = Op::apply(sum, value);
            }
            if constexpr (T::NARROW) {
                if (arguments.partials >> MOST_SOURCES & 1) {
                    store_raw(arguments.into + at * sizeof(float), bits_as<uint32_t>(sum));
                    continue;
                }
            }
            if constexpr (Op::DIVIDED) sum = T::divide(sum, arguments.divisor.ranks);
            store_raw(arguments.into + at * sizeof(Raw), T::encode(sum));
        }
    }

    DOORBELL_EVERYWHERE static void all(const Arguments &arguments) {
        constexpr int NARROWER = sizeof(Raw) == 8 ? 8 : 4;
        if (T::NARROW && arguments.partials != 0) {
            if constexpr (T::NARROW) mixed_groups(arguments);
        } else if (arguments.group == 16) {
            groups<16>(arguments);
        } else {
            groups<NARROWER>(arguments);
        }
        elements(arguments);
    }
};

}  // namespace doorbell

#define DOORBELL_KERNEL(type, Type, op, Op) \
    extern "C" __global__ void __launch_bounds__(doorbell::MOST_THREADS, DOORBELL_BLOCKS) reduce_##type##_##op(const __grid_constant__ doorbell::Arguments arguments) { \
        doorbell::Reduction<Type, doorbell::Op>::all(arguments); \
    }
#define DOORBELL_KERNELS(type, Type) \
    DOORBELL_KERNEL(type, Type, sum, Sum) \
    DOORBELL_KERNEL(type, Type, prod, Prod) \
    DOORBELL_KERNEL(type, Type, min, Min) \
    DOORBELL_KERNEL(type, Type, max, Max) \
    DOORBELL_KERNEL(type, Type, avg, Average) \
    DOORBELL_KERNEL(type, Type, premulsum, ScaledSum)

DOORBELL_KERNELS(i8, doorbell::I8)
DOORBELL_KERNELS(u8, doorbell::U8)
DOORBELL_KERNELS(i32, doorbell::I32)
DOORBELL_KERNELS(u32, doorbell::U32)
DOORBELL_KERNELS(i64, doorbell::I64)
DOORBELL_KERNELS(u64, doorbell::U64)
DOORBELL_KERNELS(f16, doorbell::Narrow<doorbell::F16>)
DOORBELL_KERNELS(bf16, doorbell::Narrow<doorbell::Bf16>)
DOORBELL_KERNELS(f32, doorbell::F32)
DOORBELL_KERNELS(f64, doorbell::F64)
DOORBELL_KERNELS(f8e4m3, doorbell::Narrow<doorbell::F8E4M3>)
DOORBELL_KERNELS(f8e5m2, doorbell::Narrow<doorbell::F8E5M2>)
