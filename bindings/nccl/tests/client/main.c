/* client id: makes a unique id, writes it, and serves it until its input ends.
   client TEST RANK RANKS ID: a rank of a test, which stays until its input ends. */
#include "client.h"

int rank, ranks;
ncclUniqueId id;

static const struct { const char *name; void (*run)(void); } TESTS[] = {
    { "collectives", collectives }, { "collectives-in-groups", collectives_in_groups }, { "messages", messages }, { "groups", groups },
    { "orders", orders }, { "overlaps", overlaps }, { "graphs", graphs },
    { "killed", killed }, { "killed-with-work", killed_with_work }, { "abort-operation", abort_operation }, { "abort-graph", abort_graph }, { "abort-initialisation", abort_initialisation },
    { "abort-initialisations", abort_initialisations }, { "abort-operations", abort_operations }, { "arguments", arguments },
    { "split", split }, { "killed-in-split", killed_in_split }, { "abort-split", abort_split }, { "shrink", shrink }, { "grow", grow },
    { "windows", windows }, { "killed-in-initialisation", killed_in_initialisation }, { "named", named },
};

ncclComm_t join(void) {
    ncclComm_t comm = NULL;
    OK(ncclCommInitRank(&comm, ranks, id, rank));
    return comm;
}

ncclResult_t state_at_last(ncclComm_t comm) {
    ncclResult_t state;
    do {
        usleep(1000);
        OK(ncclCommGetAsyncError(comm, &state));
    } while (state == ncclInProgress);
    return state;
}

void share_id(ncclComm_t comm, ncclUniqueId *other, cudaStream_t stream) {
    char *memory = gpu_memory(sizeof *other);
    if (!rank) gpu_write(memory, other, sizeof *other, stream);
    OK(ncclBcast(memory, sizeof *other, ncclInt8, 0, comm, stream));
    gpu_read(other, memory, sizeof *other, stream);
}

int names_rank(ncclComm_t comm, int other) {
    char name[32];
    snprintf(name, sizeof name, "rank %d", other);
    return strstr(ncclGetLastError(comm), name) != NULL;
}

void await_abort(ncclComm_t comm) {
    ncclResult_t state = ncclSuccess;
    while (state == ncclSuccess) {
        usleep(1000);
        OK(ncclCommGetAsyncError(comm, &state));
    }
    CHECK(state == ncclRemoteError);
    CHECK(names_rank(comm, ranks - 1));
    CHECK(strstr(ncclGetLastError(comm), "ncclCommAbort"));
    OK(ncclCommAbort(comm));
}

static void wait_for_end(void) {
    char byte;
    while (read(0, &byte, 1) > 0) { }
}

static void serve_id(void) {
    OK(ncclGetUniqueId(&id));
    for (size_t i = 0; i < sizeof id; i++) printf("%02x", (unsigned char)id.internal[i]);
    printf("\n");
    fflush(stdout);
    wait_for_end();
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "id")) {
        serve_id();
        return 0;
    }
    if (argc != 5 || strlen(argv[4]) != 2 * sizeof id) return 2;
    rank = atoi(argv[2]);
    ranks = atoi(argv[3]);
    for (size_t i = 0; i < sizeof id; i++) {
        unsigned byte;
        sscanf(argv[4] + 2 * i, "%2x", &byte);
        id.internal[i] = (char)byte;
    }
    gpu_open();
    for (size_t i = 0; i < sizeof TESTS / sizeof *TESTS; i++) {
        if (!strcmp(TESTS[i].name, argv[1])) {
            TESTS[i].run();
            printf("PASS\n");
            fflush(stdout);
            wait_for_end();
            return 0;
        }
    }
    return 2;
}
