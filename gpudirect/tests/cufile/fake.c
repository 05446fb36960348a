// cuFile's functions for tests: they copy by the CUDA library of DOORBELL_CUDA_LIBRARY, and refuse
// what FAKE_CUFILE says. Reads and writes move at most 100000 bytes a call, as cuFile may.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { int code, cuda; } Status;
typedef struct { unsigned kind; union { int fd; void *other; } handle; const void *operations; } Descriptor;

static int refuses(const char *what) {
    const char *mode = getenv("FAKE_CUFILE");
    return mode && !strcmp(mode, what);
}

static Status status(int code) { return (Status){code, 0}; }

// Of the compatibility mode: allowed unless it is set otherwise, as by cuFile's configuration.
static bool allowed = true;

static int without_module(void) { return refuses("module") || refuses("forced"); }

Status cuFileDriverOpen(void) {
    if (refuses("driver") || (without_module() && !allowed && !refuses("forced"))) return status(5001);
    return status(0);
}

Status cuFileDriverGetProperties(unsigned *properties) {
    properties[0] = without_module() ? 0 : 2;
    properties[1] = 0;
    return status(0);
}

#ifdef PARAMETERS
Status cuFileSetParameterBool(int parameter, bool value) {
    if (parameter == 1) allowed = value;
    return status(parameter == 1 && refuses("parameter") ? 5022 : 0);
}

Status cuFileGetParameterBool(int parameter, bool *value) {
    if (parameter != 1 && parameter != 2) return status(5022);
    *value = parameter == 1 ? allowed : refuses("forced");
    return status(0);
}
#endif

Status cuFileHandleRegister(void **handle, Descriptor *descriptor) {
    if (descriptor->kind != 1 || !(fcntl(descriptor->handle.fd, F_GETFL) & O_DIRECT)) return status(5019);
    if (refuses("filesystem")) return status(5008);
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor->handle.fd);
    int *fd = malloc(sizeof *fd);
    *fd = open(name, fcntl(descriptor->handle.fd, F_GETFL) & O_ACCMODE);
    *handle = fd;
    return status(*fd < 0 ? 5018 : 0);
}

void cuFileHandleDeregister(void *handle) {
    close(*(int *)handle);
    free(handle);
}

static void *function(const char *name) {
    void *library = dlopen(getenv("DOORBELL_CUDA_LIBRARY"), RTLD_NOW | RTLD_LOCAL);
    void *found = library ? dlsym(library, name) : NULL;
    if (!found) abort();
    return found;
}

static void *stream(void) {
    static void *made;
    if (!made && ((int (*)(void **, unsigned, int))function("cuStreamCreateWithPriority"))(&made, 1, 0)) abort();
    return made;
}

static ssize_t move(void *handle, void *memory, size_t size, off_t offset, off_t at, int write) {
    static char buffer[100000];
    if (refuses("io")) return -5030;
    if (refuses("errno")) {
        errno = EIO;
        return -1;
    }
    size = size < sizeof buffer ? size : sizeof buffer;
    char *device = (char *)memory + at;
    int fd = *(int *)handle;
    if (write) {
        if (((int (*)(void *, void *, size_t, void *))function("cuMemcpyDtoHAsync_v2"))(buffer, device, size, stream()))
            return -5011;
        return pwrite(fd, buffer, size, offset);
    }
    ssize_t got = pread(fd, buffer, size, offset);
    if (got > 0 &&
        ((int (*)(void *, void *, size_t, void *))function("cuMemcpyHtoDAsync_v2"))(device, buffer, (size_t)got, stream()))
        return -5011;
    return got;
}

ssize_t cuFileRead(void *handle, void *memory, size_t size, off_t offset, off_t at) {
    return move(handle, memory, size, offset, at, 0);
}

ssize_t cuFileWrite(void *handle, const void *memory, size_t size, off_t offset, off_t at) {
    return move(handle, (void *)memory, size, offset, at, 1);
}
