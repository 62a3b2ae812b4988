/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What is posted to a send queue, by ibv_post_send: counted before the device is told of it. */
#ifndef SWERVE_RDMA_POST_H
#define SWERVE_RDMA_POST_H

#include "rdma/rows.h"

#define DEPTH_USED (DEPTH - 16) /* threads that post at once may overshoot */
#define POSTS_AT_ONCE 16
#define POSTS_MOST 1024
#define SGES 32
#define NONE_TIMED (~0ULL)

static __always_inline u64 bytes_of(u64 sges, u32 sge_count)
{
	u64 bytes = 0;
	u32 length;

#pragma clang loop unroll(disable)
	for (u32 i = 0; i < SGES; i++) {
		if (i >= sge_count)
			return bytes;
		length = 0;
		if (bpf_probe_read_user(&length, sizeof(length), (void *)sges + i * 16 + 8)) {
			count(SWERVE_RDMA_FAULTS, 1);
			return bytes;
		}
		bytes += length;
	}
	if (sge_count > SGES)
		count(SWERVE_RDMA_TOO_LONG, 1);
	return bytes;
}

/* Whether the request of this number belongs to a run that is timed. */
static __always_inline bool is_timed(const struct swerve_qp *row, u64 number)
{
	u64 mask = row->run_mask;

	return mask != NONE_TIMED && !((number >> SWERVE_RUN_SHIFT) & mask);
}

/*
 * Remember a request; the row's own sums are raised by the caller. Once one of a call finds no room, none after it looks
 * for any: those without room are always the call's last signalled ones.
 */
static __always_inline void remember(struct swerve_qp *row, struct queue *queue, struct call *call, u64 wr_id,
				     u64 bytes, u32 opcode, bool signalled)
{
	struct signalled *entry;
	struct posted *post;
	u64 number, tail;

	number = __sync_fetch_and_add(&queue->number, 1);
	post = &queue->posts[number & (DEPTH - 1)];
	post->wr_id = wr_id;
	post->at_ns = 0;
	if (is_timed(row, number)) {
		post->bytes = bytes;
		post->at_ns = bpf_ktime_get_ns();
	}
	add(&row->opcodes[opcode < SWERVE_OPCODES ? opcode : SWERVE_OPCODES - 1], 1);
	if (!signalled && !queue->all_signalled) {
		add(&queue->open_bytes, bytes);
		add(&queue->open_requests, 1);
		return;
	}
	add(&row->signalled, 1);
	if (call->full || queue->tail - queue->head >= DEPTH_USED) {
		call->full = 1;
		add(&queue->gap, 1);
		add(&queue->gap_bytes, bytes);
		add(&row->untracked, 1);
		add(&row->completed_bytes, bytes);
		add(&row->completed, 1);
		return;
	}
	tail = __sync_fetch_and_add(&queue->tail, 1);
	entry = &queue->ring[tail & (DEPTH - 1)];
	entry->wr_id = wr_id;
	entry->number = number;
	entry->bytes = bytes;
	entry->requests = 1;
	entry->gap = 0;
	if (queue->open_requests) {
		entry->bytes += __sync_lock_test_and_set(&queue->open_bytes, 0);
		entry->requests += __sync_lock_test_and_set(&queue->open_requests, 0);
	}
	if (queue->gap) {
		entry->gap = __sync_lock_test_and_set(&queue->gap, 0);
		queue->gap_bytes = 0;
	}
}

/* Read a request of a list, and move on to the next; false at the end, also where the list cannot be read. */
static __always_inline bool read_request(struct verbs_send *request, u64 *next)
{
	if (!*next)
		return false;
	if (bpf_probe_read_user(request, sizeof(*request), (void *)*next)) {
		count(SWERVE_RDMA_FAULTS, 1);
		*next = 0;
		return false;
	}
	*next = request->next;
	return true;
}

/* Look at some requests of the list that a thread posts; true when there are more. */
static __always_inline bool post_some(struct call *call)
{
	u64 next = call->next, each;
	struct verbs_send request;
	struct swerve_qp *row;
	struct queue *queue;

	queue = queue_of(call->slot, &row);
	if (!queue)
		return false;
#pragma clang loop unroll(disable)
	for (int i = 0; i < POSTS_AT_ONCE; i++) {
		if (!read_request(&request, &next))
			break;
		each = bytes_of(request.sges, request.sge_count);
		add(&row->posted_bytes, each);
		add(&row->posted, 1);
		remember(row, queue, call, request.wr_id, each, request.opcode, request.flags & SEND_SIGNALED);
	}
	call->next = next;
	call->tail = queue->tail;
	return next;
}

/* A request of the end of a list that is too long to follow; with -1: it is taken back. */
static __always_inline void count_unfollowed(struct swerve_qp *row, struct queue *queue, u32 flags, u64 one)
{
	u64 signalled = queue->all_signalled | (flags / SEND_SIGNALED & 1);

	add(&row->posted, one);
	add(&row->untracked, one);
	add(&row->completed, one);
	add(&row->signalled, signalled * one);
	add(&queue->gap, signalled * one);
}

/* The end of a list that is too long to follow: counted as completed at once, without its bytes. */
static __always_inline void post_rest(struct call *call)
{
	struct verbs_send request;
	struct swerve_qp *row;
	struct queue *queue;
	u64 next = call->next;

	queue = queue_of(call->slot, &row);
	if (!queue)
		return;
	call->rest = next;
#pragma clang loop unroll(disable)
	for (int i = 0; i < POSTS_MOST; i++) {
		if (!read_request(&request, &next))
			return;
		count_unfollowed(row, queue, request.flags, 1);
	}
	if (next)
		count(SWERVE_RDMA_TOO_LONG, 1);
}

int rdma_post_more(struct pt_regs *ctx)
{
	struct call *call = call_of_thread();

	if (!call || call->kind != CALL_SEND)
		return 0;
	if (post_some(call)) {
		rdma_more.call(ctx, MORE_POSTS); /* comes back when the kernel follows no more calls: 33 */
		post_rest(call);
	}
	return 0;
}

int rdma_post_send(struct pt_regs *ctx)
{
	struct call *call = begin_call(CALL_SEND, PT_REGS_PARM1(ctx));

	if (!call)
		return 0;
	call->slot = row_of(call, PT_REGS_PARM1(ctx));
	call->next = PT_REGS_PARM2(ctx);
	call->bad = PT_REGS_PARM3(ctx);
	call->full = 0;
	call->rest = 0;
	if (post_some(call))
		rdma_more.call(ctx, MORE_POSTS);
	return 0;
}

#endif /* SWERVE_RDMA_POST_H */
