/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What completes, by ibv_poll_cq: a completion belongs to the oldest signalled request of its queue pair, and retires
 * the unsignalled ones before it.
 */
#ifndef SWERVE_RDMA_COMPLETE_H
#define SWERVE_RDMA_COMPLETE_H

#include "rdma/post.h"

#define POLLS_AT_ONCE 8
#define LOOK_AHEAD 4 /* threads that share a queue pair may be seen in another order than the device sees */
#define LOOK_BACK 32 /* requests of a queue in error, of which some may be done without a completion */
#define TIMED_AT_ONCE 64

static __always_inline void record_time(struct swerve_qp *row, struct queue *queue, u64 number, u64 *now_ns)
{
	struct posted *post = &queue->posts[number & (DEPTH - 1)];
	struct swerve_timed_request *timed;

	if (!post->at_ns)
		return;
	if (!*now_ns)
		*now_ns = bpf_ktime_get_ns();
	timed = &row->timed_requests[row->timed & (SWERVE_TIMED - 1)];
	timed->number = number;
	timed->posted_ns = post->at_ns;
	timed->completed_ns = *now_ns;
	timed->bytes = post->bytes;
	post->at_ns = 0;
	add(&row->timed, 1); /* last: the reader goes by it */
}

static __always_inline void record_times(struct swerve_qp *row, struct queue *queue, u64 last, u64 requests,
					 u64 *now_ns)
{
	u64 first;

	if (row->run_mask == NONE_TIMED)
		return;
	first = last + 1 - (requests < TIMED_AT_ONCE ? requests : TIMED_AT_ONCE);
#pragma clang loop unroll(disable)
	for (u64 i = 0; i < TIMED_AT_ONCE;) {
		AROUND(i);
		if (first + i > last)
			break;
		if (is_timed(row, first + i))
			record_time(row, queue, first + i, now_ns);
		i++;
		AROUND(i);
	}
}

static __always_inline void retire(struct swerve_qp *row, u64 requests, u64 bytes)
{
	add(&row->completed_bytes, bytes);
	add(&row->completed, requests);
}

/*
 * Nothing signalled is outstanding. Either all requests are signalled without saying so (sq_sig_all, unseen when the
 * queue pair was made), or the queue is in error and tells each request, or the completion is of a request from before
 * we looked.
 */
static __always_inline void complete_open(struct swerve_qp *row, struct queue *queue, u32 status)
{
	u64 requests = queue->open_requests, bytes;

	if (queue->gap) {
		add(&queue->gap, -1ULL);
		return;
	}
	if (!requests || (!status && queue->told)) {
		count(SWERVE_RDMA_UNMATCHED, 1);
		return;
	}
	bytes = queue->open_bytes / requests;
	add(&queue->open_requests, -1ULL);
	add(&queue->open_bytes, -bytes);
	queue->oldest++;
	retire(row, 1, bytes);
}

/*
 * The completion is of another request than the oldest: true when of one shortly after it, which then takes its
 * number. Threads that share a queue pair may be seen in another order than the device sees them.
 */
static __always_inline bool is_ahead(struct queue *queue, u64 head, u64 wr_id)
{
	struct signalled *entry = &queue->ring[head & (DEPTH - 1)], *other;

#pragma clang loop unroll(disable)
	for (u64 i = 1; i <= LOOK_AHEAD;) {
		AROUND(i);
		other = &queue->ring[(head + i) & (DEPTH - 1)];
		if (head + i < queue->tail && other->wr_id == wr_id) {
			other->wr_id = entry->wr_id;
			return true;
		}
		i++;
		AROUND(i);
	}
	return false;
}

static __always_inline void complete_send(struct swerve_qp *row, struct queue *queue, u64 wr_id, u32 status,
					  u64 *now_ns)
{
	u64 head, bytes, requests, number;
	struct signalled *entry;

	add(&row->completions, 1);
	head = queue->head;
	if (head == queue->tail) {
		complete_open(row, queue, status);
		return;
	}
	entry = &queue->ring[head & (DEPTH - 1)];
	if (entry->gap) {
		add(&entry->gap, -1ULL);
		return;
	}
	if (entry->wr_id != wr_id && !is_ahead(queue, head, wr_id)) {
		if (status && entry->requests > 1) {
			/* A queue in error tells unsignalled requests as well. */
			bytes = entry->bytes / entry->requests;
			entry->bytes -= bytes;
			entry->requests--;
			queue->oldest++;
			retire(row, 1, bytes);
			return;
		}
		if (!queue->told) {
			count(SWERVE_RDMA_UNMATCHED, 1);
			return;
		}
	}
	/* Another thread may take the same one: then this is of the next. */
	head = __sync_fetch_and_add(&queue->head, 1);
	entry = &queue->ring[head & (DEPTH - 1)];
	queue->oldest = entry->number + 1;
	retire(row, entry->requests, entry->bytes);
	record_times(row, queue, entry->number, entry->requests, now_ns);
}

/* Whether one of the oldest requests that are outstanding has this number. */
static __always_inline bool is_outstanding(const struct queue *queue, u64 wr_id)
{
	u64 number = queue->oldest;

#pragma clang loop unroll(disable)
	for (u64 i = 0; i < LOOK_BACK;) {
		AROUND(i);
		if (number + i >= queue->number)
			break;
		if (queue->posts[(number + i) & (DEPTH - 1)].wr_id == wr_id)
			return true;
		i++;
		AROUND(i);
	}
	return false;
}

/* Whether a completion is of the receive queue. Its operation code is undefined when it tells an error. */
static __always_inline bool is_receive(const struct swerve_qp *row, const struct queue *queue,
				       const struct verbs_completion *completion, u64 cq)
{
	if (!completion->status && completion->opcode != UNKNOWN)
		return completion->opcode & WC_RECEIVE;
	if (queue->send_cq && queue->send_cq != queue->receive_cq)
		return cq != queue->send_cq;
	if (queue->head == queue->tail && !queue->open_requests)
		return true;
	if (!row->srq && row->receives_posted <= row->receives_completed)
		return false;
	return !is_outstanding(queue, completion->wr_id);
}

static __always_inline void complete(u32 *rows, u64 cq, const struct verbs_completion *completion, u64 *now_ns)
{
	u32 status = completion->status, slot;
	struct swerve_qp *row;
	struct queue *queue;

	slot = row_of_completion(rows, cq, completion->qp_number);
	queue = queue_of(slot, &row);
	if (!queue)
		return;
	add(&row->statuses[status < SWERVE_STATUSES ? status : SWERVE_STATUSES - 1], 1);
	if (!is_receive(row, queue, completion, cq)) {
		complete_send(row, queue, completion->wr_id, status, now_ns);
		return;
	}
	if (!status)
		add(&row->received_bytes, completion->bytes);
	add(&row->receives_completed, 1);
}

int rdma_poll(struct pt_regs *ctx)
{
	struct call *call = begin_call(CALL_POLL, PT_REGS_PARM1(ctx));

	if (call)
		call->next = PT_REGS_PARM3(ctx);
	return 0;
}

/* Look at some completions; true when there are more. */
static __always_inline bool poll_some(struct call *call)
{
	struct verbs_completion completion;
	u64 next = call->next;
	u32 left = call->left;

#pragma clang loop unroll(disable)
	for (int i = 0; i < POLLS_AT_ONCE; i++) {
		if (!left)
			return false;
		if (bpf_probe_read_user(&completion, sizeof(completion), (void *)next)) {
			count(SWERVE_RDMA_FAULTS, left);
			return false;
		}
		complete(call->rows, call->object, &completion, &call->now_ns);
		next += 48; /* struct ibv_wc */
		left--;
	}
	call->next = next;
	call->left = left;
	return left;
}

int rdma_poll_more(struct pt_regs *ctx)
{
	struct call *call = call_of_thread();

	if (call && poll_some(call)) {
		rdma_more.call(ctx, MORE_POLLS);
		count(SWERVE_RDMA_TOO_LONG, call->left);
	}
	return 0;
}

int rdma_poll_return(struct pt_regs *ctx)
{
	int found = PT_REGS_RC(ctx);
	struct call *call;

	count(SWERVE_RDMA_HITS, 1);
	if (found <= 0)
		return 0;
	call = end_call(CALL_POLL);
	if (!call) {
		count(SWERVE_RDMA_CALLS_LOST, 1);
		return 0;
	}
	call->left = found;
	call->now_ns = 0;
	if (poll_some(call)) {
		rdma_more.call(ctx, MORE_POLLS);
		count(SWERVE_RDMA_TOO_LONG, call->left);
	}
	return 0;
}

#endif /* SWERVE_RDMA_COMPLETE_H */
