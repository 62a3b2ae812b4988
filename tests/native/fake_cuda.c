/* SPDX-License-Identifier: Apache-2.0
 * A libcuda.so.1 with two GPUs: the symbols that reading their timers needs. The kernel `reflect` is a thread, and the
 * timer of GPU n is CLOCK_MONOTONIC plus (n + 1) hours, 5 ppm faster from FAKE_EPOCH_NS on. FAKE_CUDA_FAILS names a function
 * that returns an error. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
	GPUS = 2,
	FAILED = 999
};

struct launch {
	int gpu;
	volatile uint32_t *asked;
	volatile uint64_t *answers;
	uint32_t count;
	uint64_t timeout_ns;
};

static _Thread_local intptr_t current;
static pthread_t threads[GPUS + 1];
static int running[GPUS + 1];

static int fails(const char *function)
{
	const char *name = getenv("FAKE_CUDA_FAILS");
	return name && !strcmp(name, function) ? FAILED : 0;
}

static uint64_t timer(int gpu)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	int64_t ns = now.tv_sec * 1000000000LL + now.tv_nsec;
	const char *epoch = getenv("FAKE_EPOCH_NS");
	return ns + (gpu + 1) * 3600000000000LL + (ns - (epoch ? atoll(epoch) : ns)) * 5 / 1000000;
}

static void *reflect(void *argument)
{
	struct launch launch = *(struct launch *)argument;
	cpu_set_t any;

	memset(&any, 0xff, sizeof(any)); /* a GPU needs none of those that whoever asks is kept on */
	sched_setaffinity(0, sizeof(any), &any);
	uint64_t since = timer(launch.gpu);

	free(argument);
	__atomic_store_n(&launch.answers[0], since, __ATOMIC_RELEASE);
	for (uint32_t i = 1; i <= launch.count; i++) {
		while (__atomic_load_n(launch.asked, __ATOMIC_ACQUIRE) != i) {
			if (timer(launch.gpu) - since > launch.timeout_ns)
				return NULL;
			sched_yield(); /* on a busy machine whoever asks may wait for this very processor */
		}
		since = timer(launch.gpu);
		__atomic_store_n(&launch.answers[i], since, __ATOMIC_RELEASE);
	}
	return NULL;
}

int cuInit(unsigned int flags)
{
	(void)flags;
	return fails("cuInit");
}

int cuGetErrorString(int status, const char **text)
{
	*text = status == FAILED ? "unknown error" : "no error";
	return 0;
}

int cuDeviceGetCount(int *count)
{
	*count = GPUS;
	return fails("cuDeviceGetCount");
}

int cuDeviceGet(int *device, int number)
{
	*device = number;
	return fails("cuDeviceGet");
}

int cuDeviceGetUuid(unsigned char *uuid, int device)
{
	memset(uuid, 0, 16);
	uuid[3] = device;
	return fails("cuDeviceGetUuid");
}

int cuCtxCreate_v2(void **context, unsigned int flags, int device)
{
	(void)flags;
	*context = (void *)(intptr_t)(device + 1);
	return fails("cuCtxCreate_v2");
}

int cuCtxPushCurrent_v2(void *context)
{
	current = (intptr_t)context;
	return 0;
}

int cuCtxPopCurrent_v2(void **context)
{
	*context = (void *)current;
	current = 0;
	return 0;
}

int cuCtxDestroy_v2(void *context)
{
	(void)context;
	return 0;
}

int cuModuleLoadData(void **module, const char *text)
{
	*module = (void *)1;
	return strstr(text, ".visible .entry reflect(") ? fails("cuModuleLoadData") : FAILED;
}

int cuModuleGetFunction(void **function, void *module, const char *name)
{
	(void)module;
	*function = (void *)reflect;
	return strcmp(name, "reflect") ? FAILED : 0;
}

int cuMemHostAlloc(void **host, size_t size, unsigned int flags)
{
	(void)flags;
	*host = aligned_alloc(64, (size + 63) / 64 * 64);
	return current ? fails("cuMemHostAlloc") : FAILED;
}

int cuMemHostGetDevicePointer_v2(uint64_t *device, void *host, unsigned int flags)
{
	(void)flags;
	*device = (uint64_t)host;
	return 0;
}

int cuLaunchKernel(void *function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
		   unsigned int bz, unsigned int shared, void *stream, void **arguments, void **extra)
{
	struct launch *launch = malloc(sizeof(*launch));

	if (!current || gx * gy * gz * bx * by * bz != 1 || shared || stream || extra)
		return FAILED;
	launch->gpu = current - 1;
	launch->asked = *(volatile uint32_t **)arguments[0];
	launch->answers = *(volatile uint64_t **)arguments[1];
	launch->count = *(uint32_t *)arguments[2];
	launch->timeout_ns = *(uint64_t *)arguments[3];
	running[current] = !pthread_create(&threads[current], NULL, function, launch);
	return running[current] ? fails("cuLaunchKernel") : FAILED;
}

int cuCtxSynchronize(void)
{
	if (current && running[current]) {
		pthread_join(threads[current], NULL);
		running[current] = 0;
	}
	return 0;
}
