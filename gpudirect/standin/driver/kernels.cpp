// One kernel source, named by the build: the source itself, and a line `ENTRY(NAME)` per kernel.
#include SOURCE

#include "kernel.h"

namespace {

#ifdef DOORBELL_THREADS_APART
constexpr bool APART = true;
#else
constexpr bool APART = false;
#endif

#define ENTRY(name) standin::Entry<name>::of(#name, APART),
constexpr standin::Kernel KERNELS[] = {
#include ENTRIES
};

struct Added {
    standin::Source source{KERNELS, sizeof(KERNELS) / sizeof(*KERNELS), nullptr};
    Added() { standin::add(source); }
} added;

}  // namespace
