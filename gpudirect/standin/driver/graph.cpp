// Captures, and the graphs they become. A graph is executed by as many threads as streams were
// captured, each node when its dependencies are done.
#include <algorithm>
#include <thread>

#include "driver.h"

using namespace standin;

namespace {

thread_local unsigned current_mode;

struct Graph {
    std::shared_ptr<Program> program;
};

void run_branch(Held &held, Program &program, int branch, std::vector<bool> &done, Status &failed) {
    for (size_t i = 0; i < program.nodes.size(); i++) {
        const Program::Node &node = program.nodes[i];
        if (node.branch != branch) continue;
        changed.wait(held, [&] { return std::all_of(node.behind.begin(), node.behind.end(), [&](size_t before) { return done[before]; }); });
        const Status code = failed ? OK : perform(held, node.work);
        if (code) failed = code;
        done[i] = true;
        changed.notify_all();
    }
}

}  // namespace

Status standin::run_program(Held &held, Program &program) {
    std::vector<bool> done(program.nodes.size());
    Status failed = OK;
    std::vector<std::thread> others;
    for (int branch = 1; branch <= program.branches; branch++) {
        others.emplace_back([&, branch] {
            Held own(lock);
            run_branch(own, program, branch, done, failed);
        });
    }
    run_branch(held, program, 0, done, failed);
    held.unlock();
    for (std::thread &other : others) other.join();
    held.lock();
    return failed;
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

EXPORT cuStreamBeginCapture_v2(Stream *stream, unsigned) {
    ENTER;
    if (stream->capture) return ILLEGAL_STATE;
    stream->capture = std::make_shared<Capture>();
    stream->capture->origin = stream;
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
    const auto &nodes = capture->program->nodes;
    std::vector<bool> joined(nodes.size());
    for (size_t tail : stream->tails) joined[tail] = true;
    for (size_t i = nodes.size(); i-- > 0;) {
        if (!joined[i]) continue;
        for (size_t before : nodes[i].behind) joined[before] = true;
    }
    for (Stream *other : streams) {
        if (other->capture == capture) other->capture = nullptr;
    }
    if (capture->invalid) return CAPTURE_INVALIDATED;
    if (std::find(joined.begin(), joined.end(), false) != joined.end()) return CAPTURE_UNJOINED;
    *graph = new Graph{capture->program};
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
    return put(*stream, std::move(work));
}
