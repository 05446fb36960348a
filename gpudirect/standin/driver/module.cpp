// Modules: the PTX, or machine code, determines which kernels exist, and the host code of the same name is executed.
// A thread block is an OS thread; kernels with independent threads run them sequentially.
#include <algorithm>
#include <chrono>
#include <thread>

#include <elf.h>
#include <sched.h>
#include <stdio.h>

#include "driver.h"

using namespace standin;

namespace {

struct Function {
    const Kernel *kernel;
    int device;
    bool loaded;
};
struct Module {
    std::map<std::string, Function> functions;
};

// Null until the first constructor of any source has run.
Source *sources;

const Kernel *find(const std::string &name) {
    for (Source *source = sources; source; source = source->next) {
        for (size_t i = 0; i < source->count; i++) {
            if (name == source->kernels[i].name) return &source->kernels[i];
        }
    }
    return nullptr;
}

std::vector<std::string> entries(const std::string &ptx) {
    std::vector<std::string> names;
    const std::string word = ".entry";
    for (size_t at = ptx.find(word); at != std::string::npos; at = ptx.find(word, at)) {
        at = ptx.find_first_not_of(" \t\r\n", at + word.size());
        if (at == std::string::npos) break;
        const size_t end = std::min(ptx.find_first_of(" \t\r\n({;", at), ptx.size());
        names.push_back(ptx.substr(at, end - at));
    }
    return names;
}

// The kernels of machine code, each in a section `.text.NAME`.
std::vector<std::string> sections(const char *image) {
    std::vector<std::string> names;
    const auto *head = reinterpret_cast<const Elf64_Ehdr *>(image);
    const auto *table = reinterpret_cast<const Elf64_Shdr *>(image + head->e_shoff);
    const char *texts = image + table[head->e_shstrndx].sh_offset;
    for (unsigned i = 0; i < head->e_shnum; i++) {
        const std::string name = texts + table[i].sh_name;
        if (name.rfind(".text.", 0) == 0) names.push_back(name.substr(6));
    }
    return names;
}

Status load(Module **module, const char *image, unsigned n, const int *options, void **values) {
    const bool is_elf = !strncmp(image, ELFMAG, SELFMAG);
    if (is_elf && image[EI_CLASS] != ELFCLASS64) return INVALID_IMAGE;
    const auto names = is_elf ? sections(image) : entries(image);
    if (names.empty()) {
        constexpr int ERROR_LOG = 5;
        for (unsigned i = 0; i < n; i++) {
            if (options[i] == ERROR_LOG) strcpy(static_cast<char *>(values[i]), "\nptxas application ptx input, line 1; fatal : there is no .entry\nmore\n");
        }
        return INVALID_PTX;
    }
    auto made = std::make_unique<Module>();
    for (const std::string &name : names) {
        if (const Kernel *kernel = find(name)) made->functions[name] = {kernel, current_device(), false};
    }
    *module = made.release();
    count(MODULE, 1);
    return OK;
}

// The first bytes of a kernel's parameters, instead of a pointer to each: CU_LAUNCH_PARAM_*.
struct Buffer {
    const void *bytes;
    size_t n;
};

Status read_extra(void **extra, Buffer &buffer) {
    for (; *extra; extra += 2) {
        switch (reinterpret_cast<uintptr_t>(*extra)) {
        case 1: buffer.bytes = extra[1]; break;
        case 2: buffer.n = *static_cast<size_t *>(extra[1]); break;
        default: return INVALID_VALUE;
        }
    }
    return buffer.bytes ? OK : INVALID_VALUE;
}

Status launch(Held &held, Function *function, unsigned blocks, unsigned threads, Stream *stream, void **arguments, void **extra) {
    if (!blocks || !threads || threads > 1024 || (arguments && extra)) return INVALID_VALUE;
    Buffer buffer{};
    if (extra) {
        // Our kernels with a buffer have one parameter.
        if (function->kernel->arguments != 1) return INVALID_VALUE;
        if (const Status status = read_extra(extra, buffer); status != OK) return status;
        if (buffer.n > function->kernel->sizes[0]) return INVALID_VALUE;
    }
    if (function->device != stream->device) return INVALID_HANDLE;
    if (!std::exchange(function->loaded, true) && settings.implicit) finish_all(held, function->device);
    auto made = std::make_shared<Launch>();
    made->kernel = function->kernel;
    made->device = function->device;
    made->blocks = blocks;
    made->threads = threads;
    for (size_t i = 0; i < function->kernel->arguments; i++) {
        const size_t bytes = function->kernel->sizes[i];
        // What is not given is undefined: no kernel may read it.
        auto &copy = made->arguments.emplace_back((bytes + 7) / 8, 0xa5a5a5a5a5a5a5a5);
        memcpy(copy.data(), extra ? buffer.bytes : arguments[i], extra ? buffer.n : bytes);
    }
    Work work;
    work.kind = Work::KERNEL;
    work.launch = std::move(made);
    return put(*stream, std::move(work));
}

// Ends a block whose wait cannot complete: thrown through the kernel.
struct GivenUp {
    Status code;
};
thread_local std::chrono::steady_clock::time_point begun;
thread_local unsigned rests;

// The threads of this process's blocks that are resident on a multiprocessor. They are of one kernel:
// a GPU may divide a multiprocessor's memory otherwise for another, and does so when it is idle.
struct Multiprocessor {
    const Kernel *kernel;
    unsigned threads;
};
std::vector<Multiprocessor> resident[MOST_DEVICES];

// A block.
class Resident {
    const Launch &launch;
    size_t place = 0;
    bool is_placed = false;

    // Finds an idle multiprocessor, or one with room beside blocks of the same kernel.
    bool find_place() {
        auto &all = resident[launch.device];
        const size_t count = size_t(multiprocessors());
        if (all.size() < count) all.resize(count);
        for (bool idle : {true, false}) {
            for (place = 0; place < count; place++) {
                const auto &one = all[place];
                const bool fits = one.kernel == launch.kernel && one.threads + launch.threads <= THREADS_PER_MULTIPROCESSOR;
                if (idle ? one.threads == 0 : fits) return true;
            }
        }
        return false;
    }

public:
    // Waits for room.
    explicit Resident(const Launch &launch) : launch(launch) {
        if (launch.device < 0) return;
        Held held(lock);
        // Without multiprocessors only kernels that may wait find no place.
        if (launch.kernel->apart && !multiprocessors()) return;
        is_placed = true;
        if (!changed.wait_for(held, PATIENCE, [&] { return lost || find_place(); })) {
            fprintf(stderr, "stand-in for a GPU: a thread block has waited for too long to be resident\n");
            throw GivenUp{LAUNCH_TIMEOUT};
        }
        if (lost) throw GivenUp{lost};
        auto &one = resident[launch.device][place];
        one = {launch.kernel, one.threads + launch.threads};
    }

    ~Resident() {
        if (!is_placed) return;
        Held held(lock);
        resident[launch.device][place].threads -= launch.threads;
        changed.notify_all();
    }
};

}  // namespace

void standin::add(Source &source) {
    source.next = std::exchange(sources, &source);
}

// The wait loop of kernels.
extern "C" void doorbell_relax() {
    sched_yield();
    if (++rests % 1024) return;
    if (lost) throw GivenUp{lost};
    urge();
    // Forever on a GPU; here a test should report what hangs.
    if (std::chrono::steady_clock::now() - begun < PATIENCE) return;
    fprintf(stderr, "stand-in for a GPU: a kernel has waited for too long\n");
    throw GivenUp{LAUNCH_TIMEOUT};
}

// The test kernel `spin`. Tests inspect pending work meanwhile, so it runs until the program waits
// for it, or otherwise much longer than requested; in lazy mode for no time.
extern "C" void doorbell_spin(uint64_t nanoseconds) {
    Stream *stream = working;
    if (settings.mode == Mode::LAZY || !stream) return;
    Held held(lock);
    changed.wait_for(held, std::chrono::nanoseconds(60 * nanoseconds), [&] { return stream->wanted || lost; });
}

Status standin::run_kernel(const Launch &launch) {
    std::vector<void *> arguments;
    for (auto &argument : launch.arguments) arguments.push_back(const_cast<uint64_t *>(argument.data()));
    gridDim = {launch.blocks, 1, 1};
    if (launch.kernel->apart) try {
            const Resident room(launch);
            blockDim = {launch.threads, 1, 1};
            for (unsigned block = launch.blocks; block-- > 0;) {
                for (unsigned thread = launch.threads; thread-- > 0;) {
                    blockIdx = {block, 0, 0};
                    threadIdx = {thread, 0, 0};
                    launch.kernel->run(arguments.data());
                }
            }
            return OK;
        } catch (const GivenUp &given_up) {
            return given_up.code;
        }
    std::atomic<Status> code = OK;
    auto run = [&](unsigned block) {
        gridDim = {launch.blocks, 1, 1};
        blockDim = {1, 1, 1};
        blockIdx = {block, 0, 0};
        threadIdx = {0, 0, 0};
        try {
            const Resident room(launch);
            begun = std::chrono::steady_clock::now();
            launch.kernel->run(arguments.data());
        } catch (const GivenUp &given_up) {
            code = given_up.code;
        }
    };
    std::vector<std::thread> blocks;
    for (unsigned block = 1; block < launch.blocks; block++) blocks.emplace_back(run, block);
    run(0);
    for (std::thread &block : blocks) block.join();
    return code;
}

// Runs a kernel by name synchronously; -1 if there is none. Addresses may be the host's.
extern "C" __attribute__((visibility("default"))) int standin_run(const char *name, unsigned blocks, unsigned threads, void **arguments) {
    Launch launch;
    launch.kernel = find(name);
    if (!launch.kernel) return -1;
    launch.device = -1;
    launch.blocks = blocks;
    launch.threads = threads;
    for (size_t i = 0; i < launch.kernel->arguments; i++) {
        launch.arguments.emplace_back((launch.kernel->sizes[i] + 7) / 8);
        memcpy(launch.arguments.back().data(), arguments[i], launch.kernel->sizes[i]);
    }
    return run_kernel(launch);
}

EXPORT cuModuleLoadDataEx(Module **module, const char *image, unsigned n, int *options, void **values) {
    ENTER_UNSAFE;
    synchronize_implicitly(held);
    return load(module, image, n, options, values);
}

EXPORT cuModuleLoadData(Module **module, const char *image) {
    ENTER_UNSAFE;
    synchronize_implicitly(held);
    return load(module, image, 0, nullptr, nullptr);
}

EXPORT cuModuleUnload(Module *module) {
    ENTER;
    delete module;
    count(MODULE, -1);
    return OK;
}

EXPORT cuModuleGetFunction(Function **function, Module *module, const char *name) {
    ENTER;
    auto found = module->functions.find(name);
    if (found == module->functions.end()) return NOT_FOUND;
    *function = &found->second;
    return OK;
}

// Its first launch then does not wait.
EXPORT cuFuncLoad(Function *function) {
    ENTER_UNSAFE;
    if (!std::exchange(function->loaded, true)) synchronize_implicitly(held);
    return OK;
}

EXPORT cuFuncGetAttribute(int *value, int attribute, Function *) {
    ENTER;
    *value = attribute == 0 ? 1024 : attribute == 4 ? 16 : 0;
    return OK;
}

EXPORT cuFuncSetAttribute(Function *, int attribute, int value) {
    ENTER;
    return attribute != 8 || value > 200 << 10 ? INVALID_VALUE : OK;
}

EXPORT cuLaunchKernel(
    Function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned, Stream *stream, void **arguments, void **extra
) {
    ENTER;
    // More than one dimension is not used by our kernels.
    if (gy != 1 || gz != 1 || by != 1 || bz != 1) return INVALID_VALUE;
    return launch(held, function, gx, bx, stream, arguments, extra);
}

// CUlaunchAttribute and CUlaunchConfig.
struct LaunchAttribute {
    unsigned id;
    alignas(8) unsigned value[16];
};

struct LaunchConfig {
    unsigned grid[3], block[3], shared;
    Stream *stream;
    const LaunchAttribute *attributes;
    unsigned count;
};

constexpr unsigned CLUSTER_DIMENSION = 4, CLUSTER_SCHEDULING = 5;

// Of the attributes those that determine clusters are known: a GPU refuses a grid of no whole ones.
EXPORT cuLaunchKernelEx(const LaunchConfig *config, Function *function, void **arguments, void **extra) {
    ENTER;
    const auto [gx, gy, gz] = config->grid;
    const auto [bx, by, bz] = config->block;
    if (gy != 1 || gz != 1 || by != 1 || bz != 1) return INVALID_VALUE;
    for (const LaunchAttribute *each = config->attributes; each != config->attributes + config->count; each++) {
        const bool is_cluster = each->id == CLUSTER_DIMENSION;
        if (!is_cluster && each->id != CLUSTER_SCHEDULING) return INVALID_VALUE;
        if (is_cluster && (each->value[0] == 0 || each->value[0] > 8 || gx % each->value[0] != 0)) return INVALID_CLUSTER_SIZE;
    }
    return launch(held, function, gx, bx, config->stream, arguments, extra);
}

EXPORT cuLaunchCooperativeKernel(
    Function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned, Stream *stream, void **arguments
) {
    ENTER;
    if (gy != 1 || gz != 1 || by != 1 || bz != 1 || !bx) return INVALID_VALUE;
    if (uint64_t(gx) * bx > uint64_t(multiprocessors()) * THREADS_PER_MULTIPROCESSOR) return TOO_LARGE;
    return launch(held, function, gx, bx, stream, arguments, nullptr);
}
