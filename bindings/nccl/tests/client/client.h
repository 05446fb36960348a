/* What the clients share: checks, and a GPU by the CUDA driver that the environment names. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "nccl.h"

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            printf("FAIL rank %d, %s:%d: %s; last error: %s\n", rank, __FILE__, __LINE__, #condition, ncclGetLastError(NULL)); \
            exit(1); \
        } \
    } while (0)
#define OK(call) CHECK((call) == ncclSuccess)
/* A call that fails, with this in its text. */
#define FAILS(call, result, text) \
    do { \
        CHECK((call) == (result)); \
        CHECK(strstr(ncclGetLastError(NULL), text)); \
    } while (0)

extern int rank, ranks;
extern ncclUniqueId id;

/* The GPU of this rank, modulo their number, is current in this thread from now on; its number. */
int gpu_open(void);
void *gpu_memory(size_t bytes);
cudaStream_t gpu_stream(void);
void gpu_stream_destroy(cudaStream_t stream);
/* These wait for the stream. */
void gpu_write(void *into, const void *from, size_t bytes, cudaStream_t stream);
void gpu_read(void *into, const void *from, size_t bytes, cudaStream_t stream);
void gpu_synchronize(cudaStream_t stream);

/* Calls a function of the host in the order of the stream. */
void gpu_call(cudaStream_t stream, void (*called)(void *), void *argument);
/* Later work of one stream waits for earlier work of another. */
void gpu_order(cudaStream_t earlier, cudaStream_t later);
/* In the mode in which programs capture: no thread may load, allocate or query meanwhile. */
void gpu_capture(cudaStream_t stream);
/* An instance of what was captured. */
void *gpu_captured(cudaStream_t stream);
void gpu_launch(void *instance, cudaStream_t stream);
void gpu_instance_destroy(void *instance);
/* Kills this process; another one executes what the streams of the stand-in have yet to begin, and writes ENDED. */
void gpu_die(void);
/* How many there are of a kind of object of the stand-in. */
int gpu_count(const char *kind);

ncclComm_t join(void);
/* The state of a communicator that is in progress at first. */
ncclResult_t state_at_last(ncclComm_t comm);
/* Gives the first rank's id to all others. */
void share_id(ncclComm_t comm, ncclUniqueId *other, cudaStream_t stream);
/* Whether the last error of the communicator, or of any, names this rank. */
int names_rank(ncclComm_t comm, int other);
/* Waits until the communicator has failed as the last rank has aborted, and aborts it. */
void await_abort(ncclComm_t comm);

void collectives(void);
void collectives_in_groups(void);
void messages(void);
void groups(void);
void orders(void);
void overlaps(void);
void killed(void);
void killed_with_work(void);
void abort_operation(void);
void abort_graph(void);
void graphs(void);
void abort_initialisation(void);
void abort_initialisations(void);
void abort_operations(void);
void arguments(void);
void split(void);
void killed_in_split(void);
void killed_in_initialisation(void);
void abort_split(void);
void shrink(void);
void grow(void);
void windows(void);
void named(void);
