// Measures NCCL's collectives between GPUs, one process per GPU: for `beside.py`, which runs
// `doorbell coll --gpu` on the same GPUs alternately.
//
//   nccl-bench RANKS OPERATION TYPE FIRST LAST FACTOR ROUNDS
//
// OPERATION is allreduce, allgather, reduce-scatter or broadcast, TYPE f32 or bf16; sizes
// are as in nccl-tests, from FIRST to LAST bytes. Each line of output is a size: its bytes, the microseconds of
// one operation when many are enqueued, and when they are launched as a graph of 20. Each is the median of
// ROUNDS, and of each round the slowest rank counts. Buffers are out of place and registered. To build where
// NCCL is installed: cc -O2 bench.c -lnccl -lcudart.
#define _GNU_SOURCE
#include <cuda_runtime.h>
#include <nccl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST = 16, GRAPH = 20, ROUNDS_MOST = 64 };

// Shared by the processes.
struct shared {
    pthread_barrier_t barrier;
    ncclUniqueId id;
    float took[MOST][ROUNDS_MOST];
};

static int rank, ranks;

static void cuda_failed(cudaError_t error, int line) {
    fprintf(stderr, "nccl-bench: rank %d, line %d: %s\n", rank, line, cudaGetErrorString(error));
    exit(1);
}

static void nccl_failed(ncclResult_t error, int line) {
    fprintf(stderr, "nccl-bench: rank %d, line %d: %s\n", rank, line, ncclGetErrorString(error));
    exit(1);
}

#define CUDA(call) do { cudaError_t error_ = (call); if (error_ != cudaSuccess) cuda_failed(error_, __LINE__); } while (0)
#define NCCL(call) do { ncclResult_t error_ = (call); if (error_ != ncclSuccess) nccl_failed(error_, __LINE__); } while (0)

enum operation { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, OPERATIONS };
static const char *const NAMES[OPERATIONS] = {"allreduce", "allgather", "reduce-scatter", "broadcast"};

struct job {
    enum operation operation;
    ncclDataType_t type;
    size_t count; // of the whole, in elements
    const void *input;
    void *output;
    ncclComm_t communicator;
    cudaStream_t stream;
};

static void enqueue(const struct job *job) {
    const size_t part = job->count / ranks;
    switch (job->operation) {
    case ALL_REDUCE: NCCL(ncclAllReduce(job->input, job->output, job->count, job->type, ncclSum, job->communicator, job->stream)); break;
    case ALL_GATHER: NCCL(ncclAllGather(job->input, job->output, part, job->type, job->communicator, job->stream)); break;
    case REDUCE_SCATTER: NCCL(ncclReduceScatter(job->input, job->output, part, job->type, ncclSum, job->communicator, job->stream)); break;
    default: NCCL(ncclBroadcast(job->input, job->output, job->count, job->type, 0, job->communicator, job->stream)); break;
    }
}

static int ascending(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

// Microseconds of one operation: of `launches` of a graph of GRAPH operations, or of as many operations without one.
static double measure(struct shared *shared, const struct job *job, cudaGraphExec_t graph, int launches, int rounds) {
    cudaEvent_t start, end;
    CUDA(cudaEventCreate(&start));
    CUDA(cudaEventCreate(&end));
    for (int round = -1; round < rounds; round++) {
        CUDA(cudaStreamSynchronize(job->stream));
        pthread_barrier_wait(&shared->barrier);
        CUDA(cudaEventRecord(start, job->stream));
        for (int i = 0; i < launches; i++) {
            if (graph) CUDA(cudaGraphLaunch(graph, job->stream));
            else enqueue(job);
        }
        CUDA(cudaEventRecord(end, job->stream));
        CUDA(cudaEventSynchronize(end));
        float milliseconds;
        CUDA(cudaEventElapsedTime(&milliseconds, start, end));
        if (round >= 0) shared->took[rank][round] = milliseconds;
    }
    pthread_barrier_wait(&shared->barrier);
    float slowest[ROUNDS_MOST];
    for (int round = 0; round < rounds; round++) {
        slowest[round] = 0;
        for (int r = 0; r < ranks; r++) if (shared->took[r][round] > slowest[round]) slowest[round] = shared->took[r][round];
    }
    pthread_barrier_wait(&shared->barrier);
    qsort(slowest, rounds, sizeof *slowest, ascending);
    CUDA(cudaEventDestroy(start));
    CUDA(cudaEventDestroy(end));
    return slowest[rounds / 2] * 1e3 / launches / (graph ? GRAPH : 1);
}

static int run(struct shared *shared, struct job job, size_t element, size_t first, size_t last, size_t factor, int rounds) {
    CUDA(cudaSetDevice(rank));
    if (rank == 0) NCCL(ncclGetUniqueId(&shared->id));
    pthread_barrier_wait(&shared->barrier);
    NCCL(ncclCommInitRank(&job.communicator, ranks, shared->id, rank));
    void *input, *output, *handles[2];
    NCCL(ncclMemAlloc(&input, last));
    NCCL(ncclMemAlloc(&output, last));
    CUDA(cudaMemset(input, 0, last));
    CUDA(cudaDeviceSynchronize());
    NCCL(ncclCommRegister(job.communicator, input, last, &handles[0]));
    NCCL(ncclCommRegister(job.communicator, output, last, &handles[1]));
    CUDA(cudaStreamCreateWithFlags(&job.stream, cudaStreamNonBlocking));
    job.input = input;
    job.output = output;
    for (size_t bytes = first; bytes <= last; bytes *= factor) {
        job.count = bytes / element;
        const int launches = bytes <= (1u << 20) ? 200 : bytes <= (64u << 20) ? 20 : 5;
        enqueue(&job);
        enqueue(&job);
        const double eager = measure(shared, &job, NULL, launches, rounds);
        double graphed = 0;
        if (bytes <= (1u << 20)) {
            cudaGraph_t graph;
            cudaGraphExec_t ready;
            CUDA(cudaStreamBeginCapture(job.stream, cudaStreamCaptureModeThreadLocal));
            for (int i = 0; i < GRAPH; i++) enqueue(&job);
            CUDA(cudaStreamEndCapture(job.stream, &graph));
            CUDA(cudaGraphInstantiate(&ready, graph, 0));
            graphed = measure(shared, &job, ready, 20, rounds);
            CUDA(cudaGraphExecDestroy(ready));
            CUDA(cudaGraphDestroy(graph));
        }
        if (rank == 0) {
            printf("%zu %.3f %.3f\n", bytes, eager, graphed);
            fflush(stdout);
        }
    }
    NCCL(ncclCommDeregister(job.communicator, handles[0]));
    NCCL(ncclCommDeregister(job.communicator, handles[1]));
    NCCL(ncclMemFree(input));
    NCCL(ncclMemFree(output));
    NCCL(ncclCommDestroy(job.communicator));
    return 0;
}

int main(int argc, char **argv) {
    struct job job = {.operation = OPERATIONS};
    if (argc == 8) for (int i = 0; i < OPERATIONS; i++) if (!strcmp(argv[2], NAMES[i])) job.operation = (enum operation)i;
    const int bf16 = argc == 8 && !strcmp(argv[3], "bf16");
    const size_t first = argc == 8 ? strtoull(argv[4], NULL, 10) : 0, last = argc == 8 ? strtoull(argv[5], NULL, 10) : 0, factor = argc == 8 ? strtoull(argv[6], NULL, 10) : 0;
    const int rounds = argc == 8 ? atoi(argv[7]) : 0;
    ranks = argc == 8 ? atoi(argv[1]) : 0;
    if (job.operation == OPERATIONS || (!bf16 && strcmp(argv[3], "f32")) || ranks < 2 || ranks > MOST || !first || last < first || factor < 2 || rounds < 1 || rounds > ROUNDS_MOST) {
        fprintf(stderr, "usage: nccl-bench RANKS allreduce|allgather|reduce-scatter|broadcast f32|bf16 FIRST LAST FACTOR ROUNDS\n");
        return 2;
    }
    job.type = bf16 ? ncclBfloat16 : ncclFloat32;
    struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) {
        perror("nccl-bench: mmap");
        return 1;
    }
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared->barrier, &attributes, ranks);
    pid_t children[MOST];
    for (rank = 0; rank < ranks; rank++) {
        children[rank] = fork();
        if (children[rank] < 0) {
            perror("nccl-bench: fork");
            return 1;
        }
        if (!children[rank]) return run(shared, job, bf16 ? 2 : 4, first, last, factor, rounds);
    }
    // One that fails leaves the others at a barrier.
    int failed = 0;
    for (int left = ranks; left; left--) {
        int status;
        wait(&status);
        if (status && !failed) {
            failed = 1;
            for (int r = 0; r < ranks; r++) kill(children[r], SIGKILL);
        }
    }
    return failed;
}
