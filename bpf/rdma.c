/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Work requests of RDMA queue pairs, counted by breakpoints in the verbs providers: what each process posts, and what
 * it is told to be complete. Reads the application's memory through the verbs' ABI alone and writes none of it.
 *
 * A request counts as posted before the device is told of it, and what the provider refuses is taken back when the
 * call returns. Send queues complete in order, so a completion belongs to the oldest signalled request and retires it
 * with the unsignalled ones before it: only signalled ones are remembered, each with the sums of those it retires. All
 * sums are moved by atomic operations, so threads that share a queue pair lose none.
 *
 * A thread is inside one verbs call at a time: what its entry has to tell its return is kept by thread.
 */
#include <uapi/linux/ptrace.h>

#include "rdma_state.h"
#include "rdma_verbs.h"
#include "swerve.h"

#ifndef NULL
#define NULL ((void *)0)
#endif

#define MAPPABLE 1024		/* BPF_F_MMAPABLE */
#define DEPTH_USED (DEPTH - 16) /* threads that post at once may overshoot */
#define POSTS_AT_ONCE 16
#define POLLS_AT_ONCE 8
#define POSTS_MOST 1024
#define SGES 32
#define RECEIVES 256 /* in one list */
#define LOOK_AHEAD 4 /* threads that share a queue pair may be seen in another order than the device sees */
#define LOOK_BACK 32 /* requests of a queue in error, of which some may be done without a completion */
#define TIMED_AT_ONCE 64

#define SEVERAL 0xfffffffe /* rows share a completion queue */
#define UNKNOWN 0xffffffff
#define NONE_TIMED (~0ULL)

BPF_TABLE("array", u32, struct queue, rdma_queues, SWERVE_QPS);
BPF_F_TABLE("array", u32, struct swerve_qp, rdma_table, SWERVE_QPS, MAPPABLE);
BPF_HASH(rdma_slots, struct qp_key, u32, 2 * SWERVE_QPS);
BPF_QUEUE(rdma_free, u32, SWERVE_QPS);
BPF_TABLE("lru_hash", u32, struct call, rdma_calls, 16384);
BPF_TABLE("lru_hash", u32, struct control, rdma_controls, 1024);
BPF_TABLE("lru_hash", u32, struct poll, rdma_polls, 16384);
BPF_TABLE("lru_hash", struct qp_key, u32, rdma_cqs,
	  2 * SWERVE_QPS); /* completion queue (context: its address) -> row */
BPF_TABLE("lru_hash", struct qp_key, struct shared, rdma_shared, 2 * SWERVE_QPS); /* by a shared queue's address */
BPF_ARRAY(rdma_ports, struct qp_port, SWERVE_QPS);
BPF_PERCPU_ARRAY(rdma_counters, u64, SWERVE_RDMA_COUNTERS);
BPF_PROG_ARRAY(rdma_more, 8);

/*
 * The first and the last statement of a loop's body, with what it counts by: a jump, and no instruction can be moved
 * past it. Before 6.2 the verifier takes a loop for one without end when something else than a jump leads to its head.
 */
#define AROUND(counter) asm volatile("goto +0" : "+r"(counter) : : "memory")

/* Hide from the compiler what it knows of a variable, so that it keeps the checks that the verifier looks for. */
#define OPAQUE(variable) asm volatile("" : "+r"(variable))

static __always_inline void count(u32 counter, u64 more)
{
	u64 *value = rdma_counters.lookup(&counter);

	if (value)
		*value += more;
}

static __always_inline void add(u64 *value, u64 more)
{
	__sync_fetch_and_add(value, more);
}

/* ---- a thread's call ----------------------------------------------------------------------------------------- */

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

/* ---- rows ---------------------------------------------------------------------------------------------------- */

static __always_inline bool read_qp(struct verbs_qp *qp, u64 address)
{
	if (!bpf_probe_read_user(qp, sizeof(*qp), (void *)address))
		return true;
	count(SWERVE_RDMA_FAULTS, 1);
	return false;
}

/* Note whose completions come from a queue. */
static __always_inline void note_cq(u64 cq, u32 tgid, u32 slot)
{
	struct qp_key key = { .context = cq, .tgid = tgid };
	u32 *there = rdma_cqs.lookup(&key);

	if (there && *there != slot)
		slot = SEVERAL;
	if (cq)
		rdma_cqs.update(&key, &slot);
}

/* A queue pair takes its receives from a shared queue: the first one tells what is posted there. */
static __always_inline void note_srq(struct swerve_qp *row, u64 srq, u32 tgid, u32 slot)
{
	struct qp_key key = { .context = srq, .tgid = tgid };
	struct shared *shared, fresh = { .slot = slot };

	shared = rdma_shared.lookup(&key);
	if (!shared) {
		rdma_shared.update(&key, &fresh);
	} else if (shared->slot == NO_ROW) {
		shared->slot = slot;
		add(&row->receives_posted, __sync_lock_test_and_set(&shared->receives, 0));
	}
}

static __always_inline u32 open_row(const struct verbs_qp *qp, struct qp_key *key)
{
	struct swerve_qp *row;
	struct queue *queue;
	u64 device = 0;
	u32 slot, *there;

	if (rdma_free.pop(&slot)) {
		count(SWERVE_RDMA_TABLE_FULL, 1);
		return NO_ROW;
	}
	row = rdma_table.lookup(&slot);
	queue = rdma_queues.lookup(&slot);
	if (!row || !queue)
		return NO_ROW;
	if (rdma_slots.insert(key, &slot)) { /* another thread was faster */
		rdma_free.push(&slot, 0);
		there = rdma_slots.lookup(key);
		return there ? *there : NO_ROW;
	}
	queue->send_cq = qp->send_cq;
	queue->receive_cq = qp->receive_cq;
	queue->srq = qp->srq;
	row->context = key->context;
	row->tgid = key->tgid;
	row->qp_number = key->number;
	row->remote_qp_number = UNKNOWN;
	row->qp_type = qp->type;
	row->srq = !!qp->srq;
	if (bpf_probe_read_user(&device, sizeof(device), (void *)key->context) ||
	    bpf_probe_read_user(row->device, sizeof(row->device), (void *)device + DEVICE_NAME))
		count(SWERVE_RDMA_FAULTS, 1);
	note_cq(qp->send_cq, key->tgid, slot);
	note_cq(qp->receive_cq, key->tgid, slot);
	if (qp->srq)
		note_srq(row, qp->srq, key->tgid, slot);
	row->created_ns = bpf_ktime_get_ns();
	row->state = SWERVE_QP_LIVE;
	return slot;
}

static __always_inline void close_row(struct qp_key *key)
{
	struct qp_key srq_key = { .tgid = key->tgid };
	struct shared *shared;
	struct swerve_qp *row;
	struct queue *queue;
	u32 *there, slot;

	there = rdma_slots.lookup(key);
	if (!there)
		return;
	slot = *there;
	rdma_slots.delete(key);
	row = rdma_table.lookup(&slot);
	queue = rdma_queues.lookup(&slot);
	if (!row || !queue)
		return;
	row->state = SWERVE_QP_CLOSED;
	if (!queue->srq)
		return;
	srq_key.context = queue->srq;
	shared = rdma_shared.lookup(&srq_key);
	if (shared && shared->slot == slot)
		shared->slot = NO_ROW;
}

static __always_inline void name_qp(struct qp_key *key, u64 context, u32 number)
{
	key->context = context;
	key->tgid = bpf_get_current_pid_tgid() >> 32;
	key->number = number;
}

static __always_inline bool is_of_process(const struct swerve_qp *row)
{
	return row->state == SWERVE_QP_LIVE && row->tgid == bpf_get_current_pid_tgid() >> 32;
}

/* The row of a queue pair, made when there is none yet. */
static __always_inline u32 row_of(struct call *call, u64 address)
{
	u32 *near = &call->rows[(address >> 6 ^ address >> 9) & (NEAR - 1)], slot = *near, *there;
	struct swerve_qp *row = rdma_table.lookup(&slot);
	struct queue *queue = rdma_queues.lookup(&slot);
	struct verbs_qp qp;
	struct qp_key key;

	if (row && queue && queue->address == address && is_of_process(row))
		return slot;
	if (!read_qp(&qp, address))
		return NO_ROW;
	name_qp(&key, qp.context, qp.number);
	there = rdma_slots.lookup(&key);
	slot = there ? *there : open_row(&qp, &key);
	queue = rdma_queues.lookup(&slot);
	if (!queue)
		return NO_ROW;
	queue->address = address;
	*near = slot;
	return slot;
}

/* The row whose completion a queue gave. */
static __always_inline u32 row_of_completion(u32 *rows, u64 cq, u32 qp_number)
{
	u32 *near = &rows[qp_number & (NEAR - 1)], slot = *near, *there;
	struct swerve_qp *row = rdma_table.lookup(&slot);
	struct queue *queue = rdma_queues.lookup(&slot);
	struct verbs_qp unseen = {};
	struct qp_key key;
	u64 context;

	if (row && queue && row->qp_number == qp_number && (queue->send_cq == cq || queue->receive_cq == cq) &&
	    is_of_process(row))
		return slot;
	if (bpf_probe_read_user(&context, sizeof(context), (void *)cq)) {
		count(SWERVE_RDMA_FAULTS, 1);
		return NO_ROW;
	}
	name_qp(&key, context, qp_number);
	there = rdma_slots.lookup(&key);
	slot = there ? *there : open_row(&unseen, &key);
	*near = slot;
	return slot;
}

/* ---- what is posted to a send queue -------------------------------------------------------------------------- */

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

/* Look at some requests of the list that a thread posts; true when there are more. */
static __always_inline bool post_some(struct call *call)
{
	u64 next = call->next, requests = 0, bytes = 0, each;
	struct verbs_send request;
	struct swerve_qp *row;
	struct queue *queue;
	u32 slot = call->slot;

	row = rdma_table.lookup(&slot);
	queue = rdma_queues.lookup(&slot);
	if (!row || !queue)
		return false;
#pragma clang loop unroll(disable)
	for (int i = 0; i < POSTS_AT_ONCE; i++) {
		if (!next)
			break;
		if (bpf_probe_read_user(&request, sizeof(request), (void *)next)) {
			count(SWERVE_RDMA_FAULTS, 1);
			next = 0;
			break;
		}
		each = bytes_of(request.sges, request.sge_count);
		bytes += each;
		requests++;
		add(&row->posted_bytes, each);
		add(&row->posted, 1);
		remember(row, queue, call, request.wr_id, each, request.opcode, request.flags & SEND_SIGNALED);
		next = request.next;
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
	u32 slot = call->slot;

	row = rdma_table.lookup(&slot);
	queue = rdma_queues.lookup(&slot);
	if (!row || !queue)
		return;
	call->rest = next;
#pragma clang loop unroll(disable)
	for (int i = 0; i < POSTS_MOST; i++) {
		if (!next)
			return;
		if (bpf_probe_read_user(&request, sizeof(request), (void *)next)) {
			count(SWERVE_RDMA_FAULTS, 1);
			return;
		}
		count_unfollowed(row, queue, request.flags, 1);
		next = request.next;
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
	u32 slot;

	if (!call)
		return 0;
	slot = call->slot;
	row = rdma_table.lookup(&slot);
	queue = rdma_queues.lookup(&slot);
	if (!row || !queue)
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
	u64 next = call->next, bytes;
	u32 slot = call->slot;

	row = rdma_table.lookup(&slot);
	queue = rdma_queues.lookup(&slot);
	if (!row || !queue)
		return false;
#pragma clang loop unroll(disable)
	for (int i = 0; i < POSTS_AT_ONCE; i++) {
		if (!next)
			break;
		if (bpf_probe_read_user(&request, sizeof(request), (void *)next)) {
			count(SWERVE_RDMA_FAULTS, 1);
			next = 0;
			break;
		}
		if (next == call->rest) {
			count_unfollowed(row, queue, request.flags, -1ULL);
			add(&row->refused, 1);
			call->rest = next = request.next;
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
		next = request.next;
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
	struct call *call;

	count(SWERVE_RDMA_HITS, 1);
	call = end_call(CALL_SEND);
	if (!call || !(u32)PT_REGS_RC(ctx))
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

/* ---- what is posted to a receive queue ----------------------------------------------------------------------- */

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
	struct swerve_qp *row;
	struct call *call;
	u64 bad = 0;
	u32 slot;

	count(SWERVE_RDMA_HITS, 1);
	call = end_call(CALL_RECEIVE);
	if (!call || !(u32)PT_REGS_RC(ctx))
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
		row = rdma_table.lookup(&slot);
		queue = rdma_queues.lookup(&slot);
		if (row && queue && queue->srq == srq && row->tgid == tgid && row->state == SWERVE_QP_LIVE)
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

/* ---- what completes ------------------------------------------------------------------------------------------ */

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
	row = rdma_table.lookup(&slot);
	queue = rdma_queues.lookup(&slot);
	if (!row || !queue)
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

/* ---- the extended way to post -------------------------------------------------------------------------------- */

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
	u32 slot = call->slot, index = call->left, staged;
	u64 place;
	struct swerve_qp *row;
	struct staged *each;
	struct queue *queue;

	row = rdma_table.lookup(&slot);
	queue = rdma_queues.lookup(&slot);
	if (!row || !queue)
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
	struct swerve_qp *row;
	struct staged *each;
	struct queue *queue;
	struct call *call;
	u32 slot, opcode;

	count(SWERVE_RDMA_HITS, 1);
	call = end_call(CALL_COMPLETE);
	if (!call || !(u32)PT_REGS_RC(ctx))
		return 0;
	slot = call->slot;
	row = rdma_table.lookup(&slot);
	queue = rdma_queues.lookup(&slot);
	if (!row || !queue)
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

/* ---- the extended way to poll -------------------------------------------------------------------------------- */

/*
 * The verbs' structure shows a completion's number and status. Whose it is, the application asks the provider, and we
 * listen to the answer; if it does not ask, the completion queue tells it as long as one queue pair alone uses it.
 */
static __always_inline struct poll *poll_of_thread(void)
{
	u32 thread = bpf_get_current_pid_tgid();

	count(SWERVE_RDMA_HITS, 1);
	return rdma_polls.lookup(&thread);
}

/* The application has done with a completion. */
static __always_inline void settle(struct poll *poll)
{
	struct qp_key key = { .context = poll->cq };
	struct verbs_completion completion;
	struct swerve_qp *row;
	u32 *there, slot;
	u64 now_ns = 0;

	if (!poll->pending)
		return;
	poll->pending = 0;
	completion = poll->completion;
	if (completion.qp_number == UNKNOWN) {
		key.tgid = bpf_get_current_pid_tgid() >> 32;
		there = rdma_cqs.lookup(&key);
		slot = there ? *there : NO_ROW;
		row = rdma_table.lookup(&slot);
		if (!row) {
			count(SWERVE_RDMA_UNNAMED, 1);
			return;
		}
		completion.qp_number = row->qp_number;
	}
	complete(poll->rows, poll->cq, &completion, &now_ns);
}

static __always_inline int settle_last(void)
{
	struct poll *poll = poll_of_thread();

	if (poll)
		settle(poll);
	return 0;
}

/* Take what the structure shows of the completion that the provider has moved on to. */
static __always_inline int take(struct pt_regs *ctx)
{
	struct poll *poll = poll_of_thread();
	struct {
		u32 status;
		u64 wr_id;
	} __attribute__((packed)) shown;

	if (!poll || (u32)PT_REGS_RC(ctx))
		return 0;
	if (bpf_probe_read_user(&shown, sizeof(shown), (void *)poll->cq + CQ_EX_STATUS)) {
		count(SWERVE_RDMA_FAULTS, 1);
		return 0;
	}
	poll->completion.wr_id = shown.wr_id;
	poll->completion.status = shown.status;
	poll->completion.opcode = UNKNOWN;
	poll->completion.qp_number = UNKNOWN;
	poll->completion.bytes = 0;
	poll->pending = 1;
	return 0;
}

int rdma_start_poll(struct pt_regs *ctx)
{
	u32 thread = bpf_get_current_pid_tgid();
	struct poll *poll = poll_of_thread(), fresh = { .cq = PT_REGS_PARM1(ctx) };

	if (!poll) {
		rdma_polls.update(&thread, &fresh);
		return 0;
	}
	poll->cq = fresh.cq;
	poll->pending = 0;
	return 0;
}

int rdma_start_poll_return(struct pt_regs *ctx)
{
	return take(ctx);
}

int rdma_next_poll(struct pt_regs *ctx)
{
	return settle_last();
}

int rdma_next_poll_return(struct pt_regs *ctx)
{
	return take(ctx);
}

int rdma_end_poll(struct pt_regs *ctx)
{
	return settle_last();
}

int rdma_read_opcode_return(struct pt_regs *ctx)
{
	struct poll *poll = poll_of_thread();

	if (poll)
		poll->completion.opcode = PT_REGS_RC(ctx);
	return 0;
}

int rdma_read_qp_num_return(struct pt_regs *ctx)
{
	struct poll *poll = poll_of_thread();

	if (poll)
		poll->completion.qp_number = PT_REGS_RC(ctx);
	return 0;
}

int rdma_read_byte_len_return(struct pt_regs *ctx)
{
	struct poll *poll = poll_of_thread();

	if (poll)
		poll->completion.bytes = PT_REGS_RC(ctx);
	return 0;
}

/* ---- making, connecting and destroying queue pairs ----------------------------------------------------------- */

static __always_inline struct control *end_control(u32 kind)
{
	u32 thread = bpf_get_current_pid_tgid();
	struct control *control = rdma_controls.lookup(&thread);

	count(SWERVE_RDMA_HITS, 1);
	if (!control || control->kind != kind)
		return NULL;
	control->kind = CONTROL_NONE;
	return control;
}

/* ibv_create_qp and ibv_create_qp_ex: the attributes begin alike. */
int rdma_create_qp(struct pt_regs *ctx)
{
	struct control control = { .kind = CONTROL_CREATE };
	u32 thread = bpf_get_current_pid_tgid();

	count(SWERVE_RDMA_HITS, 1);
	if (bpf_probe_read_user(&control.all_signalled, sizeof(control.all_signalled),
				(void *)PT_REGS_PARM2(ctx) + INIT_SIGNAL_ALL))
		count(SWERVE_RDMA_FAULTS, 1);
	rdma_controls.update(&thread, &control);
	return 0;
}

int rdma_create_qp_return(struct pt_regs *ctx)
{
	struct control *control = end_control(CONTROL_CREATE);
	struct swerve_qp *row;
	struct verbs_qp qp;
	struct queue *queue;
	struct qp_key key;
	u32 slot, *there;

	if (!control || !PT_REGS_RC(ctx) || !read_qp(&qp, PT_REGS_RC(ctx)))
		return 0;
	name_qp(&key, qp.context, qp.number);
	there = rdma_slots.lookup(&key);
	slot = there ? *there : NO_ROW;
	row = rdma_table.lookup(&slot);
	if (row && (row->posted || row->receives_posted || row->completions)) {
		close_row(&key); /* its end was not seen */
		row = NULL;
	}
	if (!row)
		slot = open_row(&qp, &key);
	queue = rdma_queues.lookup(&slot);
	if (!queue)
		return 0;
	queue->all_signalled = control->all_signalled;
	queue->told = 1;
	return 0;
}

static __always_inline bool name_of(struct qp_key *key, u64 address)
{
	struct verbs_qp qp;

	if (!read_qp(&qp, address))
		return false;
	name_qp(key, qp.context, qp.number);
	return true;
}

int rdma_destroy_qp(struct pt_regs *ctx)
{
	struct control control = { .kind = CONTROL_DESTROY };
	u32 thread = bpf_get_current_pid_tgid();

	count(SWERVE_RDMA_HITS, 1);
	if (name_of(&control.key, PT_REGS_PARM1(ctx)))
		rdma_controls.update(&thread, &control);
	return 0;
}

int rdma_destroy_qp_return(struct pt_regs *ctx)
{
	struct control *control = end_control(CONTROL_DESTROY);
	struct qp_key key;

	if (!control || (u32)PT_REGS_RC(ctx))
		return 0;
	key = control->key;
	close_row(&key);
	return 0;
}

int rdma_modify_qp(struct pt_regs *ctx)
{
	struct control control = { .kind = CONTROL_MODIFY, .mask = PT_REGS_PARM3(ctx) };
	u32 thread = bpf_get_current_pid_tgid();
	void *attributes = (void *)PT_REGS_PARM2(ctx);

	count(SWERVE_RDMA_HITS, 1);
	if (!name_of(&control.key, PT_REGS_PARM1(ctx)))
		return 0;
	if (bpf_probe_read_user(&control.state, sizeof(control.state), attributes) ||
	    bpf_probe_read_user(&control.remote_qp_number, sizeof(u32), attributes + ATTR_DEST_QPN) ||
	    bpf_probe_read_user(&control.remote, sizeof(control.remote), attributes + ATTR_DGID) ||
	    bpf_probe_read_user(&control.sgid_index, sizeof(u8), attributes + ATTR_SGID_INDEX) ||
	    bpf_probe_read_user(&control.port, sizeof(u8), attributes + ATTR_PORT)) {
		count(SWERVE_RDMA_FAULTS, 1);
		return 0;
	}
	rdma_controls.update(&thread, &control);
	return 0;
}

/* What was outstanding at a reset is forgotten by the device. */
static __always_inline void reset(struct swerve_qp *row, struct queue *queue)
{
	queue->head = queue->tail;
	queue->open_bytes = 0;
	queue->open_requests = 0;
	queue->gap = 0;
	queue->gap_bytes = 0;
	queue->published = 1;
	queue->oldest = queue->number;
	row->completed_bytes = row->posted_bytes;
	row->completed = row->posted;
}

int rdma_modify_qp_return(struct pt_regs *ctx)
{
	struct control *control = end_control(CONTROL_MODIFY);
	struct swerve_qp *row;
	struct qp_port *port;
	struct queue *queue;
	struct qp_key key;
	u32 slot, *there;

	if (!control || (u32)PT_REGS_RC(ctx))
		return 0;
	key = control->key;
	there = rdma_slots.lookup(&key);
	slot = there ? *there : NO_ROW;
	row = rdma_table.lookup(&slot);
	queue = rdma_queues.lookup(&slot);
	port = rdma_ports.lookup(&slot);
	if (!row || !queue || !port)
		return 0;
	if (control->mask & QP_DEST_QPN)
		row->remote_qp_number = control->remote_qp_number;
	if (control->mask & QP_AV) {
		row->remote = control->remote;
		port->port = control->port;
		port->gid_index = control->sgid_index;
		port->known = 1;
	}
	if (control->mask & QP_STATE && control->state == QPS_RESET)
		reset(row, queue);
	return 0;
}

/* What a probe costs that does nothing. */
int rdma_empty(struct pt_regs *ctx)
{
	return 0;
}
