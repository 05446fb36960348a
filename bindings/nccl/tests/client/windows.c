/* Windows: memory that the ranks register together. */
#include "client.h"

#define COUNT 100000
#define BYTES (COUNT * sizeof(int))
/* Where in a window the results are. */
#define OFFSET 4096

/* Memory of any rank that this process has mapped. */
static int mapped(void) {
    char line[512];
    int count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps)) count += strstr(line, "/memfd:") != NULL;
    fclose(maps);
    return count;
}

/* The sum of all ranks' elements at the offset, there and in place. */
static void check_sum(ncclComm_t comm, char *memory, cudaStream_t stream) {
    int *values = malloc(BYTES), *into = (int *)(memory + OFFSET);
    for (int in_place = 0; in_place < 2; in_place++) {
        int *from = in_place ? into : gpu_memory(BYTES);
        for (int i = 0; i < COUNT; i++) values[i] = i + rank;
        gpu_write(from, values, BYTES, stream);
        OK(ncclAllReduce(from, into, COUNT, ncclInt32, ncclSum, comm, stream));
        gpu_read(values, into, BYTES, stream);
        for (int i = 0; i < COUNT; i++) CHECK(values[i] == i * ranks + ranks * (ranks - 1) / 2);
    }
    free(values);
}

void windows(void) {
    size_t bytes = OFFSET + BYTES;
    cudaStream_t stream = gpu_stream(), captured = gpu_stream();
    ncclComm_t comm = join(), other = NULL;
    ncclWindow_t shared, unshared, local = NULL;
    void *allocated, *pointer;
    char *plain = gpu_memory(bytes);
    OK(ncclMemAlloc(&allocated, bytes));
    OK(ncclCommSplit(comm, 0, 0, &other, NULL));
    check_sum(comm, allocated, stream);
    int before = mapped();
    /* In one group, which disturbs no capture; memory of cuMemAlloc cannot be shared by descriptor, and is accepted. */
    gpu_capture(captured);
    OK(ncclGroupStart());
    OK(ncclCommWindowRegister(comm, allocated, bytes, &shared, NCCL_WIN_COLL_SYMMETRIC));
    OK(ncclCommWindowRegister(comm, plain, bytes, &unshared, NCCL_WIN_COLL_SYMMETRIC));
    OK(ncclGroupEnd());
    gpu_instance_destroy(gpu_captured(captured));
    int all = getenv("DOORBELL_GPU") ? 0 : ranks - 1;
    CHECK(mapped() >= before + all);
    check_sum(comm, allocated, stream);
    check_sum(comm, plain, stream);
    check_sum(other, allocated, stream);
    /* One that not all ranks use alike is this rank's alone. */
    if (rank == 0) {
        OK(ncclCommWindowRegister(comm, plain, bytes, &local, NCCL_WIN_DEFAULT));
        OK(ncclWinGetUserPtr(comm, local, &pointer));
        CHECK(pointer == plain);
        OK(ncclCommWindowDeregister(comm, local));
        FAILS(ncclCommWindowDeregister(comm, local), ncclInvalidArgument, "no window");
    }
    FAILS(ncclCommWindowDeregister(other, shared), ncclInvalidArgument, "no window");
    FAILS(ncclCommWindowRegister(comm, NULL, bytes, &local, NCCL_WIN_COLL_SYMMETRIC), ncclInvalidArgument, "NULL");
    FAILS(ncclCommWindowRegister(comm, plain, 0, &local, NCCL_WIN_COLL_SYMMETRIC), ncclInvalidArgument, "size is 0");
    /* None waits for another rank. */
    before = mapped();
    gpu_capture(captured);
    OK(ncclCommWindowDeregister(comm, rank % 2 ? shared : unshared));
    OK(ncclCommWindowDeregister(comm, rank % 2 ? unshared : shared));
    gpu_instance_destroy(gpu_captured(captured));
    CHECK(mapped() <= before - all);
    check_sum(comm, allocated, stream);
    OK(ncclCommDestroy(comm));
    OK(ncclCommDestroy(other));
    OK(ncclMemFree(allocated));
}

/* Communicators one after another, at the rendezvous that the environment names. */
void named(void) {
    cudaStream_t stream = gpu_stream();
    char *memory = gpu_memory(OFFSET + BYTES);
    for (int turn = 0; turn < 3; turn++) {
        ncclComm_t comm;
        OK(ncclGetUniqueId(&id));
        OK(ncclCommInitRank(&comm, ranks, id, rank));
        check_sum(comm, memory, stream);
        OK(ncclCommDestroy(comm));
    }
}
