/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Work requests of RDMA queue pairs, counted by breakpoints in the verbs providers: what each process posts, and what
 * it is told to be complete. Reads the application's memory through the verbs' ABI alone and writes none of it.
 *
 * A request counts as posted before the device is told of it, and what the provider refuses is taken back when the
 * call returns. Send queues complete in order, so a completion belongs to the oldest signalled request and retires it
 * with the unsignalled ones before it: only signalled ones are remembered, each with the sums of those it retires. All
 * sums are moved by atomic operations, so threads that share a queue pair lose none.
 */
#include <uapi/linux/ptrace.h>

#include "rdma/tables.h"

#include "rdma/calls.h"
#include "rdma/rows.h"

#include "rdma/post.h"
#include "rdma/refused.h"
#include "rdma/receive.h"
#include "rdma/complete.h"
#include "rdma/extended.h"
#include "rdma/extended_poll.h"
#include "rdma/control.h"

/* What a probe costs that does nothing. */
int rdma_empty(struct pt_regs *ctx)
{
	return 0;
}
