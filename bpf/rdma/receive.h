/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What is posted to a receive queue, or to one that queue pairs share. */
#ifndef SWERVE_RDMA_RECEIVE_H
#define SWERVE_RDMA_RECEIVE_H

#include "rdma/rows.h"

#define RECEIVES 256 /* in one list */

/* How many requests there are in a list. */
static __always_inline u32 receives_in(u64 next)
{
	struct verbs_receive request;
	u32 found = 0;

#pragma clang loop unroll(disable)
	for (int i = 0; i < RECEIVES; i++) {
		if (!next)
			return found;
		if (bpf_probe_read_user(&request, sizeof(request), (void *)next)) {
			count(SWERVE_RDMA_FAULTS, 1);
			return found;
		}
		found++;
		next = request.next;
	}
	if (next)
		count(SWERVE_RDMA_TOO_LONG, 1);
	return found;
}

int rdma_post_receive(struct pt_regs *ctx)
{
	struct call *call = begin_call(CALL_RECEIVE, PT_REGS_PARM1(ctx));
	struct swerve_qp *row;
	u32 slot;

	if (!call)
		return 0;
	slot = row_of(call, PT_REGS_PARM1(ctx));
	call->slot = slot;
	call->bad = PT_REGS_PARM3(ctx);
	row = rdma_table.lookup(&slot);
	if (row)
		add(&row->receives_posted, receives_in(PT_REGS_PARM2(ctx)));
	return 0;
}

int rdma_post_receive_return(struct pt_regs *ctx)
{
	struct call *call = failed_call(ctx, CALL_RECEIVE);
	struct swerve_qp *row;
	u64 bad = 0;
	u32 slot;

	if (!call)
		return 0;
	slot = call->slot;
	row = rdma_table.lookup(&slot);
	if (!row)
		return 0;
	if (bpf_probe_read_user(&bad, sizeof(bad), (void *)call->bad))
		count(SWERVE_RDMA_FAULTS, 1);
	else
		add(&row->receives_posted, -(u64)receives_in(bad));
	return 0;
}

/* The next of a shared queue's queue pairs, after the one that told its receives is gone; it has to be searched. */
static __always_inline u32 heir_of(u64 srq, u32 tgid)
{
	struct swerve_qp *row;
	struct queue *queue;
	u32 slot;

#pragma clang loop unroll(disable)
	for (u64 i = 0; i < SWERVE_QPS;) {
		AROUND(i);
		slot = i;
		queue = queue_of(slot, &row);
		if (queue && queue->srq == srq && row->tgid == tgid && row->state == SWERVE_QP_LIVE)
			return slot;
		i++;
		AROUND(i);
	}
	return NO_ROW;
}

static __always_inline void share_receives(u64 srq, u64 more)
{
	struct qp_key key = { .context = srq, .tgid = bpf_get_current_pid_tgid() >> 32 };
	struct shared *shared, fresh = { .slot = NO_ROW };
	struct swerve_qp *row;
	u32 slot;

	shared = rdma_shared.lookup(&key);
	if (!shared) {
		rdma_shared.update(&key, &fresh);
		shared = rdma_shared.lookup(&key);
		if (!shared)
			return;
	}
	if (shared->slot == NO_ROW)
		shared->slot = heir_of(srq, key.tgid);
	slot = shared->slot;
	row = rdma_table.lookup(&slot);
	add(row ? &row->receives_posted : &shared->receives, more);
}

int rdma_post_srq_receive(struct pt_regs *ctx)
{
	struct call *call = begin_call(CALL_SRQ, PT_REGS_PARM1(ctx));

	if (call)
		call->bad = PT_REGS_PARM3(ctx);
	share_receives(PT_REGS_PARM1(ctx), receives_in(PT_REGS_PARM2(ctx)));
	return 0;
}

int rdma_post_srq_receive_return(struct pt_regs *ctx)
{
	struct call *call;
	u64 bad = 0;

	count(SWERVE_RDMA_HITS, 1);
	call = end_call(CALL_SRQ);
	if (!call || !(u32)PT_REGS_RC(ctx))
		return 0;
	if (bpf_probe_read_user(&bad, sizeof(bad), (void *)call->bad))
		count(SWERVE_RDMA_FAULTS, 1);
	else
		share_receives(call->object, -(u64)receives_in(bad));
	return 0;
}

#endif /* SWERVE_RDMA_RECEIVE_H */
