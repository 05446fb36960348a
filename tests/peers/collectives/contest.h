// The measurement loop of the peers' collectives: cargo xtask peers coll compares them with `doorbell coll`.
//
// usage: PROGRAM OPERATION FROM TO FACTOR
// prints one line for each size: OPERATION BYTES MICROSECONDS
//
// BYTES are as in nccl-tests: the total output of an all-gather, the total input of a reduce-scatter or an all-to-all.
#ifndef DOORBELL_CONTEST_H
#define DOORBELL_CONTEST_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct contest {
    const char *operation;
    size_t from, to, factor;
};

static inline struct contest contest_of(int argc, char **argv) {
    struct contest c = {0};
    if (argc == 5) {
        c.operation = argv[1];
        c.from = strtoull(argv[2], NULL, 10);
        c.to = strtoull(argv[3], NULL, 10);
        c.factor = strtoull(argv[4], NULL, 10);
    }
    if (!c.operation || c.from < 4 || c.factor < 2) {
        fprintf(stderr, "usage: %s allreduce|allgather|reduce-scatter|broadcast|alltoall FROM TO FACTOR\n", argv[0]);
        exit(2);
    }
    return c;
}

// Repetitions of an operation of this size: for about a tenth of a second, but at least ten.
static inline int contest_repeats(size_t bytes) {
    size_t n = (size_t)200000000 / (bytes + 20000);
    return n < 10 ? 10 : n > 5000 ? 5000 : (int)n;
}

static inline double contest_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

#endif
