/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Our functions in the place of the provider's: those of struct ibv_context and of struct ibv_cq_ex.
 */
#ifndef SWERVE_TAP_REQUESTS_H
#define SWERVE_TAP_REQUESTS_H

#include "follow.h"

/* ---- requests: struct ibv_context ------------------------------------------------------------------------------ */

static inline u64 send_bytes(const struct ibv_send_wr *wr)
{
	u64 bytes = 0;

	if (wr->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wr->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
		return 8;
	for (int i = 0; i < wr->num_sge; i++)
		bytes += wr->sg_list[i].length;
	return wr->opcode == IBV_WR_TSO ? bytes + wr->tso.hdr_sz : bytes;
}

/* From the request that was refused on. */
slow_path static void take_back_list(struct queue *queue, const struct posting *posting, const struct ibv_send_wr *wr,
				     const struct ibv_send_wr *bad)
{
	u64 index = 0, from;
	bool free = true;

	for (; wr && wr != bad; wr = wr->next)
		index++;
	from = index;
	for (; wr; wr = wr->next, index++)
		free &= take_back(queue, posting, index, wr->wr_id, send_bytes(wr), wr->opcode,
				  wr->send_flags & IBV_SEND_SIGNALED);
	if (free)
		reuse_places(queue, posting, from);
}

static int tap_post_send(struct ibv_qp *qp, struct ibv_send_wr *list, struct ibv_send_wr **bad)
{
	struct queue *queue = followed(qp);
	const struct ibv_send_wr *wr;
	struct posting posting;
	u64 count = 0;
	int result;

	if (unlikely(!queue || !alive(queue->generation)))
		return device_of(qp->context)->ops.post_send(qp, list, bad);
	for (wr = list; wr; wr = wr->next)
		count++;
	begin_posting(queue, &posting, count);
	count = 0;
	for (wr = list; wr; wr = wr->next)
		post_one(queue, &posting, count++, wr->wr_id, send_bytes(wr), wr->opcode,
			 wr->send_flags & IBV_SEND_SIGNALED);
	end_posting(queue, &posting);
	result = queue->device->ops.post_send(qp, list, bad);
	if (unlikely(result))
		take_back_list(queue, &posting, list, *bad);
	return result;
}

static inline u64 receives_from(const struct ibv_recv_wr *wr)
{
	u64 count = 0;

	for (; wr; wr = wr->next)
		count++;
	return count;
}

static int tap_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *list, struct ibv_recv_wr **bad)
{
	struct queue *queue = followed(qp);
	int result;

	if (unlikely(!queue || !alive(queue->generation)))
		return device_of(qp->context)->ops.post_recv(qp, list, bad);
	add(false, &queue->record->receives_posted, receives_from(list));
	result = queue->device->ops.post_recv(qp, list, bad);
	if (unlikely(result))
		add(false, &queue->record->receives_posted, -receives_from(*bad));
	return result;
}

static struct shared *shared_of(struct ibv_srq *srq)
{
	struct shared *shared = look_up(srqs_by_address, SRQS_SHIFT, (u64)srq);

	if (likely(shared))
		return shared;
	lock();
	shared = look_up(srqs_by_address, SRQS_SHIFT, (u64)srq);
	if (!shared) {
		shared = pages(sizeof(*shared));
		if (shared && !put(srqs_by_address, SRQS_SHIFT, (u64)srq, shared))
			shared = NULL;
	}
	unlock();
	return shared;
}

static void count_shared(struct shared *shared, u64 more)
{
	struct queue *queue = load_acquire(&shared->queue);

	add(false, queue ? &queue->record->receives_posted : &shared->waiting, more);
}

static int tap_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *list, struct ibv_recv_wr **bad)
{
	struct device *device = device_of(srq->context);
	struct shared *shared = alive(device->generation) ? shared_of(srq) : NULL;
	int result;

	if (shared)
		count_shared(shared, receives_from(list));
	result = device->ops.post_srq_recv(srq, list, bad);
	if (unlikely(result && shared))
		count_shared(shared, -receives_from(*bad));
	return result;
}

/* Some providers make a post of this, others do not. */
static int tap_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
	struct queue *queue = followed(qp);
	struct posting posting;
	u64 before;
	int result;

	if (unlikely(!queue || !alive(queue->generation)))
		return device_of(qp->context)->ops.bind_mw(qp, mw, bind);
	before = load(&queue->record->posted) + load(&queue->record->refused);
	result = queue->device->ops.bind_mw(qp, mw, bind);
	if (!result && before == load(&queue->record->posted) + load(&queue->record->refused)) {
		begin_posting(queue, &posting, 1);
		post_one(queue, &posting, 0, bind->wr_id, 0, IBV_WR_BIND_MW, bind->send_flags & IBV_SEND_SIGNALED);
		end_posting(queue, &posting);
	}
	return result;
}

static int tap_poll_cq(struct ibv_cq *cq, int most, struct ibv_wc *wc)
{
	struct device *device = device_of(cq->context);
	int found = device->ops.poll_cq(cq, most, wc), i = 0;
	struct completing completing;
	struct queue *queue;
	u64 now = 0;

	if (found <= 0 || unlikely(!alive(device->generation)))
		return found;
	while (i < found) {
		queue = queue_of_number(cq->context, wc[i].qp_num);
		if (unlikely(!queue || !alive(queue->generation))) {
			i++;
			continue;
		}
		begin_completing(queue, &completing, now);
		do {
			complete_one(queue, &completing, cq, wc[i].wr_id, wc[i].status, wc[i].opcode, wc[i].byte_len);
			i++;
		} while (i < found && wc[i].qp_num == queue->number);
		end_completing(queue, &completing);
		now = completing.now;
	}
	return found;
}

/* ---- requests: struct ibv_cq_ex -------------------------------------------------------------------------------- */

static inline void complete_extended(struct device *device, struct ibv_cq_ex *cq)
{
	struct completing completing;
	struct queue *queue;
	u32 opcode = 0;
	u64 bytes = 0;

	if (unlikely(!alive(device->generation) || !cq->read_qp_num))
		return;
	queue = queue_of_number(cq->context, cq->read_qp_num(cq));
	if (unlikely(!queue || !alive(queue->generation)))
		return;
	if (likely(!cq->status)) {
		opcode = cq->read_opcode(cq);
		if (opcode & IBV_WC_RECV && cq->read_byte_len)
			bytes = cq->read_byte_len(cq);
	}
	begin_completing(queue, &completing, 0);
	complete_one(queue, &completing, (struct ibv_cq *)cq, cq->wr_id, cq->status, opcode, bytes);
	end_completing(queue, &completing);
}

static int tap_start_poll(struct ibv_cq_ex *cq, struct ibv_poll_cq_attr *attr)
{
	struct extended_cq *own = look_up(cqs_by_address, CQS_SHIFT, (u64)cq);
	int result = own->start_poll(cq, attr);

	if (!result)
		complete_extended(own->device, cq);
	return result;
}

static int tap_next_poll(struct ibv_cq_ex *cq)
{
	struct extended_cq *own = look_up(cqs_by_address, CQS_SHIFT, (u64)cq);
	int result = own->next_poll(cq);

	if (!result)
		complete_extended(own->device, cq);
	return result;
}

static struct ibv_cq_ex *tap_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr)
{
	struct device *device = device_of(context);
	struct ibv_cq_init_attr_ex wider = *attr;
	struct extended_cq *own;
	struct ibv_cq_ex *cq;

	/* Which queue pair a completion is of, the provider tells only if asked when the queue is made. */
	wider.wc_flags |= IBV_WC_EX_WITH_QP_NUM | IBV_WC_EX_WITH_BYTE_LEN;
	cq = device->create_cq_ex(context, alive(device->generation) ? &wider : attr);
	if (!cq && wider.wc_flags != attr->wc_flags)
		cq = device->create_cq_ex(context, attr);
	if (!cq || !cq->start_poll || !cq->next_poll || !alive(device->generation))
		return cq;
	lock();
	own = pages(
		sizeof(*own)); /* one that is there belongs to a queue that was at the same address, and goes with it */
	if (own) {
		own->device = device;
		own->start_poll = cq->start_poll;
		own->next_poll = cq->next_poll;
	}
	if (own && put(cqs_by_address, CQS_SHIFT, (u64)cq, own)) {
		cq->start_poll = tap_start_poll;
		cq->next_poll = tap_next_poll;
	}
	unlock();
	return cq;
}

#endif /* SWERVE_TAP_REQUESTS_H */
