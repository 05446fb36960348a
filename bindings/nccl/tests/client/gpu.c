#include <dlfcn.h>

#include "client.h"

static void *driver;

static void *function(const char *name) {
    void *found = dlsym(driver, name);
    if (!found) {
        printf("FAIL there is no %s\n", name);
        exit(1);
    }
    return found;
}

#define CU(name, types, ...) CHECK(((int (*) types)function(name))(__VA_ARGS__) == 0)

int gpu_open(void) {
    void *context;
    int devices;
    if (!driver) driver = dlopen(getenv("DOORBELL_CUDA_LIBRARY"), RTLD_NOW);
    CU("cuInit", (unsigned), 0);
    CU("cuDeviceGetCount", (int *), &devices);
    CU("cuDevicePrimaryCtxRetain", (void **, int), &context, rank % devices);
    CU("cuCtxSetCurrent", (void *), context);
    return rank % devices;
}

void *gpu_memory(size_t bytes) {
    uint64_t address;
    CU("cuMemAlloc_v2", (uint64_t *, size_t), &address, bytes);
    return (void *)(uintptr_t)address;
}

cudaStream_t gpu_stream(void) {
    void *stream;
    CU("cuStreamCreateWithPriority", (void **, unsigned, int), &stream, 1, 0);
    return stream;
}

void gpu_stream_destroy(cudaStream_t stream) {
    CU("cuStreamDestroy_v2", (void *), stream);
}

void gpu_synchronize(cudaStream_t stream) {
    CU("cuStreamSynchronize", (void *), stream);
}

void gpu_write(void *into, const void *from, size_t bytes, cudaStream_t stream) {
    CU("cuMemcpyHtoDAsync_v2", (uint64_t, const void *, size_t, void *), (uintptr_t)into, from, bytes, stream);
    gpu_synchronize(stream);
}

void gpu_read(void *into, const void *from, size_t bytes, cudaStream_t stream) {
    CU("cuMemcpyDtoHAsync_v2", (void *, uint64_t, size_t, void *), into, (uintptr_t)from, bytes, stream);
    gpu_synchronize(stream);
}

void gpu_call(cudaStream_t stream, void (*called)(void *), void *argument) {
    CU("cuLaunchHostFunc", (void *, void (*)(void *), void *), stream, called, argument);
}

void gpu_order(cudaStream_t earlier, cudaStream_t later) {
    void *event;
    CU("cuEventCreate", (void **, unsigned), &event, 2);
    CU("cuEventRecord", (void *, void *), event, earlier);
    CU("cuStreamWaitEvent", (void *, void *, unsigned), later, event, 0);
    CU("cuEventDestroy_v2", (void *), event);
}

void gpu_capture(cudaStream_t stream) {
    CU("cuStreamBeginCapture_v2", (void *, unsigned), stream, 0);
}

void *gpu_captured(cudaStream_t stream) {
    void *graph, *instance;
    CU("cuStreamEndCapture", (void *, void **), stream, &graph);
    CU("cuGraphInstantiateWithFlags", (void **, void *, unsigned long long), &instance, graph, 0);
    CU("cuGraphDestroy", (void *), graph);
    return instance;
}

void gpu_launch(void *instance, cudaStream_t stream) {
    CU("cuGraphLaunch", (void *, void *), instance, stream);
}

void gpu_instance_destroy(void *instance) {
    CU("cuGraphExecDestroy", (void *), instance);
}

void gpu_die(void) {
    ((void (*)(void))function("standin_die"))();
}

int gpu_count(const char *kind) {
    return ((int (*)(const char *))function("standin_count"))(kind);
}
