/* A fake NVML for tests. The machine is described by lines of text: those of the file FAKE_NVML
 * names, or those passed to fake_describe().
 *
 *   driver VERSION
 *   gpu ADDRESS UUID NAME             a GPU, counted from 0; an address is DOMAIN:BUS:DEVICE
 *   links GPU COUNT MBPS VERSION FAR  adds active links: FAR is switch, npu, unknown, or another
 *                                     GPU's number; MBPS 0 and VERSION -1 are not reported
 *   dead GPU COUNT                    adds inactive links
 *   ancestor GPU GPU LEVEL            an nvmlGpuTopologyLevel_t; 50 by default
 *   p2p GPU GPU CAPABILITY STATUS     nvmlGpuP2PCapsIndex_t and nvmlGpuP2PStatus_t; by default
 *                                     derived from the links
 *   cpus GPU FIRST LAST, node GPU N   adds CPUs, a NUMA node
 *   fail FUNCTION CODE                all calls of FUNCTION (without "nvml") return CODE; * is every
 *                                     function but Init_v2
 *
 * With -DOLD it has only the functions that every NVML has. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, MOST = 16, LINKS = 36 };
enum { GPU = 0, NPU = 1, SWITCH = 2, UNKNOWN = 255 };

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; } Pci;
typedef struct { unsigned field, scope; long long timestamp, latency; int kind, answer; union { unsigned number; unsigned long long wide; } value; } Field;
typedef struct { int active, speed, version, far, gpu; } Link;
typedef struct {
	Pci pci;
	char uuid[96], name[96];
	int count;
	Link links[LINKS];
	int ancestor[MOST], p2p[MOST][8];
	unsigned char cpus[4096];
	unsigned long nodes;
} Gpu;

static Gpu gpus[MOST];
static int count, started, described;
static char driver[96];
static struct { char name[64]; int code; } failures[32];
static int failing;

static void line(const char *text)
{
	char name[96], far[32];
	int a, b, c, d, used = 0;
	Gpu *gpu = &gpus[count];
	if (sscanf(text, "driver %95s", driver) == 1)
		return;
	if (sscanf(text, "gpu %x:%x:%x %95s %n", &gpu->pci.domain, &gpu->pci.bus, &gpu->pci.device, gpu->uuid, &used) == 4 && used && count < MOST) {
		snprintf(gpu->name, sizeof gpu->name, "%s", text + used);
		for (a = 0; a < MOST; a++) {
			gpu->ancestor[a] = 50;
			memset(gpu->p2p[a], -1, sizeof gpu->p2p[a]);
		}
		count++;
	} else if (sscanf(text, "links %d %d %d %d %31s", &a, &b, &c, &d, far) == 5) {
		while (b-- > 0) {
			Link *link = &gpus[a].links[gpus[a].count++];
			*link = (Link){ 1, c, d, UNKNOWN, -1 };
			if (!strcmp(far, "switch"))
				link->far = SWITCH;
			else if (!strcmp(far, "npu"))
				link->far = NPU;
			else if (strcmp(far, "unknown"))
				*link = (Link){ 1, c, d, GPU, atoi(far) };
		}
	} else if (sscanf(text, "dead %d %d", &a, &b) == 2) {
		gpus[a].count += b;
	} else if (sscanf(text, "ancestor %d %d %d", &a, &b, &c) == 3) {
		gpus[a].ancestor[b] = gpus[b].ancestor[a] = c;
	} else if (sscanf(text, "p2p %d %d %d %d", &a, &b, &c, &d) == 4) {
		gpus[a].p2p[b][c] = d;
	} else if (sscanf(text, "cpus %d %d %d", &a, &b, &c) == 3) {
		for (; b <= c; b++)
			gpus[a].cpus[b] = 1;
	} else if (sscanf(text, "node %d %d", &a, &b) == 2) {
		gpus[a].nodes |= 1ul << b;
	} else if (sscanf(text, "fail %63s %d", name, &a) == 2) {
		memcpy(failures[failing].name, name, sizeof failures[0].name);
		failures[failing++].code = a;
	} else if (*text) {
		fprintf(stderr, "the tests' NVML does not understand: %s\n", text);
		abort();
	}
}

void fake_describe(const char *text)
{
	char *copy = strdup(text), *rest = copy, *one;
	described = 1;
	while ((one = strsep(&rest, "\n")))
		line(one);
	free(copy);
}

int fake_started(void)
{
	return started;
}

static void describe(void)
{
	static char text[65536];
	const char *path = getenv("FAKE_NVML");
	FILE *file = path ? fopen(path, "r") : NULL;
	described = 1;
	if (!file)
		return;
	text[fread(text, 1, sizeof text - 1, file)] = 0;
	fclose(file);
	fake_describe(text);
}

static int answer(const char *function)
{
	for (int i = 0; i < failing; i++)
		if (!strcmp(failures[i].name, function) || (!strcmp(failures[i].name, "*") && strcmp(function, "Init_v2")))
			return failures[i].code;
	return started || !strcmp(function, "Init_v2") ? SUCCESS : UNINITIALIZED;
}

#define TRY(function) do { int code_ = answer(function); if (code_) return code_; } while (0)

int nvmlInit_v2(void)
{
	if (!described)
		describe();
	TRY("Init_v2");
	started++;
	return SUCCESS;
}

int nvmlShutdown(void)
{
	if (!started)
		return UNINITIALIZED;
	started--;
	return SUCCESS;
}

const char *nvmlErrorString(int code)
{
	switch (code) {
	case NOT_SUPPORTED: return "Not Supported";
	case 9: return "Driver Not Loaded";
	case 18: return "Driver/library\nversion mismatch";
	case 999: return NULL;
	default: return "Unknown Error";
	}
}

int nvmlDeviceGetCount_v2(unsigned *devices)
{
	TRY("DeviceGetCount_v2");
	*devices = count;
	return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **gpu)
{
	TRY("DeviceGetHandleByIndex_v2");
	if (index >= (unsigned)count)
		return INVALID_ARGUMENT;
	*gpu = &gpus[index];
	return SUCCESS;
}

static void pci(const Gpu *gpu, Pci *to)
{
	memset(to, 0, sizeof *to);
	to->domain = gpu->pci.domain, to->bus = gpu->pci.bus, to->device = gpu->pci.device;
	snprintf(to->text, sizeof to->text, "%08X:%02X:%02X.0", to->domain, to->bus, to->device);
	snprintf(to->legacy, sizeof to->legacy, "%04X:%02X:%02X.0", to->domain & 0xffff, to->bus & 0xff, to->device & 0xff);
}

int nvmlDeviceGetPciInfo_v3(Gpu *gpu, Pci *to)
{
	TRY("DeviceGetPciInfo_v3");
	pci(gpu, to);
	return SUCCESS;
}

#ifndef OLD

static int text(const char *from, char *to, unsigned room)
{
	if (strlen(from) >= room)
		return INSUFFICIENT_SIZE;
	strcpy(to, from);
	return SUCCESS;
}

int nvmlSystemGetDriverVersion(char *to, unsigned room)
{
	TRY("SystemGetDriverVersion");
	return text(driver, to, room);
}

int nvmlDeviceGetUUID(Gpu *gpu, char *to, unsigned room)
{
	TRY("DeviceGetUUID");
	return text(gpu->uuid, to, room);
}

int nvmlDeviceGetName(Gpu *gpu, char *to, unsigned room)
{
	TRY("DeviceGetName");
	return text(gpu->name, to, room);
}

static int link_of(const Gpu *gpu, unsigned link)
{
	if (!gpu->count)
		return NOT_SUPPORTED;
	return link < (unsigned)gpu->count ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetNvLinkState(Gpu *gpu, unsigned link, unsigned *active)
{
	TRY("DeviceGetNvLinkState");
	int code = link_of(gpu, link);
	if (!code)
		*active = gpu->links[link].active;
	return code;
}

int nvmlDeviceGetNvLinkVersion(Gpu *gpu, unsigned link, unsigned *version)
{
	TRY("DeviceGetNvLinkVersion");
	int code = link_of(gpu, link);
	if (!code && gpu->links[link].version < 0)
		return NOT_SUPPORTED;
	if (!code)
		*version = gpu->links[link].version;
	return code;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(Gpu *gpu, unsigned link, int *type)
{
	TRY("DeviceGetNvLinkRemoteDeviceType");
	int code = link_of(gpu, link);
	if (!code)
		*type = gpu->links[link].far;
	return code;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(Gpu *gpu, unsigned link, Pci *to)
{
	TRY("DeviceGetNvLinkRemotePciInfo_v2");
	int code = link_of(gpu, link);
	if (code)
		return code;
	if (gpu->links[link].gpu >= 0)
		pci(&gpus[gpu->links[link].gpu], to);
	else
		memset(to, 0, sizeof *to);
	return SUCCESS;
}

int nvmlDeviceGetFieldValues(Gpu *gpu, int number, Field *fields)
{
	TRY("DeviceGetFieldValues");
	for (; number-- > 0; fields++) {
		int link = fields->field == 164 ? (int)fields->scope : 0;
		fields->answer = NOT_SUPPORTED;
		if ((fields->field != 164 && fields->field != 90) || link >= gpu->count || !gpu->links[link].speed)
			continue;
		fields->answer = SUCCESS;
		fields->kind = 1;
		fields->value.wide = ~0ull;
		fields->value.number = gpu->links[link].speed;
	}
	return SUCCESS;
}

int nvmlDeviceGetTopologyCommonAncestor(Gpu *one, Gpu *two, int *level)
{
	TRY("DeviceGetTopologyCommonAncestor");
	*level = one->ancestor[two - gpus];
	return SUCCESS;
}

static int linked(const Gpu *one, const Gpu *two)
{
	int direct = 0, mine = 0, other = 0;
	for (int i = 0; i < one->count; i++) {
		direct |= one->links[i].active && one->links[i].gpu == two - gpus;
		mine |= one->links[i].active && one->links[i].far == SWITCH;
	}
	for (int i = 0; i < two->count; i++)
		other |= two->links[i].active && two->links[i].far == SWITCH;
	return direct || (mine && other);
}

int nvmlDeviceGetP2PStatus(Gpu *one, Gpu *two, int capability, int *status)
{
	TRY("DeviceGetP2PStatus");
	if (capability < 0 || capability > 4)
		return INVALID_ARGUMENT;
	int configured = one->p2p[two - gpus][capability];
	*status = configured >= 0 ? configured : linked(one, two) ? 0 : capability == 2 ? 5 : 1;
	return SUCCESS;
}

int nvmlDeviceGetCpuAffinity(Gpu *gpu, unsigned words, unsigned long *set)
{
	TRY("DeviceGetCpuAffinity");
	memset(set, 0, words * sizeof *set);
	for (unsigned i = 0; i < sizeof gpu->cpus; i++)
		if (gpu->cpus[i] && i / 64 < words)
			set[i / 64] |= 1ul << i % 64;
	return SUCCESS;
}

int nvmlDeviceGetMemoryAffinity(Gpu *gpu, unsigned words, unsigned long *set, unsigned scope)
{
	TRY("DeviceGetMemoryAffinity");
	memset(set, 0, words * sizeof *set);
	if (scope || !words)
		return INVALID_ARGUMENT;
	set[0] = gpu->nodes;
	return SUCCESS;
}

#endif
