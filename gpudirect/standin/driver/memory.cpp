// Device memory, backed by memfds, and host memory.
//
// Device addresses have no host mapping, so that host access faults; the driver and the kernels use
// a second range behind it. Freed addresses are unmapped, and reused as late as possible, so that
// late work faults, too.
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "memory.h"

using namespace standin;

doorbell_host::Window doorbell_window;

namespace standin {

namespace {

constexpr size_t RANGE = size_t(64) << 30;
constexpr const char *PREFIX = "doorbell-standin";

// The range of device addresses, and its reservations.
Address first, cursor;
auto &reserved = *new std::map<Address, size_t>;
auto &mappings = *new std::map<Address, Mapping>;
auto &hosts = *new std::map<Address, Host>;

bool provide_range() {
    if (first) return true;
    void *range = mmap(nullptr, settings.open ? RANGE : 2 * RANGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return false;
    first = cursor = reinterpret_cast<Address>(range);
    doorbell_window = {first, RANGE, settings.open ? 0 : RANGE};
    return true;
}

// Removes the mapping but keeps the reservation.
void clear(Address address, size_t bytes) {
    mmap(at<void>(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
}

// A free range of this many bytes, at or after `from`.
Address place(Address from, size_t bytes, size_t alignment) {
    for (;;) {
        from = (from + alignment - 1) / alignment * alignment;
        if (from + bytes > first + RANGE) return 0;
        auto after = reserved.lower_bound(from);
        if (after != reserved.begin()) {
            auto before = std::prev(after);
            if (before->first + before->second > from) {
                from = before->first + before->second;
                continue;
            }
        }
        if (after == reserved.end() || after->first >= from + bytes) return from;
        from = after->first + after->second;
    }
}

template <class Map>
auto lookup(Map &map, Address address) -> decltype(&map.begin()->second) {
    auto after = map.upper_bound(address);
    if (after == map.begin()) return nullptr;
    auto found = std::prev(after);
    return address - found->first < found->second.bytes ? &found->second : nullptr;
}

}  // namespace

uint64_t unused_number() {
    static uint64_t next = 1;
    return next++;
}

Allocation::Allocation() {
    count(ALLOCATION, 1);
}

Allocation::~Allocation() {
    close(fd);
    count(ALLOCATION, -1);
}

Mapping *mapping_of(Address address) {
    return lookup(mappings, address);
}

bool is_pinned(Address host) {
    return lookup(hosts, host) != nullptr;
}

size_t used(int device) {
    size_t bytes = 0;
    for (auto &[_, mapping] : mappings) {
        if (mapping.of->device == device) bytes += mapping.length;
    }
    return bytes;
}

int duplicate(int fd) {
    return fcntl(fd, F_DUPFD_CLOEXEC, 0);
}

SharedAllocation adopt(int fd) {
    char path[64], name[128];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(path, name, sizeof name - 1);
    name[length < 0 ? 0 : length] = 0;
    struct stat status = {};
    fstat(fd, &status);
    auto made = std::make_shared<Allocation>();
    made->fd = fd;
    made->bytes = status.st_size;
    char format[64];
    snprintf(format, sizeof format, "/memfd:%s:%%d:%%d:%%llx", PREFIX);
    unsigned long long nonce;
    if (sscanf(name, format, &made->device, &made->capable, &nonce) != 3) return nullptr;
    made->nonce = nonce;
    return made;
}

SharedAllocation allocate(size_t bytes, int device, bool capable) {
    auto made = std::make_shared<Allocation>();
    made->bytes = bytes;
    made->device = device;
    made->capable = capable;
    made->nonce = uint64_t(getpid()) << 32 | unused_number();
    char name[128];
    snprintf(name, sizeof name, "%s:%d:%d:%llx", PREFIX, device, capable, static_cast<unsigned long long>(made->nonce));
    made->fd = memfd_create(name, MFD_CLOEXEC);
    return made->fd < 0 || ftruncate(made->fd, bytes) ? nullptr : made;
}

Status reserve(Address *address, size_t bytes, size_t alignment) {
    if (!provide_range()) return OUT_OF_MEMORY;
    if (alignment < GRANULARITY) alignment = GRANULARITY;
    Address found = place(cursor, bytes, alignment);
    if (!found) found = place(first, bytes, alignment);
    if (!found) return OUT_OF_MEMORY;
    reserved[found] = bytes;
    cursor = found + bytes;
    *address = found;
    count(RESERVATION, 1);
    return OK;
}

Status unreserve(Address address) {
    if (!reserved.erase(address)) return INVALID_VALUE;
    count(RESERVATION, -1);
    return OK;
}

Status map(Address address, size_t bytes, const SharedAllocation &allocation, Mapping::Kind kind) {
    const size_t length = (bytes + 4095) / 4096 * 4096;
    if (length > allocation->bytes) return INVALID_VALUE;
    const int access = kind == Mapping::MAPPED ? PROT_NONE : PROT_READ | PROT_WRITE;
    if (mmap(at<void>(address), length, access, MAP_SHARED | MAP_FIXED, allocation->fd, 0) == MAP_FAILED) return OPERATING_SYSTEM;
    mappings[address] = {address, bytes, length, unused_number(), kind, allocation};
    count(MAPPING, 1);
    return OK;
}

Status unmap(Address address) {
    auto found = mappings.find(address);
    if (found == mappings.end()) return INVALID_VALUE;
    clear(address, found->second.length);
    mappings.erase(found);
    count(MAPPING, -1);
    return OK;
}

Status map_all(Address *address, size_t bytes, const SharedAllocation &allocation, Mapping::Kind kind) {
    if (Status code = reserve(address, allocation->bytes, GRANULARITY)) return code;
    const Status code = map(*address, bytes, allocation, kind);
    if (code) unreserve(*address);
    return code;
}

}  // namespace standin

namespace {

struct Prop {
    unsigned kind, handles;
    struct {
        int kind, id;
    } location;
    void *win32;
    unsigned char compression, capable;
    uint16_t usage;
    unsigned char reserved[4];
};
struct Access {
    int kind, id;
    unsigned flags;
};

// A VMM allocation handle: a pointer to its content.
Status handle(SharedAllocation **into, SharedAllocation allocation, Status otherwise) {
    if (!allocation) return otherwise;
    *into = new SharedAllocation(std::move(allocation));
    return OK;
}

}  // namespace

EXPORT cuMemGetAllocationGranularity(size_t *granularity, const Prop *prop, unsigned option) {
    ENTER;
    *granularity = GRANULARITY;
    return prop->kind != 1 || option > 1 ? INVALID_VALUE : OK;
}

EXPORT cuMemCreate(SharedAllocation **into, size_t bytes, const Prop *prop, unsigned long long flags) {
    ENTER_UNSAFE;
    if (flags || prop->kind != 1 || prop->location.kind != 1 || prop->handles != 1 || !bytes || bytes % GRANULARITY) return INVALID_VALUE;
    if (bytes > DEVICE_MEMORY) return OUT_OF_MEMORY;
    return handle(into, allocate(bytes, prop->location.id, prop->capable), OPERATING_SYSTEM);
}

EXPORT cuMemRelease(SharedAllocation *allocation) {
    ENTER;
    delete allocation;
    return OK;
}

EXPORT cuMemRetainAllocationHandle(SharedAllocation **into, void *address) {
    ENTER;
    Mapping *mapping = mapping_of(reinterpret_cast<Address>(address));
    return handle(into, mapping && mapping->kind == Mapping::MAPPED ? mapping->of : nullptr, INVALID_VALUE);
}

EXPORT cuMemGetAllocationPropertiesFromHandle(Prop *prop, SharedAllocation *allocation) {
    ENTER;
    *prop = {};
    prop->kind = prop->handles = 1;
    prop->location = {1, (*allocation)->device};
    prop->capable = (*allocation)->capable;
    return OK;
}

EXPORT cuMemExportToShareableHandle(int *fd, SharedAllocation *allocation, unsigned kind, unsigned long long flags) {
    ENTER;
    if (kind != 1 || flags) return INVALID_VALUE;
    *fd = duplicate((*allocation)->fd);
    return *fd < 0 ? OPERATING_SYSTEM : OK;
}

EXPORT cuMemImportFromShareableHandle(SharedAllocation **into, void *fd, unsigned kind) {
    ENTER;
    if (kind != 1) return INVALID_VALUE;
    const int own = duplicate(static_cast<int>(reinterpret_cast<intptr_t>(fd)));
    return handle(into, own < 0 ? nullptr : adopt(own), INVALID_VALUE);
}

EXPORT cuMemAddressReserve(Address *address, size_t bytes, size_t alignment, Address, unsigned long long flags) {
    ENTER;
    return flags || !bytes || bytes % GRANULARITY ? INVALID_VALUE : reserve(address, bytes, alignment);
}

EXPORT cuMemAddressFree(Address address, size_t) {
    ENTER;
    return unreserve(address);
}

EXPORT cuMemMap(Address address, size_t bytes, size_t offset, SharedAllocation *allocation, unsigned long long flags) {
    ENTER;
    return flags || offset ? INVALID_VALUE : map(address, bytes, *allocation, Mapping::MAPPED);
}

EXPORT cuMemUnmap(Address address, size_t bytes) {
    ENTER;
    Mapping *mapping = mapping_of(address);
    return mapping && mapping->kind == Mapping::MAPPED && mapping->bytes == bytes ? unmap(address) : INVALID_VALUE;
}

EXPORT cuMemSetAccess(Address address, size_t bytes, const Access *accesses, size_t n) {
    ENTER;
    for (size_t i = 0; i < n; i++) {
        if (accesses[i].kind != 1 || accesses[i].id >= settings.devices || accesses[i].flags != 3) return INVALID_VALUE;
    }
    return mprotect(at<void>(address), bytes, PROT_READ | PROT_WRITE) ? OPERATING_SYSTEM : OK;
}

// cuMemAlloc, as used by PyTorch.
EXPORT cuMemAlloc_v2(Address *address, size_t bytes) {
    ENTER_UNSAFE;
    if (!current()) return INVALID_CONTEXT;
    if (!bytes) return INVALID_VALUE;
    if (bytes > DEVICE_MEMORY) return OUT_OF_MEMORY;
    auto made = allocate((bytes + GRANULARITY - 1) / GRANULARITY * GRANULARITY, current_device(), true);
    return made ? map_all(address, bytes, made, Mapping::ALLOCATED) : OPERATING_SYSTEM;
}

// Waits for the device, like NVIDIA's driver.
EXPORT cuMemFree_v2(Address address) {
    ENTER_UNSAFE;
    Mapping *mapping = mapping_of(address);
    if (!mapping || mapping->kind != Mapping::ALLOCATED || mapping->at != address) return INVALID_VALUE;
    finish_all(held, mapping->of->device);
    unmap(address);
    return unreserve(address);
}

EXPORT cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
    ENTER_UNSAFE;
    if (flags != 3 || !bytes) return INVALID_VALUE;
    synchronize_implicitly(held);
    void *made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) return OUT_OF_MEMORY;
    const Address at = reinterpret_cast<Address>(*address = made);
    hosts[at] = {at, bytes, unused_number(), current_device(), false};
    count(HOST, 1);
    return OK;
}

EXPORT cuMemFreeHost(void *address) {
    ENTER_UNSAFE;
    synchronize_implicitly(held);
    auto found = hosts.find(reinterpret_cast<Address>(address));
    if (found == hosts.end() || found->second.registered) return INVALID_VALUE;
    munmap(address, found->second.bytes);
    hosts.erase(found);
    count(HOST, -1);
    return OK;
}

EXPORT cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
    ENTER;
    const Address at = reinterpret_cast<Address>(address);
    if (flags != 3 || !bytes) return INVALID_VALUE;
    auto after = hosts.lower_bound(at);
    if (lookup(hosts, at) || (after != hosts.end() && after->first < at + bytes)) return ALREADY_REGISTERED;
    hosts[at] = {at, bytes, unused_number(), current_device(), true};
    count(REGISTERED, 1);
    return OK;
}

EXPORT cuMemHostUnregister(void *address) {
    ENTER;
    auto found = hosts.find(reinterpret_cast<Address>(address));
    if (found == hosts.end() || !found->second.registered) return NOT_REGISTERED;
    hosts.erase(found);
    count(REGISTERED, -1);
    return OK;
}

EXPORT cuMemHostGetDevicePointer_v2(Address *device, void *address, unsigned) {
    ENTER;
    *device = reinterpret_cast<Address>(address);
    return lookup(hosts, *device) ? OK : INVALID_VALUE;
}

namespace {

enum Attribute {
    CONTEXT_OF = 1, MEMORY_TYPE = 2, DEVICE_POINTER = 3, HOST_POINTER = 4, SYNC_MEMOPS = 6, BUFFER_ID = 7, IS_MANAGED = 8, DEVICE_ORDINAL = 9, IS_LEGACY_IPC_CAPABLE = 10,
    RANGE_START = 11, RANGE_SIZE = 12, IS_MAPPED = 13, HANDLE_TYPES = 14, IS_GPU_DIRECT_RDMA_CAPABLE = 15
};

template <class T>
Status give(void *into, T value) {
    memcpy(into, &value, sizeof(value));
    return OK;
}

Status attribute_of(void *into, int attribute, Address address) {
    const Mapping *mapping = mapping_of(address);
    const Host *host = mapping ? nullptr : lookup(hosts, address);
    if (!mapping && !host) return INVALID_VALUE;
    switch (attribute) {
        case MEMORY_TYPE: return give<unsigned>(into, mapping ? 2 : 1);
        case DEVICE_POINTER: return give<Address>(into, address);
        case HOST_POINTER: return host ? give<Address>(into, address) : INVALID_VALUE;
        case SYNC_MEMOPS: return give<char>(into, 0);
        case BUFFER_ID: return give<unsigned long long>(into, mapping ? mapping->number : host->number);
        case IS_MANAGED: return give<char>(into, 0);
        case DEVICE_ORDINAL: return give<int>(into, mapping ? mapping->of->device : host->device);
        case IS_LEGACY_IPC_CAPABLE: return give<char>(into, mapping && mapping->kind == Mapping::ALLOCATED);
        case RANGE_START: return give<Address>(into, mapping ? mapping->at : host->at);
        case RANGE_SIZE: return give<size_t>(into, mapping ? mapping->bytes : host->bytes);
        case IS_MAPPED: return give<char>(into, 1);
        case HANDLE_TYPES: return give<unsigned long long>(into, mapping && mapping->kind == Mapping::MAPPED);
        case IS_GPU_DIRECT_RDMA_CAPABLE: return give<char>(into, mapping && mapping->of->capable);
        default: return INVALID_VALUE;
    }
}

}  // namespace

EXPORT cuPointerGetAttribute(void *into, int attribute, Address address) {
    ENTER;
    return attribute_of(into, attribute, address);
}

// For an address unknown to CUDA nothing is written, without an error.
EXPORT cuPointerGetAttributes(unsigned n, const int *attributes, void **into, Address address) {
    ENTER;
    for (unsigned i = 0; i < n; i++) attribute_of(into[i], attributes[i], address);
    return OK;
}

EXPORT cuPointerSetAttribute(const void *, int attribute, Address address) {
    ENTER;
    return attribute == SYNC_MEMOPS && mapping_of(address) ? OK : INVALID_VALUE;
}

EXPORT cuMemGetAddressRange_v2(Address *base, size_t *bytes, Address address) {
    ENTER;
    if (const Mapping *mapping = mapping_of(address)) {
        *base = mapping->at;
        *bytes = mapping->bytes;
        return OK;
    }
    if (const Host *host = lookup(hosts, address)) {
        *base = host->at;
        *bytes = host->bytes;
        return OK;
    }
    return NOT_FOUND;
}
