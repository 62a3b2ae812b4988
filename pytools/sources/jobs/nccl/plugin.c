/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The profiler plugin that NCCL loads (NCCL_PROFILER_PLUGIN): what a communicator does, written into a ring (ring.h).
 *
 * Changes nothing for the job: every call returns success, no call waits for a reader, nothing is allocated after the
 * first communicator. What NCCL is given as a context or a handle is a number, never an address, so that one that is
 * wrong, over, or another process's is noticed and counted. For NCCL a collective stops when it is enqueued; the kernels
 * and proxies that follow carry its number, and the reader joins them.
 *
 * The event mask is a word of the ring. A thread of its own looks at it four times a second, and gives a sign of life;
 * with nothing wanted NCCL makes no call at all. A mask lapses unless its reader renews it. The thread wakes as a period
 * begins (limit.h): the operation that is the last of its period switches NCCL's mask off, the next period on.
 *
 * A child of fork() records nothing until it makes a communicator itself, in a ring of its own.
 */
#define _GNU_SOURCE
#include "communicators.h"

#define visible __attribute__((visibility("default")))
#define NAMED(names, number) ((number) < sizeof(names) / sizeof(*(names)) ? (names)[number] : NULL)

static const char *const functions[] = { "Broadcast", "Reduce",	  "AllGather", "ReduceScatter",
					 "AllReduce", "SendRecv", "Send",      "Recv" };
static const char *const datatypes[] = { "ncclInt8",   "ncclUint8",   "ncclInt32",   "ncclUint32",  "ncclInt64",
					 "ncclUint64", "ncclFloat16", "ncclFloat32", "ncclFloat64", "ncclBfloat16" };
static const char *const algorithms[] = {
	"TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT"
};
static const char *const protocols[] = { "LL", "LL128", "SIMPLE" };

/* All of them begin like this. Nothing wanted: an event of before, or a captured graph. */
#define BEGIN(version)                                       \
	const struct nccl_v##version##_event *event = given; \
                                                             \
	if (handle)                                          \
		*handle = NULL;                              \
	if (!handle || !event || !load(&plugin.events))      \
	return 0

/* Only with a handle for its group does NCCL number the collectives of a captured graph. */
#define SAME_IN_ALL                                                               \
	case NCCL_GROUP:                                                          \
		*handle = load_acquire(&plugin.ring) ? handle_of(SEEN, 1) : NULL; \
		break;                                                            \
	case NCCL_PROXY_OP:                                                       \
		*handle = start_proxy(context, event->parent, &event->proxy);     \
		break;                                                            \
	case NCCL_PROXY_STEP:                                                     \
		*handle = start_step(context, event->parent);                     \
		break

static int start_v1(void *context, void **handle, const void *given)
{
	BEGIN(1);
	switch (event->type) {
	case NCCL_COLLECTIVE:
		name(context, event->collective.hash, event->collective.communicator, event->rank);
		*handle = start_operation(context, RING_COLLECTIVE, event->parent,
					  &(struct operation){
						  .function = NAMED(functions, event->collective.function),
						  .datatype = NAMED(datatypes, event->collective.datatype),
						  .algorithm = NAMED(algorithms, event->collective.algorithm),
						  .protocol = NAMED(protocols, event->collective.protocol),
						  .number = event->collective.number,
						  .count = event->collective.count,
						  .peer = event->collective.root,
						  .channels = event->collective.channels,
					  });
		break;
	case NCCL_P2P:
		name(context, event->p2p.hash, event->p2p.communicator, event->rank);
		*handle = start_operation(context, RING_P2P, event->parent,
					  &(struct operation){
						  .function = NAMED(functions, event->p2p.function),
						  .datatype = NAMED(datatypes, event->p2p.datatype),
						  .count = event->p2p.count,
						  .peer = event->p2p.peer,
					  });
		break;
		SAME_IN_ALL;
	}
	return 0;
}

/* From version 2 on the members have the same names; their places differ. */
#define COLLECTIVE                                                                  \
	*handle = start_operation(context, RING_COLLECTIVE, event->parent,          \
				  &(struct operation){                              \
					  .function = event->collective.function,   \
					  .datatype = event->collective.datatype,   \
					  .algorithm = event->collective.algorithm, \
					  .protocol = event->collective.protocol,   \
					  .number = event->collective.number,       \
					  .count = event->collective.count,         \
					  .peer = event->collective.root,           \
					  .channels = event->collective.channels,   \
				  })
#define P2P(many)                                                          \
	*handle = start_operation(context, RING_P2P, event->parent,        \
				  &(struct operation){                     \
					  .function = event->p2p.function, \
					  .datatype = event->p2p.datatype, \
					  .count = event->p2p.count,       \
					  .peer = event->p2p.peer,         \
					  .channels = many,                \
				  })

static int start_v2(void *context, void **handle, const void *given)
{
	BEGIN(2);
	switch (event->type) {
	case NCCL_COLLECTIVE:
		name(context, event->collective.hash, event->collective.communicator, event->rank);
		COLLECTIVE;
		break;
	case NCCL_P2P:
		name(context, event->p2p.hash, event->p2p.communicator, event->rank);
		P2P(0);
		break;
		SAME_IN_ALL;
	}
	return 0;
}

static int start_v3(void *context, void **handle, const void *given)
{
	BEGIN(3);
	switch (event->type) {
	case NCCL_COLLECTIVE:
		name(context, event->collective.hash, event->collective.communicator, event->rank);
		COLLECTIVE;
		break;
	case NCCL_P2P:
		name(context, event->p2p.hash, event->p2p.communicator, event->rank);
		P2P(0);
		break;
	case NCCL_KERNEL:
		*handle = start_kernel(context, event->parent, event->channel, 0);
		break;
		SAME_IN_ALL;
	}
	return 0;
}

static int start_v4(void *context, void **handle, const void *given)
{
	BEGIN(4);
	switch (event->type) {
	case NCCL_COLLECTIVE:
		COLLECTIVE;
		break;
	case NCCL_P2P:
		P2P(event->p2p.channels);
		break;
	case NCCL_KERNEL:
		*handle = start_kernel(context, event->parent, event->kernel.channel, event->kernel.gpu_ns);
		break;
		SAME_IN_ALL;
	}
	return 0;
}

static int start_v5(void *context, void **handle, const void *given)
{
	BEGIN(5);
	switch (event->type) {
	case NCCL_COLLECTIVE_CALL:
		*handle = start_call(event->collective_call.captured);
		break;
	case NCCL_P2P_CALL:
		*handle = start_call(event->p2p_call.captured);
		break;
	case NCCL_COLLECTIVE:
		COLLECTIVE;
		break;
	case NCCL_P2P:
		P2P(event->p2p.channels);
		break;
	case NCCL_KERNEL:
		*handle = start_kernel(context, event->parent, event->kernel.channel, event->kernel.gpu_ns);
		break;
		SAME_IN_ALL;
	}
	return 0;
}

static int init_v1(void **context, int *mask)
{
	return open_communicator(context, mask, &(struct described){ NULL, 0, -1, -1, -1, 1 }, NULL);
}

static int init_v2(void **context, int *mask)
{
	return open_communicator(context, mask, &(struct described){ NULL, 0, -1, -1, -1, 2 }, NULL);
}

static int init_v3(void **context, int *mask)
{
	return open_communicator(context, mask, &(struct described){ NULL, 0, -1, -1, -1, 3 }, NULL);
}

static int init_v4(void **context, int *mask, const char *called, u64 hash, int nodes, int ranks, int rank,
		   nccl_log_t log)
{
	return open_communicator(context, mask, &(struct described){ called, hash, nodes, ranks, rank, 4 }, log);
}

static int init_v5(void **context, u64 hash, int *mask, const char *called, int nodes, int ranks, int rank,
		   nccl_log_t log)
{
	return open_communicator(context, mask, &(struct described){ called, hash, nodes, ranks, rank, 5 }, log);
}

#define PLUGIN "swerve"
visible struct nccl_profiler_v1 ncclProfiler_v1 = { PLUGIN, init_v1, start_v1, stop, record_v1, finalize };
visible struct nccl_profiler_v1 ncclProfiler_v2 = { PLUGIN, init_v2, start_v2, stop, record_v1, finalize };
visible struct nccl_profiler_v1 ncclProfiler_v3 = { PLUGIN, init_v3, start_v3, stop, record_v1, finalize };
visible struct nccl_profiler_v4 ncclProfiler_v4 = { PLUGIN, init_v4, start_v4, stop, record_v4, finalize };
visible struct nccl_profiler_v5 ncclProfiler_v5 = { PLUGIN, init_v5, start_v5, stop, record_v4, finalize };
