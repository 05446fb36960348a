// What the files on memory share: allocations, which several processes may have, and their mappings in this one.
#pragma once

#include "driver.h"

namespace standin {

// A file that only lives in memory. Its name says what it is, so that another process that has a descriptor of it knows.
struct Allocation {
    int fd = -1;
    size_t bytes = 0;
    int device = 0, capable = 0;
    // No other allocation of any process has it.
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
    // What was asked for, and whole pages.
    size_t bytes, length;
    uint64_t number;
    Kind kind;
    SharedAllocation of;
};

// The host's memory that devices reach.
struct Host {
    Address at;
    size_t bytes;
    uint64_t number;
    int device;
    bool registered;
};

uint64_t unused_number();
int duplicate(int fd);
// Null where the system refuses.
SharedAllocation allocate(size_t bytes, int device, bool capable);
// What a descriptor stands for, which is closed with it; null where that is no such memory.
SharedAllocation adopt(int fd);
Mapping *mapping_of(Address address);
Status reserve(Address *address, size_t bytes, size_t alignment);
Status unreserve(Address address);
Status map(Address address, size_t bytes, const SharedAllocation &allocation, Mapping::Kind kind);
Status unmap(Address address);
// At an address of its own.
Status map_all(Address *address, size_t bytes, const SharedAllocation &allocation, Mapping::Kind kind);

}  // namespace standin
