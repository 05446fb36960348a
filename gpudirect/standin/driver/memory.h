// Allocations, possibly shared between processes, and their mappings in this one.
#pragma once

#include "driver.h"

namespace standin {

// A memfd. Its name describes it to other processes that receive a descriptor.
struct Allocation {
    int fd = -1;
    size_t bytes = 0;
    int device = 0, capable = 0;
    // Unique among all allocations of all processes.
    uint64_t nonce = 0;
    Allocation();
    ~Allocation();
    Allocation(const Allocation &) = delete;
};
using SharedAllocation = std::shared_ptr<Allocation>;

struct Mapping {
    enum Kind {
        // By cuMemMap, cuMemAlloc, and cuIpcOpenMemHandle.
        MAPPED,
        ALLOCATED,
        OPENED
    };
    Address at;
    // The requested length, and whole pages.
    size_t bytes, length;
    uint64_t number;
    Kind kind;
    SharedAllocation of;
};

// Host memory accessible to devices.
struct Host {
    Address at;
    size_t bytes;
    uint64_t number;
    int device;
    bool registered;
};

uint64_t unused_number();
int duplicate(int fd);
// Null if the system refuses.
SharedAllocation allocate(size_t bytes, int device, bool capable);
// The allocation of a descriptor, which is closed with it; null if it is no such memory.
SharedAllocation adopt(int fd);
Mapping *mapping_of(Address address);
Status reserve(Address *address, size_t bytes, size_t alignment);
Status unreserve(Address address);
Status map(Address address, size_t bytes, const SharedAllocation &allocation, Mapping::Kind kind);
Status unmap(Address address);
// At a newly reserved address.
Status map_all(Address *address, size_t bytes, const SharedAllocation &allocation, Mapping::Kind kind);

}  // namespace standin
