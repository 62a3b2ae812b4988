/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The extended way to post: ibv_wr_start, a call for each part of each request, ibv_wr_complete or ibv_wr_abort. */
#ifndef SWERVE_RDMA_EXTENDED_H
#define SWERVE_RDMA_EXTENDED_H

#include "rdma/refused.h"

/* A request is begun: its numbers so far are in the queue pair's structure, its bytes follow by other calls. */
static __always_inline int stage(struct pt_regs *ctx, u32 opcode)
{
	struct call *call = call_of_thread();
	struct {
		u64 wr_id;
		u32 flags;
		u32 pad;
	} request;
	u32 slot, index;
	struct staged *staged;
	struct queue *queue;

	count(SWERVE_RDMA_HITS, 1);
	if (!call)
		call = first_call();
	if (!call)
		return 0;
	call->stage = 0;
	if (call->kind == CALL_SEND) /* a provider whose ibv_post_send builds on these */
		return 0;
	slot = row_of(call, PT_REGS_PARM1(ctx));
	queue = rdma_queues.lookup(&slot);
	if (!queue)
		return 0;
	if (bpf_probe_read_user(&request, sizeof(request), (void *)PT_REGS_PARM1(ctx) + QP_EX_WR_ID)) {
		count(SWERVE_RDMA_FAULTS, 1);
		return 0;
	}
	if (queue->published) {
		queue->published = 0;
		queue->staging = 0;
	}
	index = queue->staging;
	if (index >= STAGED) {
		count(SWERVE_RDMA_TOO_LONG, 1);
		return 0;
	}
	staged = &queue->staged[index];
	staged->wr_id = request.wr_id;
	staged->signalled = request.flags & SEND_SIGNALED;
	staged->opcode = opcode;
	staged->bytes = 0;
	queue->staging = index + 1;
	call->stage = PT_REGS_PARM1(ctx);
	call->stage_slot = slot;
	call->stage_index = index;
	return 0;
}

static __always_inline int stage_bytes(struct pt_regs *ctx, u64 bytes)
{
	struct call *call = call_of_thread();
	struct queue *queue;
	u32 slot, index;

	count(SWERVE_RDMA_HITS, 1);
	if (!call || call->stage != PT_REGS_PARM1(ctx))
		return 0;
	slot = call->stage_slot;
	index = call->stage_index;
	queue = rdma_queues.lookup(&slot);
	if (queue && index < STAGED)
		queue->staged[index].bytes = bytes;
	return 0;
}

int rdma_wr_rdma_write(struct pt_regs *ctx)
{
	return stage(ctx, WR_RDMA_WRITE);
}

int rdma_wr_rdma_write_imm(struct pt_regs *ctx)
{
	return stage(ctx, WR_RDMA_WRITE_WITH_IMM);
}

int rdma_wr_send(struct pt_regs *ctx)
{
	return stage(ctx, WR_SEND);
}

int rdma_wr_send_imm(struct pt_regs *ctx)
{
	return stage(ctx, WR_SEND_WITH_IMM);
}

int rdma_wr_rdma_read(struct pt_regs *ctx)
{
	return stage(ctx, WR_RDMA_READ);
}

int rdma_wr_atomic_cmp_swp(struct pt_regs *ctx)
{
	return stage(ctx, WR_ATOMIC_CMP_AND_SWP);
}

int rdma_wr_atomic_fetch_add(struct pt_regs *ctx)
{
	return stage(ctx, WR_ATOMIC_FETCH_AND_ADD);
}

int rdma_wr_local_inv(struct pt_regs *ctx)
{
	return stage(ctx, WR_LOCAL_INV);
}

int rdma_wr_bind_mw(struct pt_regs *ctx)
{
	return stage(ctx, WR_BIND_MW);
}

int rdma_wr_send_inv(struct pt_regs *ctx)
{
	return stage(ctx, WR_SEND_WITH_INV);
}

int rdma_wr_send_tso(struct pt_regs *ctx)
{
	return stage(ctx, WR_TSO);
}

int rdma_wr_atomic_write(struct pt_regs *ctx)
{
	return stage(ctx, WR_ATOMIC_WRITE);
}

int rdma_wr_set_sge(struct pt_regs *ctx)
{
	return stage_bytes(ctx, (u32)PT_REGS_PARM4(ctx));
}

int rdma_wr_set_sge_list(struct pt_regs *ctx)
{
	return stage_bytes(ctx, bytes_of(PT_REGS_PARM3(ctx), PT_REGS_PARM2(ctx)));
}

int rdma_wr_set_inline_data(struct pt_regs *ctx)
{
	return stage_bytes(ctx, PT_REGS_PARM3(ctx));
}

/* Buffers of (address, length), each 64 bits: inline data is short, so the lower half of the length will do. */
int rdma_wr_set_inline_data_list(struct pt_regs *ctx)
{
	return stage_bytes(ctx, bytes_of(PT_REGS_PARM3(ctx), PT_REGS_PARM2(ctx)));
}

/* Count some of the requests that were staged; true when there are more. */
static __always_inline bool publish_some(struct call *call)
{
	u32 index = call->left, staged;
	u64 place;
	struct swerve_qp *row;
	struct staged *each;
	struct queue *queue;

	queue = queue_of(call->slot, &row);
	if (!queue)
		return false;
	staged = queue->staging;
#pragma clang loop unroll(disable)
	for (int i = 0; i < POSTS_AT_ONCE; i++) {
		if (index >= staged)
			break;
		place = index;
		OPAQUE(place);
		each = &queue->staged[place & (STAGED - 1)];
		add(&row->posted_bytes, each->bytes);
		add(&row->posted, 1);
		remember(row, queue, call, each->wr_id, each->bytes, each->opcode, each->signalled);
		index++;
	}
	call->left = index;
	call->tail = queue->tail;
	if (index < staged)
		return true;
	queue->published = 1;
	return false;
}

int rdma_publish_more(struct pt_regs *ctx)
{
	struct call *call = call_of_thread();

	if (call && publish_some(call))
		rdma_more.call(ctx, MORE_STAGED);
	return 0;
}

int rdma_wr_complete(struct pt_regs *ctx)
{
	struct call *call = call_of_thread();
	struct queue *queue;
	u32 slot;

	count(SWERVE_RDMA_HITS, 1);
	if (!call || call->kind == CALL_SEND)
		return 0;
	slot = row_of(call, PT_REGS_PARM1(ctx));
	queue = rdma_queues.lookup(&slot);
	if (!queue || queue->published)
		return 0;
	call->kind = CALL_COMPLETE;
	call->stage = 0;
	call->slot = slot;
	call->left = 0;
	call->full = 0;
	rdma_more.call(ctx, MORE_STAGED);
	return 0;
}

int rdma_wr_complete_return(struct pt_regs *ctx)
{
	struct call *call = failed_call(ctx, CALL_COMPLETE);
	struct swerve_qp *row;
	struct staged *each;
	struct queue *queue;
	u32 opcode;

	if (!call)
		return 0;
	queue = queue_of(call->slot, &row);
	if (!queue)
		return 0;
	call->requests = queue->staging;
	call->left = 0;
	call->bytes = 0;
	call->signalled_bytes = 0;
#pragma clang loop unroll(disable)
	for (u64 i = 0; i < STAGED;) {
		AROUND(i);
		if (i >= call->requests)
			break;
		each = &queue->staged[i];
		call->bytes += each->bytes;
		if (each->signalled || queue->all_signalled) {
			call->left++;
			call->signalled_bytes += each->bytes;
		}
		opcode = each->opcode;
		add(&row->opcodes[opcode & (SWERVE_OPCODES - 1)], -1ULL);
		i++;
		AROUND(i);
	}
	rdma_more.call(ctx, TAKE_BACK);
	return 0;
}

int rdma_wr_abort(struct pt_regs *ctx)
{
	struct call *call = call_of_thread();
	struct queue *queue;
	u32 slot;

	count(SWERVE_RDMA_HITS, 1);
	if (!call) /* it has begun nothing */
		return 0;
	slot = row_of(call, PT_REGS_PARM1(ctx));
	queue = rdma_queues.lookup(&slot);
	if (queue)
		queue->published = 1;
	return 0;
}

#endif /* SWERVE_RDMA_EXTENDED_H */
