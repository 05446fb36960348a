/* Every collective, type and operator, in place and not. Three ranks, whose values every type has. */
#include "client.h"

#define COUNT 1003

static const size_t SIZES[ncclNumTypes] = { 1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1 };

static ncclComm_t comm;
static cudaStream_t stream;
static char *given, *got;

/* A small positive number as a float of these bits. */
static uint64_t small_float(unsigned value, int exponent_bits, int mantissa_bits) {
    int exponent = 31 - __builtin_clz(value);
    uint64_t fraction = (uint64_t)(value - (1u << exponent)) << mantissa_bits >> exponent;
    return (uint64_t)(exponent + (1 << (exponent_bits - 1)) - 1) << mantissa_bits | fraction;
}

static void put(char *array, size_t index, int type, unsigned value) {
    uint64_t bits = value;
    switch (type) {
    case ncclFloat16: bits = small_float(value, 5, 10); break;
    case ncclFloat32: bits = small_float(value, 8, 23); break;
    case ncclFloat64: bits = small_float(value, 11, 52); break;
    case ncclBfloat16: bits = small_float(value, 8, 7); break;
    case ncclFloat8e4m3: bits = small_float(value, 4, 3); break;
    case ncclFloat8e5m2: bits = small_float(value, 5, 2); break;
    }
    memcpy(array + index * SIZES[type], &bits, SIZES[type]);
}

/* Element `index` of a rank's input: 1 or 2. For averages and scalars it is of all ranks alike. */
static unsigned element(size_t index, int of, int alike) {
    return 1 + (index / 3 + (alike ? 0 : index * (unsigned)of + (unsigned)of)) % 2;
}

static unsigned reduced(size_t index, int op) {
    unsigned sum = 0, product = 1, most = 0, least = 9;
    for (int of = 0; of < ranks; of++) {
        unsigned value = element(index, of, op >= ncclAvg);
        sum += value;
        product *= value;
        most = value > most ? value : most;
        least = value < least ? value : least;
    }
    switch (op) {
    case ncclSum: return sum;
    case ncclProd: return product;
    case ncclMax: return most;
    case ncclMin: return least;
    case ncclAvg: return sum / (unsigned)ranks;
    default: return 2 * sum;
    }
}

static void fill(void *into, size_t elements, int type, int alike) {
    for (size_t i = 0; i < elements; i++) put(given, i, type, element(i, rank, alike));
    gpu_write(into, given, elements * SIZES[type], stream);
}

/* `elements` of the result are as `expected`, which was written to `given`. */
static void compare(const void *from, size_t elements, int type, const char *what, int op, int in_place) {
    gpu_read(got, from, elements * SIZES[type], stream);
    for (size_t i = 0; i < elements; i++) {
        if (memcmp(given + i * SIZES[type], got + i * SIZES[type], SIZES[type])) {
            printf("FAIL rank %d: %s, type %d, operator %d, in place: %d: element %zu\n", rank, what, type, op, in_place, i);
            exit(1);
        }
    }
}

static void reductions(char *input, char *output, int type, int op, int in_place) {
    int kind = op >= ncclNumOps ? ncclNumOps : op;
    int alike = kind >= ncclAvg, root = 1;
    char *into = in_place ? input : output;

    fill(input, COUNT, type, alike);
    OK(ncclAllReduce(input, into, COUNT, type, op, comm, stream));
    for (size_t i = 0; i < COUNT; i++) put(given, i, type, reduced(i, kind));
    compare(into, COUNT, type, "all-reduce", op, in_place);

    fill(input, COUNT, type, alike);
    OK(ncclReduce(input, rank == root ? into : NULL, COUNT, type, op, root, comm, stream));
    if (rank == root) {
        for (size_t i = 0; i < COUNT; i++) put(given, i, type, reduced(i, kind));
        compare(into, COUNT, type, "reduce", op, in_place);
    }

    size_t own = (size_t)rank * COUNT;
    into = in_place ? input + own * SIZES[type] : output;
    fill(input, (size_t)ranks * COUNT, type, alike);
    OK(ncclReduceScatter(input, into, COUNT, type, op, comm, stream));
    for (size_t i = 0; i < COUNT; i++) put(given, i, type, reduced(own + i, kind));
    compare(into, COUNT, type, "reduce-scatter", op, in_place);
}

static void movements(char *input, char *output, int type, int in_place) {
    size_t size = SIZES[type], own = (size_t)rank * COUNT;
    int root = 2;
    char *from, *into;

    /* Element i of the root. */
    from = input;
    into = in_place ? input : output;
    fill(from, COUNT, type, 0);
    if (in_place) OK(ncclBcast(into, COUNT, type, root, comm, stream));
    else OK(ncclBroadcast(rank == root ? from : NULL, into, COUNT, type, root, comm, stream));
    for (size_t i = 0; i < COUNT; i++) put(given, i, type, element(i, root, 0));
    compare(into, COUNT, type, "broadcast", -1, in_place);

    from = in_place ? output + own * size : input;
    fill(from, COUNT, type, 0);
    OK(ncclAllGather(from, output, COUNT, type, comm, stream));
    for (int of = 0; of < ranks; of++)
        for (size_t i = 0; i < COUNT; i++) put(given, (size_t)of * COUNT + i, type, element(i, of, 0));
    compare(output, (size_t)ranks * COUNT, type, "all-gather", -1, in_place);

    from = in_place && rank == root ? output + own * size : input;
    fill(from, COUNT, type, 0);
    OK(ncclGather(from, rank == root ? output : NULL, COUNT, type, root, comm, stream));
    if (rank == root) {
        for (int of = 0; of < ranks; of++)
            for (size_t i = 0; i < COUNT; i++) put(given, (size_t)of * COUNT + i, type, element(i, of, 0));
        compare(output, (size_t)ranks * COUNT, type, "gather", -1, in_place);
    }

    fill(input, (size_t)ranks * COUNT, type, 0);
    into = in_place && rank == root ? input + own * size : output;
    OK(ncclScatter(rank == root ? input : NULL, into, COUNT, type, root, comm, stream));
    for (size_t i = 0; i < COUNT; i++) put(given, i, type, element(own + i, root, 0));
    compare(into, COUNT, type, "scatter", -1, in_place);

    if (in_place) return;
    fill(input, (size_t)ranks * COUNT, type, 0);
    OK(ncclAlltoAll(input, output, COUNT, type, comm, stream));
    for (int of = 0; of < ranks; of++)
        for (size_t i = 0; i < COUNT; i++) put(given, (size_t)of * COUNT + i, type, element(own + i, of, 0));
    compare(output, (size_t)ranks * COUNT, type, "all-to-all", -1, 0);
}

void collectives(void) {
    size_t bytes = (size_t)ranks * COUNT * 8;
    void *allocated, *handle, *scalar = gpu_memory(8);
    int value;
    given = malloc(bytes);
    got = malloc(bytes);
    stream = gpu_stream();
    comm = join();
    OK(ncclCommCount(comm, &value));
    CHECK(value == ranks);
    OK(ncclCommUserRank(comm, &value));
    CHECK(value == rank);
    OK(ncclCommCuDevice(comm, &value));
    CHECK(value == gpu_open());
    /* Memory of both kinds, one of them registered. */
    OK(ncclMemAlloc(&allocated, bytes));
    char *input = gpu_memory(bytes), *output = allocated;
    OK(ncclCommRegister(comm, output, bytes, &handle));
    for (int type = 0; type < ncclNumTypes; type++) {
        char two[8];
        int scaled, by_device;
        put(two, 0, type, 2);
        OK(ncclRedOpCreatePreMulSum(&scaled, two, type, ncclScalarHostImmediate, comm));
        OK(ncclRedOpCreatePreMulSum(&by_device, scalar, type, ncclScalarDevice, comm));
        CHECK(scaled >= ncclNumOps && by_device > scaled);
        gpu_write(scalar, two, SIZES[type], stream);
        reductions(input, output, type, by_device, 0);
        for (int in_place = 0; in_place < 2; in_place++) {
            for (int op = 0; op < ncclNumOps; op++) reductions(input, output, type, op, in_place);
            reductions(input, output, type, scaled, in_place);
            movements(input, output, type, in_place);
        }
        OK(ncclRedOpDestroy(scaled, comm));
        OK(ncclRedOpDestroy(by_device, comm));
    }
    /* Streams that go with work in them: what it uses is kept. */
    for (int turn = 0; turn < 20; turn++) {
        cudaStream_t brief = gpu_stream();
        OK(ncclAllReduce(input, output, COUNT, ncclInt32, ncclSum, comm, brief));
        gpu_stream_destroy(brief);
    }
    OK(ncclAllReduce(input, output, 0, ncclInt32, ncclSum, comm, stream));
    gpu_synchronize(stream);
    OK(ncclCommDeregister(comm, handle));
    OK(ncclCommFinalize(comm));
    FAILS(ncclAllReduce(input, output, COUNT, ncclInt32, ncclSum, comm, stream), ncclInvalidUsage, "finalized");
    OK(ncclCommDestroy(comm));
    OK(ncclMemFree(allocated));
}
