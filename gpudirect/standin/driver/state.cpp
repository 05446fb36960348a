// Global state of the driver, its configuration, and the functions for tests.
#include <stdio.h>
#include <stdlib.h>

#include "driver.h"

using namespace standin;

namespace standin {

std::mutex lock;
Settings &settings = *new Settings;
std::condition_variable &changed = *new std::condition_variable;
std::atomic<Status> lost = OK;
thread_local bool destroying;

namespace {

const char *const NAMES[COUNTED] = {"allocation", "mapping", "reservation", "host", "registered", "stream", "event", "module", "graph", "exec", "object", "context", "work"};
int live[COUNTED];
// The injected failure: a function, and the number of its calls until then.
struct {
    char call[64];
    int nth;
    Status code;
} fault;
// Call counts by function. The name is the same string literal each time.
auto &calls = *new std::map<const char *, int>;

void fail(const char *call, int nth, Status code) {
    snprintf(fault.call, sizeof fault.call, "%s", call);
    fault.nth = nth;
    fault.code = code;
}

// DOORBELL_STANDIN: a comma-separated list.
void configure() {
    const char *text = getenv("DOORBELL_STANDIN");
    std::string words = text ? text : "";
    for (size_t begin = 0; begin < words.size();) {
        const size_t end = std::min(words.find(',', begin), words.size());
        const std::string word = words.substr(begin, end - begin);
        int attribute, value;
        char call[64];
        if (word == "lazy") settings.mode = Mode::LAZY;
        else if (word == "prompt") settings.mode = Mode::PROMPT;
        else if (word == "open") settings.open = true;
        else if (word == "apart") settings.peers = false;
        else if (word.rfind("devices=", 0) == 0) settings.devices = std::max(0, std::min(atoi(word.c_str() + 8), MOST_DEVICES));
        else if (word == "implicit") settings.implicit = true;
        else if (word.rfind("queue=", 0) == 0) settings.queue = std::max(0, atoi(word.c_str() + 6));
        else if (sscanf(word.c_str(), "fail=%63[^:]:%d:%d", call, &attribute, &value) == 3) fail(call, attribute, value);
        else if (sscanf(word.c_str(), "%d=%d", &attribute, &value) == 2) settings.attributes[attribute] = value;
        else fprintf(stderr, "DOORBELL_STANDIN has %s, which is none of lazy, prompt, open, apart, implicit, queue=N, devices=N, fail=CALL:NTH:CODE and ATTRIBUTE=VALUE\n", word.c_str());
        begin = end + 1;
    }
}

// The environment is read when the library is loaded; calls by a test override it.
struct Configured {
    Configured() { configure(); }
} configured;

}  // namespace

void count(Counted what, int by) {
    live[what] += by;
}

Status failing(const char *call) {
    if (destroying) return NOT_PERMITTED;
    if (lost) return lost;
    calls[call]++;
    if (!fault.code || strcmp(fault.call, call) || --fault.nth) return OK;
    return std::exchange(fault.code, OK);
}

}  // namespace standin

#define TESTS extern "C" __attribute__((visibility("default")))

// The number of live objects of a kind; -1 for an unknown kind.
TESTS int standin_count(const char *name) {
    Held held(lock);
    for (int i = 0; i < COUNTED; i++) {
        if (!strcmp(NAMES[i], name)) return live[i];
    }
    return -1;
}

TESTS void standin_fail(const char *call, int nth, int code) {
    Held held(lock);
    fail(call, nth, code);
}

TESTS int standin_failing() {
    Held held(lock);
    return fault.code != OK;
}

// The call count and name of the index-th function called; negative past the last.
TESTS int standin_calls(int index, const char **name) {
    Held held(lock);
    if (index >= int(calls.size())) return -1;
    auto found = std::next(calls.begin(), index);
    *name = found->first;
    return found->second;
}

TESTS void standin_lose(int code) {
    Held held(lock);
    lost = code;
    changed.notify_all();
}

TESTS void standin_peers(int can) {
    Held held(lock);
    settings.peers = can;
}

TESTS void standin_start(int devices, int version) {
    Held held(lock);
    settings.devices = devices;
    settings.version = version;
}

// Before any object is created.
TESTS void standin_manner(int prompt) {
    Held held(lock);
    settings.mode = prompt ? Mode::PROMPT : Mode::LAZY;
}

TESTS void standin_implicit(int implicit) {
    Held held(lock);
    settings.implicit = implicit;
}

TESTS void standin_attribute(int attribute, int value) {
    Held held(lock);
    settings.attributes[attribute] = value;
}

TESTS void standin_open(int open) {
    Held held(lock);
    settings.open = open;
}

EXPORT cuInit(unsigned flags) {
    ENTER;
    return flags ? INVALID_VALUE : OK;
}

EXPORT cuDriverGetVersion(int *version) {
    ENTER;
    *version = settings.version;
    return OK;
}

namespace {

struct Described {
    Status code;
    const char *name, *text;
};
constexpr Described DESCRIBED[] = {
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

Status describe(Status code, const char *Described::*what, const char **text) {
    *text = nullptr;
    for (const Described &one : DESCRIBED) {
        if (one.code == code) *text = one.*what;
    }
    return *text ? OK : INVALID_VALUE;
}

}  // namespace

EXPORT cuGetErrorName(int code, const char **name) {
    return describe(code, &Described::name, name);
}

EXPORT cuGetErrorString(int code, const char **text) {
    return describe(code, &Described::text, text);
}
