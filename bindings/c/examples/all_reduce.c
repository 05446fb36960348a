/*
 * The sum over all ranks. Start one process for each:
 *
 *     all_reduce 0 2 127.0.0.1:18600 & all_reduce 1 2 127.0.0.1:18600
 */

#include <doorbell.h>
#include <stdio.h>
#include <stdlib.h>

static void check(doorbell_status status) {
    if (status != DOORBELL_OK) {
        fprintf(stderr, "all_reduce: %s\n", doorbell_last_error());
        exit(1);
    }
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: all_reduce RANK RANKS HOST:PORT\n");
        return 2;
    }
    uint32_t rank = (uint32_t)atoi(argv[1]), ranks = (uint32_t)atoi(argv[2]);
    doorbell_device *device;
    doorbell_comm *comm;
    check(doorbell_open(NULL, &device));
    /* NULL: the secret is that of DOORBELL_SECRET. */
    check(doorbell_comm_create(device, rank, ranks, argv[3], NULL, 10000, &comm));

    /* Any memory will do; that of the communicator is not copied. */
    doorbell_memory *memory;
    check(doorbell_comm_alloc(comm, 4 * sizeof(float), &memory));
    float *gradients = doorbell_address(memory);
    for (uint32_t i = 0; i < 4; i++) {
        gradients[i] = (float)(i < 3 ? i + 1 : rank);
    }
    doorbell_all_reduce(comm, gradients, gradients, 4, DOORBELL_FLOAT32, DOORBELL_SUM);
    int64_t culprit;
    if (doorbell_comm_failure(comm, &culprit) != DOORBELL_OK) {
        fprintf(stderr, "all_reduce: rank %lld has failed: %s\n", (long long)culprit, doorbell_last_error());
        return 1;
    }
    printf("rank %u of %u: %g %g %g %g\n", doorbell_comm_rank(comm), doorbell_comm_size(comm), gradients[0],
           gradients[1], gradients[2], gradients[3]);

    check(doorbell_free(memory));
    check(doorbell_comm_destroy(comm));
    return doorbell_close(device);
}
