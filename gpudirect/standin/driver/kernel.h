// A kernel compiled for the CPU, as the driver sees it.
#pragma once

#include <stddef.h>

#include <utility>

#include "host.cuh"

namespace standin {

struct Kernel {
    const char *name;
    // Runs a thread with pointers to its arguments. The built-in variables are set.
    void (*run)(void **arguments);
    const size_t *sizes;
    size_t arguments;
    // Whether its threads are executed sequentially.
    bool apart;
};

// The kernels of one source, in a linked list of all.
struct Source {
    const Kernel *kernels;
    size_t count;
    Source *next;
};
void add(Source &source);

template <auto KERNEL>
struct Entry;

template <class... Arguments, void (*KERNEL)(Arguments...)>
struct Entry<KERNEL> {
    static constexpr size_t SIZES[] = {sizeof(Arguments)..., 0};

    template <size_t... AT>
    static void call([[maybe_unused]] void **arguments, std::index_sequence<AT...>) {
        KERNEL(*static_cast<Arguments *>(arguments[AT])...);
    }

    static void run(void **arguments) {
        call(arguments, std::index_sequence_for<Arguments...>());
    }

    static constexpr Kernel of(const char *name, bool apart) {
        return {name, run, SIZES, sizeof...(Arguments), apart};
    }
};

}  // namespace standin
