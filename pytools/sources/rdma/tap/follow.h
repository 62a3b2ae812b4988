/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Which process this is, and the queue pairs that the tap follows: from their making to their end, and their way into the
 * tables that the agent reads.
 */
#ifndef SWERVE_TAP_FOLLOW_H
#define SWERVE_TAP_FOLLOW_H

#include "share.h"
#include "tables.h"

/* ---- which process this is ------------------------------------------------------------------------------------- */

static u32 *tap_process; /* a page that reads zero in a child of fork() */
static u32 tap_generation, tap_lock;

/* Whether what was made in this generation is this process's own. */
static inline bool alive(u32 generation)
{
	return likely(load(tap_process) == generation);
}

static bool prepare(void);

static void lock(void)
{
	if (tap_process && !load(tap_process))
		prepare(); /* a child: the lock may have been held when it was made */
	for (int i = 0; __atomic_exchange_n(&tap_lock, 1, __ATOMIC_ACQUIRE); i++) {
		if (i < 1000)
			system_call0(SYS_sched_yield);
		else
			pause_ns(100000);
	}
}

static void unlock(void)
{
	store_release(&tap_lock, 0);
}

/* Be ready to follow this process: at its first device, and anew at a child's. */
slow_path static bool prepare(void)
{
	u32 *page = load_acquire(&tap_process), *none = NULL;

	if (!page) {
		page = pages(4096);
		if (!page || system_call3(SYS_madvise, page, 4096, MADV_WIPEONFORK) < 0)
			return false; /* a child could not be told from its parent */
		if (!__atomic_compare_exchange_n(&tap_process, &none, page, false, __ATOMIC_ACQ_REL,
						 __ATOMIC_ACQUIRE)) {
			system_call2(SYS_munmap, page, 4096);
			page = none;
		}
	}
	/* One thread does it, the others wait: the second word says that one is at it, and is wiped by fork() as well. */
	while (!load_acquire(page) && __atomic_exchange_n(&page[1], 1, __ATOMIC_ACQUIRE))
		system_call0(SYS_sched_yield);
	if (load_acquire(page)) {
		store_release(&page[1], 0);
		return true;
	}
	tap_clock.writing = 0;
	store(&tap_lock, 0); /* whoever held it stayed with the parent */
	memset(&tap_share.tables, 0, sizeof(tap_share.tables));
	tap_share.count = tap_share.next = 0;
	tap_share.retry_ns = 0;
	hang_up();
	tap_can_own = !system_call3(SYS_membarrier, 1 << 4, 0, 0); /* MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED */
	start_clock();
	store_release(page, ++tap_generation);
	store_release(&page[1], 0);
	return true;
}

/* ---- queue pairs come and go ----------------------------------------------------------------------------------- */

/* Have the record of a queue pair where the agent reads it, if there is an agent. */
static void share(struct queue *queue)
{
	struct swerve_qp *row = queue->record == &queue->own ? new_row() : NULL;

	if (row)
		move_record(queue, row);
}

/* Once there is a table: the queue pairs that were made before it was. */
slow_path static void share_all(void)
{
	struct queue *queue;

	for (u64 i = 0; tap_share.count && i < 1 << QUEUES_SHIFT; i++) {
		queue = queues_by_address[i].key > SLOT_GONE ? queues_by_address[i].value : NULL;
		if (queue && alive(queue->generation))
			share(queue);
	}
}

/* Look whether a table has come that was asked for. */
static inline void settle(void)
{
	if (likely(load(&tap_share.sock) < 0))
		return;
	lock();
	if (tap_share.sock >= 0 && take_answer())
		share_all();
	unlock();
}

static void describe(struct queue *queue, const struct ibv_qp *qp)
{
	struct swerve_qp *record = &queue->own;

	record->context = (u64)qp->context;
	record->tgid = system_call0(SYS_getpid);
	record->qp_number = qp->qp_num;
	record->remote_qp_number = ~0U;
	record->qp_type = qp->qp_type;
	record->srq = !!qp->srq;
	record->created_ns = clock_ns();
	record->run_mask = NONE_TIMED; /* as long as nobody reads */
	append(record->device, sizeof(record->device), queue->device->name);
}

static void join_shared(struct queue *queue)
{
	struct shared *shared = look_up(srqs_by_address, SRQS_SHIFT, (u64)queue->srq);

	if (!shared) {
		shared = pages(sizeof(*shared));
		if (!shared || !put(srqs_by_address, SRQS_SHIFT, (u64)queue->srq, shared))
			return;
	}
	if (shared->queue)
		return;
	queue->own.receives_posted = __atomic_exchange_n(&shared->waiting, 0, __ATOMIC_RELAXED);
	store_release(&shared->queue, queue);
}

/* The posts of a shared receive queue are counted for another of its queue pairs, when the one it was is gone. */
static void leave_shared(const struct queue *queue)
{
	struct shared *shared = look_up(srqs_by_address, SRQS_SHIFT, (u64)queue->srq);
	struct queue *other, *heir = NULL;

	if (!shared || shared->queue != queue)
		return;
	for (u64 i = 0; i < 1 << QUEUES_SHIFT; i++) {
		other = queues_by_address[i].key > SLOT_GONE ? queues_by_address[i].value : NULL;
		if (other && other != queue && other->srq == queue->srq && alive(other->generation))
			heir = other;
	}
	store_release(&shared->queue, heir);
}

/* The queue pair is no more. */
static void forget(struct queue *queue)
{
	struct swerve_qp *row;

	take_out(queues_by_number, QUEUES_SHIFT, number_key(queue->context, queue->number), queue);
	take_out(queues_by_address, QUEUES_SHIFT, (u64)queue->qp, queue);
	queues_used--;
	if (!alive(queue->generation))
		return; /* its pages are the child's copies of what the parent still uses */
	if (queue->srq)
		leave_shared(queue);
	row = queue->record;
	store_release(&queue->record, &queue->own); /* what comes late is counted where nobody reads */
	if (row != &queue->own)
		store_release(&row->state, SWERVE_QP_CLOSED);
	give_queue(queue);
}

/* Follow a queue pair from now on. Wanted: how many requests it may have outstanding, 0 when that is not known. */
slow_path static struct queue *follow(struct ibv_qp *qp, u64 wanted, bool signal_all)
{
	struct device *device = device_of(qp->context);
	struct queue *queue;
	u32 tables;

	lock();
	tables = tap_share.count;
	queue = queue_of(qp);
	if (queue && alive(queue->generation) && queue->number == qp->qp_num)
		goto out; /* one of our functions was called by another */
	if (queue)
		forget(queue); /* of a queue pair that was at the same address, and whose end we did not see */
	queue = queues_used < QUEUES_MOST && alive(device->generation) ? take_queue(wanted) : NULL;
	if (!queue)
		goto out;
	queue->qp = qp;
	queue->context = qp->context;
	queue->number = qp->qp_num;
	queue->send_cq = qp->send_cq;
	queue->recv_cq = qp->recv_cq;
	queue->srq = qp->srq;
	queue->device = device;
	queue->generation = tap_generation;
	queue->signal_all = signal_all;
	queue->record = &queue->own;
	describe(queue, qp);
	if (queue->srq)
		join_shared(queue);
	share(queue);
	put(queues_by_number, QUEUES_SHIFT, number_key(queue->context, queue->number), queue);
	put(queues_by_address, QUEUES_SHIFT, (u64)qp, queue);
	queues_used++;
	if (!tap_share.count)
		get_table();
	if (tap_share.count != tables)
		share_all(); /* those that found no row before, this one perhaps among them */
out:
	unlock();
	return queue;
}

/* A queue pair that was made behind our back: its requests are counted, but cannot be told from each other. */
static inline struct queue *followed(struct ibv_qp *qp)
{
	struct queue *queue = queue_of(qp);

	if (likely(queue))
		return queue;
	if (load(&queues_used) >= QUEUES_MOST || !alive(device_of(qp->context)->generation))
		return NULL;
	return follow(qp, 0, false);
}

#endif /* SWERVE_TAP_FOLLOW_H */
