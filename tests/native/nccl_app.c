/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A job's process, as far as a profiler plugin sees NCCL: loads the plugin and calls it, several threads at once.
 *
 *     nccl_app PLUGIN VERSION
 *
 * One command a line, one answer a line ("ok ..."):
 *   init HASH RANKS RANK         a communicator, the last one from now on
 *   mask VALUE                   wait until the plugin has asked for these events
 *   run THREADS N CHANNELS STEPS each thread: N collectives, each with kernels on CHANNELS channels and a send and a
 *                                receive of STEPS steps; answers how many events were given a handle, by kind
 *   last FUNCTION N LASTED WORK  N collectives of one kernel, which lasts this long, in nanoseconds; before each one
 *                                this process computes for WORK nanoseconds of a processor (default: 0)
 *   flood                        collectives of one kernel until the plugin asks for none; answers how many were told of
 *   captured                     from now on the calls capture a graph
 *   begin                        a collective that never ends
 *   wrong                        calls that NCCL would never make
 *   fork                         a child uses the parent's communicator, then one of its own; answers its process id
 *   stale                        finalize, then a collective of that communicator; answers how many got a handle
 *   finalize, unload, exit
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "interface.h"

/* As NCCL's own headers have them on a 64 bit machine. */
#define AT(version, member, offset) \
	_Static_assert(offsetof(struct nccl_v##version##_event, member) == offset, #version " " #member)
#define OF_SIZE(version, bytes) _Static_assert(sizeof(struct nccl_v##version##_event) == bytes, #version)
#define IN_ALL(version)                                                                                \
	AT(version, parent, 8); AT(version, rank, 16); AT(version, proxy.pid, 24); AT(version, proxy.channel, 28); \
	AT(version, proxy.peer, 32); AT(version, proxy.steps, 36); AT(version, proxy.send, 44); AT(version, step, 24)
IN_ALL(1); IN_ALL(2); IN_ALL(3); IN_ALL(4); IN_ALL(5);
OF_SIZE(1, 120); OF_SIZE(2, 128); OF_SIZE(3, 120); OF_SIZE(4, 104); OF_SIZE(5, 112);
AT(1, collective.hash, 32); AT(1, collective.number, 40); AT(1, collective.function, 48);
AT(1, collective.count, 72); AT(1, collective.root, 80); AT(1, collective.datatype, 84);
AT(1, collective.channels, 104); AT(1, collective.algorithm, 106); AT(1, collective.protocol, 107);
AT(1, p2p.hash, 32); AT(1, p2p.function, 40); AT(1, p2p.datatype, 56); AT(1, p2p.count, 64); AT(1, p2p.peer, 72);
AT(2, collective.hash, 32); AT(2, collective.number, 40); AT(2, collective.function, 48);
AT(2, collective.count, 72); AT(2, collective.root, 80); AT(2, collective.datatype, 88);
AT(2, collective.channels, 104); AT(2, collective.algorithm, 112); AT(2, collective.protocol, 120);
AT(2, p2p.hash, 32); AT(2, p2p.function, 40); AT(2, p2p.datatype, 56); AT(2, p2p.count, 64); AT(2, p2p.peer, 72);
AT(3, collective.channels, 96); AT(3, collective.algorithm, 104); AT(3, collective.protocol, 112);
AT(3, collective.datatype, 88); AT(3, collective.number, 40); AT(3, collective.function, 48); AT(3, channel, 24);
AT(4, collective.number, 24); AT(4, collective.function, 32); AT(4, collective.count, 56);
AT(4, collective.root, 64); AT(4, collective.datatype, 72); AT(4, collective.channels, 80);
AT(4, collective.algorithm, 88); AT(4, collective.protocol, 96); AT(4, p2p.peer, 56); AT(4, p2p.channels, 60);
AT(4, kernel.channel, 24); AT(4, kernel.gpu_ns, 32);
AT(5, collective.number, 24); AT(5, collective.function, 32); AT(5, collective.count, 56);
AT(5, collective.root, 64); AT(5, collective.datatype, 72); AT(5, collective.channels, 80);
AT(5, collective.algorithm, 88); AT(5, collective.protocol, 96); AT(5, p2p.function, 24); AT(5, p2p.datatype, 40);
AT(5, p2p.count, 48); AT(5, p2p.peer, 56); AT(5, p2p.channels, 60); AT(5, kernel.channel, 24); AT(5, kernel.gpu_ns, 32);
AT(5, collective_call.captured, 64); AT(5, p2p_call.captured, 56);

static int version;
static struct nccl_profiler_v1 *v1; /* 1 to 3 */
static struct nccl_profiler_v4 *v4;
static struct nccl_profiler_v5 *v5;
static int mask;
static void *context;
static long numbers, logged;
enum { CALLS, GROUPS, COLLECTIVES, KERNELS, PROXIES, STEPS, KINDS };
static long given[KINDS];
static bool captured;

static void heard(int level, unsigned long subsystem, const char *file, int line, const char *format, ...)
{
	__atomic_fetch_add(&logged, 1, __ATOMIC_RELAXED);
}

static void *start(int kind, const void *event)
{
	void *handle = (void *)0x5a5a;
	int failed = (v5 ? v5->start : v4 ? v4->start : v1->start)(context, &handle, event);

	if (failed || handle == (void *)0x5a5a)
		abort(); /* a plugin has to set it */
	if (handle)
		__atomic_fetch_add(&given[kind], 1, __ATOMIC_RELAXED);
	return handle;
}

static void stop(void *handle)
{
	if (handle && (v5 ? v5->stop : v4 ? v4->stop : v1->stop)(handle))
		abort();
}

static void change(void *handle, int state, uint64_t bytes_or_ns)
{
	int failed = 0;

	if (handle && v1)
		failed = v1->record(handle, state, &(union nccl_v1_state){ .proxy = { bytes_or_ns, 1 } });
	else if (handle)
		failed = (v5 ? v5->record : v4->record)(handle, state,
							&(union nccl_v4_state){ .gpu_ns = bytes_or_ns });
	if (failed)
		abort();
}

static int now_mask(void)
{
	return __atomic_load_n(&mask, __ATOMIC_RELAXED);
}

#define EVENT(version_, ...) (version == version_) return start(kind, &(struct nccl_v##version_##_event){ __VA_ARGS__ })

#define IN_EVERY_VERSION(...)         \
	do {                          \
		if EVENT(1, __VA_ARGS__); \
		if EVENT(2, __VA_ARGS__); \
		if EVENT(3, __VA_ARGS__); \
		if EVENT(4, __VA_ARGS__); \
		if EVENT(5, __VA_ARGS__); \
		abort();              \
	} while (0)

static void *start_group(void)
{
	int kind = GROUPS;

	IN_EVERY_VERSION(.type = NCCL_GROUP);
}

static void *start_collective(void *parent, const char *function, uint64_t number, int channels, int rank)
{
	int kind = COLLECTIVES;

	if EVENT(1, .type = NCCL_COLLECTIVE, .parent = parent, .rank = rank,
		 .collective = { .communicator = "world", .hash = 77, .number = number, .function = 4, .count = 256,
				 .root = 3, .datatype = 7, .channels = channels, .algorithm = 1, .protocol = 2 });
#define STRINGS .number = number, .function = function, .count = 256, .root = 3, .datatype = "ncclFloat32", \
		.channels = channels, .algorithm = "RING", .protocol = "SIMPLE"
	if EVENT(2, .type = NCCL_COLLECTIVE, .parent = parent, .rank = rank,
		 .collective = { .communicator = "world", .hash = 77, STRINGS });
	if EVENT(3, .type = NCCL_COLLECTIVE, .parent = parent, .rank = rank,
		 .collective = { .communicator = "world", .hash = 77, STRINGS });
	if EVENT(4, .type = NCCL_COLLECTIVE, .parent = parent, .rank = rank, .collective = { STRINGS });
	if EVENT(5, .type = NCCL_COLLECTIVE, .parent = parent, .rank = rank, .collective = { STRINGS });
	abort();
}

static void *start_kernel(void *parent, int channel, uint64_t gpu_ns)
{
	int kind = KERNELS;

	if EVENT(3, .type = NCCL_KERNEL, .parent = parent, .channel = channel);
	if EVENT(4, .type = NCCL_KERNEL, .parent = parent, .kernel = { channel, gpu_ns });
	if EVENT(5, .type = NCCL_KERNEL, .parent = parent, .kernel = { channel, gpu_ns });
	abort();
}

static void *start_proxy(void *parent, int send, int steps, pid_t pid)
{
	struct nccl_proxy_op proxy = { pid, 2, 5, steps, 4096, send };
	int kind = PROXIES;

	IN_EVERY_VERSION(.type = NCCL_PROXY_OP, .parent = parent, .proxy = proxy);
}

static void *start_step(void *parent, int step)
{
	int kind = STEPS;

	IN_EVERY_VERSION(.type = NCCL_PROXY_STEP, .parent = parent, .step = step);
}

static void pause_us(long us)
{
	nanosleep(&(struct timespec){ 0, us * 1000 }, NULL);
}

static void proxy(void *collective, int send, int steps)
{
	static const int sending[] = { NCCL_SEND_GPU_WAIT, NCCL_SEND_PEER_WAIT, NCCL_SEND_WAIT };
	static const int receiving[] = { NCCL_RECEIVE_WAIT, NCCL_RECEIVE_FLUSH_WAIT, NCCL_RECEIVE_GPU_WAIT };
	void *op = start_proxy(collective, send, steps, getpid()), *step;

	for (int at = 0; at < steps; at++) {
		step = start_step(op, at);
		for (int i = 0; i < 3; i++) {
			if (version < 4 && send && i == 1)
				continue; /* not a state of its own then */
			change(step, (send ? sending : receiving)[i], 1000);
			if (at == 0)
				pause_us(200);
		}
		if (version < 4)
			change(op, send ? 2 : 5, 1000 * (at + 1));
		stop(step);
	}
	stop(op);
}

/*
 * As NCCL does: each collective has the mask as it is when it begins. What that has not is not told, but what those events
 * hang from is. Returns whether anything is told.
 */
static bool collective(const char *function, int channels, int steps, uint64_t lasted_ns)
{
	int own = now_mask();
	long number = __atomic_fetch_add(&numbers, 1, __ATOMIC_RELAXED);
	struct timespec now;
	void *call = NULL, *group, *one, *kernel;
	uint64_t gpu_ns;

	if (!own)
		return false;
	if (version == 5)
		call = start(CALLS, &(struct nccl_v5_event){ .type = NCCL_COLLECTIVE_CALL,
							     .collective_call = { .function = function,
										  .captured = captured } });
	group = start_group();
	one = start_collective(version == 5 ? call : group, function, number, channels, 1);
	stop(one);
	stop(group);
	stop(call);
	clock_gettime(CLOCK_MONOTONIC, &now);
	gpu_ns = 1000000 + now.tv_sec * 1000000000ULL + now.tv_nsec; /* a clock of its own */
	if (lasted_ns > 100000)
		pause_us(lasted_ns / 1000);
	for (int channel = 0; channel < channels && version >= 3 && own & NCCL_KERNEL; channel++) {
		kernel = start_kernel(one, channel, gpu_ns + channel);
		if (version >= 4)
			change(kernel, NCCL_KERNEL_STOP, gpu_ns + lasted_ns + channel);
		stop(kernel);
	}
	if (steps && own & (NCCL_PROXY_OP | NCCL_PROXY_STEP)) {
		proxy(one, 1, steps);
		proxy(one, 0, steps);
	}
	return true;
}

static void compute(uint64_t ns)
{
	struct timespec now, begin;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
	do
		clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
	while ((now.tv_sec - begin.tv_sec) * 1000000000LL + now.tv_nsec - begin.tv_nsec < (long long)ns);
}

static int many, channels, steps;

static void *work(void *unused)
{
	for (int i = 0; i < many; i++)
		collective("AllReduce", channels, steps, 5000);
	return NULL;
}

static void run(int threads)
{
	pthread_t each[64];

	memset(given, 0, sizeof(given));
	for (int i = 0; i < threads; i++)
		pthread_create(&each[i], NULL, work, NULL);
	for (int i = 0; i < threads; i++)
		pthread_join(each[i], NULL);
	printf("ok %ld %ld %ld %ld %ld %ld\n", given[CALLS], given[GROUPS], given[COLLECTIVES], given[KERNELS],
	       given[PROXIES], given[STEPS]);
}

static void init(unsigned long hash, int ranks, int rank)
{
	int failed = v5 ? v5->init(&context, hash, &mask, "world", 2, ranks, rank, heard) :
		     v4 ? v4->init(&context, &mask, "world", hash, 2, ranks, rank, heard) :
			  v1->init(&context, &mask);

	if (failed)
		abort();
}

static void finalize(void)
{
	if (context && (v5 ? v5->finalize : v4 ? v4->finalize : v1->finalize)(context))
		abort();
	context = NULL;
}

static void wrong(void)
{
	int (*stops)(void *) = v5 ? v5->stop : v4 ? v4->stop : v1->stop;
	int (*starts)(void *, void **, const void *) = v5 ? v5->start : v4 ? v4->start : v1->start;
	int (*ends)(void *) = v5 ? v5->finalize : v4 ? v4->finalize : v1->finalize;
	void *mine = context, *one = start_collective(NULL, "AllReduce", 1, 1, 1), *handle;
	struct nccl_v5_event none = { .type = 0 };

	stop(one);
	for (uint64_t bits = 1; bits; bits <<= 1) {
		stops((void *)bits);
		stops((void *)~bits);
		ends((void *)(bits | 1ULL << 63));
		change((void *)bits, 9, 1);
		change((void *)((uint64_t)one | bits), 22, 1);
		context = (void *)bits;
		handle = mine;
		starts((void *)~bits, &handle, &none);
		if (handle)
			abort();
		stop(start_collective((void *)~bits, NULL, 1, 1, 1));
		context = mine;
		stop(start_proxy((void *)bits, 1, 1, getpid() + 1));
		stop(start_step((void *)bits, 1));
	}
	stops(one); /* for the second time */
	stops(NULL);
	ends(NULL);
	starts(context, NULL, NULL);
	starts(context, &handle, NULL);
	starts(NULL, &handle, &none);
	if (v1) {
		v1->record(NULL, 9, NULL);
		v1->record(one, 2, NULL);
		v1->init(NULL, NULL);
	} else {
		(v5 ? v5->record : v4->record)(NULL, 9, NULL);
		(v5 ? v5->record : v4->record)(one, 22, NULL);
	}
	printf("ok\n");
}

static void child(void)
{
	pid_t pid = fork();
	int status;

	if (!pid) {
		collective("AllReduce", 1, 1, 1);
		init(5, 2, 0);
		mask = NCCL_KERNEL | NCCL_PROXY_OP;
		collective("AllReduce", 1, 1, 1); /* nothing is wanted of this process yet */
		finalize();
		_exit(0);
	}
	waitpid(pid, &status, 0);
	printf(status ? "failed\n" : "ok %d\n", pid);
}

int main(int argc, char **argv)
{
	void *library = argc == 3 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
	char line[200], word[32], symbol[32];
	unsigned long a, b, c, d;

	if (!library)
		return fprintf(stderr, "%s\n", dlerror()), 1;
	version = atoi(argv[2]);
	snprintf(symbol, sizeof(symbol), "ncclProfiler_v%d", version);
	if (version == 5)
		v5 = dlsym(library, symbol);
	else if (version == 4)
		v4 = dlsym(library, symbol);
	else
		v1 = dlsym(library, symbol);
	if (!v1 && !v4 && !v5)
		return 1;
	setlinebuf(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		a = b = c = d = 0;
		c = 0;
		if (sscanf(line, "last %31s %lu %lu %lu", word, &a, &b, &c) >= 3) {
			for (unsigned long i = 0; i < a; i++) {
				compute(c);
				collective(word, 1, 0, b);
			}
			printf("ok\n");
			continue;
		}
		sscanf(line, "%31s %lu %lu %lu %lu", word, &a, &b, &c, &d);
		if (!strcmp(word, "init")) {
			init(a, b, c);
			printf("ok %d %d %ld\n", !!context, now_mask(), logged);
		} else if (!strcmp(word, "mask")) {
			for (int i = 0; i < 50000 && now_mask() != (int)a; i++)
				pause_us(200);
			printf(now_mask() == (int)a ? "ok\n" : "mask is %d\n", now_mask());
		} else if (!strcmp(word, "run")) {
			many = b, channels = c, steps = d;
			run(a);
		} else if (!strcmp(word, "flood")) {
			for (a = 0; a < 1000000 && collective("AllReduce", 1, 0, 5000); a++)
				;
			printf("ok %lu\n", a);
		} else if (!strcmp(word, "captured")) {
			captured = true;
			printf("ok\n");
		} else if (!strcmp(word, "begin")) {
			start_collective(NULL, "AllReduce", 9, 1, 1);
			printf("ok\n");
		} else if (!strcmp(word, "wrong")) {
			wrong();
		} else if (!strcmp(word, "fork")) {
			child();
		} else if (!strcmp(word, "stale")) {
			void *gone = context;

			finalize();
			given[COLLECTIVES] = 0;
			context = gone;
			stop(start_collective(NULL, "AllReduce", 1, 1, 1));
			context = NULL;
			printf("ok %ld\n", given[COLLECTIVES]);
		} else if (!strcmp(word, "finalize")) {
			finalize();
			printf("ok\n");
		} else if (!strcmp(word, "unload")) { /* as NCCL does after its last communicator */
			dlclose(library);
			printf("ok\n");
		} else if (!strcmp(word, "exit")) {
			exit(0);
		} else {
			printf("what is %s?\n", word);
		}
	}
	return 0;
}
