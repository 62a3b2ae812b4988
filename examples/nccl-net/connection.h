/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A one-way connection over two rails: chunks with numbers, acknowledged by the receiver, sent again over the other rail.
 *
 * The immediate data of a chunk is its number and whether it ends its message. The receiver copies the chunk that is due
 * to the application, discards earlier ones as duplicates, and answers with the number that is due and how many receives
 * the application has posted so far; the sender sends no message before its receive is posted. On each change of rails
 * the sender begins with the first chunk without acknowledgement, so no rail ever skips a chunk.
 *
 * Queue pairs are exchanged over a TCP connection. One lock for all connections (plugin.c): each call moves all of them.
 */
#ifndef SWERVE_NCCL_NET_CONNECTION_H
#define SWERVE_NCCL_NET_CONNECTION_H

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "rail.h"

enum {
	ACKNOWLEDGEMENTS = 4
}; /* on their way at a time; meanwhile the next one gathers */

#define LOG(level, ...)                                                                                      \
	do {                                                                                                 \
		if (net_log)                                                                                 \
			net_log(NCCL_LOG_##level, NCCL_LOG_NET, __func__, __LINE__, "swerve: " __VA_ARGS__); \
	} while (0)

enum control_kind {
	ASK,
	ANSWER,
	WELL,
	FAILED
}; /* WELL from the sender, FAILED from the receiver */

struct control {
	uint64_t token; /* of the listener */
	uint32_t kind, rail, life, number, packet_number, mtu;
	union ibv_gid gid;
};

struct memory {
	struct ibv_mr *on[RAILS];
};

struct request {
	struct connection *connection;
	bool used, done;
	uint8_t *data;
	uint32_t bytes, moved; /* of the application's buffer; cut into chunks, or received */
	struct memory *memory;
};

struct chunk {
	struct request *request;
	uint8_t *data;
	uint32_t bytes;
	bool last;
};

struct connection {
	struct connection *following;
	bool sends, broken, established;
	int socket;
	uint64_t token, began_ns;
	struct control read; /* so far, read_bytes of it */
	size_t read_bytes;
	struct rail rails[RAILS];
	int active;
	struct request requests[NCCL_REQUESTS];
	uint32_t posted, granted;	      /* requests so far; sender: for which the receiver has a buffer */
	uint32_t turn;			      /* request that is being sent or received */
	uint32_t first, due, following_chunk; /* chunks: without acknowledgement; to be posted or received; to be cut */
	struct chunk chunks[WINDOW];
	bool acknowledge;
	uint64_t again, duplicates, failures, returns, sent;
};

static nccl_logger net_log;
static uint64_t stall_ns = 50000000, attempt_ns = 200000000;
static const char *const role[] = { "receiver", "sender" };

static bool control_send(struct connection *connection, enum control_kind kind, int rail, uint32_t life)
{
	struct rail *of = &connection->rails[rail];
	struct control control = { connection->token,
				   kind,
				   rail,
				   life,
				   of->pair ? of->pair->qp_num : 0,
				   of->packet_number,
				   of->device->port.active_mtu,
				   of->device->gid };

	if (send(connection->socket, &control, sizeof(control), MSG_NOSIGNAL) != sizeof(control))
		connection->broken = true;
	return !connection->broken;
}

static void fail(struct connection *connection, int index, const char *why)
{
	struct rail *rail = &connection->rails[index];
	bool was_up = rail->state == RAIL_UP;

	rail_end(rail);
	rail->due_ns = now_ns() + attempt_ns;
	if (!was_up)
		return;
	connection->failures++;
	connection->acknowledge = true;
	LOG(WARN, "%s: rail %d failed: %s", role[connection->sends], index, why);
	if (!connection->sends) {
		control_send(connection, FAILED, index, rail->peer_life);
	} else if (index == connection->active) { /* over whichever rail is well first */
		connection->again += connection->due - connection->first;
		connection->due = connection->first;
	}
}

static void change(struct connection *connection, int index)
{
	connection->active = index;
	connection->acknowledge = true;
	connection->returns += connection->sends && index == 0;
	LOG(INFO, "%s: rail %d from chunk %u on", role[connection->sends], index, connection->due);
}

static void well(struct connection *connection, int index)
{
	if (connection->rails[index].state == RAIL_UP)
		return;
	connection->rails[index].state = RAIL_UP;
	connection->acknowledge = true;
	LOG(INFO, "%s: rail %d is well", role[connection->sends], index);
	if (connection->sends)
		control_send(connection, WELL, index, connection->rails[index].life);
}

/* ---- control messages ---- */

static void control_take(struct connection *connection, const struct control *said)
{
	struct rail *rail = &connection->rails[said->rail % RAILS];
	int index = said->rail % RAILS;

	if (said->token != connection->token) {
		connection->broken = true;
	} else if (said->kind == ASK && !connection->sends) {
		if (!rail_begin(rail) ||
		    !rail_connect(rail, said->number, said->packet_number, &said->gid, said->mtu)) {
			rail_end(rail);
			return;
		}
		rail->peer_life = said->life;
		rail->state = RAIL_CONNECTED;
		control_send(connection, ANSWER, index, said->life);
	} else if (said->kind == ANSWER && rail->state == RAIL_ASKED && said->life == rail->life) {
		rail->state = RAIL_CONNECTED;
		if (!rail_connect(rail, said->number, said->packet_number, &said->gid, said->mtu) || !rail_probe(rail))
			fail(connection, index, "cannot connect");
	} else if (said->kind == WELL && rail->state == RAIL_CONNECTED && said->life == rail->peer_life) {
		well(connection, index);
	} else if (said->kind == FAILED && connection->sends && said->life == rail->life) {
		fail(connection, index, "the receiver says so");
	}
}

static void control_read(struct connection *connection)
{
	while (!connection->broken) {
		uint8_t *place = (uint8_t *)&connection->read + connection->read_bytes;
		ssize_t got = recv(connection->socket, place, sizeof(connection->read) - connection->read_bytes, 0);

		if (got < 0 && (errno == EAGAIN || errno == EINTR || errno == ENOTCONN))
			return;
		if (got <= 0) {
			connection->broken = true;
			return;
		}
		connection->read_bytes += got;
		if (connection->read_bytes < sizeof(connection->read))
			continue;
		connection->read_bytes = 0;
		control_take(connection, &connection->read);
	}
}

/* ---- chunks ---- */

/* Whether chunk a comes after b; numbers have 31 bits. */
static bool after(uint32_t a, uint32_t b)
{
	return (int32_t)((a - b) << 1) > 0;
}

static void chunk_take(struct connection *connection, int index, uint32_t said, const uint8_t *data, uint32_t bytes)
{
	struct request *request = &connection->requests[connection->turn % NCCL_REQUESTS];
	uint32_t number = said >> 1, due = connection->due & 0x7fffffff;

	connection->acknowledge = true;
	connection->active = index;
	if (after(due, number)) {
		connection->duplicates++;
		LOG(INFO, "receiver: chunk %u came again over rail %d", number, index);
		return;
	}
	if (number != due || connection->turn == connection->posted || bytes > request->bytes - request->moved) {
		LOG(WARN, "receiver: chunk %u of %u bytes came where %u was due", number, bytes, due);
		connection->broken = true;
		return;
	}
	memcpy(request->data + request->moved, data, bytes);
	request->moved += bytes;
	connection->due++;
	if (said & 1) {
		request->done = true;
		connection->turn++;
	}
}

static void acknowledged(struct connection *connection, uint32_t due, const uint8_t *data)
{
	uint32_t granted;

	memcpy(&granted, data, sizeof(granted));
	if ((int32_t)(granted - connection->granted) > 0)
		connection->granted = granted;
	while (after(due, connection->first & 0x7fffffff) && connection->first != connection->following_chunk) {
		struct chunk *chunk = &connection->chunks[connection->first % WINDOW];

		chunk->request->done |= chunk->last;
		if (connection->due == connection->first++)
			connection->due++;
	}
}

static void completions_read(struct connection *connection, int index)
{
	struct rail *rail = &connection->rails[index];
	struct ibv_wc done;

	while (rail->pair && ibv_poll_cq(rail->completions, 1, &done) > 0) {
		enum work kind = done.wr_id >> 16 & 0xff;
		uint32_t slot = done.wr_id & 0xffff;
		const uint8_t *data = rail->slots + (size_t)slot * rail->slot_bytes;

		if (done.wr_id >> 32 != rail->life)
			continue;
		if (done.status != IBV_WC_SUCCESS) {
			fail(connection, index, ibv_wc_status_str(done.status));
			return;
		}
		if (kind != WORK_RECEIVE) {
			rail->outstanding--;
			rail->moved_ns = now_ns();
			if (kind == WORK_PROBE)
				well(connection, index);
			continue;
		}
		if (!connection->sends)
			well(connection, index);
		if (connection->sends)
			acknowledged(connection, ntohl(done.imm_data), data);
		else
			chunk_take(connection, index, ntohl(done.imm_data), data, done.byte_len);
		if (!rail_receive(rail, slot))
			fail(connection, index, "cannot post a receive");
	}
}

static void cut(struct connection *connection)
{
	struct request *request = &connection->requests[connection->turn % NCCL_REQUESTS];
	struct chunk *chunk = &connection->chunks[connection->following_chunk % WINDOW];
	uint32_t left = request->bytes - request->moved;

	*chunk = (struct chunk){ request, request->data + request->moved, left < CHUNK_BYTES ? left : CHUNK_BYTES,
				 left <= CHUNK_BYTES };
	request->moved += chunk->bytes;
	connection->following_chunk++;
	connection->turn += chunk->last;
}

static void chunks_send(struct connection *connection)
{
	struct rail *rail = &connection->rails[connection->active];
	bool going_back = connection->active && connection->rails[0].state == RAIL_UP;

	while (!going_back && connection->turn != connection->granted && connection->turn != connection->posted &&
	       connection->following_chunk - connection->first < WINDOW)
		cut(connection);
	while (connection->due != connection->following_chunk && rail->outstanding < WINDOW) {
		struct chunk *chunk = &connection->chunks[connection->due % WINDOW];
		uint32_t key = chunk->bytes ? chunk->request->memory->on[connection->active]->lkey : 0;

		if (!rail_send(rail, chunk->data, chunk->bytes, key, connection->due << 1 | chunk->last, false)) {
			fail(connection, connection->active, "cannot post");
			return;
		}
		connection->due++;
		connection->sent++;
	}
	if (going_back && connection->first == connection->following_chunk)
		change(connection, 0);
}

static void acknowledge(struct connection *connection)
{
	struct rail *rail = &connection->rails[connection->active];
	uint32_t said[ACK_BYTES / 4] = { connection->posted };

	if (!connection->acknowledge || rail->outstanding >= ACKNOWLEDGEMENTS)
		return;
	connection->acknowledge = false;
	if (!rail_send(rail, said, sizeof(said), 0, connection->due & 0x7fffffff, true))
		fail(connection, connection->active, "cannot post");
}

static bool connected(struct connection *connection)
{
	struct pollfd ready = { connection->socket, POLLOUT, 0 };

	return poll(&ready, 1, 0) == 1 && ready.revents & POLLOUT;
}

static void attempt(struct connection *connection, int index, uint64_t now)
{
	struct rail *rail = &connection->rails[index];

	if (rail->state == RAIL_UP || now < rail->due_ns || !connected(connection))
		return;
	rail->due_ns = now + attempt_ns;
	if (rail_begin(rail) && control_send(connection, ASK, index, rail->life))
		rail->state = RAIL_ASKED;
}

/* Does what can be done without waiting. A rail on which nothing completes for too long has failed. */
static void progress(struct connection *connection)
{
	uint64_t now = now_ns(); /* before completions are read: what had completed by then is no stall */

	control_read(connection);
	for (int index = 0; index < RAILS; index++) {
		struct rail *rail = &connection->rails[index];

		completions_read(connection, index);
		if (rail->state == RAIL_UP && rail->outstanding && now > rail->moved_ns + stall_ns)
			fail(connection, index, "nothing completed for too long");
		if (connection->sends && !connection->broken)
			attempt(connection, index, now);
	}
	for (int index = 0; connection->established && index < RAILS; index++)
		if (connection->rails[connection->active].state != RAIL_UP && connection->rails[index].state == RAIL_UP)
			change(connection, index);
	if (connection->rails[connection->active].state != RAIL_UP)
		return;
	if (connection->sends)
		chunks_send(connection);
	else
		acknowledge(connection);
}

#endif
