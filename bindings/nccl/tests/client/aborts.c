/* Aborts in every part of an initialisation and of an operation: after fractions of the time that one takes. Two
   ranks, of which the last one aborts. */
#include <pthread.h>
#include <time.h>

#include "client.h"

#define PARTS 16
#define COUNT (1 << 19)

static cudaStream_t stream;
static float *input, *output;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* An abort of what a call may be about to make. */
static struct {
    ncclComm_t volatile comm;
    double seconds;
} later;

static void *abort_later(void *unused) {
    while (!later.comm) usleep(10);
    usleep((useconds_t)(1e6 * later.seconds));
    OK(ncclCommAbort(later.comm));
    return unused;
}

static int aborts(void) {
    return rank == ranks - 1;
}

static ncclUniqueId next_id(ncclComm_t parent) {
    ncclUniqueId next;
    if (!rank) OK(ncclGetUniqueId(&next));
    share_id(parent, &next, stream);
    return next;
}

/* The call waits for the end of the initialisation, or does not. */
static void abort_initialisation_after(double seconds, ncclUniqueId next, int blocking) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    pthread_t thread;
    config.blocking = blocking;
    later.comm = NULL;
    later.seconds = seconds;
    pthread_create(&thread, NULL, abort_later, NULL);
    ncclResult_t result = ncclCommInitRankConfig((ncclComm_t *)&later.comm, ranks, next, rank, &config);
    if (blocking) CHECK(result == ncclSuccess || (result == ncclInvalidUsage && strstr(ncclGetLastError(NULL), "aborted")));
    else CHECK(result == ncclInProgress);
    pthread_join(thread, NULL);
    CHECK(ncclCommGetAsyncError(later.comm, &result) == ncclInvalidArgument);
}

void abort_initialisations(void) {
    double whole = 0;
    ncclComm_t parent = join(), comm = NULL;
    stream = gpu_stream();
    for (int turn = 0; turn < 2; turn++) {
        ncclUniqueId next = next_id(parent);
        whole = now();
        OK(ncclCommInitRank(&comm, ranks, next, rank));
        whole = now() - whole;
        OK(ncclCommDestroy(comm));
    }
    for (int part = 0; part <= PARTS; part++) {
        ncclUniqueId next = next_id(parent);
        comm = NULL;
        if (aborts()) {
            abort_initialisation_after(whole * part / PARTS, next, part % 2);
            continue;
        }
        ncclResult_t result = ncclCommInitRank(&comm, ranks, next, rank);
        if (result == ncclSuccess) await_abort(comm);
        else CHECK(result == ncclRemoteError && names_rank(NULL, ranks - 1));
    }
    OK(ncclCommDestroy(parent));
}

static ncclResult_t operate(int which, ncclComm_t comm) {
    size_t part = COUNT / (size_t)ranks;
    switch (which) {
    case 0: return ncclAllReduce(input, output, COUNT, ncclFloat32, ncclSum, comm, stream);
    case 1: return ncclReduceScatter(input, output, part, ncclFloat32, ncclSum, comm, stream);
    case 2: return ncclAllGather(input, output, part, ncclFloat32, comm, stream);
    case 3: return ncclBroadcast(input, output, COUNT, ncclFloat32, 1, comm, stream);
    case 4: return ncclAlltoAll(input, output, part, ncclFloat32, comm, stream);
    default:
        OK(ncclGroupStart());
        ncclSend(input, COUNT, ncclFloat32, 1 - rank, comm, stream);
        ncclRecv(output, COUNT, ncclFloat32, 1 - rank, comm, stream);
        return ncclGroupEnd();
    }
}

/* Whatever part an abort comes in, the streams go on, the other rank learns of it, and the parent still works. */
void abort_operations(void) {
    ncclComm_t parent = join(), comm = NULL;
    pthread_t thread;
    stream = gpu_stream();
    input = gpu_memory(COUNT * sizeof *input);
    output = gpu_memory(COUNT * sizeof *output);
    for (int which = 0; which < 6; which++) {
        double whole = 0;
        for (int turn = 0; turn < 2; turn++) {
            whole = now();
            OK(operate(which, parent));
            gpu_synchronize(stream);
            whole = now() - whole;
        }
        for (int part = 0; part <= PARTS; part += 4) {
            OK(ncclCommSplit(parent, 0, rank, &comm, NULL));
            later.comm = comm;
            later.seconds = whole * part / PARTS;
            if (aborts()) pthread_create(&thread, NULL, abort_later, NULL);
            /* Between the two calls, too. */
            for (int turn = 0; turn < 2; turn++) {
                ncclResult_t result = operate(which, comm);
                CHECK(result == ncclSuccess || result == ncclRemoteError || (aborts() && result == ncclInvalidArgument));
            }
            gpu_synchronize(stream);
            if (aborts()) pthread_join(thread, NULL);
            else await_abort(comm);
        }
    }
    OK(ncclCommDestroy(parent));
}
