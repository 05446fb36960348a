// Devices and contexts.
#include <stdio.h>

#include "driver.h"

using namespace standin;

namespace {

Context contexts[MOST_DEVICES];
thread_local Context *stack[16];
thread_local int depth;
unsigned flags_of_context;

}  // namespace

Context *standin::current() {
    return depth ? stack[depth - 1] : nullptr;
}

int standin::current_device() {
    Context *context = current();
    return context ? context->device : 0;
}

int standin::multiprocessors() {
    auto other = settings.attributes.find(MULTIPROCESSOR_COUNT);
    return other == settings.attributes.end() ? MULTIPROCESSORS : other->second;
}

extern "C" __attribute__((visibility("default"))) int standin_depth() {
    return depth;
}

EXPORT cuDeviceGetCount(int *count) {
    ENTER;
    *count = settings.devices;
    return OK;
}

EXPORT cuDeviceGet(int *device, int ordinal) {
    ENTER;
    *device = ordinal;
    return OK;
}

EXPORT cuDeviceGetName(char *name, int length, int device) {
    ENTER;
    snprintf(name, length, "CPU stand-in %d", device);
    return OK;
}

EXPORT cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    ENTER;
    for (int i = 0; i < 16; i++) uuid[i] = 16 * device + i;
    return OK;
}

EXPORT cuDeviceGetPCIBusId(char *id, int length, int device) {
    ENTER;
    snprintf(id, length, "0000:%02X:00.0", 0x1a + device);
    return OK;
}

EXPORT cuDeviceTotalMem_v2(size_t *bytes, int) {
    ENTER;
    *bytes = DEVICE_MEMORY;
    return OK;
}

EXPORT cuDeviceGetAttribute(int *value, int attribute, int) {
    ENTER;
    if (auto other = settings.attributes.find(attribute); other != settings.attributes.end()) {
        *value = other->second;
        return OK;
    }
    switch (attribute) {
        case 8: *value = 48 << 10; return OK;
        case MULTIPROCESSOR_COUNT: *value = MULTIPROCESSORS; return OK;
        case 18: *value = 0; return OK;
        case 38: *value = 4 << 20; return OK;
        case 40: *value = 3; return OK;
        case 75: *value = 9; return OK;
        // Minor compute capability, MPS.
        case 76: case 133: *value = 0; return OK;
        case 97: *value = 200 << 10; return OK;
        case 115: *value = 0; return OK;
        case 117: *value = 1; return OK;
        case 118: *value = 100; return OK;
        // Cooperative launch, VMM, GPUDirect RDMA, 64-bit memory operations, dma-buf, event IPC.
        case 95: case 102: case 103: case 110: case 116: case 122: case 124: case 125: *value = 1; return OK;
        default: return INVALID_VALUE;
    }
}

EXPORT cuDeviceCanAccessPeer(int *can, int one, int other) {
    ENTER;
    *can = one != other && settings.peers;
    return OK;
}

EXPORT cuDeviceGetP2PAttribute(int *value, int attribute, int, int) {
    ENTER;
    // All are equally fast, have peer access and native atomics, as over NVLink.
    *value = attribute == 1 ? 0 : settings.peers;
    return OK;
}

EXPORT cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER;
    Context &of = contexts[device];
    of.device = device;
    if (!of.retained++) count(CONTEXT, 1);
    *context = &of;
    return OK;
}

EXPORT cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER;
    if (!--contexts[device].retained) count(CONTEXT, -1);
    return OK;
}

EXPORT cuCtxCreate_v2(void **context, unsigned, int device) {
    ENTER;
    Context *made = new Context();
    made->device = device;
    made->retained = 1;
    count(CONTEXT, 1);
    stack[depth++] = made;
    *context = made;
    return OK;
}

EXPORT cuCtxDestroy_v2(Context *context) {
    ENTER;
    delete context;
    count(CONTEXT, -1);
    return OK;
}

EXPORT cuCtxGetCurrent(void **context) {
    *context = current();
    return OK;
}

EXPORT cuCtxGetDevice(int *device) {
    const Context *context = current();
    if (!context) return INVALID_CONTEXT;
    *device = context->device;
    return OK;
}

EXPORT cuCtxSetCurrent(Context *context) {
    if (!depth) depth = 1;
    stack[depth - 1] = context;
    return OK;
}

EXPORT cuCtxPushCurrent_v2(Context *context) {
    if (depth == 16) return INVALID_VALUE;
    stack[depth++] = context;
    return OK;
}

EXPORT cuCtxPopCurrent_v2(void **context) {
    if (!depth) return INVALID_VALUE;
    *context = stack[--depth];
    return OK;
}

EXPORT cuCtxSynchronize() {
    ENTER;
    return finish_all(held, current_device());
}

EXPORT cuCtxEnablePeerAccess(Context *peer, unsigned) {
    ENTER;
    return !settings.peers ? PEER_UNSUPPORTED : peer == current() ? INVALID_VALUE : PEER_ALREADY;
}

EXPORT cuCtxGetFlags(unsigned *flags) {
    ENTER;
    *flags = flags_of_context;
    return OK;
}

EXPORT cuCtxSetFlags(unsigned flags) {
    ENTER;
    flags_of_context = flags;
    return OK;
}

EXPORT cuMemGetInfo_v2(size_t *free, size_t *total) {
    ENTER;
    const size_t taken = used(current_device());
    *total = DEVICE_MEMORY;
    *free = taken < DEVICE_MEMORY ? DEVICE_MEMORY - taken : 0;
    return OK;
}

EXPORT cuFlushGPUDirectRDMAWrites(int target, int scope) {
    ENTER;
    return target || (scope != 100 && scope != 200) ? INVALID_VALUE : OK;
}
