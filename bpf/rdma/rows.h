/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The row of a queue pair: opened, found by its address or by a completion's number, closed. */
#ifndef SWERVE_RDMA_ROWS_H
#define SWERVE_RDMA_ROWS_H

#include "rdma/calls.h"

#define SEVERAL 0xfffffffe /* rows share a completion queue */
#define UNKNOWN 0xffffffff

/* The row of a queue pair, and what the kernel side keeps beside it; NULL where there is no such row. */
static __always_inline struct queue *queue_of(u32 slot, struct swerve_qp **row)
{
	*row = rdma_table.lookup(&slot);
	return *row ? rdma_queues.lookup(&slot) : NULL;
}

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
	queue = queue_of(slot, &row);
	if (!queue)
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
	queue = queue_of(slot, &row);
	if (!queue)
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

#endif /* SWERVE_RDMA_ROWS_H */
