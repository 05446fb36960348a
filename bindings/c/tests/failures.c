/*
 * A rank of three that fails as its argument says: failures RANK HOST:PORT killed|aborted|absent
 * Rank 2 fails; the others report so.
 */

#define _POSIX_C_SOURCE 200809L

#include "check.h"

#include <signal.h>
#include <time.h>

enum { TIMEOUT_MS = 10000 };

int main(int argc, char **argv) {
    EXPECT(argc == 4);
    uint32_t rank = (uint32_t)atoi(argv[1]);
    int killed = strcmp(argv[3], "killed") == 0, aborted = strcmp(argv[3], "aborted") == 0;
    doorbell_device *device;
    doorbell_comm *comm;
    OK(doorbell_open("soft0", &device));
    OK(doorbell_comm_create(device, rank, 3, argv[2], "a secret of the test", TIMEOUT_MS, &comm));
    double data[512] = {0};
    OK(doorbell_all_reduce(comm, data, data, 512, DOORBELL_FLOAT64, DOORBELL_SUM));
    if (rank == 2) {
        if (killed) {
            raise(SIGKILL);
        } else if (aborted) {
            OK(doorbell_comm_abort(comm, "out of oil"));
        }
        /* Until the others have reported it. */
        while (getchar() != EOF) {
        }
        return 0;
    }
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    doorbell_status expected = killed ? DOORBELL_PEER_FAILED : aborted ? DOORBELL_ABORTED : DOORBELL_TIMED_OUT;
    const char *words = killed ? "rank 2" : aborted ? "out of oil" : "has not begun";
    FAILS(doorbell_all_reduce(comm, data, data, 512, DOORBELL_FLOAT64, DOORBELL_SUM), expected, words);
    clock_gettime(CLOCK_MONOTONIC, &end);
    long waited = (end.tv_sec - start.tv_sec) * 1000 + (end.tv_nsec - start.tv_nsec) / 1000000;
    fprintf(stderr, "rank %u after %ld ms: %s\n", rank, waited, doorbell_last_error());
    EXPECT(waited < (killed || aborted ? TIMEOUT_MS / 2 : 2 * TIMEOUT_MS));

    int64_t culprit = -1;
    FAILS(doorbell_comm_failure(comm, &culprit), expected, words);
    EXPECT(culprit == 2);
    /* All later operations, and the end. */
    FAILS(doorbell_barrier(comm), expected, words);
    FAILS(doorbell_comm_destroy(comm), expected, words);
    OK(doorbell_close(device));
    return 0;
}
