// Modules: PTX says which kernels there are, and the processor's code of the same names is run. A block is a thread of the operating system; kernels whose threads are apart are run one thread after another.
#include <algorithm>
#include <chrono>
#include <thread>

#include <sched.h>

#include "driver.h"

using namespace standin;

namespace {

struct Module;
struct Function {
    const Kernel *kernel;
};
struct Module {
    std::map<std::string, Function> functions;
};

// Null before the first constructor of any source is run.
Source *sources;

const Kernel *find(const std::string &name) {
    for (Source *source = sources; source; source = source->next) {
        for (size_t i = 0; i < source->count; i++) {
            if (name == source->kernels[i].name) return &source->kernels[i];
        }
    }
    return nullptr;
}

// The names of all `.entry`s of PTX.
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

Status load(Module **module, const char *image, unsigned n, const int *options, void **values) {
    if (!strncmp(image, "\x7f" "ELF", 4)) return INVALID_IMAGE;
    const auto names = entries(image);
    if (names.empty()) {
        constexpr int ERROR_LOG = 5;
        for (unsigned i = 0; i < n; i++) {
            if (options[i] == ERROR_LOG) strcpy(static_cast<char *>(values[i]), "\nptxas application ptx input, line 1; fatal : there is no .entry\nmore\n");
        }
        return INVALID_PTX;
    }
    auto made = std::make_unique<Module>();
    for (const std::string &name : names) {
        if (const Kernel *kernel = find(name)) made->functions[name] = {kernel};
    }
    *module = made.release();
    count(MODULE, 1);
    return OK;
}

Status launch(const Function *function, unsigned blocks, unsigned threads, Stream *stream, void **arguments) {
    if (!blocks || !threads || threads > 1024) return INVALID_VALUE;
    auto made = std::make_shared<Launch>();
    made->kernel = function->kernel;
    made->blocks = blocks;
    made->threads = threads;
    for (size_t i = 0; i < function->kernel->arguments; i++) {
        const size_t bytes = function->kernel->sizes[i];
        made->arguments.emplace_back((bytes + 7) / 8);
        memcpy(made->arguments.back().data(), arguments[i], bytes);
    }
    Work work;
    work.kind = Work::KERNEL;
    work.launch = std::move(made);
    return put(*stream, std::move(work));
}

}  // namespace

void standin::add(Source &source) {
    source.next = std::exchange(sources, &source);
}

extern "C" void doorbell_relax() {
    static thread_local unsigned times;
    sched_yield();
    if (++times % 4096 == 0) urge();
}

// What the kernel `spin` of the tests does: no time at all where work is late anyhow; else for longer than it is asked for, as tests look at what is still to be done meanwhile, on machines with much else to do.
extern "C" void doorbell_sleep(uint64_t nanoseconds) {
    if (settings.manner == Manner::PROMPT) std::this_thread::sleep_for(std::chrono::nanoseconds(5 * nanoseconds));
}

Status standin::run_kernel(const Launch &launch) {
    std::vector<void *> arguments;
    for (auto &argument : launch.arguments) arguments.push_back(const_cast<uint64_t *>(argument.data()));
    gridDim = {launch.blocks, 1, 1};
    if (launch.kernel->apart) {
        blockDim = {launch.threads, 1, 1};
        for (unsigned block = launch.blocks; block-- > 0;) {
            for (unsigned thread = launch.threads; thread-- > 0;) {
                blockIdx = {block, 0, 0};
                threadIdx = {thread, 0, 0};
                launch.kernel->run(arguments.data());
            }
        }
        return OK;
    }
    auto run = [&](unsigned block) {
        gridDim = {launch.blocks, 1, 1};
        blockDim = {1, 1, 1};
        blockIdx = {block, 0, 0};
        threadIdx = {0, 0, 0};
        launch.kernel->run(arguments.data());
    };
    std::vector<std::thread> blocks;
    for (unsigned block = 1; block < launch.blocks; block++) blocks.emplace_back(run, block);
    run(0);
    for (std::thread &block : blocks) block.join();
    return OK;
}

// Runs a kernel of a name here and now; -1 where there is none. Addresses may be the processor's.
extern "C" __attribute__((visibility("default"))) int standin_run(const char *name, unsigned blocks, unsigned threads, void **arguments) {
    Launch launch;
    launch.kernel = find(name);
    if (!launch.kernel) return -1;
    launch.blocks = blocks;
    launch.threads = threads;
    for (size_t i = 0; i < launch.kernel->arguments; i++) {
        launch.arguments.emplace_back((launch.kernel->sizes[i] + 7) / 8);
        memcpy(launch.arguments.back().data(), arguments[i], launch.kernel->sizes[i]);
    }
    return run_kernel(launch);
}

EXPORT cuModuleLoadDataEx(Module **module, const char *image, unsigned n, int *options, void **values) {
    ENTER;
    return load(module, image, n, options, values);
}

EXPORT cuModuleLoadData(Module **module, const char *image) {
    ENTER;
    return load(module, image, 0, nullptr, nullptr);
}

EXPORT cuModuleUnload(Module *module) {
    ENTER;
    delete module;
    count(MODULE, -1);
    return OK;
}

EXPORT cuModuleGetFunction(const Function **function, Module *module, const char *name) {
    ENTER;
    auto found = module->functions.find(name);
    if (found == module->functions.end()) return NOT_FOUND;
    *function = &found->second;
    return OK;
}

EXPORT cuFuncGetAttribute(int *value, int attribute, const Function *) {
    ENTER;
    *value = attribute == 0 ? 1024 : attribute == 4 ? 16 : 0;
    return OK;
}

EXPORT cuFuncSetAttribute(const Function *, int attribute, int value) {
    ENTER;
    return attribute != 8 || value > 200 << 10 ? INVALID_VALUE : OK;
}

EXPORT cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const Function *, int threads, size_t) {
    ENTER;
    *blocks = THREADS_PER_MULTIPROCESSOR / threads;
    return OK;
}

EXPORT cuLaunchKernel(
    const Function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned, Stream *stream, void **arguments, void **extra
) {
    ENTER;
    // What has more than one dimension, none of our kernels does.
    if (gy != 1 || gz != 1 || by != 1 || bz != 1 || extra) return INVALID_VALUE;
    return launch(function, gx, bx, stream, arguments);
}

EXPORT cuLaunchCooperativeKernel(
    const Function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned, Stream *stream, void **arguments
) {
    ENTER;
    if (gy != 1 || gz != 1 || by != 1 || bz != 1 || !bx) return INVALID_VALUE;
    if (uint64_t(gx) * bx > MULTIPROCESSORS * THREADS_PER_MULTIPROCESSOR) return TOO_LARGE;
    return launch(function, gx, bx, stream, arguments);
}
