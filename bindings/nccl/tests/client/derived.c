/* Communicators of others: split, shrunk and grown. */
#include <pthread.h>
#include <signal.h>

#include "client.h"

static cudaStream_t stream;

/* The sum of the ranks' values. */
static int sum(ncclComm_t comm, int value) {
    int *memory = gpu_memory(sizeof value);
    gpu_write(memory, &value, sizeof value, stream);
    OK(ncclAllReduce(memory, memory, 1, ncclInt32, ncclSum, comm, stream));
    gpu_read(&value, memory, sizeof value, stream);
    return value;
}

/* Checks the rank and the number of ranks. */
static int is_rank(ncclComm_t comm, int expected, int of) {
    int own, all;
    OK(ncclCommUserRank(comm, &own));
    OK(ncclCommCount(comm, &all));
    return own == expected && all == of;
}

/* Four ranks. */
void split(void) {
    ncclComm_t parent, half = NULL, same = (void *)16, none = (void *)16, alone = NULL;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    stream = gpu_stream();
    OK(ncclCommInitRankConfig(&parent, ranks, id, rank, NULL));
    FAILS(ncclCommSplit(parent, -2, 0, &half, NULL), ncclInvalidArgument, "colour");
    FAILS(ncclCommSplit(parent, 0, 0, NULL, NULL), ncclInvalidArgument, "newcomm is NULL");
    /* The higher rank is the lower one by its key. */
    OK(ncclCommSplit(parent, rank % 2, -rank, &half, NULL));
    CHECK(is_rank(half, 1 - rank / 2, 2));
    CHECK(sum(half, 1 << rank) == (rank % 2 ? 2 + 8 : 1 + 4));
    CHECK(sum(parent, 1 << rank) == 15);
    /* Two of one parent in a group: in the order of the calls on all ranks. Rank 0 is in one only. */
    OK(ncclGroupStart());
    OK(ncclCommSplit(parent, 7, 0, &same, NULL));
    OK(ncclCommSplit(parent, rank ? 0 : NCCL_SPLIT_NOCOLOR, rank, &none, NULL));
    OK(ncclGroupEnd());
    CHECK(is_rank(same, rank, 4));
    CHECK(sum(same, 1 << rank) == 15);
    CHECK(!rank == !none);
    if (rank) CHECK(is_rank(none, rank - 1, 3));
    if (rank) CHECK(sum(none, 1 << rank) == 14);
    /* Of what was split, and of one whose parent ends first. */
    OK(ncclCommDestroy(parent));
    OK(ncclCommSplit(half, rank, 0, &alone, &config));
    CHECK(sum(half, 1 << rank) == (rank % 2 ? 2 + 8 : 1 + 4));
    CHECK(state_at_last(alone) == ncclSuccess);
    CHECK(is_rank(alone, 0, 1));
    CHECK(sum(alone, rank) == rank);
    /* Without blocking: a child has the parent's configuration, unless it is given one. */
    CHECK(ncclCommSplit(alone, 0, 0, &parent, NULL) == ncclInProgress);
    CHECK(state_at_last(parent) == ncclSuccess);
    CHECK(sum(parent, rank) == rank);
    OK(ncclCommDestroy(parent));
    OK(ncclCommDestroy(alone));
    OK(ncclCommDestroy(half));
    OK(ncclCommDestroy(same));
    if (rank) OK(ncclCommDestroy(none));
}

/* The last rank is killed while the others split. */
void killed_in_split(void) {
    ncclComm_t part = NULL, comm = join();
    if (rank == ranks - 1) kill(getpid(), SIGKILL);
    CHECK(ncclCommSplit(comm, 0, 0, &part, NULL) == ncclRemoteError);
    CHECK(names_rank(NULL, ranks - 1));
    OK(ncclCommAbort(comm));
}

static void *abort_later(void *comm) {
    usleep(200000);
    OK(ncclCommAbort(comm));
    return NULL;
}

/* The last rank does not split, and another thread aborts the parent meanwhile. */
void abort_split(void) {
    ncclComm_t part = NULL, comm = join();
    ncclResult_t state = ncclSuccess;
    pthread_t thread;
    if (rank == 0) {
        pthread_create(&thread, NULL, abort_later, comm);
        CHECK(ncclCommSplit(comm, 0, 0, &part, NULL) == ncclRemoteError);
        pthread_join(thread, NULL);
        return;
    }
    while (state == ncclSuccess) {
        usleep(1000);
        OK(ncclCommGetAsyncError(comm, &state));
    }
    CHECK(state == ncclRemoteError);
    CHECK(names_rank(comm, 0));
    OK(ncclCommAbort(comm));
}

/* Four ranks: first without rank 1; then without the first of the others, which leaves their
   operation to itself; then without the last one, which is killed. */
void shrink(void) {
    ncclComm_t parent = join(), three = NULL, two = NULL, last = NULL;
    int without[2] = { 1, 1 }, own = rank, none = 4, first = 0, second = 1, *memory = gpu_memory(1 << 20);
    ncclResult_t state = ncclSuccess;
    stream = gpu_stream();
    FAILS(ncclCommShrink(parent, &own, 1, &three, NULL, NCCL_SHRINK_DEFAULT), ncclInvalidArgument, "itself");
    FAILS(ncclCommShrink(parent, &none, 1, &three, NULL, NCCL_SHRINK_DEFAULT), ncclInvalidArgument, "excluded rank 4");
    FAILS(ncclCommShrink(parent, &own, 0, &three, NULL, NCCL_SHRINK_DEFAULT), ncclInvalidArgument, "no rank");
    FAILS(ncclCommShrink(parent, NULL, 1, &three, NULL, NCCL_SHRINK_DEFAULT), ncclInvalidArgument, "NULL");
    if (rank != 1) {
        OK(ncclCommShrink(parent, without, 2, &three, NULL, NCCL_SHRINK_DEFAULT));
        CHECK(is_rank(three, rank ? rank - 1 : 0, 3));
        CHECK(sum(three, 1 << rank) == 1 + 4 + 8);
        FAILS(ncclCommShrink(parent, without, 2, &two, NULL, NCCL_SHRINK_DEFAULT), ncclInvalidUsage, "shrunk before");
    }
    CHECK(sum(parent, 1 << rank) == 15);
    OK(ncclCommDestroy(parent));
    if (rank == 1) return;
    if (rank == 0) {
        while (state == ncclSuccess) {
            usleep(1000);
            OK(ncclCommGetAsyncError(three, &state));
        }
        CHECK(state == ncclRemoteError);
        OK(ncclCommAbort(three));
        return;
    }
    /* The other one's abort may come first, and then it is the other whose operation it ends. */
    state = ncclAllReduce(memory, memory, 1 << 18, ncclInt32, ncclSum, three, stream);
    CHECK(state == ncclSuccess || state == ncclRemoteError);
    OK(ncclCommShrink(three, &first, 1, &two, NULL, NCCL_SHRINK_ABORT));
    gpu_synchronize(stream);
    OK(ncclCommAbort(three));
    CHECK(is_rank(two, rank - 2, 2));
    CHECK(sum(two, 1 << rank) == 4 + 8);
    if (rank == 3) kill(getpid(), SIGKILL);
    OK(ncclCommShrink(two, &second, 1, &last, NULL, NCCL_SHRINK_ABORT));
    CHECK(is_rank(last, 0, 1));
    CHECK(sum(last, 5) == 5);
    OK(ncclCommDestroy(last));
    OK(ncclCommAbort(two));
}

/* Three ranks, of which the last one joins the first two. */
void grow(void) {
    ncclComm_t all = join(), two = NULL, three = NULL;
    ncclUniqueId more;
    stream = gpu_stream();
    OK(ncclCommSplit(all, rank / 2, 0, &two, NULL));
    if (rank == 0) OK(ncclCommGetUniqueId(two, &more));
    share_id(all, &more, stream);
    if (rank < 2) {
        FAILS(ncclCommGrow(two, 2, NULL, -1, &three, NULL), ncclInvalidArgument, "2 ranks already");
        FAILS(ncclCommGrow(two, 3, NULL, 2, &three, NULL), ncclInvalidArgument, "give -1");
        FAILS(ncclCommGrow(two, 3, NULL, -1, &three, NULL), ncclInvalidUsage, "ncclCommGetUniqueId");
        OK(ncclCommGrow(two, 3, rank == 0 ? &more : NULL, -1, &three, NULL));
        CHECK(sum(two, 1 << rank) == 3);
    } else {
        FAILS(ncclCommGrow(NULL, 3, NULL, 2, &three, NULL), ncclInvalidArgument, "NULL");
        OK(ncclCommGrow(NULL, 3, &more, 2, &three, NULL));
    }
    CHECK(is_rank(three, rank, 3));
    CHECK(sum(three, 1 << rank) == 7);
    OK(ncclCommDestroy(three));
    OK(ncclCommDestroy(two));
    OK(ncclCommDestroy(all));
}
