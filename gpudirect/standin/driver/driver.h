// A driver of CUDA without a GPU: as much of libcuda.so.1 as doorbell-cuda calls, and a little more that tests do. Names and numbers are those of NVIDIA's "CUDA Driver API".
//
// Everything is under one lock, which is let go of while work is done. Objects that work may use are held by it, so that handles can be destroyed at any time. What is made here is never destroyed with the process: threads of streams may still run then.
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
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_UNJOINED = 904,
    TIMEOUT = 909
};

constexpr int MOST_DEVICES = 8;
constexpr size_t GRANULARITY = 2 << 20;
constexpr size_t DEVICE_MEMORY = size_t(1) << 30;
// How long work waits before it fails: a word, another process's event, a kernel.
constexpr std::chrono::seconds PATIENCE(120), PATIENCE_LAZY(20);
constexpr int MULTIPROCESSORS = 4;
constexpr int THREADS_PER_MULTIPROCESSOR = 2048;

// How work is done.
enum class Manner {
    // When somebody waits for it and then only what that needs, so that all that is asynchronous is as late and as unordered as it can be.
    LAZY,
    // At once: each stream has a thread.
    PROMPT,
};

enum Counted { ALLOCATION, MAPPING, RESERVATION, HOST, REGISTERED, STREAM, EVENT, MODULE, GRAPH, EXEC, CONTEXT, WORK, COUNTED };

struct Settings {
    Manner manner = Manner::PROMPT;
    int devices = 2;
    int version = 13000;
    bool peers = true;
    // Device addresses can be followed by the processor.
    bool open = false;
    // A kernel's first launch waits for the whole device, as NVIDIA's driver may when kernels are loaded late (CUDA_MODULE_LOADING).
    bool late = false;
    // Attributes of all devices that are to be others than usual.
    std::map<int, int> attributes;
};

extern std::mutex lock;
extern Settings &settings;
// Something was done that others may wait for.
extern std::condition_variable &changed;
// What every call answers once the device is lost.
extern std::atomic<Status> lost;

void count(Counted what, int by);
// Counts a call; what it is to answer, as a test has asked for.
Status failing(const char *call);

// Begins every function of the driver.
#define ENTER \
    standin::Held held(standin::lock); \
    if (standin::Status failing_ = standin::failing(__func__)) return failing_

#define EXPORT extern "C" __attribute__((visibility("default"))) standin::Status

// Contexts.

struct Context {
    int device, retained;
};
// The context that is current for this thread; none is null.
Context *current();
int current_device();

// Memory.

// Where the processor finds what is at an address of the device's.
template <class T>
T *at(Address address) {
    if (address - doorbell_window.first < doorbell_window.bytes) address += doorbell_window.shift;
    return reinterpret_cast<T *>(address);
}
// Bytes that are mapped of a device by this process.
size_t used(int device);

// Streams.

// How often an event was recorded and how often that has come to pass, which other processes may have mapped, too.
struct Passage {
    struct Counts {
        uint64_t recorded, passed;
    };
    Counts own{}, *counts = &own;
    double when = 0;
    // Of one that is shared: its file.
    int fd = -1;
    ~Passage();
    bool shared() const { return fd >= 0; }
    uint64_t recorded() const { return __atomic_load_n(&counts->recorded, __ATOMIC_ACQUIRE); }
    uint64_t passed() const { return __atomic_load_n(&counts->passed, __ATOMIC_ACQUIRE); }
    uint64_t record() { return __atomic_add_fetch(&counts->recorded, 1, __ATOMIC_ACQ_REL); }
    void pass(uint64_t time);
};
using SharedPassage = std::shared_ptr<Passage>;

// A kernel with its arguments, as it was launched.
struct Launch {
    const Kernel *kernel;
    unsigned blocks, threads;
    std::vector<std::vector<uint64_t>> arguments;
};

struct Program;
struct Capture;

// A piece of work.
struct Work {
    enum Kind { NOTHING, COPY, FILL, FILL_WORDS, WRITE, WAIT, RECORD, DEPEND, KERNEL, CALL, GRAPH } kind = NOTHING;
    Address to = 0, from = 0;
    size_t bytes = 0;
    uint64_t value = 0;
    unsigned flags = 0;
    SharedPassage passage;
    std::shared_ptr<const Launch> launch;
    std::shared_ptr<Program> program;
    void (*function)(void *) = nullptr;
    void *argument = nullptr;
};

// A capture's work, each piece behind others.
struct Program {
    struct Node {
        Work work;
        int branch;
        std::vector<size_t> behind;
    };
    std::vector<Node> nodes;
    int branches = 0;
    // Of launches, each of which waits for the one before.
    SharedPassage passage = std::make_shared<Passage>();
};

struct Stream {
    int device;
    std::deque<Work> queue;
    uint64_t put = 0, done = 0;
    bool running = false, destroyed = false;
    // Lazy: whether a thread does its work that nobody has asked for. By how many threads it is used.
    bool urged = false;
    int kept = 0;
    Status failed = OK;
    // Prompt: for its thread.
    std::condition_variable more;
    // Whether somebody in the program waits for it, be it by other streams that wait for its events; and what it waits for now itself.
    bool wanted = false;
    SharedPassage awaited;
    uint64_t awaited_time = 0;
    // What it is captured by, and the nodes that its next one is behind.
    std::shared_ptr<Capture> capture;
    int branch = 0;
    std::vector<size_t> tails;
    bool idle() const { return put == done; }
};

struct Capture {
    std::shared_ptr<Program> program = std::make_shared<Program>();
    Stream *origin;
    bool invalid = false;
};

struct Event {
    int device = current_device();
    SharedPassage passage = std::make_shared<Passage>();
    // Where it was recorded in a capture.
    std::shared_ptr<Capture> capture;
    std::vector<size_t> tails;
};

extern std::vector<Stream *> &streams;
// Whose work this thread does.
extern thread_local Stream *working;

Status put(Stream &stream, Work work);
// Does one piece of work, without the lock.
Status perform(Held &held, const Work &work);
// Until an event has come to pass so many times, for a stream or for the program itself.
Status wait_for(Held &held, const SharedPassage &passage, uint64_t time, Stream *by);
// Until what is in a stream now is done; what it has failed with since it was asked last.
Status finish(Held &held, Stream &stream);
// The same of all streams of a device.
Status finish_all(Held &held, int device);
Status run_kernel(const Launch &launch);
Status run_program(Held &held, Program &program);
// Lazy: has all work begun that somebody's work may wait for. Without the lock.
void urge();

}  // namespace standin
