/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A profiler plugin that does nothing, for bench/nccl_plugin.py: what NCCL itself takes for kernel events. The mask is
 * that of swerve's plugin with kernel events on, and the same events get a handle, so that NCCL makes the same calls.
 */
#include "interface.h"

#define ANSWERED (NCCL_GROUP | NCCL_COLLECTIVE | NCCL_P2P | NCCL_KERNEL | NCCL_COLLECTIVE_CALL | NCCL_P2P_CALL)
#define visible __attribute__((visibility("default")))

static char something; /* all handles and contexts */

static int begin(void **context, int *mask)
{
	*context = &something;
	*mask = NCCL_KERNEL;
	return 0;
}

static int init_v1(void **context, int *mask)
{
	return begin(context, mask);
}

static int init_v4(void **context, int *mask, const char *communicator, uint64_t hash, int nodes, int ranks, int rank,
		   nccl_log_t log)
{
	return begin(context, mask);
}

static int init_v5(void **context, uint64_t hash, int *mask, const char *communicator, int nodes, int ranks, int rank,
		   nccl_log_t log)
{
	return begin(context, mask);
}

/* The type has 8 bits up to version 4, and 64 since. */
static int start_v1(void *context, void **handle, const void *event)
{
	*handle = ((const struct nccl_v1_event *)event)->type & ANSWERED ? &something : NULL;
	return 0;
}

static int start_v5(void *context, void **handle, const void *event)
{
	*handle = ((const struct nccl_v5_event *)event)->type & ANSWERED ? &something : NULL;
	return 0;
}

static int stop(void *handle)
{
	return 0;
}

static int record_v1(void *handle, int state, const union nccl_v1_state *more)
{
	return 0;
}

static int record_v4(void *handle, int state, const union nccl_v4_state *more)
{
	return 0;
}

static int finalize(void *context)
{
	return 0;
}

#define PLUGIN "empty"
visible struct nccl_profiler_v1 ncclProfiler_v1 = { PLUGIN, init_v1, start_v1, stop, record_v1, finalize };
visible struct nccl_profiler_v1 ncclProfiler_v2 = { PLUGIN, init_v1, start_v1, stop, record_v1, finalize };
visible struct nccl_profiler_v1 ncclProfiler_v3 = { PLUGIN, init_v1, start_v1, stop, record_v1, finalize };
visible struct nccl_profiler_v4 ncclProfiler_v4 = { PLUGIN, init_v4, start_v1, stop, record_v4, finalize };
visible struct nccl_profiler_v5 ncclProfiler_v5 = { PLUGIN, init_v5, start_v5, stop, record_v4, finalize };
