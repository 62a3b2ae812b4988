/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the provider refused of a list: taken back when the call returns, the last first. */
#ifndef SWERVE_RDMA_REFUSED_H
#define SWERVE_RDMA_REFUSED_H

#include "rdma/post.h"

/*
 * Take back the last requests of a queue, that the provider refused: call->requests of them, call->left of these
 * signalled, call->bytes together, call->signalled_bytes the signalled ones'. Those that found no room are in the gap,
 * counted as completed; they are the last, so the gap goes back first.
 */
int rdma_take_back(struct pt_regs *ctx)
{
	u64 tail, gap, signalled, requests, bytes, roomless, roomless_bytes;
	struct call *call = call_of_thread();
	struct signalled *entry;
	struct swerve_qp *row;
	struct queue *queue;

	if (!call)
		return 0;
	queue = queue_of(call->slot, &row);
	if (!queue)
		return 0;
	tail = call->tail;
	signalled = call->left;
	requests = call->requests;
	bytes = call->bytes;
	gap = queue->gap;
	roomless = gap < signalled ? gap : signalled;
	roomless_bytes = gap < signalled ? queue->gap_bytes : call->signalled_bytes;
	add(&row->refused, requests);
	if (__sync_val_compare_and_swap(&queue->gap, gap, gap - roomless) != gap) {
		add(&row->untracked, requests);
		return 0;
	}
	signalled -= roomless;
	if (__sync_val_compare_and_swap(&queue->tail, tail, tail - signalled) != tail) {
		/* Another thread has posted since: they stay, and are retired with what follows. */
		add(&queue->gap, roomless);
		add(&row->untracked, requests);
		return 0;
	}
	add(&queue->gap_bytes, -roomless_bytes);
	add(&row->untracked, -roomless);
	add(&row->completed_bytes, -roomless_bytes);
	add(&row->completed, -roomless);
#pragma clang loop unroll(disable)
	for (u64 i = 0; i < DEPTH;) {
		AROUND(i);
		if (i >= signalled)
			break;
		entry = &queue->ring[(tail - 1 - i) & (DEPTH - 1)];
		add(&queue->open_bytes, entry->bytes);
		add(&queue->open_requests, entry->requests);
		add(&queue->gap, entry->gap);
		i++;
		AROUND(i);
	}
	add(&queue->open_bytes, roomless_bytes - bytes);
	add(&queue->open_requests, roomless - requests);
	add(&queue->number, -requests);
	add(&row->signalled, -signalled - roomless);
	add(&row->posted_bytes, -bytes);
	add(&row->posted, -requests);
	return 0;
}

/* The provider refused what is left of the list: add some of it up; true when there is more. */
static __always_inline bool refuse_some(struct call *call)
{
	struct verbs_send request;
	struct swerve_qp *row;
	struct queue *queue;
	u64 next = call->next, at, bytes;

	queue = queue_of(call->slot, &row);
	if (!queue)
		return false;
#pragma clang loop unroll(disable)
	for (int i = 0; i < POSTS_AT_ONCE; i++) {
		at = next;
		if (!read_request(&request, &next))
			break;
		if (at == call->rest) {
			count_unfollowed(row, queue, request.flags, -1ULL);
			add(&row->refused, 1);
			call->rest = next;
			continue;
		}
		bytes = bytes_of(request.sges, request.sge_count);
		call->bytes += bytes;
		call->requests++;
		if (request.flags & SEND_SIGNALED || queue->all_signalled) {
			call->left++;
			call->signalled_bytes += bytes;
		}
		add(&row->opcodes[request.opcode < SWERVE_OPCODES ? request.opcode : SWERVE_OPCODES - 1], -1ULL);
	}
	call->next = next;
	return next;
}

int rdma_refuse_more(struct pt_regs *ctx)
{
	struct call *call = call_of_thread();

	if (!call)
		return 0;
	if (refuse_some(call)) {
		rdma_more.call(ctx, MORE_REFUSED);
		count(SWERVE_RDMA_TOO_LONG, 1);
	} else {
		rdma_more.call(ctx, TAKE_BACK);
	}
	return 0;
}

/* Where in the refused list those begin that were not followed: at once, where it begins among them itself. */
static __always_inline void find_rest(struct call *call)
{
	u64 next = call->rest;

#pragma clang loop unroll(disable)
	for (int i = 0; i < POSTS_MOST; i++) {
		if (!next)
			return;
		if (next == call->next) {
			call->rest = next;
			return;
		}
		if (bpf_probe_read_user(&next, sizeof(next),
					(void *)next + __builtin_offsetof(struct verbs_send, next))) {
			count(SWERVE_RDMA_FAULTS, 1);
			return;
		}
	}
}

int rdma_post_send_return(struct pt_regs *ctx)
{
	struct call *call = failed_call(ctx, CALL_SEND);

	if (!call)
		return 0;
	if (bpf_probe_read_user(&call->next, sizeof(call->next), (void *)call->bad)) {
		count(SWERVE_RDMA_FAULTS, 1);
		return 0;
	}
	find_rest(call);
	call->requests = 0;
	call->left = 0;
	call->bytes = 0;
	call->signalled_bytes = 0;
	rdma_more.call(ctx, MORE_REFUSED);
	return 0;
}

#endif /* SWERVE_RDMA_REFUSED_H */
