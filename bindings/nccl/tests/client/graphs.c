/* Operations in streams that the program captures. */
#include "client.h"

#define COUNT 20011
#define REPLAYS 50

enum { INPUT, SUM, CAST, SENT, RECEIVED, MOST, DIRECT, DIRECT_SUM, BUFFERS };

static int *buffers[BUFFERS];
/* For the graphs, and for operations that are enqueued directly. */
static cudaStream_t streams[4];

static int value(int buffer, int from, int turn, int i) {
    return i * 7 + buffer * 31 + from * 1009 + turn * 10007;
}

static void write_values(int buffer, int turn, cudaStream_t stream) {
    int *values = malloc(COUNT * sizeof *values);
    for (int i = 0; i < COUNT; i++) values[i] = value(buffer, rank, turn, i);
    gpu_write(buffers[buffer], values, COUNT * sizeof *values, stream);
    free(values);
}

/* Whether it has one rank's values of another buffer, or with rank -1 the sums of all ranks'. */
static int has(int buffer, int source, int from, int turn, cudaStream_t stream) {
    int *values = malloc(COUNT * sizeof *values), same = 1;
    gpu_read(values, buffers[buffer], COUNT * sizeof *values, stream);
    for (int i = 0; i < COUNT && same; i++) {
        int wanted = 0;
        for (int other = 0; other < ranks; other++) wanted += from < 0 || other == from ? value(source, other, turn, i) : 0;
        same = values[i] == wanted;
    }
    free(values);
    return same;
}

static void delay(void *microseconds) {
    usleep(*(const unsigned *)microseconds);
}

/* In two streams that the program does not order. */
static void *capture_several(ncclComm_t comm) {
    gpu_capture(streams[0]);
    gpu_order(streams[0], streams[1]);
    OK(ncclAllReduce(buffers[INPUT], buffers[SUM], COUNT, ncclInt32, ncclSum, comm, streams[0]));
    OK(ncclBroadcast(buffers[CAST], buffers[CAST], COUNT, ncclInt32, ranks - 1, comm, streams[1]));
    /* The communicator's own thread must not disturb it. */
    usleep(20000);
    OK(ncclGroupStart());
    OK(ncclSend(buffers[SENT], COUNT, ncclInt32, (rank + 1) % ranks, comm, streams[0]));
    OK(ncclRecv(buffers[RECEIVED], COUNT, ncclInt32, (rank + ranks - 1) % ranks, comm, streams[0]));
    OK(ncclGroupEnd());
    gpu_order(streams[1], streams[0]);
    return gpu_captured(streams[0]);
}

/* A scalar that would have to be read now is refused, and the capture goes on. */
static void *capture_one(ncclComm_t comm) {
    int scaled;
    OK(ncclRedOpCreatePreMulSum(&scaled, buffers[INPUT], ncclInt32, ncclScalarDevice, comm));
    gpu_capture(streams[2]);
    FAILS(ncclAllReduce(buffers[INPUT], buffers[MOST], COUNT, ncclInt32, scaled, comm, streams[2]), ncclInvalidUsage, "captured");
    OK(ncclAllReduce(buffers[INPUT], buffers[MOST], COUNT, ncclInt32, ncclMax, comm, streams[2]));
    return gpu_captured(streams[2]);
}

static void check_several(int turn) {
    CHECK(has(SUM, INPUT, -1, turn, streams[0]));
    CHECK(has(CAST, CAST, ranks - 1, turn, streams[0]));
    CHECK(has(RECEIVED, SENT, (rank + ranks - 1) % ranks, turn, streams[0]));
}

static void write_several(int turn) {
    for (int i = 0; i < 3; i++) write_values((int[]){ INPUT, CAST, SENT }[i], turn, streams[0]);
}

static const char *const KINDS[] = { "mapping", "reservation", "host", "registered", "stream", "event", "module", "exec", "object", "context" };
#define KIND_COUNT (sizeof KINDS / sizeof *KINDS)

/* A communicator of this rank alone, whose end frees what was left. */
static void come_and_go(void) {
    ncclUniqueId own;
    ncclComm_t comm;
    OK(ncclGetUniqueId(&own));
    OK(ncclCommInitRank(&comm, 1, own, 0));
    OK(ncclCommDestroy(comm));
}

/* Graphs that are replayed, mixed with operations enqueued directly, all in different streams that
   nothing but the communicator orders. */
void graphs(void) {
    unsigned microseconds = 100000;
    int before[KIND_COUNT];
    for (int i = 0; i < 4; i++) streams[i] = gpu_stream();
    for (int i = 0; i < BUFFERS; i++) buffers[i] = gpu_memory(COUNT * sizeof(int));
    for (size_t i = 0; i < KIND_COUNT; i++) before[i] = gpu_count(KINDS[i]);
    ncclComm_t comm = join();
    /* It goes on during the capture, and the graph's first launch waits for it. */
    gpu_call(streams[3], delay, &microseconds);
    write_values(DIRECT, 0, streams[0]);
    OK(ncclAllReduce(buffers[DIRECT], buffers[DIRECT_SUM], COUNT, ncclInt32, ncclSum, comm, streams[3]));
    void *several = capture_several(comm), *one = capture_one(comm);
    for (int turn = 0; turn < REPLAYS; turn++) {
        write_several(turn);
        CHECK(has(DIRECT_SUM, DIRECT, -1, turn, streams[3]));
        write_values(DIRECT, turn + 1, streams[3]);
        /* One rank is late with the graph, and so with all that follows. */
        microseconds = 2000;
        if (turn % ranks == rank) gpu_call(streams[0], delay, &microseconds);
        gpu_launch(several, streams[0]);
        gpu_launch(one, streams[2]);
        OK(ncclAllReduce(buffers[DIRECT], buffers[DIRECT_SUM], COUNT, ncclInt32, ncclSum, comm, streams[3]));
        check_several(turn);
        CHECK(has(MOST, INPUT, ranks - 1, turn, streams[2]));
    }
    CHECK(has(DIRECT_SUM, DIRECT, -1, REPLAYS, streams[3]));
    gpu_instance_destroy(one);
    OK(ncclCommDestroy(comm));
    /* What the graph uses is there as long as the graph. */
    write_several(REPLAYS);
    gpu_launch(several, streams[0]);
    check_several(REPLAYS);
    gpu_instance_destroy(several);
    while (gpu_count("object")) usleep(1000);
    come_and_go();
    /* The thread that has initialised a communicator may be the last to drop it. */
    for (size_t i = 0; i < KIND_COUNT; i++) {
        for (int tries = 0; gpu_count(KINDS[i]) != before[i] && tries < 10000; tries++) usleep(1000);
        if (gpu_count(KINDS[i]) != before[i]) printf("%s: %d, before %d\n", KINDS[i], gpu_count(KINDS[i]), before[i]);
        CHECK(gpu_count(KINDS[i]) == before[i]);
    }
}
