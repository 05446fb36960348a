// A CUDA driver without a GPU: the part of libcuda.so.1 that doorbell-cuda calls, and a little more
// for tests. Names and numbers are those of NVIDIA's "CUDA Driver API".
//
// One lock protects everything, and is released while work executes. Work holds the objects it
// uses. Global state is never destroyed at exit, as stream threads may still run.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kernel.h"

namespace standin {

using Status = int;
using Address = uint64_t;
using Held = std::unique_lock<std::mutex>;

enum : Status {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    PEER_UNSUPPORTED = 217,
    INVALID_PTX = 218,
    OPERATING_SYSTEM = 304,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    LAUNCH_TIMEOUT = 702,
    PEER_ALREADY = 704,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    TOO_LARGE = 720,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
    CAPTURED_EVENT = 907,
    TIMEOUT = 909,
    INVALID_CLUSTER_SIZE = 912,
};

constexpr int MOST_DEVICES = 8;
constexpr size_t GRANULARITY = 2 << 20;
constexpr size_t DEVICE_MEMORY = size_t(1) << 30;
// The timeout of a wait for a word, another process's event, or a kernel.
constexpr std::chrono::seconds PATIENCE(120), PATIENCE_LAZY(20);
constexpr int MULTIPROCESSORS = 132;
// Those of resident blocks: registers suffice for as many where a kernel uses up to 128.
constexpr unsigned THREADS_PER_MULTIPROCESSOR = 512;

enum class Mode {
    // When something waits for it, and only what that needs: as late and unordered as possible.
    LAZY,
    // Immediately: each stream has a thread.
    PROMPT,
};

enum Counted { ALLOCATION, MAPPING, RESERVATION, HOST, REGISTERED, STREAM, EVENT, MODULE, GRAPH, EXEC, OBJECT, CONTEXT, WORK, COUNTED };

struct Settings {
    Mode mode = Mode::PROMPT;
    int devices = 2;
    int version = 13000;
    bool peers = true;
    // Device addresses are accessible to the host.
    bool open = false;
    // Implicit synchronization: what may wait for all work of the device does. Loading a module, or
    // (CUDA_MODULE_LOADING=LAZY) a kernel, at its first launch at the latest; allocating and freeing
    // pinned memory.
    bool implicit = false;
    // The operations that a stream holds; the call that finds no space waits, and so do all others
    // of its context that enqueue. 0: any number.
    uint64_t queue = 0;
    // Overridden attributes of all devices.
    std::map<int, int> attributes;
};

extern std::mutex lock;
extern Settings &settings;
// Notifies waiters of progress.
extern std::condition_variable &changed;
// The status of every call once the device is lost.
extern std::atomic<Status> lost;

void count(Counted what, int by);
// Counts a call; returns the status injected by a test.
Status failing(const char *call);

#define ENTER \
    standin::Held held(standin::lock); \
    if (standin::Status failing_ = standin::failing(__func__)) return failing_

// Of a call that is potentially unsafe in a capture: whether one forbids it, and is invalid now.
Status forbidding();

#define ENTER_UNSAFE \
    ENTER; \
    if (standin::Status forbidding_ = standin::forbidding()) return forbidding_

// Whether the thread calls the destructor of a user object.
extern thread_local bool destroying;

#define EXPORT extern "C" __attribute__((visibility("default"))) standin::Status

// Contexts.

struct Context {
    int device, retained;
    // A call waits for space in a stream.
    bool waits;
};
// The thread's current context, or null.
Context *current();
int current_device();

// Memory.

// The host address of a device address.
template <class T>
T *at(Address address) {
    if (address - doorbell_window.first < doorbell_window.bytes) address += doorbell_window.shift;
    return reinterpret_cast<T *>(address);
}
// The attribute of a device, and its number of multiprocessors. Under the lock.
constexpr int MULTIPROCESSOR_COUNT = 16;
int multiprocessors();
// Bytes of a device mapped by this process.
size_t used(int device);

// Streams.

// An event's counts of records and completions, possibly mapped by other processes.
struct Passage {
    struct Counts {
        uint64_t recorded, passed;
    };
    Counts own{}, *counts = &own;
    double when = 0;
    // The file of a shared one.
    int fd = -1;
    bool destroyed = false;
    ~Passage();
    bool shared() const { return fd >= 0; }
    uint64_t recorded() const { return __atomic_load_n(&counts->recorded, __ATOMIC_ACQUIRE); }
    uint64_t passed() const { return __atomic_load_n(&counts->passed, __ATOMIC_ACQUIRE); }
    uint64_t record() { return __atomic_add_fetch(&counts->recorded, 1, __ATOMIC_ACQ_REL); }
    void pass(uint64_t time);
};
using SharedPassage = std::shared_ptr<Passage>;

// A launched kernel with its arguments.
struct Launch {
    const Kernel *kernel;
    // Negative: of no device, so that nothing limits how many blocks are resident.
    int device;
    unsigned blocks, threads;
    std::vector<std::vector<uint64_t>> arguments;
};

struct Program;
struct Capture;

// An operation of a stream.
struct Work {
    enum Kind { NOTHING, COPY, FILL, FILL_WORDS, WRITE, WAIT, RECORD, DEPEND, KERNEL, CALL, GRAPH } kind = NOTHING;
    Address to = 0, from = 0;
    size_t bytes = 0;
    uint64_t value = 0;
    unsigned flags = 0;
    SharedPassage passage;
    std::shared_ptr<const Launch> launch;
    std::shared_ptr<Program> program;
    // Of a launch: for each node that uses an event, which of its records.
    std::vector<uint64_t> times;
    void (*function)(void *) = nullptr;
    void *argument = nullptr;
};

// Captured operations with their dependencies.
struct Program {
    struct Node {
        Work work;
        int branch;
        std::vector<size_t> behind;
        // Not captured: it need not be joined.
        bool added = false;
    };
    std::vector<Node> nodes;
    int branches = 0;
    // Released with the last graph, instance or launch.
    std::vector<std::shared_ptr<void>> objects;
    // Launch counts; each launch waits for the previous one.
    SharedPassage passage = std::make_shared<Passage>();
};

struct Stream {
    int device;
    // Of no other stream.
    uint64_t id;
    std::deque<Work> queue;
    uint64_t put = 0, done = 0;
    bool running = false, destroyed = false;
    // Lazy: whether a thread executes its work unrequested. The number of threads using it.
    bool urged = false;
    int kept = 0;
    Status failed = OK;
    // Prompt: wakes its thread.
    std::condition_variable more;
    // Whether the program waits for it, directly or through events; and what it waits for.
    bool wanted = false;
    SharedPassage awaited;
    uint64_t awaited_time = 0;
    // The capture it is in, and the dependencies of its next node.
    std::shared_ptr<Capture> capture;
    int branch = 0;
    std::vector<size_t> tails;
    bool idle() const { return put == done; }
};

struct Graph {
    std::shared_ptr<Program> program;
};

struct Capture {
    // Null when it has ended.
    std::unique_ptr<Graph> graph = std::make_unique<Graph>(Graph{std::make_shared<Program>()});
    uint64_t id;
    Stream *origin;
    unsigned mode;
    std::thread::id thread;
    bool invalid = false;
    // What was returned last of a stream's dependencies.
    std::vector<void *> dependencies;
};

struct Event {
    int device = current_device();
    SharedPassage passage = std::make_shared<Passage>();
    // Its position in a capture.
    std::shared_ptr<Capture> capture;
    std::vector<size_t> tails;
};

extern std::vector<Stream *> &streams;
// The stream whose work this thread executes.
extern thread_local Stream *working;

Status put(Stream &stream, Work work);
// Executes one operation, without the lock.
Status perform(Held &held, const Work &work);
// Waits until an event has completed this many times, for a stream or for the program.
Status wait_for(Held &held, const SharedPassage &passage, uint64_t time, Stream *by);
// Whether devices may access it later.
bool is_pinned(Address host);
// Waits for a stream's current work; returns its error since the last call.
Status finish(Held &held, Stream &stream);
// The same for all streams of a device.
Status finish_all(Held &held, int device);
// The same, if the settings have implicit synchronization.
void synchronize_implicitly(Held &held);
Status run_kernel(const Launch &launch);
Status run_program(Held &held, Program &program, const std::vector<uint64_t> &times);
// Lazy: starts all work that other work may wait for. Without the lock.
void urge();

}  // namespace standin
