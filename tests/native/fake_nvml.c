/* SPDX-License-Identifier: Apache-2.0
 * A libnvidia-ml.so with two GPUs whose answers a test sets: the symbols that nvidia-ml-py calls for swerve.
 *
 * fake_set(name, gpu, value) sets what is answered; fake_fail(function, gpu, status) has a function return an error;
 * fake_hang(function, gpu) has it wait for fake_release(). A GPU of -1: all. WITHOUT_REASONS leaves out a symbol that
 * older drivers do not have. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
	GPUS = 2,
	NAMES = 64,
	XIDS = 64,
	SUCCESS = 0,
	INVALID = 2,
	TOO_SMALL = 7,
	TIMEOUT = 10
};

struct gpu {
	unsigned int index;
};
struct entry {
	char name[64];
	int gpu;
	unsigned long long value;
};
struct event {
	void *device;
	unsigned long long type, data;
	unsigned int instances[2];
};
struct pci {
	char legacy[16];
	unsigned int domain, bus, device, ids[2];
	char bus_id[32];
};
struct process {
	unsigned int pid;
	unsigned long long memory;
	unsigned int instances[2];
};
union value {
	double real;
	unsigned long long number;
};
struct field {
	unsigned int id, scope;
	long long at, latency;
	unsigned int type, status;
	union value value;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct gpu gpus[GPUS] = { { 0 }, { 1 } };
static struct entry values[NAMES], failures[NAMES], hangs[NAMES], calls[NAMES];
static int value_count, failure_count, hang_count, call_count;
static struct event events[XIDS];
static int event_count;
static int inits;

static struct entry *find(struct entry *table, int count, const char *name, int gpu)
{
	for (int i = 0; i < count; i++)
		if (!strcmp(table[i].name, name) && (table[i].gpu == gpu || table[i].gpu < 0))
			return &table[i];
	return NULL;
}

static void put(struct entry *table, int *count, const char *name, int gpu, unsigned long long value)
{
	pthread_mutex_lock(&lock);
	struct entry *entry = find(table, *count, name, gpu);
	if (!entry && *count < NAMES) {
		entry = &table[(*count)++];
		snprintf(entry->name, sizeof(entry->name), "%s", name);
		entry->gpu = gpu;
	}
	if (entry)
		entry->value = value;
	pthread_mutex_unlock(&lock);
}

void fake_set(const char *name, int gpu, unsigned long long value)
{
	put(values, &value_count, name, gpu, value);
}

void fake_fail(const char *function, int gpu, unsigned long long status)
{
	put(failures, &failure_count, function, gpu, status);
}

void fake_hang(const char *function, int gpu)
{
	put(hangs, &hang_count, function, gpu, 1);
}

void fake_release(void)
{
	pthread_mutex_lock(&lock);
	hang_count = 0;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}

unsigned long long fake_calls(const char *function, int gpu)
{
	pthread_mutex_lock(&lock);
	struct entry *entry = find(calls, call_count, function, gpu);
	unsigned long long value = entry ? entry->value : 0;
	pthread_mutex_unlock(&lock);
	return value;
}

int fake_inits(void)
{
	return inits;
}

void fake_xid(int gpu, unsigned long long number)
{
	pthread_mutex_lock(&lock);
	if (event_count < XIDS)
		events[event_count++] = (struct event){ &gpus[gpu], 8, number, { 0 } };
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}

/* Counts the call, hangs if told so; returns the status that it is to have. */
static int enter(const char *function, int gpu)
{
	pthread_mutex_lock(&lock);
	struct entry *entry = find(calls, call_count, function, gpu);
	if (!entry && call_count < NAMES) {
		entry = &calls[call_count++];
		snprintf(entry->name, sizeof(entry->name), "%s", function);
		entry->gpu = gpu;
	}
	if (entry)
		entry->value++;
	while (find(hangs, hang_count, function, gpu))
		pthread_cond_wait(&changed, &lock);
	struct entry *failure = find(failures, failure_count, function, gpu);
	int status = failure ? (int)failure->value : SUCCESS;
	pthread_mutex_unlock(&lock);
	return status;
}

static unsigned long long answer(const char *name, int gpu)
{
	pthread_mutex_lock(&lock);
	struct entry *entry = find(values, value_count, name, gpu);
	unsigned long long value = entry ? entry->value : 0;
	pthread_mutex_unlock(&lock);
	return value;
}

static int number(struct gpu *gpu, const char *function, const char *name, unsigned int *into)
{
	int status = enter(function, gpu->index);
	if (status == SUCCESS)
		*into = answer(name, gpu->index);
	return status;
}

static int text(struct gpu *gpu, const char *function, const char *format, char *into, unsigned int size)
{
	int status = enter(function, gpu->index);
	if (status == SUCCESS)
		snprintf(into, size, format, gpu->index);
	return status;
}

int nvmlInitWithFlags(unsigned int flags)
{
	int status = enter("nvmlInitWithFlags", flags);
	inits += status == SUCCESS;
	return status;
}

int nvmlShutdown(void)
{
	inits--;
	return enter("nvmlShutdown", 0);
}

const char *nvmlErrorString(int status)
{
	return status == 20 ? "out of memory" : "some error";
}

int nvmlDeviceGetCount_v2(unsigned int *count)
{
	*count = GPUS;
	return enter("nvmlDeviceGetCount_v2", 0);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, struct gpu **gpu)
{
	*gpu = &gpus[index];
	return enter("nvmlDeviceGetHandleByIndex_v2", index);
}

int nvmlDeviceGetUUID(struct gpu *gpu, char *into, unsigned int size)
{
	return text(gpu, "nvmlDeviceGetUUID", "GPU-%08u-0000-0000-0000-000000000000", into, size);
}

int nvmlDeviceGetName(struct gpu *gpu, char *into, unsigned int size)
{
	return text(gpu, "nvmlDeviceGetName", "Fake H100", into, size);
}

int nvmlDeviceGetPciInfo_v3(struct gpu *gpu, struct pci *into)
{
	return text(gpu, "nvmlDeviceGetPciInfo_v3", "00000000:%02u:00.0", into->bus_id, sizeof(into->bus_id));
}

int nvmlDeviceGetClockInfo(struct gpu *gpu, int kind, unsigned int *into)
{
	return number(gpu, "nvmlDeviceGetClockInfo", kind == 1 ? "sm" : "memory", into);
}

int nvmlDeviceGetMaxClockInfo(struct gpu *gpu, int kind, unsigned int *into)
{
	return number(gpu, "nvmlDeviceGetMaxClockInfo", kind == 1 ? "sm_max" : "memory_max", into);
}

static int reasons(struct gpu *gpu, const char *function, unsigned long long *into)
{
	*into = answer("reasons", gpu->index);
	return enter(function, gpu->index);
}

#ifndef WITHOUT_REASONS
int nvmlDeviceGetCurrentClocksEventReasons(struct gpu *gpu, unsigned long long *into)
{
	return reasons(gpu, "nvmlDeviceGetCurrentClocksEventReasons", into);
}
#endif

int nvmlDeviceGetCurrentClocksThrottleReasons(struct gpu *gpu, unsigned long long *into)
{
	return reasons(gpu, "nvmlDeviceGetCurrentClocksThrottleReasons", into);
}

int nvmlDeviceGetUtilizationRates(struct gpu *gpu, unsigned int into[2])
{
	into[0] = answer("busy", gpu->index);
	into[1] = answer("memory_busy", gpu->index);
	return enter("nvmlDeviceGetUtilizationRates", gpu->index);
}

int nvmlDeviceGetPowerUsage(struct gpu *gpu, unsigned int *into)
{
	return number(gpu, "nvmlDeviceGetPowerUsage", "power", into);
}

int nvmlDeviceGetEnforcedPowerLimit(struct gpu *gpu, unsigned int *into)
{
	return number(gpu, "nvmlDeviceGetEnforcedPowerLimit", "power_limit", into);
}

int nvmlDeviceGetTemperature(struct gpu *gpu, int sensor, unsigned int *into)
{
	return sensor ? INVALID : number(gpu, "nvmlDeviceGetTemperature", "temperature", into);
}

int nvmlDeviceGetComputeRunningProcesses_v3(struct gpu *gpu, unsigned int *count, struct process *into)
{
	unsigned int pid = answer("pid", gpu->index), room = *count;
	*count = pid ? 2 : 0;
	if (pid && room < 2)
		return TOO_SMALL;
	if (pid) {
		into[0] = (struct process){ pid + 1, 0, { 0 } };
		into[1] = (struct process){ pid, 0, { 0 } };
	}
	return enter("nvmlDeviceGetComputeRunningProcesses_v3", gpu->index);
}

int nvmlDeviceGetTotalEccErrors(struct gpu *gpu, int kind, int counter, unsigned long long *into)
{
	*into = counter ? 0 : answer(kind ? "ecc_uncorrected" : "ecc_corrected", gpu->index);
	return enter("nvmlDeviceGetTotalEccErrors", gpu->index);
}

int nvmlDeviceGetCurrPcieLinkGeneration(struct gpu *gpu, unsigned int *into)
{
	return number(gpu, "nvmlDeviceGetCurrPcieLinkGeneration", "generation", into);
}

int nvmlDeviceGetMaxPcieLinkGeneration(struct gpu *gpu, unsigned int *into)
{
	return number(gpu, "nvmlDeviceGetMaxPcieLinkGeneration", "generation_max", into);
}

int nvmlDeviceGetCurrPcieLinkWidth(struct gpu *gpu, unsigned int *into)
{
	return number(gpu, "nvmlDeviceGetCurrPcieLinkWidth", "width", into);
}

int nvmlDeviceGetMaxPcieLinkWidth(struct gpu *gpu, unsigned int *into)
{
	return number(gpu, "nvmlDeviceGetMaxPcieLinkWidth", "width_max", into);
}

int nvmlDeviceGetPcieReplayCounter(struct gpu *gpu, unsigned int *into)
{
	return number(gpu, "nvmlDeviceGetPcieReplayCounter", "replays", into);
}

int nvmlDeviceGetPcieThroughput(struct gpu *gpu, int direction, unsigned int *into)
{
	usleep(20000); /* as the real one */
	return number(gpu, "nvmlDeviceGetPcieThroughput", direction ? "pcie_received" : "pcie_sent", into);
}

int nvmlDeviceGetNvLinkState(struct gpu *gpu, unsigned int link, unsigned int *into)
{
	if (link >= answer("links", gpu->index))
		return INVALID;
	return number(gpu, "nvmlDeviceGetNvLinkState", link ? "link_up" : "link0_up", into);
}

int nvmlDeviceGetNvLinkErrorCounter(struct gpu *gpu, unsigned int link, int counter, unsigned long long *into)
{
	*into = link == 1 && counter == 3 ? answer("link_errors", gpu->index) : 0;
	return enter("nvmlDeviceGetNvLinkErrorCounter", gpu->index);
}

int nvmlDeviceGetFieldValues(struct gpu *gpu, int count, struct field *fields)
{
	for (int i = 0; i < count; i++) {
		fields[i].status = answer("field_status", gpu->index);
		fields[i].value.number = answer(fields[i].id == 138 ? "link_sent" : "link_received", gpu->index);
	}
	return enter("nvmlDeviceGetFieldValues", gpu->index);
}

int nvmlEventSetCreate(void **set)
{
	*set = &events;
	return enter("nvmlEventSetCreate", 0);
}

int nvmlEventSetFree(void *set)
{
	(void)set;
	return enter("nvmlEventSetFree", 0);
}

int nvmlDeviceRegisterEvents(struct gpu *gpu, unsigned long long types, void *set)
{
	(void)set;
	return types == 8 ? enter("nvmlDeviceRegisterEvents", gpu->index) : INVALID;
}

int nvmlEventSetWait_v2(void *set, struct event *into, unsigned int timeout_ms)
{
	struct timespec until;
	(void)set;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_nsec += (timeout_ms % 1000) * 1000000L;
	until.tv_sec += timeout_ms / 1000 + until.tv_nsec / 1000000000L;
	until.tv_nsec %= 1000000000L;
	pthread_mutex_lock(&lock);
	while (!event_count && !pthread_cond_timedwait(&changed, &lock, &until))
		;
	int found = event_count > 0;
	if (found) {
		*into = events[0];
		memmove(events, events + 1, sizeof(*events) * --event_count);
	}
	pthread_mutex_unlock(&lock);
	return found ? enter("nvmlEventSetWait_v2", 0) : TIMEOUT;
}
