// Collectives of an MPI, measured. mpicc -O2 mpi.c -o mpi; mpirun -n 3 ./mpi allreduce 8 67108864 8
#include "contest.h"
#include <mpi.h>

static int ranks;

static int run(const char *operation, float *in, float *out, size_t bytes) {
    int count = (int)(bytes / sizeof(float)), part = count / ranks;
    if (!strcmp(operation, "allreduce")) return MPI_Allreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    if (!strcmp(operation, "allgather")) return MPI_Allgather(in, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD);
    if (!strcmp(operation, "reduce-scatter")) return MPI_Reduce_scatter_block(in, out, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    if (!strcmp(operation, "broadcast")) return MPI_Bcast(out, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
    if (!strcmp(operation, "alltoall")) return MPI_Alltoall(in, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD);
    fprintf(stderr, "no operation %s\n", operation);
    MPI_Abort(MPI_COMM_WORLD, 2);
    return -1;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    struct contest c = contest_of(argc, argv);
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    float *in = malloc(c.to + 64), *out = malloc(c.to + 64);
    for (size_t i = 0; i < c.to / sizeof(float); i++) in[i] = out[i] = (float)(i % 1000 + (size_t)rank);
    for (size_t bytes = c.from; bytes <= c.to; bytes *= c.factor) {
        int repeats = contest_repeats(bytes);
        for (int i = 0; i < repeats / 10 + 2; i++) run(c.operation, in, out, bytes);
        MPI_Barrier(MPI_COMM_WORLD);
        double begun = contest_now();
        for (int i = 0; i < repeats; i++) run(c.operation, in, out, bytes);
        double mine = (contest_now() - begun) / repeats, mean;
        MPI_Reduce(&mine, &mean, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
        if (rank == 0) printf("%s %zu %.3f\n", c.operation, bytes, mean / ranks), fflush(stdout);
    }
    MPI_Finalize();
    return 0;
}
