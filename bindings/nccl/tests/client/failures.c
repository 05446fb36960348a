/* Ranks that are killed, aborts, and wrong arguments. */
#include <signal.h>

#include "client.h"

#define COUNT 100000

/* The last rank is killed; the streams of the others go on, and they learn which rank it was. */
void killed(void) {
    cudaStream_t stream = gpu_stream();
    float *memory = gpu_memory(COUNT * sizeof(float));
    ncclResult_t state = ncclSuccess;
    ncclComm_t comm = join();
    OK(ncclAllReduce(memory, memory, COUNT, ncclFloat32, ncclSum, comm, stream));
    gpu_synchronize(stream);
    if (rank == ranks - 1) kill(getpid(), SIGKILL);
    while (state == ncclSuccess) {
        state = ncclAllReduce(memory, memory, COUNT, ncclFloat32, ncclSum, comm, stream);
        gpu_synchronize(stream);
    }
    CHECK(state == ncclRemoteError);
    CHECK(names_rank(NULL, ranks - 1));
    OK(ncclCommGetAsyncError(comm, &state));
    CHECK(state == ncclRemoteError);
    CHECK(names_rank(comm, ranks - 1));
    OK(ncclCommAbort(comm));
    gpu_synchronize(stream);
}

static void wait_for_ever(void *unused) {
    (void)unused;
    for (;;) pause();
}

/* The last rank is killed, and what it has enqueued is executed without it: the others end what waits for them. */
void killed_with_work(void) {
    cudaStream_t stream = gpu_stream();
    float *memory = gpu_memory(COUNT * sizeof(float));
    ncclResult_t state = ncclSuccess;
    ncclComm_t comm = join();
    OK(ncclAllReduce(memory, memory, COUNT, ncclFloat32, ncclSum, comm, stream));
    gpu_synchronize(stream);
    if (rank == ranks - 1) {
        gpu_call(stream, wait_for_ever, NULL);
        for (int turn = 0; turn < 3; turn++) OK(ncclAllReduce(memory, memory, COUNT, ncclFloat32, ncclSum, comm, stream));
        gpu_die();
    }
    while (state == ncclSuccess) {
        usleep(1000);
        OK(ncclCommGetAsyncError(comm, &state));
    }
    CHECK(state == ncclRemoteError);
    CHECK(names_rank(comm, ranks - 1));
    OK(ncclCommAbort(comm));
}

static void *abort_later(void *comm) {
    usleep(200000);
    OK(ncclCommAbort(comm));
    return NULL;
}

/* The last rank waits for an operation of which the other has no part, until another thread aborts. */
static void abort_one(int is_captured) {
    cudaStream_t stream = gpu_stream();
    float *memory = gpu_memory(COUNT * sizeof(float));
    ncclComm_t comm = join();
    if (rank == ranks - 1) {
        pthread_t thread;
        if (is_captured) gpu_capture(stream);
        OK(ncclAllReduce(memory, memory, COUNT, ncclFloat32, ncclSum, comm, stream));
        if (is_captured) gpu_launch(gpu_captured(stream), stream);
        pthread_create(&thread, NULL, abort_later, comm);
        gpu_synchronize(stream);
        pthread_join(thread, NULL);
        FAILS(ncclAllReduce(memory, memory, COUNT, ncclFloat32, ncclSum, comm, stream), ncclInvalidArgument, "aborted");
    } else {
        await_abort(comm);
    }
}

void abort_operation(void) {
    abort_one(0);
}

void abort_graph(void) {
    abort_one(1);
}

static void *abort_when_begun(void *comm) {
    ncclComm_t volatile *begun = comm;
    while (!*begun) usleep(1000);
    usleep(100000);
    OK(ncclCommAbort(*begun));
    return NULL;
}

/* The only rank that comes of two. */
void abort_initialisation(void) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm = NULL;
    ncclResult_t state;
    pthread_t thread;
    config.blocking = 0;
    CHECK(ncclCommInitRankConfig(&comm, ranks, id, rank, &config) == ncclInProgress);
    usleep(200000);
    OK(ncclCommGetAsyncError(comm, &state));
    CHECK(state == ncclInProgress);
    CHECK(ncclBcast(NULL, 0, ncclInt8, 0, comm, NULL) == ncclInvalidArgument);
    OK(ncclCommAbort(comm));
    CHECK(ncclCommGetAsyncError(comm, &state) == ncclInvalidArgument);
    OK(ncclGetUniqueId(&id));
    comm = NULL;
    pthread_create(&thread, NULL, abort_when_begun, &comm);
    FAILS(ncclCommInitRank(&comm, ranks, id, rank), ncclInvalidUsage, "aborted");
    pthread_join(thread, NULL);
}

void arguments(void) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    cudaStream_t stream = gpu_stream();
    char *memory = gpu_memory(1024);
    ncclComm_t comm = NULL, other = (void *)16, comms[2];
    ncclUniqueId unmade = { { 0 } };
    int value, op, all[2] = { 0, 9 };
    OK(ncclGetVersion(&value));
    CHECK(value == 23007);
    CHECK(!strcmp(ncclGetErrorString(ncclSuccess), "no error"));
    CHECK(ncclGetVersion(NULL) == ncclInvalidArgument);
    FAILS(ncclGetUniqueId(NULL), ncclInvalidArgument, "NULL");
    FAILS(ncclCommInitRank(NULL, 1, id, 0), ncclInvalidArgument, "comm is NULL");
    FAILS(ncclCommInitRank(&comm, 1, unmade, 0), ncclInvalidArgument, "unique id");
    FAILS(ncclCommInitRank(&comm, 1, id, 1), ncclInvalidArgument, "no rank 1 of 1");
    FAILS(ncclCommInitRank(&comm, 0, id, 0), ncclInvalidArgument, "no rank 0 of 0");
    FAILS(ncclCommInitRank(&comm, 1, id, -1), ncclInvalidArgument, "no rank -1");
    config.magic = 0;
    FAILS(ncclCommInitRankConfig(&comm, 1, id, 0, &config), ncclInvalidArgument, "NCCL_CONFIG_INITIALIZER");
    FAILS(ncclCommInitAll(comms, 2, all), ncclInvalidArgument, "9");
    FAILS(ncclGroupEnd(), ncclInvalidUsage, "ncclGroupStart");
    config.magic = 0xcafebeef;
    config.blocking = 0;
    CHECK(ncclCommInitRankConfig(&comm, ranks, id, rank, &config) == ncclInProgress);
    CHECK(state_at_last(comm) == ncclSuccess);

    FAILS(ncclCommCount(NULL, &value), ncclInvalidArgument, "communicator is NULL");
    FAILS(ncclCommCount(other, &value), ncclInvalidArgument, "no communicator");
    FAILS(ncclCommCount(comm, NULL), ncclInvalidArgument, "count is NULL");
    FAILS(ncclCommGetAsyncError(comm, NULL), ncclInvalidArgument, "asyncError is NULL");
    FAILS(ncclAllReduce(NULL, memory, 4, ncclInt32, ncclSum, comm, stream), ncclInvalidArgument, "sendbuff is NULL");
    FAILS(ncclAllReduce(memory, NULL, 4, ncclInt32, ncclSum, comm, stream), ncclInvalidArgument, "recvbuff is NULL");
    FAILS(ncclAllReduce(memory, memory, 4, 12, ncclSum, comm, stream), ncclInvalidArgument, "data type 12");
    FAILS(ncclAllReduce(memory, memory, 4, -1, ncclSum, comm, stream), ncclInvalidArgument, "data type -1");
    FAILS(ncclAllReduce(memory, memory, 4, ncclInt32, 5, comm, stream), ncclInvalidArgument, "operator 5");
    FAILS(ncclAllReduce(memory, memory, 4, ncclInt32, -1, comm, stream), ncclInvalidArgument, "operator -1");
    FAILS(ncclAllReduce(memory, memory, (size_t)1 << 62, ncclInt32, ncclSum, comm, stream), ncclInvalidArgument, "more than");
    FAILS(ncclAllReduce(memory, memory + 4, 4, ncclInt32, ncclSum, comm, stream), ncclInvalidArgument, "in place");
    FAILS(ncclAllReduce(memory + 1, memory + 1, 4, ncclInt32, ncclSum, comm, stream), ncclInvalidArgument, "natural");
    FAILS(ncclBcast(memory, 4, ncclInt32, 1, comm, stream), ncclInvalidArgument, "root 1");
    FAILS(ncclSend(memory, 4, ncclInt32, -1, comm, stream), ncclInvalidArgument, "peer -1");
    FAILS(ncclSend(memory, 4, ncclInt32, 0, comm, stream), ncclInvalidArgument, "itself");
    value = 3;
    OK(ncclRedOpCreatePreMulSum(&op, &value, ncclInt32, ncclScalarHostImmediate, comm));
    FAILS(ncclAllReduce(memory, memory, 4, ncclFloat32, op, comm, stream), ncclInvalidArgument, "created for i32");
    FAILS(ncclRedOpCreatePreMulSum(&op, memory, ncclInt32, 2, comm), ncclInvalidArgument, "residence 2");
    OK(ncclRedOpDestroy(op, comm));
    FAILS(ncclRedOpDestroy(op, comm), ncclInvalidArgument, "not created");
    FAILS(ncclCommRevoke(comm, 0), ncclInvalidUsage, "ncclCommRevoke is not supported");
    FAILS(ncclMemFree(memory), ncclInvalidArgument, "ncclMemAlloc");
    OK(ncclCommDestroy(comm));
    FAILS(ncclCommDestroy(comm), ncclInvalidArgument, "destroyed");
}
