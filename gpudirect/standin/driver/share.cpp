// IPC handles of memory and events, which name a process and its descriptor; emulated dma-bufs.
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "memory.h"

using namespace standin;

namespace {

constexpr uint64_t MEMORY_MAGIC = 0x796d656d2d626f6f, EVENT_MAGIC = 0x746e7665e2d626f6;
constexpr const char *EVENT_NAME = "doorbell-standin-event";

union Handle {
    char bytes[64];
    struct {
        uint64_t magic, nonce, size;
        int pid, fd;
    } of;
};

// Another process's file; negative if there is none.
int open_of(const Handle &handle) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.of.pid, handle.of.fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

Passage::Counts *map_counts(int fd) {
    void *counts = mmap(nullptr, sizeof(Passage::Counts), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return counts == MAP_FAILED ? nullptr : static_cast<Passage::Counts *>(counts);
}

}  // namespace

Passage::~Passage() {
    if (counts != &own) munmap(counts, sizeof(Counts));
    if (fd >= 0) close(fd);
}

EXPORT cuIpcGetMemHandle(Handle *handle, Address address) {
    ENTER;
    const Mapping *mapping = mapping_of(address);
    if (!mapping || mapping->kind != Mapping::ALLOCATED) return INVALID_VALUE;
    *handle = {};
    handle->of = {MEMORY_MAGIC, mapping->of->nonce, mapping->bytes, getpid(), mapping->of->fd};
    return OK;
}

EXPORT cuIpcOpenMemHandle_v2(Address *address, Handle handle, unsigned) {
    ENTER;
    if (handle.of.magic != MEMORY_MAGIC) return INVALID_VALUE;
    if (handle.of.pid == getpid()) return INVALID_CONTEXT;
    const int fd = open_of(handle);
    if (fd < 0) return INVALID_VALUE;
    auto allocation = adopt(fd);
    if (!allocation || allocation->nonce != handle.of.nonce) return INVALID_VALUE;
    if (allocation->device != current_device() && !settings.peers) return PEER_UNSUPPORTED;
    return map_all(address, handle.of.size, allocation, Mapping::OPENED);
}

EXPORT cuIpcCloseMemHandle(Address address) {
    ENTER;
    Mapping *mapping = mapping_of(address);
    if (!mapping || mapping->kind != Mapping::OPENED || mapping->at != address) return INVALID_VALUE;
    unmap(address);
    return unreserve(address);
}

EXPORT cuIpcGetEventHandle(Handle *handle, Event *event) {
    ENTER;
    Passage &passage = *event->passage;
    if (!passage.shared()) {
        const int fd = memfd_create(EVENT_NAME, MFD_CLOEXEC);
        Passage::Counts *counts = fd < 0 || ftruncate(fd, sizeof(*counts)) ? nullptr : map_counts(fd);
        if (!counts) return OPERATING_SYSTEM;
        *counts = passage.own;
        passage.counts = counts;
        passage.fd = fd;
    }
    *handle = {};
    handle->of = {EVENT_MAGIC, 0, 0, getpid(), passage.fd};
    return OK;
}

EXPORT cuIpcOpenEventHandle(Event **event, Handle handle) {
    ENTER;
    const int fd = handle.of.magic == EVENT_MAGIC ? open_of(handle) : -1;
    if (fd < 0) return INVALID_VALUE;
    auto made = std::make_unique<Event>();
    made->passage->fd = fd;
    Passage::Counts *counts = map_counts(fd);
    if (!counts) return OPERATING_SYSTEM;
    made->passage->counts = counts;
    *event = made.release();
    count(EVENT, 1);
    return OK;
}

// A dma-buf is emulated by a file of the right length with "dmabuf" in its name. Like NVIDIA's it
// cannot be mapped writable, and it is empty: the receiver is given the address, too.
EXPORT cuMemGetHandleForAddressRange(int *fd, Address address, size_t bytes, unsigned kind, unsigned long long) {
    ENTER;
    const Mapping *mapping = mapping_of(address);
    if (kind != 1 || !mapping || !bytes || address % 4096 || bytes % 4096 || address + bytes > mapping->at + mapping->length) return INVALID_VALUE;
    *fd = memfd_create("/dmabuf:doorbell-standin", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (*fd < 0) return OPERATING_SYSTEM;
    if (ftruncate(*fd, bytes) || fcntl(*fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL)) {
        close(*fd);
        return OPERATING_SYSTEM;
    }
    return OK;
}
