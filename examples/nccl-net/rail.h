/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * One rail of a connection: a queue pair between a device here and one of the peer, and whether it works.
 *
 * Each attempt to establish it is a life, with a new queue pair: packets and completions of earlier lives reach nobody.
 */
#ifndef SWERVE_NCCL_NET_RAIL_H
#define SWERVE_NCCL_NET_RAIL_H

#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "net.h"

enum {
	RAILS = 2, /* the first one is the primary */
	CHUNK_BYTES = 32768,
	WINDOW = 16, /* chunks without acknowledgement */
	SLOTS = 64,  /* receives posted: more than the peer sends before it must hear from us */
	ACK_BYTES = 8,
};

enum rail_state {
	RAIL_DOWN,
	RAIL_ASKED,	/* the sender waits for the receiver's queue pair */
	RAIL_CONNECTED, /* both queue pairs are there; nothing has passed */
	RAIL_UP,
};

enum work {
	WORK_SEND,
	WORK_PROBE,
	WORK_RECEIVE
};

struct device {
	struct ibv_context *context;
	struct ibv_pd *domain;
	struct ibv_port_attr port;
	union ibv_gid gid;
	int gid_index;
};

struct rail {
	struct device *device;
	struct ibv_cq *completions;
	struct ibv_qp *pair;
	struct ibv_mr *memory;
	uint8_t *slots;
	uint32_t slot_bytes;
	enum rail_state state;
	uint32_t life, peer_life, packet_number;
	uint32_t outstanding; /* work requests without completion */
	uint64_t moved_ns;    /* last completion, or the first request after none were outstanding */
	uint64_t due_ns;      /* of the next attempt */
};

static struct device devices[RAILS];

static inline uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + now.tv_nsec;
}

/* The first IPv4 address with RoCE v2 in the first port's table. */
static bool device_open(struct device *device, const char *name)
{
	struct ibv_device **listed = ibv_get_device_list(NULL);
	struct ibv_gid_entry gid;

	for (struct ibv_device **each = listed; each && *each && !device->context; each++)
		if (!strcmp(ibv_get_device_name(*each), name))
			device->context = ibv_open_device(*each);
	if (listed)
		ibv_free_device_list(listed);
	if (!device->context || ibv_query_port(device->context, 1, &device->port))
		return false;
	for (int index = 0; index < device->port.gid_tbl_len; index++) {
		if (ibv_query_gid_ex(device->context, 1, index, &gid, 0) || gid.gid_type != IBV_GID_TYPE_ROCE_V2)
			continue;
		if (memcmp(gid.gid.raw, "\0\0\0\0\0\0\0\0\0\0\xff\xff", 12))
			continue;
		device->gid = gid.gid;
		device->gid_index = index;
		device->domain = ibv_alloc_pd(device->context);
		return device->domain != NULL;
	}
	return false;
}

static bool rail_open(struct rail *rail, struct device *device, uint32_t slot_bytes)
{
	rail->device = device;
	rail->slot_bytes = slot_bytes;
	rail->completions = ibv_create_cq(device->context, 2 * (SLOTS + WINDOW), NULL, NULL, 0);
	rail->slots = calloc(SLOTS, slot_bytes);
	if (rail->slots)
		rail->memory = ibv_reg_mr(device->domain, rail->slots, SLOTS * slot_bytes, IBV_ACCESS_LOCAL_WRITE);
	return rail->completions && rail->memory;
}

/* Ends this life: nothing more is sent, and no memory of the application is read any more. */
static void rail_end(struct rail *rail)
{
	if (rail->pair)
		ibv_destroy_qp(rail->pair);
	rail->pair = NULL;
	rail->outstanding = 0;
	rail->state = RAIL_DOWN;
}

static void rail_close(struct rail *rail)
{
	rail_end(rail);
	if (rail->memory)
		ibv_dereg_mr(rail->memory);
	if (rail->completions)
		ibv_destroy_cq(rail->completions);
	free(rail->slots);
}

static uint64_t work_id(const struct rail *rail, enum work kind, uint32_t slot)
{
	return (uint64_t)rail->life << 32 | kind << 16 | slot;
}

static bool rail_receive(struct rail *rail, uint32_t slot)
{
	struct ibv_sge place = { (uintptr_t)rail->slots + (size_t)slot * rail->slot_bytes, rail->slot_bytes,
				 rail->memory->lkey };
	struct ibv_recv_wr *bad,
		request = { .wr_id = work_id(rail, WORK_RECEIVE, slot), .sg_list = &place, .num_sge = 1 };

	return !ibv_post_recv(rail->pair, &request, &bad);
}

/* Begins a life: a queue pair with all its receives, not connected yet. */
static bool rail_begin(struct rail *rail)
{
	struct ibv_qp_init_attr wanted = {
		.send_cq = rail->completions,
		.recv_cq = rail->completions,
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = 1,
		.cap = { .max_send_wr = WINDOW + 1,
			 .max_recv_wr = SLOTS,
			 .max_send_sge = 1,
			 .max_recv_sge = 1,
			 .max_inline_data = ACK_BYTES },
	};
	struct ibv_qp_attr attributes = { .qp_state = IBV_QPS_INIT,
					  .port_num = 1,
					  .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
	struct ibv_wc stale;

	rail_end(rail);
	while (ibv_poll_cq(rail->completions, 1, &stale) > 0)
		;
	rail->life++;
	if (getrandom(&rail->packet_number, sizeof(rail->packet_number), 0) < 0)
		return false;
	rail->packet_number &= 0xffffff;
	rail->pair = ibv_create_qp(rail->device->domain, &wanted);
	if (!rail->pair || ibv_modify_qp(rail->pair, &attributes,
					 IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
		return false;
	for (uint32_t slot = 0; slot < SLOTS; slot++)
		if (!rail_receive(rail, slot))
			return false;
	return true;
}

/* A packet is sent again after 4.096 us * 2^14 = 67 ms, six times: seven is without end on Soft-RoCE. */
static bool rail_connect(struct rail *rail, uint32_t number, uint32_t packet_number, const union ibv_gid *gid, int mtu)
{
	struct ibv_qp_attr receive = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu =
			mtu < (int)rail->device->port.active_mtu ? (enum ibv_mtu)mtu : rail->device->port.active_mtu,
		.dest_qp_num = number,
		.rq_psn = packet_number,
		.max_dest_rd_atomic = 1,
		.min_rnr_timer = 1,
		.ah_attr = { .is_global = 1,
			     .port_num = 1,
			     .grh = { .dgid = *gid, .sgid_index = rail->device->gid_index, .hop_limit = 64 } },
	};
	struct ibv_qp_attr send = { .qp_state = IBV_QPS_RTS,
				    .sq_psn = rail->packet_number,
				    .timeout = 14,
				    .retry_cnt = 6,
				    .rnr_retry = 7,
				    .max_rd_atomic = 1 };

	return !ibv_modify_qp(rail->pair, &receive,
			      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) &&
	       !ibv_modify_qp(rail->pair, &send,
			      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
				      IBV_QP_MAX_QP_RD_ATOMIC);
}

static bool rail_post(struct rail *rail, struct ibv_send_wr *request, enum work kind)
{
	struct ibv_send_wr *bad;

	request->wr_id = work_id(rail, kind, 0);
	if (ibv_post_send(rail->pair, request, &bad))
		return false;
	if (!rail->outstanding++)
		rail->moved_ns = now_ns();
	return true;
}

/* What is said is in the immediate data, which a late retransmission cannot change; the bytes it could. */
static bool rail_send(struct rail *rail, void *data, uint32_t bytes, uint32_t key, uint32_t said, bool copied)
{
	struct ibv_sge place = { (uintptr_t)data, bytes, key };
	struct ibv_send_wr request = { .opcode = IBV_WR_SEND_WITH_IMM,
				       .imm_data = htonl(said),
				       .sg_list = &place,
				       .num_sge = bytes ? 1 : 0,
				       .send_flags = copied ? IBV_SEND_INLINE : 0 };

	return rail_post(rail, &request, WORK_SEND);
}

/* A write of no bytes: the peer's device answers it, without a receive or a key. */
static bool rail_probe(struct rail *rail)
{
	struct ibv_send_wr request = { .opcode = IBV_WR_RDMA_WRITE };

	return rail_post(rail, &request, WORK_PROBE);
}

#endif
