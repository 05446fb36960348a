// Collectives of gloo over its TCP transport, measured. c++ -O2 gloo.cc -lgloo -o gloo
// Rendezvous by files in a folder: GLOO_FOLDER=DIR GLOO_RANK=r GLOO_RANKS=n ./gloo allreduce 8 67108864 8
#include "contest.h"
#include <cstdlib>
#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/alltoall.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>
#include <gloo/reduce_scatter.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>
#include <functional>
#include <memory>
#include <string>
#include <vector>

using Context = std::shared_ptr<gloo::Context>;

static std::function<void()> prepare(const Context &context, const std::string &operation, std::vector<float> &in, std::vector<float> &out, size_t bytes) {
    const size_t count = bytes / sizeof(float), part = count / context->size;
    if (operation == "allreduce") {
        return [&in, &out, context, count] {
            gloo::AllreduceOptions options(context);
            options.setInput(in.data(), count);
            options.setOutput(out.data(), count);
            options.setReduceFunction([](void *a, const void *b, const void *c, size_t n) { gloo::sum<float>(a, b, c, n); });
            gloo::allreduce(options);
        };
    }
    if (operation == "allgather") {
        return [&in, &out, context, part] {
            if (part == 0) return;
            gloo::AllgatherOptions options(context);
            options.setInput(in.data(), part);
            options.setOutput(out.data(), part * context->size);
            gloo::allgather(options);
        };
    }
    if (operation == "reduce-scatter") {
        auto parts = std::vector<int>(context->size, (int)part);
        auto algorithm = std::make_shared<gloo::ReduceScatterHalvingDoubling<float>>(context, std::vector<float *>{out.data()}, (int)(part * context->size), parts);
        return [algorithm] { algorithm->run(); };
    }
    if (operation == "broadcast") {
        return [&out, context, count] {
            gloo::BroadcastOptions options(context);
            options.setOutput(out.data(), count);
            options.setRoot(0);
            gloo::broadcast(options);
        };
    }
    if (operation == "alltoall") {
        return [&in, &out, context, part] {
            if (part == 0) return;
            gloo::AlltoallOptions options(context);
            options.setInput(in.data(), part * context->size);
            options.setOutput(out.data(), part * context->size);
            gloo::alltoall(options);
        };
    }
    fprintf(stderr, "no operation %s\n", operation.c_str());
    exit(2);
}

static const char *variable(const char *name) {
    const char *value = getenv(name);
    if (!value) {
        fprintf(stderr, "%s is not set\n", name);
        exit(2);
    }
    return value;
}

int main(int argc, char **argv) {
    struct contest c = contest_of(argc, argv);
    const int rank = atoi(variable("GLOO_RANK")), ranks = atoi(variable("GLOO_RANKS"));
    auto context = std::make_shared<gloo::rendezvous::Context>(rank, ranks);
    gloo::rendezvous::FileStore store(variable("GLOO_FOLDER"));
    gloo::transport::tcp::attr where("127.0.0.1");
    auto device = gloo::transport::tcp::CreateDevice(where);
    context->connectFullMesh(store, device);
    std::vector<float> in(c.to / sizeof(float) + 16, 1.0f + (float)rank), out(in);
    for (size_t bytes = c.from; bytes <= c.to; bytes *= c.factor) {
        auto run = prepare(context, c.operation, in, out, bytes);
        const int repeats = contest_repeats(bytes);
        for (int i = 0; i < repeats / 10 + 2; i++) run();
        gloo::BarrierOptions barrier(context);
        gloo::barrier(barrier);
        const double begun = contest_now();
        for (int i = 0; i < repeats; i++) run();
        double mine = (contest_now() - begun) / repeats, sum = 0;
        gloo::AllreduceOptions options(context);
        options.setInput(&mine, 1);
        options.setOutput(&sum, 1);
        options.setReduceFunction([](void *a, const void *b, const void *c, size_t n) { gloo::sum<double>(a, b, c, n); });
        gloo::allreduce(options);
        if (rank == 0) printf("%s %zu %.3f\n", c.operation, bytes, sum / ranks), fflush(stdout);
    }
    return 0;
}
