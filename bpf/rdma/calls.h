/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A thread is inside one verbs call at a time: what its entry has to tell its return is kept by thread. */
#ifndef SWERVE_RDMA_CALLS_H
#define SWERVE_RDMA_CALLS_H

#include "rdma/tables.h"

static __always_inline struct call *call_of_thread(void)
{
	u32 thread = bpf_get_current_pid_tgid();

	return rdma_calls.lookup(&thread);
}

/* What is kept for this thread, which makes its first call. */
static __always_inline struct call *first_call(void)
{
	u32 thread = bpf_get_current_pid_tgid();
	struct call *call, fresh = {};

	rdma_calls.update(&thread, &fresh);
	call = rdma_calls.lookup(&thread);
	if (!call)
		count(SWERVE_RDMA_CALLS_LOST, 1);
	return call;
}

static __always_inline struct call *begin_call(u32 kind, u64 object)
{
	struct call *call = call_of_thread();

	count(SWERVE_RDMA_HITS, 1);
	if (!call)
		call = first_call();
	if (!call)
		return NULL;
	call->kind = kind;
	call->object = object;
	return call;
}

/* The call that now returns; only once. */
static __always_inline struct call *end_call(u32 kind)
{
	struct call *call = call_of_thread();

	if (!call || call->kind != kind)
		return NULL;
	call->kind = CALL_NONE;
	return call;
}

/* The call that now returns, if it returns an error. */
static __always_inline struct call *failed_call(struct pt_regs *ctx, u32 kind)
{
	struct call *call = end_call(kind);

	count(SWERVE_RDMA_HITS, 1);
	return (u32)PT_REGS_RC(ctx) ? call : NULL;
}

#endif /* SWERVE_RDMA_CALLS_H */
