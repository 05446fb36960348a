// A driver of CUDA without a GPU: as much of libcuda.so.1 as doorbell-cuda calls, for its tests.
//
// Device memory is memfds, mapped nowhere once it is freed, so that work that came too late would fault. Work is done only when somebody waits for its stream (or has asked often enough), and then only what that stream
// needs, so that all that is asynchronous on a GPU is as late and as unordered as it can be here. Names and numbers are those of NVIDIA's "CUDA Driver API".
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, PEER_UNSUPPORTED = 217, INVALID_PTX = 218, NOT_FOUND = 500, NOT_READY = 600, PEER_ALREADY = 704,
    NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_UNJOINED = 904, TIMEOUT = 909
};
enum { DEVICES = 2, GRANULARITY = 2 << 20, QUERIES = 4096 };

typedef uint64_t ptr_t;
struct graph;
struct handle { char bytes[64]; };
struct stream { struct graph *capture; struct stream *next; };
struct event { uint64_t recorded, passed; struct graph *capture; double when; };
struct op {
    enum { COPY, FILL, RECORD, DEPEND, ADD_ONE, LENT, WRITE, WAIT, NOTHING } kind;
    struct stream *stream; struct event *event;
    ptr_t to, from; size_t bytes; uint64_t value; int flags, done;
    void *kernel; unsigned blocks, threads; char argument[256];
};
struct graph { struct op *ops; size_t count; int invalid; struct stream *origin; };
struct module { int unused; };
struct allocation { int fd; size_t bytes; int device, capable, references; };
struct mapping { ptr_t at; size_t bytes; struct allocation *of; struct mapping *next; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct op *queue; static size_t queued; static int runners;
static struct mapping *mappings; static struct stream *streams;
static int asked, peers = 1, count_of_devices = DEVICES, version = 13000, flags_of_context;
static __thread void *current[16]; static __thread int depth, mode;
static int contexts[DEVICES], retained[DEVICES];
static struct { const char *name; int live; } counts[] = {{"allocation", 0}, {"mapping", 0}, {"reservation", 0}, {"host", 0}, {"registered", 0}, {"stream", 0}, {"event", 0}, {"module", 0}, {"graph", 0}, {"exec", 0}, {"context", 0}};
enum { ALLOCATION, MAPPING, RESERVATION, HOST, REGISTERED, STREAM, EVENT, MODULE, GRAPH, EXEC, CONTEXT };
static struct { char call[64]; int code; } fault;

// What tests do with it besides.
int fake_count(const char *name) { for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) if (!strcmp(counts[i].name, name)) return counts[i].live; return -1; }
void fake_fail(const char *call, int code) { snprintf(fault.call, sizeof fault.call, "%s", call); fault.code = code; }
void fake_peers(int can) { peers = can; }
void fake_start(int devices, int of_version) { count_of_devices = devices; version = of_version; }
// Kernels of the tests' own, with one argument of at most 256 bytes: where they are, and what runs one.
static void *(*find_kernel)(const char *); static void (*run_kernel)(void *, unsigned, unsigned, const void *); static size_t argument_bytes;
void fake_kernels(void *(*find)(const char *), void (*run)(void *, unsigned, unsigned, const void *), size_t bytes) { find_kernel = find; run_kernel = run; argument_bytes = bytes; }
int fake_mode(void) { return mode; }
int fake_depth(void) { return depth; }

// The next call of this name fails as a test has asked for.
static int failing(const char *call) { if (fault.code && !strcmp(fault.call, call)) { int code = fault.code; fault.code = 0; return code; } return OK; }
#define ENTER int code_ = failing(__func__); if (code_) return code_; pthread_mutex_lock(&lock)
#define LEAVE(code) do { int result_ = (code); pthread_mutex_unlock(&lock); return result_; } while (0)

static int satisfied(struct op *op) {
    if (op->bytes == 4) { uint32_t v = __atomic_load_n((uint32_t *)op->to, __ATOMIC_ACQUIRE), w = op->value; return op->flags == 0 ? (int32_t)(v - w) >= 0 : op->flags == 1 ? v == w : (v & w) != 0; }
    uint64_t v = __atomic_load_n((uint64_t *)op->to, __ATOMIC_ACQUIRE), w = op->value;
    return op->flags == 0 ? (int64_t)(v - w) >= 0 : op->flags == 1 ? v == w : (v & w) != 0;
}
static int passes(struct event *e, uint64_t time);
static int perform(struct op *op) {
    static double clock;
    switch (op->kind) {
    case COPY: memmove((void *)op->to, (void *)op->from, op->bytes); break;
    case FILL: memset((void *)op->to, op->value, op->bytes); break;
    case RECORD: op->event->passed = op->value; op->event->when = clock += 0.5; break;
    case DEPEND: return passes(op->event, op->value);
    case ADD_ONE: for (size_t i = 0; i < op->bytes; i++) ((uint32_t *)op->to)[i]++; break;
    case WRITE: if (op->bytes == 4) __atomic_store_n((uint32_t *)op->to, op->value, __ATOMIC_RELEASE); else __atomic_store_n((uint64_t *)op->to, op->value, __ATOMIC_RELEASE); break;
    case WAIT: for (int tries = 0; !satisfied(op); tries++) { if (tries > 20000) return TIMEOUT; pthread_mutex_unlock(&lock); usleep(1000); pthread_mutex_lock(&lock); } break;
    case LENT: run_kernel(op->kernel, op->blocks, op->threads, op->argument); break;
    case NOTHING: break;
    }
    return OK;
}
// Does what is queued of one stream, or of all with none, until an event has been recorded so many times.
static int run(struct stream *s, struct event *e, uint64_t time) {
    int code = OK;
    runners++;
    for (size_t i = 0; i < queued && !(e && e->passed >= time); i++)
        if (!queue[i].done && (!s || queue[i].stream == s)) { struct op op = queue[i]; queue[i].done = 1; int c = perform(&op); if (c && !code) code = c; }
    size_t left = 0;
    if (!--runners) { for (size_t i = 0; i < queued; i++) if (!queue[i].done) queue[left++] = queue[i]; queued = left; asked = 0; }
    return code;
}
// Does what an event waits for.
static int passes(struct event *e, uint64_t time) {
    if (e->passed >= time) return OK;
    for (size_t i = 0; i < queued; i++) if (queue[i].kind == RECORD && queue[i].event == e && queue[i].value == time) return run(queue[i].stream, e, time);
    return OK;
}
static int put(struct stream *s, struct op op) {
    op.stream = s;
    struct graph *g = s->capture;
    if (g) { if (g->invalid) return CAPTURE_INVALIDATED; g->ops = realloc(g->ops, (g->count + 1) * sizeof op); g->ops[g->count++] = op; return OK; }
    queue = realloc(queue, (queued + 1) * sizeof op); queue[queued++] = op;
    return OK;
}
// Whether something is still said to be pending, which after so many questions is done.
static int pending(void) { if (++asked >= QUERIES) return run(0, 0, 0), 0; return 1; }

int cuInit(unsigned flags) { ENTER; LEAVE(flags ? INVALID_VALUE : OK); }
int cuDriverGetVersion(int *v) { ENTER; *v = version; LEAVE(OK); }
int cuGetErrorName(int code, const char **s) { *s = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 1 ? "CUDA_ERROR_INVALID_VALUE" : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == 218 ? "CUDA_ERROR_INVALID_PTX" : code == 34 ? "CUDA_ERROR_STUB_LIBRARY" : 0; return *s ? OK : INVALID_VALUE; }
int cuGetErrorString(int code, const char **s) { *s = code == 2 ? "out of memory" : code == 1 ? "invalid argument" : code == 700 ? "an illegal memory access was encountered" : code == 218 ? "a PTX JIT compilation failed" : code == 34 ? "CUDA driver is a stub library" : 0; return *s ? OK : INVALID_VALUE; }

int cuDeviceGetCount(int *n) { ENTER; *n = count_of_devices; LEAVE(OK); }
int cuDeviceGet(int *d, int ordinal) { ENTER; *d = ordinal; LEAVE(OK); }
int cuDeviceGetName(char *name, int len, int d) { ENTER; snprintf(name, len, "Fake %d", d); LEAVE(OK); }
int cuDeviceGetUuid_v2(unsigned char *uuid, int d) { ENTER; for (int i = 0; i < 16; i++) uuid[i] = 16 * d + i; LEAVE(OK); }
int cuDeviceGetPCIBusId(char *id, int len, int d) { ENTER; snprintf(id, len, "0000:%02X:00.0", 0x1a + d); LEAVE(OK); }
int cuDeviceTotalMem_v2(size_t *n, int d) { (void)d; ENTER; *n = 1ul << 30; LEAVE(OK); }
int cuDeviceGetAttribute(int *v, int a, int d) {
    (void)d; ENTER;
    switch (a) {
    case 8: *v = 48 << 10; break; case 16: *v = 4; break; case 75: *v = 9; break; case 76: *v = 0; break; case 117: *v = 1; break; case 118: *v = 100; break;
    case 102: case 103: case 110: case 116: case 122: case 125: *v = 1; break;
    case 124: *v = 0; break;
    default: LEAVE(INVALID_VALUE);
    }
    LEAVE(OK);
}
int cuDeviceCanAccessPeer(int *can, int a, int b) { ENTER; *can = a != b && peers; LEAVE(OK); }
int cuDeviceGetP2PAttribute(int *v, int a, int from, int to) { (void)from, (void)to; ENTER; *v = a == 3; LEAVE(OK); }

int cuDevicePrimaryCtxRetain(void **c, int d) { ENTER; *c = &contexts[d]; if (!retained[d]++) counts[CONTEXT].live++; LEAVE(OK); }
int cuDevicePrimaryCtxRelease_v2(int d) { ENTER; if (!--retained[d]) counts[CONTEXT].live--; LEAVE(OK); }
int cuCtxGetCurrent(void **c) { *c = depth ? current[depth - 1] : 0; return OK; }
int cuCtxSetCurrent(void *c) { if (!depth) depth = 1; current[depth - 1] = c; return OK; }
int cuCtxPushCurrent_v2(void *c) { if (depth == 16) return INVALID_VALUE; current[depth++] = c; return OK; }
int cuCtxPopCurrent_v2(void **c) { if (!depth) return INVALID_VALUE; *c = current[--depth]; return OK; }
int cuCtxSynchronize(void) { ENTER; LEAVE(run(0, 0, 0)); }
int cuCtxEnablePeerAccess(void *c, unsigned f) { (void)f; ENTER; LEAVE(!peers ? PEER_UNSUPPORTED : c == current[depth - 1] ? INVALID_VALUE : PEER_ALREADY); }
int cuCtxGetFlags(unsigned *f) { *f = flags_of_context; return OK; }
int cuCtxSetFlags(unsigned f) { flags_of_context = f; return OK; }
int cuMemGetInfo_v2(size_t *f, size_t *t) { ENTER; *f = 1 << 29; *t = 1 << 30; LEAVE(OK); }
int cuFlushGPUDirectRDMAWrites(int target, int scope) { ENTER; LEAVE(target || (scope != 100 && scope != 200) ? INVALID_VALUE : OK); }

int cuStreamCreateWithPriority(struct stream **s, unsigned flags, int priority) { (void)priority; ENTER; if (flags != 1) LEAVE(INVALID_VALUE); *s = calloc(1, sizeof **s); (*s)->next = streams; streams = *s; counts[STREAM].live++; LEAVE(OK); }
// Neither waits nor frees: what is queued still names it.
int cuStreamDestroy_v2(struct stream *s) { ENTER; for (struct stream **p = &streams; *p; p = &(*p)->next) if (*p == s) { *p = s->next; break; } counts[STREAM].live--; LEAVE(OK); }
int cuStreamSynchronize(struct stream *s) { ENTER; if (s->capture) { s->capture->invalid = 1; LEAVE(CAPTURE_UNSUPPORTED); } LEAVE(run(s, 0, 0)); }
int cuStreamQuery(struct stream *s) {
    ENTER;
    if (s->capture) { s->capture->invalid = 1; LEAVE(CAPTURE_UNSUPPORTED); }
    for (size_t i = 0; i < queued; i++) if (queue[i].stream == s && !queue[i].done) LEAVE(pending() ? NOT_READY : OK);
    LEAVE(OK);
}
int cuStreamWaitEvent(struct stream *s, struct event *e, unsigned f) { (void)f; ENTER; if (e->capture && !s->capture) s->capture = e->capture; if (s->capture) LEAVE(put(s, (struct op){.kind = NOTHING})); LEAVE(put(s, (struct op){.kind = DEPEND, .event = e, .value = e->recorded})); }
int cuStreamIsCapturing(struct stream *s, unsigned *status) { ENTER; *status = s->capture != 0; LEAVE(OK); }
int cuThreadExchangeStreamCaptureMode(unsigned *m) { ENTER; int old = mode; mode = *m; *m = old; LEAVE(OK); }

int cuEventCreate(struct event **e, unsigned flags) { (void)flags; ENTER; *e = calloc(1, sizeof **e); counts[EVENT].live++; LEAVE(OK); }
// Not freed: what is queued may still name it, as the driver keeps what it needs.
int cuEventDestroy_v2(struct event *e) { ENTER; (void)e; counts[EVENT].live--; LEAVE(OK); }
int cuEventRecord(struct event *e, struct stream *s) { ENTER; e->capture = s->capture; if (s->capture) LEAVE(put(s, (struct op){.kind = NOTHING})); LEAVE(put(s, (struct op){.kind = RECORD, .event = e, .value = ++e->recorded})); }
int cuEventQuery(struct event *e) { ENTER; LEAVE(e->passed < e->recorded && pending() ? NOT_READY : OK); }
int cuEventSynchronize(struct event *e) { ENTER; LEAVE(passes(e, e->recorded)); }
int cuEventElapsedTime(float *ms, struct event *a, struct event *b) { ENTER; if (a->passed < a->recorded || b->passed < b->recorded) LEAVE(NOT_READY); *ms = b->when - a->when; LEAVE(OK); }
int cuIpcGetEventHandle(char *h, struct event *e) { ENTER; memset(h, 0, 64); memcpy(h, &e, sizeof e); LEAVE(OK); }
int cuIpcOpenEventHandle(struct event **e, struct handle h) { ENTER; memcpy(e, &h, sizeof *e); if (!*e) LEAVE(INVALID_VALUE); counts[EVENT].live++; LEAVE(OK); }

struct location { int kind, id; };
struct prop { unsigned kind, handles; struct location at; void *win32; unsigned char compression, capable; uint16_t usage; unsigned char reserved[4]; };
struct access { struct location at; unsigned flags; };
int cuMemGetAllocationGranularity(size_t *g, const struct prop *p, unsigned f) { ENTER; *g = GRANULARITY; LEAVE(p->kind != 1 || f ? INVALID_VALUE : OK); }
static void forget(struct allocation *a) { if (!--a->references) { close(a->fd); free(a); counts[ALLOCATION].live--; } }
static struct allocation *made(int fd, size_t bytes, int device, int capable) { struct allocation *a = malloc(sizeof *a); *a = (struct allocation){fd, bytes, device, capable, 1}; counts[ALLOCATION].live++; return a; }
int cuMemCreate(struct allocation **h, size_t bytes, const struct prop *p, unsigned long long f) {
    ENTER;
    if (f || p->at.kind != 1 || p->handles != 1 || !bytes || bytes % GRANULARITY) LEAVE(INVALID_VALUE);
    if (bytes > 1ul << 30) LEAVE(OUT_OF_MEMORY);
    int fd = memfd_create("fake", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, bytes)) LEAVE(304);
    *h = made(fd, bytes, p->at.id, p->capable);
    LEAVE(OK);
}
int cuMemRelease(struct allocation *a) { ENTER; forget(a); LEAVE(OK); }
int cuMemRetainAllocationHandle(struct allocation **h, void *at) { ENTER; for (struct mapping *m = mappings; m; m = m->next) if ((ptr_t)at - m->at < m->bytes) { *h = m->of; m->of->references++; LEAVE(OK); } LEAVE(INVALID_VALUE); }
int cuMemGetAllocationPropertiesFromHandle(struct prop *p, struct allocation *a) { ENTER; *p = (struct prop){.kind = 1, .handles = 1, .at = {1, a->device}, .capable = a->capable}; LEAVE(OK); }
int cuMemExportToShareableHandle(int *fd, struct allocation *a, unsigned kind, unsigned long long f) { ENTER; LEAVE(kind != 1 || f ? INVALID_VALUE : (*fd = dup(a->fd)) < 0 ? 304 : OK); }
int cuMemImportFromShareableHandle(struct allocation **h, void *fd, unsigned kind) {
    ENTER;
    struct stat st;
    if (kind != 1 || fstat((int)(intptr_t)fd, &st) || st.st_size % GRANULARITY || !st.st_size) LEAVE(INVALID_VALUE);
    *h = made(dup((int)(intptr_t)fd), st.st_size, 0, 1);
    LEAVE(OK);
}
int cuMemAddressReserve(ptr_t *at, size_t bytes, size_t align, ptr_t hint, unsigned long long f) {
    (void)hint; ENTER;
    if (f) LEAVE(INVALID_VALUE);
    char *p = mmap(0, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) LEAVE(OUT_OF_MEMORY);
    char *q = (char *)(((uintptr_t)p + align - 1) / align * align);
    if (q > p) munmap(p, q - p);
    munmap(q + bytes, p + align - q);
    *at = (ptr_t)q; counts[RESERVATION].live++;
    LEAVE(OK);
}
int cuMemAddressFree(ptr_t at, size_t bytes) { ENTER; munmap((void *)at, bytes); counts[RESERVATION].live--; LEAVE(OK); }
int cuMemMap(ptr_t at, size_t bytes, size_t offset, struct allocation *a, unsigned long long f) {
    ENTER;
    if (f || offset || bytes > a->bytes) LEAVE(INVALID_VALUE);
    if (mmap((void *)at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, a->fd, 0) == MAP_FAILED) LEAVE(304);
    struct mapping *m = malloc(sizeof *m);
    *m = (struct mapping){at, bytes, a, mappings}; mappings = m; a->references++; counts[MAPPING].live++;
    LEAVE(OK);
}
int cuMemUnmap(ptr_t at, size_t bytes) {
    ENTER;
    for (struct mapping **p = &mappings; *p; p = &(*p)->next) if ((*p)->at == at && (*p)->bytes == bytes) {
        struct mapping *m = *p; *p = m->next; forget(m->of); free(m); counts[MAPPING].live--;
        mmap((void *)at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
        LEAVE(OK);
    }
    LEAVE(INVALID_VALUE);
}
int cuMemSetAccess(ptr_t at, size_t bytes, const struct access *a, size_t n) { ENTER; for (size_t i = 0; i < n; i++) if (a[i].at.kind != 1 || a[i].at.id >= DEVICES || a[i].flags != 3) LEAVE(INVALID_VALUE); LEAVE(mprotect((void *)at, bytes, PROT_READ | PROT_WRITE) ? 304 : OK); }

int cuMemHostAlloc(void **p, size_t bytes, unsigned f) { ENTER; if (f != 3) LEAVE(INVALID_VALUE); *p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096); counts[HOST].live++; LEAVE(OK); }
int cuMemFreeHost(void *p) { ENTER; free(p); counts[HOST].live--; LEAVE(OK); }
int cuMemHostRegister_v2(void *p, size_t bytes, unsigned f) { (void)p, (void)bytes; ENTER; if (f != 3) LEAVE(INVALID_VALUE); counts[REGISTERED].live++; LEAVE(OK); }
int cuMemHostUnregister(void *p) { (void)p; ENTER; counts[REGISTERED].live--; LEAVE(OK); }
int cuMemHostGetDevicePointer_v2(ptr_t *d, void *p, unsigned f) { (void)f; ENTER; *d = (ptr_t)p; LEAVE(OK); }

int cuMemcpyHtoDAsync_v2(ptr_t to, const void *from, size_t bytes, struct stream *s) { ENTER; LEAVE(put(s, (struct op){.kind = COPY, .to = to, .from = (ptr_t)from, .bytes = bytes})); }
int cuMemcpyDtoHAsync_v2(void *to, ptr_t from, size_t bytes, struct stream *s) { ENTER; LEAVE(put(s, (struct op){.kind = COPY, .to = (ptr_t)to, .from = from, .bytes = bytes})); }
int cuMemcpyDtoDAsync_v2(ptr_t to, ptr_t from, size_t bytes, struct stream *s) { ENTER; LEAVE(put(s, (struct op){.kind = COPY, .to = to, .from = from, .bytes = bytes})); }
int cuMemcpyAsync(ptr_t to, ptr_t from, size_t bytes, struct stream *s) { ENTER; LEAVE(put(s, (struct op){.kind = COPY, .to = to, .from = from, .bytes = bytes})); }
int cuMemcpyPeerAsync(ptr_t to, void *tc, ptr_t from, void *fc, size_t bytes, struct stream *s) { (void)tc, (void)fc; ENTER; LEAVE(put(s, (struct op){.kind = COPY, .to = to, .from = from, .bytes = bytes})); }
int cuMemsetD8Async(ptr_t to, unsigned char value, size_t n, struct stream *s) { ENTER; LEAVE(put(s, (struct op){.kind = FILL, .to = to, .bytes = n, .value = value})); }
int cuMemcpyBatchAsync_v2(ptr_t *to, ptr_t *from, size_t *bytes, size_t n, void *attrs, size_t *first, size_t attr_count, struct stream *s) {
    (void)attrs; ENTER;
    if (attr_count != 1 || first[0] || s->capture) LEAVE(INVALID_VALUE);
    // Unordered: the last goes first.
    while (n--) put(s, (struct op){.kind = COPY, .to = to[n], .from = from[n], .bytes = bytes[n]});
    LEAVE(OK);
}
int cuStreamWriteValue32_v2(struct stream *s, ptr_t at, uint32_t v, unsigned f) { ENTER; LEAVE(f ? INVALID_VALUE : put(s, (struct op){.kind = WRITE, .to = at, .bytes = 4, .value = v})); }
int cuStreamWriteValue64_v2(struct stream *s, ptr_t at, uint64_t v, unsigned f) { ENTER; LEAVE(f ? INVALID_VALUE : put(s, (struct op){.kind = WRITE, .to = at, .bytes = 8, .value = v})); }
int cuStreamWaitValue32_v2(struct stream *s, ptr_t at, uint32_t v, unsigned f) { ENTER; LEAVE(put(s, (struct op){.kind = WAIT, .to = at, .bytes = 4, .value = v, .flags = f})); }
int cuStreamWaitValue64_v2(struct stream *s, ptr_t at, uint64_t v, unsigned f) { ENTER; LEAVE(put(s, (struct op){.kind = WAIT, .to = at, .bytes = 8, .value = v, .flags = f})); }

int cuModuleLoadDataEx(struct module **m, const char *ptx, unsigned n, int *options, void **values) {
    ENTER;
    if (strstr(ptx, "nonsense")) { for (unsigned i = 0; i < n; i++) if (options[i] == 5) strcpy(values[i], "\nptxas application ptx input, line 1; fatal : Parsing error near 'nonsense'\nmore\n"); LEAVE(INVALID_PTX); }
    *m = malloc(sizeof **m); counts[MODULE].live++;
    LEAVE(OK);
}
int cuModuleUnload(struct module *m) { ENTER; free(m); counts[MODULE].live--; LEAVE(OK); }
static const char *kernels[] = {"add_one", "spin"};
int cuModuleGetFunction(const char **f, struct module *m, const char *name) { (void)m; ENTER; for (int i = 0; i < 2; i++) if (!strcmp(kernels[i], name)) { *f = kernels[i]; LEAVE(OK); } if (find_kernel && (*f = find_kernel(name))) LEAVE(OK); LEAVE(NOT_FOUND); }
int cuFuncGetAttribute(int *v, int a, const char *f) { (void)f; ENTER; *v = a == 0 ? 1024 : a == 4 ? 16 : 0; LEAVE(OK); }
int cuFuncSetAttribute(const char *f, int a, int v) { (void)f; ENTER; LEAVE(a != 8 || v > 200 << 10 ? INVALID_VALUE : OK); }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const char *f, int threads, size_t shared) { (void)f, (void)shared; ENTER; *n = 2048 / threads; LEAVE(OK); }
int cuLaunchKernel(const char *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, struct stream *s, void **p, void **extra) {
    (void)gy, (void)gz, (void)by, (void)bz, (void)shared; ENTER;
    if (!gx || !bx || bx > 1024 || extra) LEAVE(INVALID_VALUE);
    if (f == kernels[1]) LEAVE(put(s, (struct op){.kind = NOTHING}));
    if (f != kernels[0]) {
        struct op op = {.kind = LENT, .kernel = (void *)f, .blocks = gx, .threads = bx};
        memcpy(op.argument, p[0], argument_bytes);
        LEAVE(put(s, op));
    }
    size_t threads = (size_t)gx * bx, n = *(uint32_t *)p[1];
    LEAVE(put(s, (struct op){.kind = ADD_ONE, .to = *(ptr_t *)p[0], .bytes = n < threads ? n : threads}));
}
int cuLaunchCooperativeKernel(const char *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, struct stream *s, void **p) { return gx > 8 ? 720 : cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, s, p, 0); }

int cuStreamBeginCapture_v2(struct stream *s, unsigned m) { (void)m; ENTER; if (s->capture) LEAVE(401); s->capture = calloc(1, sizeof *s->capture); s->capture->origin = s; counts[GRAPH].live++; LEAVE(OK); }
int cuStreamEndCapture(struct stream *s, struct graph **g) {
    ENTER;
    struct graph *of = s->capture;
    if (!of || of->origin != s) LEAVE(401);
    for (struct stream *t = streams; t; t = t->next) if (t->capture == of) t->capture = 0;
    *g = of;
    if (of->invalid) { *g = 0; counts[GRAPH].live--; LEAVE(CAPTURE_INVALIDATED); }
    LEAVE(OK);
}
int cuGraphDestroy(struct graph *g) { ENTER; free(g->ops); free(g); counts[GRAPH].live--; LEAVE(OK); }
int cuGraphGetNodes(struct graph *g, void **nodes, size_t *n) { (void)nodes; ENTER; *n = g->count; LEAVE(OK); }
int cuGraphInstantiateWithFlags(struct graph **e, struct graph *g, unsigned long long f) { (void)f; ENTER; *e = malloc(sizeof **e); **e = *g; (*e)->ops = malloc(g->count * sizeof *g->ops + 1); memcpy((*e)->ops, g->ops, g->count * sizeof *g->ops); counts[EXEC].live++; LEAVE(OK); }
int cuGraphExecDestroy(struct graph *e) { ENTER; free(e->ops); free(e); counts[EXEC].live--; LEAVE(OK); }
int cuGraphUpload(struct graph *e, struct stream *s) { (void)e, (void)s; ENTER; LEAVE(OK); }
int cuGraphLaunch(struct graph *e, struct stream *s) { ENTER; for (size_t i = 0; i < e->count; i++) put(s, e->ops[i]); LEAVE(OK); }

int cuPointerGetAttribute(void *data, int a, ptr_t p) {
    ENTER;
    for (struct mapping *m = mappings; m; m = m->next) if (p - m->at < m->bytes) switch (a) {
        case 2: *(unsigned *)data = 2; LEAVE(OK);
        case 7: *(unsigned long long *)data = m->at; LEAVE(OK);
        case 9: *(int *)data = m->of->device; LEAVE(OK);
        case 8: case 10: *(char *)data = 0; LEAVE(OK);
        case 15: *(char *)data = m->of->capable; LEAVE(OK);
        }
    LEAVE(INVALID_VALUE);
}
int cuPointerSetAttribute(const void *v, int a, ptr_t p) { (void)v, (void)p; ENTER; LEAVE(a == 6 ? OK : INVALID_VALUE); }
int cuMemGetAddressRange_v2(ptr_t *base, size_t *bytes, ptr_t p) { ENTER; for (struct mapping *m = mappings; m; m = m->next) if (p - m->at < m->bytes) { *base = m->at; *bytes = m->bytes; LEAVE(OK); } LEAVE(NOT_FOUND); }
int cuIpcGetMemHandle(char *h, ptr_t p) { (void)h, (void)p; ENTER; LEAVE(INVALID_VALUE); }
int cuIpcOpenMemHandle_v2(ptr_t *p, struct handle h, unsigned f) { (void)p, (void)h, (void)f; ENTER; LEAVE(INVALID_VALUE); }
int cuIpcCloseMemHandle(ptr_t p) { (void)p; ENTER; LEAVE(INVALID_VALUE); }
