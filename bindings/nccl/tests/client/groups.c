/* Sends and receives, groups that nest, several streams and communicators. */
#include "client.h"

#define COUNT 70001

static void fill(int *values, int from, int to, int turn) {
    for (int i = 0; i < COUNT; i++) values[i] = i * 31 + from * 1009 + to * 10007 + turn;
}

static void write_values(int *into, int from, int to, int turn, cudaStream_t stream) {
    int *values = malloc(COUNT * sizeof *values);
    fill(values, from, to, turn);
    gpu_write(into, values, COUNT * sizeof *values, stream);
    free(values);
}

static int is(const int *memory, int from, int to, int turn, cudaStream_t stream) {
    int *values = malloc(2 * COUNT * sizeof *values);
    fill(values, from, to, turn);
    gpu_read(values + COUNT, memory, COUNT * sizeof *values, stream);
    int same = !memcmp(values, values + COUNT, COUNT * sizeof *values);
    free(values);
    return same;
}

/* Between all pairs, the own rank included, all sends before all receives; in two streams. */
void messages(void) {
    cudaStream_t streams[2] = { gpu_stream(), gpu_stream() };
    ncclComm_t comm = join();
    int **sent = malloc((size_t)ranks * sizeof *sent), **received = malloc((size_t)ranks * sizeof *received);
    for (int peer = 0; peer < ranks; peer++) {
        sent[peer] = gpu_memory(COUNT * sizeof(int));
        received[peer] = gpu_memory(COUNT * sizeof(int));
    }
    for (int turn = 0; turn < 3; turn++) {
        for (int peer = 0; peer < ranks; peer++) write_values(sent[peer], rank, peer, turn, streams[0]);
        OK(ncclGroupStart());
        for (int peer = 0; peer < ranks; peer++) {
            OK(ncclGroupStart());
            OK(ncclSend(sent[peer], COUNT, ncclInt32, peer, comm, streams[peer % 2]));
            OK(ncclSend(NULL, 0, ncclInt32, peer, comm, streams[peer % 2]));
            OK(ncclGroupEnd());
        }
        for (int peer = ranks - 1; peer >= 0; peer--) {
            OK(ncclRecv(received[peer], COUNT, ncclInt32, peer, comm, streams[(peer + 1) % 2]));
            OK(ncclRecv(NULL, 0, ncclInt32, peer, comm, streams[peer % 2]));
        }
        OK(ncclGroupEnd());
        for (int peer = 0; peer < ranks; peer++) CHECK(is(received[peer], peer, rank, turn, streams[turn % 2]));
    }
    /* A chain without a group. */
    if (rank) OK(ncclRecv(received[0], COUNT, ncclInt32, rank - 1, comm, streams[0]));
    else write_values(received[0], 7, 7, 7, streams[0]);
    if (rank + 1 < ranks) OK(ncclSend(received[0], COUNT, ncclInt32, rank + 1, comm, streams[0]));
    CHECK(is(received[0], 7, 7, 7, streams[0]));
    OK(ncclCommDestroy(comm));
}

/* What is received overlaps what is sent, where contents are undefined: other memory is unharmed. */
void overlaps(void) {
    cudaStream_t stream = gpu_stream();
    ncclComm_t comm = join();
    int *memory = gpu_memory((size_t)(ranks + 2) * COUNT * sizeof(int)), *inside = memory + COUNT, *behind = inside + ranks * COUNT;
    for (int part = 0; part < ranks + 2; part++) write_values(memory + part * COUNT, rank, part, 0, stream);
    for (int shift = 0; shift <= COUNT / 4; shift += COUNT / 4) {
        OK(ncclAlltoAll(inside, inside + shift, COUNT / 2, ncclInt32, comm, stream));
        OK(ncclGroupStart());
        OK(ncclSend(inside, COUNT / 2, ncclInt32, (rank + 1) % ranks, comm, stream));
        OK(ncclRecv(inside + shift, COUNT / 2, ncclInt32, (rank + ranks - 1) % ranks, comm, stream));
        OK(ncclGroupEnd());
    }
    CHECK(is(memory, rank, 0, 0, stream));
    CHECK(is(behind, rank, ranks + 1, 0, stream));
    OK(ncclAllReduce(behind, inside, COUNT, ncclInt32, ncclMax, comm, stream));
    CHECK(is(inside, ranks - 1, ranks + 1, 0, stream));
    OK(ncclCommDestroy(comm));
}

/* Two communicators, in which the ranks are in opposite orders. */
static void join_two(ncclComm_t *comms, cudaStream_t stream) {
    ncclUniqueId second;
    comms[0] = join();
    if (!rank) OK(ncclGetUniqueId(&second));
    share_id(comms[0], &second, stream);
    /* The initialisation is over at the outermost end. */
    OK(ncclGroupStart());
    OK(ncclGroupStart());
    OK(ncclCommInitRank(&comms[1], ranks, second, ranks - 1 - rank));
    OK(ncclGroupEnd());
    OK(ncclGroupEnd());
}

/* Two communicators in one group. */
void groups(void) {
    cudaStream_t streams[2] = { gpu_stream(), gpu_stream() };
    int *input = gpu_memory(4 * COUNT), *output = gpu_memory(4 * COUNT), *gathered = gpu_memory(4 * COUNT);
    ncclComm_t comms[2];
    join_two(comms, streams[0]);
    for (int turn = 0; turn < 5; turn++) {
        write_values(input, rank, 0, turn, streams[0]);
        OK(ncclGroupStart());
        OK(ncclAllReduce(input, output, COUNT, ncclInt32, ncclMax, comms[0], streams[0]));
        OK(ncclBroadcast(input, gathered, COUNT, ncclInt32, ranks - 1, comms[1], streams[1]));
        OK(ncclGroupEnd());
        CHECK(is(output, ranks - 1, 0, turn, streams[0]));
        CHECK(is(gathered, 0, 0, turn, streams[1]));
    }
    /* One that fails: nothing of the group is done. */
    OK(ncclGroupStart());
    OK(ncclAllReduce(input, output, COUNT, ncclInt32, ncclMax, comms[0], streams[0]));
    CHECK(ncclSend(input, COUNT, ncclInt32, ranks, comms[0], streams[0]) == ncclInvalidArgument);
    CHECK(ncclGroupEnd() == ncclInvalidArgument);
    write_values(output, 5, 5, 5, streams[0]);
    CHECK(is(output, 5, 5, 5, streams[0]));
    /* Destroyed in opposite orders: none waits for another rank. */
    OK(ncclCommDestroy(comms[rank % 2]));
    OK(ncclCommDestroy(comms[1 - rank % 2]));
}

/* Two communicators in streams of their own, which half of the ranks feed in the other order: the
   first operations of each, short and long. */
void orders(void) {
    const size_t counts[] = { COUNT, 10 * COUNT };
    cudaStream_t streams[2] = { gpu_stream(), gpu_stream() };
    int *input[2], *output[2];
    ncclComm_t comms[2];
    join_two(comms, streams[0]);
    for (int i = 0; i < 2; i++) {
        input[i] = gpu_memory(10 * COUNT * sizeof(int));
        output[i] = gpu_memory(10 * COUNT * sizeof(int));
    }
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0; i < 2; i++) write_values(input[i], rank, i, turn, streams[i]);
        for (int i = 0; i < 2; i++) {
            int of = (rank + i) % 2;
            OK(ncclAllReduce(input[of], output[of], counts[turn], ncclInt32, ncclMax, comms[of], streams[of]));
        }
        for (int i = 0; i < 2; i++) CHECK(is(output[i], ranks - 1, i, turn, streams[i]));
    }
    for (int i = 0; i < 2; i++) OK(ncclCommDestroy(comms[i]));
}
