// Captures, and the graphs they become. A graph is executed by as many threads as streams were
// captured, each node when its dependencies are done.
#include <algorithm>
#include <thread>

#include "driver.h"

using namespace standin;

namespace {

enum : unsigned { GLOBAL, THREAD_LOCAL, RELAXED };
thread_local unsigned current_mode = GLOBAL;

struct Object {
    void *pointer;
    void (*destroy)(void *);
};

// Nodes are named by their number from 1.
void *name(size_t node) {
    return reinterpret_cast<void *>(node + 1);
}

size_t number(void *node) {
    return reinterpret_cast<size_t>(node) - 1;
}

void run_branch(Held &held, Program &program, const std::vector<uint64_t> &times, int branch, std::vector<bool> &done, Status &failed) {
    for (size_t i = 0; i < program.nodes.size(); i++) {
        const Program::Node &node = program.nodes[i];
        if (node.branch != branch) continue;
        changed.wait(held, [&] { return std::all_of(node.behind.begin(), node.behind.end(), [&](size_t before) { return done[before]; }); });
        Status code = OK;
        if (node.work.kind == Work::RECORD || node.work.kind == Work::DEPEND) {
            Work work = node.work;
            work.value = times[i];
            code = perform(held, work);
        } else if (!failed) {
            code = perform(held, node.work);
        }
        if (code) failed = code;
        done[i] = true;
        changed.notify_all();
    }
}

}  // namespace

Status standin::run_program(Held &held, Program &program, const std::vector<uint64_t> &times) {
    std::vector<bool> done(program.nodes.size());
    Status failed = OK;
    std::vector<std::thread> others;
    for (int branch = 1; branch <= program.branches; branch++) {
        others.emplace_back([&, branch] {
            Held own(lock);
            run_branch(own, program, times, branch, done, failed);
        });
    }
    run_branch(held, program, times, 0, done, failed);
    held.unlock();
    for (std::thread &other : others) other.join();
    held.lock();
    return failed;
}

Status standin::forbidding() {
    Status code = OK;
    for (Stream *stream : streams) {
        Capture *capture = stream->capture.get();
        if (!capture || capture->origin != stream) continue;
        const bool own = capture->thread == std::this_thread::get_id() && capture->mode != RELAXED;
        const bool global = current_mode == GLOBAL && capture->mode == GLOBAL;
        if (current_mode == RELAXED || (!own && !global)) continue;
        capture->invalid = true;
        code = CAPTURE_UNSUPPORTED;
    }
    return code;
}

EXPORT cuThreadExchangeStreamCaptureMode(unsigned *mode) {
    ENTER;
    std::swap(*mode, current_mode);
    return OK;
}

extern "C" __attribute__((visibility("default"))) int standin_mode() {
    return static_cast<int>(current_mode);
}

EXPORT cuStreamIsCapturing(Stream *stream, unsigned *status) {
    ENTER;
    *status = stream->capture != nullptr;
    return OK;
}

// Of a capture that is active, 1; that is invalid, 2.
EXPORT cuStreamGetCaptureInfo_v2(Stream *stream, unsigned *status, uint64_t *id, Graph **graph, void *const **dependencies, size_t *n) {
    ENTER;
    Capture *capture = stream->capture.get();
    *status = capture ? 1 + capture->invalid : 0;
    if (*status != 1) return OK;
    *id = capture->id;
    *graph = capture->graph.get();
    capture->dependencies.clear();
    for (size_t tail : stream->tails) capture->dependencies.push_back(name(tail));
    *dependencies = capture->dependencies.data();
    *n = capture->dependencies.size();
    return OK;
}

EXPORT cuStreamBeginCapture_v2(Stream *stream, unsigned mode) {
    ENTER;
    static uint64_t last_id;
    if (stream->capture) return ILLEGAL_STATE;
    stream->capture = std::make_shared<Capture>();
    stream->capture->id = ++last_id;
    stream->capture->origin = stream;
    stream->capture->mode = mode;
    stream->capture->thread = std::this_thread::get_id();
    stream->branch = 0;
    stream->tails.clear();
    return OK;
}

EXPORT cuStreamEndCapture(Stream *stream, Graph **graph) {
    ENTER;
    const std::shared_ptr<Capture> capture = stream->capture;
    *graph = nullptr;
    if (!capture || capture->origin != stream) return ILLEGAL_STATE;
    // All dependencies of the stream's next node.
    std::unique_ptr<Graph> made = std::move(capture->graph);
    const auto &nodes = made->program->nodes;
    std::vector<bool> joined(nodes.size());
    for (size_t tail : stream->tails) joined[tail] = true;
    for (size_t i = nodes.size(); i-- > 0;) {
        if (nodes[i].added) joined[i] = true;
        if (!joined[i]) continue;
        for (size_t before : nodes[i].behind) joined[before] = true;
    }
    for (Stream *other : streams) {
        if (other->capture == capture) other->capture = nullptr;
    }
    if (capture->invalid) return CAPTURE_INVALIDATED;
    if (std::find(joined.begin(), joined.end(), false) != joined.end()) return CAPTURE_UNJOINED;
    *graph = made.release();
    count(GRAPH, 1);
    return OK;
}

EXPORT cuGraphDestroy(Graph *graph) {
    ENTER;
    delete graph;
    count(GRAPH, -1);
    return OK;
}

EXPORT cuGraphGetNodes(Graph *graph, void **, size_t *n) {
    ENTER;
    *n = graph->program->nodes.size();
    return OK;
}

namespace {

Status edges(Graph *graph, void *const *from, void *const *to, size_t n, bool wanted) {
    auto &nodes = graph->program->nodes;
    for (size_t i = 0; i < n; i++) {
        if (number(from[i]) >= nodes.size() || number(to[i]) >= nodes.size()) return INVALID_VALUE;
        auto &behind = nodes[number(to[i])].behind;
        auto found = std::find(behind.begin(), behind.end(), number(from[i]));
        if ((found != behind.end()) == wanted) return INVALID_VALUE;
        if (wanted) behind.push_back(number(from[i]));
        else behind.erase(found);
    }
    return OK;
}

}  // namespace

EXPORT cuGraphAddEventRecordNode(void **node, Graph *graph, void *const *dependencies, size_t n, Event *event) {
    ENTER;
    Program &program = *graph->program;
    Work work;
    work.kind = Work::RECORD;
    work.passage = event->passage;
    // As its dependencies may follow it in the list, it has a branch of its own.
    program.nodes.push_back({std::move(work), ++program.branches, {}, true});
    *node = name(program.nodes.size() - 1);
    for (size_t i = 0; i < n; i++) {
        if (Status code = edges(graph, dependencies + i, node, 1, true)) return code;
    }
    return OK;
}

EXPORT cuGraphAddDependencies(Graph *graph, void *const *from, void *const *to, size_t n) {
    ENTER;
    return edges(graph, from, to, n, true);
}

EXPORT cuGraphRemoveDependencies(Graph *graph, void *const *from, void *const *to, size_t n) {
    ENTER;
    return edges(graph, from, to, n, false);
}

EXPORT cuUserObjectCreate(Object **object, void *pointer, void (*destroy)(void *), unsigned references, unsigned flags) {
    ENTER;
    if (references != 1 || flags != 1) return INVALID_VALUE;
    *object = new Object{pointer, destroy};
    count(OBJECT, 1);
    return OK;
}

namespace {

// In a thread of the driver, which may not call it.
void release(Object *object) {
    std::thread([object] {
        destroying = true;
        object->destroy(object->pointer);
        delete object;
        Held held(lock);
        count(OBJECT, -1);
    }).detach();
}

}  // namespace

EXPORT cuUserObjectRelease(Object *object, unsigned references) {
    ENTER;
    if (references != 1) return INVALID_VALUE;
    release(object);
    return OK;
}

EXPORT cuGraphRetainUserObject(Graph *graph, Object *object, unsigned references, unsigned flags) {
    ENTER;
    if (references != 1 || flags != 1) return INVALID_VALUE;
    graph->program->objects.emplace_back(object, [](void *object) { release(static_cast<Object *>(object)); });
    return OK;
}

EXPORT cuGraphInstantiateWithFlags(Graph **exec, Graph *graph, unsigned long long) {
    ENTER;
    // Its launches are counted separately from those of other instances of the graph.
    auto program = std::make_shared<Program>(*graph->program);
    program->passage = std::make_shared<Passage>();
    *exec = new Graph{std::move(program)};
    count(EXEC, 1);
    return OK;
}

EXPORT cuGraphExecDestroy(Graph *exec) {
    ENTER;
    delete exec;
    count(EXEC, -1);
    return OK;
}

EXPORT cuGraphUpload(Graph *, Stream *) {
    ENTER;
    return OK;
}

EXPORT cuGraphLaunch(Graph *exec, Stream *stream) {
    ENTER;
    Work work;
    work.kind = Work::GRAPH;
    work.program = exec->program;
    work.passage = exec->program->passage;
    work.value = work.passage->record();
    for (const Program::Node &node : work.program->nodes) {
        const bool waits = node.work.kind == Work::DEPEND, records = node.work.kind == Work::RECORD;
        if ((waits || records) && node.work.passage->destroyed) return INVALID_HANDLE;
        work.times.push_back(records ? node.work.passage->record() : waits ? node.work.passage->recorded() : 0);
    }
    return put(*stream, std::move(work));
}
