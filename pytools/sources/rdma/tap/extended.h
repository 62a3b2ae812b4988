/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Our functions in the place of the provider's: those of struct ibv_qp_ex, which build requests piece by piece.
 */
#ifndef SWERVE_TAP_EXTENDED_H
#define SWERVE_TAP_EXTENDED_H

#include "follow.h"

/* Between start and complete the application has the queue pair to itself: providers hold their lock for it. */
static inline void stage(struct queue *queue, const struct ibv_qp_ex *ex, u32 opcode, u64 bytes)
{
	u64 at = queue->staged++;

	if (likely(at < queue->capacity))
		queue->stage[at] = (struct staged){ ex->wr_id, bytes, opcode, ex->wr_flags & IBV_SEND_SIGNALED };
}

static inline void stage_bytes(struct queue *queue, u64 bytes)
{
	u64 at = queue->staged - 1;
	struct staged *last;

	if (unlikely(at >= queue->capacity))
		return;
	last = &queue->stage[at];
	if (last->opcode != IBV_WR_ATOMIC_CMP_AND_SWP && last->opcode != IBV_WR_ATOMIC_FETCH_AND_ADD)
		last->bytes += bytes;
}

static void tap_wr_start(struct ibv_qp_ex *ex)
{
	struct queue *queue = queue_of(&ex->qp_base);

	queue->original.wr_start(ex);
	queue->staged = 0;
}

static int tap_wr_complete(struct ibv_qp_ex *ex)
{
	struct queue *queue = queue_of(&ex->qp_base);
	u64 count = queue->staged;
	struct posting posting;
	struct staged *each;
	bool free = true;
	int result;

	if (unlikely(!alive(queue->generation) || count > queue->capacity))
		return queue->original.wr_complete(ex);
	begin_posting(queue, &posting, count);
	for (u64 i = 0; i < count; i++) {
		each = &queue->stage[i];
		post_one(queue, &posting, i, each->wr_id, each->bytes, each->opcode, each->signalled);
	}
	end_posting(queue, &posting);
	result = queue->original.wr_complete(ex);
	if (unlikely(result)) {
		for (u64 i = 0; i < count; i++) {
			each = &queue->stage[i];
			free &= take_back(queue, &posting, i, each->wr_id, each->bytes, each->opcode, each->signalled);
		}
		if (free)
			reuse_places(queue, &posting, 0);
	}
	return result;
}

#define STAGED(name, opcode, bytes, parameters, arguments)    \
	static void tap_##name parameters                     \
	{                                                     \
		struct queue *queue = queue_of(&ex->qp_base); \
                                                              \
		stage(queue, ex, opcode, bytes);              \
		queue->original.name arguments;               \
	}

STAGED(wr_atomic_cmp_swp, IBV_WR_ATOMIC_CMP_AND_SWP, 8,
       (struct ibv_qp_ex * ex, uint32_t key, uint64_t at, uint64_t compare, uint64_t swap),
       (ex, key, at, compare, swap))
STAGED(wr_atomic_fetch_add, IBV_WR_ATOMIC_FETCH_AND_ADD, 8,
       (struct ibv_qp_ex * ex, uint32_t key, uint64_t at, uint64_t more), (ex, key, at, more))
STAGED(wr_atomic_write, IBV_WR_ATOMIC_WRITE, 8, (struct ibv_qp_ex * ex, uint32_t key, uint64_t at, const void *what),
       (ex, key, at, what))
STAGED(wr_bind_mw, IBV_WR_BIND_MW, 0,
       (struct ibv_qp_ex * ex, struct ibv_mw *mw, uint32_t key, const struct ibv_mw_bind_info *info),
       (ex, mw, key, info))
STAGED(wr_local_inv, IBV_WR_LOCAL_INV, 0, (struct ibv_qp_ex * ex, uint32_t key), (ex, key))
STAGED(wr_rdma_read, IBV_WR_RDMA_READ, 0, (struct ibv_qp_ex * ex, uint32_t key, uint64_t at), (ex, key, at))
STAGED(wr_rdma_write, IBV_WR_RDMA_WRITE, 0, (struct ibv_qp_ex * ex, uint32_t key, uint64_t at), (ex, key, at))
STAGED(wr_rdma_write_imm, IBV_WR_RDMA_WRITE_WITH_IMM, 0,
       (struct ibv_qp_ex * ex, uint32_t key, uint64_t at, __be32 immediate), (ex, key, at, immediate))
STAGED(wr_send, IBV_WR_SEND, 0, (struct ibv_qp_ex * ex), (ex))
STAGED(wr_send_imm, IBV_WR_SEND_WITH_IMM, 0, (struct ibv_qp_ex * ex, __be32 immediate), (ex, immediate))
STAGED(wr_send_inv, IBV_WR_SEND_WITH_INV, 0, (struct ibv_qp_ex * ex, uint32_t key), (ex, key))
STAGED(wr_send_tso, IBV_WR_TSO, size, (struct ibv_qp_ex * ex, void *header, uint16_t size, uint16_t mss),
       (ex, header, size, mss))

static void tap_wr_set_inline_data(struct ibv_qp_ex *ex, void *at, size_t length)
{
	struct queue *queue = queue_of(&ex->qp_base);

	stage_bytes(queue, length);
	queue->original.wr_set_inline_data(ex, at, length);
}

static void tap_wr_set_inline_data_list(struct ibv_qp_ex *ex, size_t count, const struct ibv_data_buf *list)
{
	struct queue *queue = queue_of(&ex->qp_base);

	for (size_t i = 0; i < count; i++)
		stage_bytes(queue, list[i].length);
	queue->original.wr_set_inline_data_list(ex, count, list);
}

static void tap_wr_set_sge(struct ibv_qp_ex *ex, uint32_t key, uint64_t at, uint32_t length)
{
	struct queue *queue = queue_of(&ex->qp_base);

	stage_bytes(queue, length);
	queue->original.wr_set_sge(ex, key, at, length);
}

static void tap_wr_set_sge_list(struct ibv_qp_ex *ex, size_t count, const struct ibv_sge *list)
{
	struct queue *queue = queue_of(&ex->qp_base);

	for (size_t i = 0; i < count; i++)
		stage_bytes(queue, list[i].length);
	queue->original.wr_set_sge_list(ex, count, list);
}

#define TAKE_PLACE(name)                       \
	do {                                   \
		if (ex->name)                  \
			ex->name = tap_##name; \
	} while (0)

/* atomic_write is the newest member: older libraries end before it. */
slow_path static void take_place_in_qp_ex(struct queue *queue, struct ibv_qp_ex *ex, bool atomic_write)
{
	memcpy(&queue->original, ex, offsetof(struct ibv_qp_ex, wr_atomic_write));
	if (atomic_write) {
		queue->original.wr_atomic_write = ex->wr_atomic_write;
		TAKE_PLACE(wr_atomic_write);
	}
	TAKE_PLACE(wr_atomic_cmp_swp);
	TAKE_PLACE(wr_atomic_fetch_add);
	TAKE_PLACE(wr_bind_mw);
	TAKE_PLACE(wr_local_inv);
	TAKE_PLACE(wr_rdma_read);
	TAKE_PLACE(wr_rdma_write);
	TAKE_PLACE(wr_rdma_write_imm);
	TAKE_PLACE(wr_send);
	TAKE_PLACE(wr_send_imm);
	TAKE_PLACE(wr_send_inv);
	TAKE_PLACE(wr_send_tso);
	TAKE_PLACE(wr_set_inline_data);
	TAKE_PLACE(wr_set_inline_data_list);
	TAKE_PLACE(wr_set_sge);
	TAKE_PLACE(wr_set_sge_list);
	TAKE_PLACE(wr_start);
	TAKE_PLACE(wr_complete);
	queue->extended = true;
}

static struct ibv_qp *tap_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
	struct device *device = device_of(context);
	struct ibv_qp *qp = device->create_qp_ex(context, attr);
	struct queue *queue;

	if (!qp || !alive(device->generation))
		return qp;
	queue = follow(qp, attr->cap.max_send_wr, attr->sq_sig_all);
	if (queue)
		queue->atomic_write = attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS &&
				      attr->send_ops_flags & IBV_QP_EX_WITH_ATOMIC_WRITE;
	return qp;
}

#endif /* SWERVE_TAP_EXTENDED_H */
