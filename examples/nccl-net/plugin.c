/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A prototype of a network plugin for NCCL that survives the loss of a rail: README.md says what is proven.
 *
 *     SWERVE_NET_RAILS     the primary's and the backup's RDMA device: rxe0,rxe1
 *     SWERVE_NET_ADDRESS   IPv4 address at which peers exchange their queue pairs (default: 127.0.0.1)
 *     SWERVE_NET_STALL_MS  a rail has failed when nothing completed for so long (default: 50)
 *
 * NCCL sees one device, which is both rails. Memory of the host only; messages match receives in order, tags are ignored.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>

#include "connection.h"

struct handle {
	struct sockaddr_in address;
	uint64_t token;
	struct connection *begun; /* by connect, which is called with this handle until it is done */
};

struct listener {
	int socket;
	uint64_t token;
	struct connection *begun;
};

_Static_assert(sizeof(struct handle) <= NCCL_HANDLE_BYTES, "a handle has room");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct connection *connections;

static int net_init(nccl_logger log)
{
	const char *rails = getenv("SWERVE_NET_RAILS"), *stall = getenv("SWERVE_NET_STALL_MS");
	char *names = rails ? strdup(rails) : NULL, *rest = names;
	bool opened = names != NULL;

	net_log = log;
	if (stall && atoi(stall) > 0)
		stall_ns = atoi(stall) * 1000000ull;
	attempt_ns = 4 * stall_ns;
	attempt_ns = attempt_ns < 200000000 ? 200000000 : attempt_ns > 1000000000 ? 1000000000 : attempt_ns;
	for (int index = 0; opened && index < RAILS; index++) {
		const char *name = strsep(&rest, ",");

		opened = name && (devices[index].context || device_open(&devices[index], name));
		if (!opened)
			LOG(WARN, "rail %d: no RDMA device %s with a RoCE v2 GID of IPv4", index,
			    name ? name : "given");
	}
	free(names);
	return opened ? NCCL_SUCCESS : NCCL_SYSTEM_ERROR; /* NCCL then takes its own network */
}

static int net_devices(int *count)
{
	*count = 1;
	return NCCL_SUCCESS;
}

static int net_properties(int device, struct nccl_net_properties *properties)
{
	(void)device;
	*properties = (struct nccl_net_properties){
		.name = "swerve",
		.guid = devices[0].gid.global.interface_id,
		.memory = NCCL_PTR_HOST,
		.speed_mbps = 10000,
		.port = 1,
		.most_connections = 1024,
		.most_grouped_receives = 1,
	};
	return NCCL_SUCCESS;
}

static void connection_free(struct connection *connection)
{
	for (struct connection **each = &connections; *each; each = &(*each)->following)
		if (*each == connection) {
			*each = connection->following;
			break;
		}
	for (int index = 0; index < RAILS; index++)
		rail_close(&connection->rails[index]);
	close(connection->socket);
	free(connection);
}

static struct connection *connection_new(bool sends, int socket, uint64_t token)
{
	struct connection *connection = calloc(1, sizeof(*connection));

	if (!connection) {
		close(socket);
		return NULL;
	}
	*connection = (struct connection){
		.following = connections, .sends = sends, .socket = socket, .token = token, .began_ns = now_ns()
	};
	connections = connection;
	for (int index = 0; index < RAILS; index++)
		if (!rail_open(&connection->rails[index], &devices[index], sends ? ACK_BYTES : CHUNK_BYTES)) {
			connection_free(connection);
			return NULL;
		}
	return connection;
}

static void progress_all(void)
{
	for (struct connection *each = connections; each; each = each->following)
		progress(each);
}

/* With both rails, or after a second with one. A connection that is broken goes. */
static int established(struct connection **begun, void **connection)
{
	int up = 0;

	progress_all();
	for (int index = 0; index < RAILS; index++)
		up += (*begun)->rails[index].state == RAIL_UP;
	if ((*begun)->broken) {
		connection_free(*begun);
		*begun = NULL;
		return NCCL_REMOTE_ERROR;
	}
	if (up == RAILS || (up && now_ns() > (*begun)->began_ns + 1000000000ull)) {
		(*begun)->established = true;
		*connection = *begun;
		*begun = NULL;
	}
	return NCCL_SUCCESS;
}

static int net_listen(int device, void *opaque, void **result)
{
	struct handle *handle = opaque;
	struct listener *listener = calloc(1, sizeof(*listener));
	const char *address = getenv("SWERVE_NET_ADDRESS");
	socklen_t length = sizeof(handle->address);

	(void)device;
	memset(handle, 0, sizeof(*handle));
	handle->address.sin_family = AF_INET;
	if (!listener)
		return NCCL_SYSTEM_ERROR;
	listener->socket = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (inet_pton(AF_INET, address ? address : "127.0.0.1", &handle->address.sin_addr) != 1 ||
	    getrandom(&listener->token, sizeof(listener->token), 0) < 0 ||
	    bind(listener->socket, (struct sockaddr *)&handle->address, length) || listen(listener->socket, 8) ||
	    getsockname(listener->socket, (struct sockaddr *)&handle->address, &length)) {
		close(listener->socket);
		free(listener);
		return NCCL_SYSTEM_ERROR;
	}
	handle->token = listener->token;
	*result = listener;
	return NCCL_SUCCESS;
}

static int net_connect(int device, void *opaque, void **sender, void **offload)
{
	struct handle *handle = opaque;
	int result = NCCL_SUCCESS;

	(void)device, (void)offload;
	*sender = NULL;
	pthread_mutex_lock(&lock);
	if (!handle->begun) {
		int to = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

		if (to < 0 || (connect(to, (struct sockaddr *)&handle->address, sizeof(handle->address)) &&
			       errno != EINPROGRESS)) {
			close(to);
			result = NCCL_REMOTE_ERROR;
		} else {
			handle->begun = connection_new(true, to, handle->token);
		}
	}
	if (handle->begun)
		result = established(&handle->begun, sender);
	else if (!result)
		result = NCCL_SYSTEM_ERROR;
	pthread_mutex_unlock(&lock);
	return result;
}

static int net_accept(void *opaque, void **receiver, void **offload)
{
	struct listener *listener = opaque;
	int result = NCCL_SUCCESS;

	(void)offload;
	*receiver = NULL;
	pthread_mutex_lock(&lock);
	if (!listener->begun) {
		int from = accept4(listener->socket, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);

		if (from >= 0 && !(listener->begun = connection_new(false, from, listener->token)))
			result = NCCL_SYSTEM_ERROR;
	}
	if (listener->begun && established(&listener->begun, receiver))
		LOG(WARN, "receiver: one that connected is no peer, or has gone");
	pthread_mutex_unlock(&lock);
	return result;
}

static int net_register(void *opaque, void *data, size_t size, int type, void **result)
{
	struct memory *memory = calloc(1, sizeof(*memory));

	(void)opaque;
	if (!memory || type != NCCL_PTR_HOST) {
		free(memory);
		return NCCL_INVALID_USAGE;
	}
	for (int index = 0; index < RAILS; index++)
		memory->on[index] = ibv_reg_mr(devices[index].domain, data, size, IBV_ACCESS_LOCAL_WRITE);
	*result = memory;
	return memory->on[0] && memory->on[1] ? NCCL_SUCCESS : NCCL_SYSTEM_ERROR;
}

static int net_register_dmabuf(void *opaque, void *data, size_t size, int type, uint64_t offset, int fd, void **result)
{
	(void)opaque, (void)data, (void)size, (void)type, (void)offset, (void)fd, (void)result;
	return NCCL_INVALID_USAGE;
}

static int net_deregister(void *opaque, void *registered)
{
	struct memory *memory = registered;

	(void)opaque;
	for (int index = 0; index < RAILS; index++)
		if (memory->on[index])
			ibv_dereg_mr(memory->on[index]);
	free(memory);
	return NCCL_SUCCESS;
}

/* The next request in order; none while all are used. */
static int request_new(struct connection *connection, void *data, int size, void *memory, void **result)
{
	struct request *request = &connection->requests[connection->posted % NCCL_REQUESTS];

	*result = NULL;
	if (size < 0 || (connection->sends && size && !memory))
		return NCCL_INVALID_ARGUMENT;
	pthread_mutex_lock(&lock);
	if (connection->broken) {
		pthread_mutex_unlock(&lock);
		return NCCL_REMOTE_ERROR;
	}
	if (!request->used) {
		*request = (struct request){ connection, true, false, data, size, 0, memory };
		connection->posted++;
		connection->acknowledge = true;
		*result = request;
	}
	progress_all();
	pthread_mutex_unlock(&lock);
	return NCCL_SUCCESS;
}

static int net_isend(void *sender, void *data, int size, int tag, void *memory, void **request)
{
	(void)tag;
	return request_new(sender, data, size, memory, request);
}

static int net_irecv(void *receiver, int count, void **data, int *sizes, int *tags, void **memory, void **request)
{
	(void)tags, (void)memory;
	if (count != 1)
		return NCCL_INVALID_USAGE;
	return request_new(receiver, data[0], sizes[0], NULL, request);
}

static int net_iflush(void *receiver, int count, void **data, int *sizes, void **memory, void **request)
{
	(void)receiver, (void)count, (void)data, (void)sizes, (void)memory;
	*request = NULL; /* memory of the host needs none */
	return NCCL_SUCCESS;
}

static int net_test(void *opaque, int *done, int *sizes)
{
	struct request *request = opaque;
	int result = NCCL_SUCCESS;

	pthread_mutex_lock(&lock);
	progress_all();
	*done = request->done;
	if (request->done) {
		if (sizes)
			*sizes = request->moved;
		request->used = false;
	} else if (request->connection->broken) {
		result = NCCL_REMOTE_ERROR;
	}
	pthread_mutex_unlock(&lock);
	return result;
}

/* A receiver goes when its last acknowledgement has arrived, or nobody takes it any more. */
static int net_close(void *opaque)
{
	struct connection *connection = opaque;
	uint64_t end_ns = now_ns() + 1000000000ull + 2 * attempt_ns;

	pthread_mutex_lock(&lock);
	while (!connection->sends && !connection->broken && now_ns() < end_ns &&
	       (connection->acknowledge || connection->rails[connection->active].outstanding))
		progress_all();
	LOG(INFO, "%s: chunks=%llu again=%llu duplicates=%llu failures=%llu returns=%llu", role[connection->sends],
	    (unsigned long long)connection->sent, (unsigned long long)connection->again,
	    (unsigned long long)connection->duplicates, (unsigned long long)connection->failures,
	    (unsigned long long)connection->returns);
	connection_free(connection);
	pthread_mutex_unlock(&lock);
	return NCCL_SUCCESS;
}

static int net_close_listen(void *opaque)
{
	struct listener *listener = opaque;

	pthread_mutex_lock(&lock);
	if (listener->begun)
		connection_free(listener->begun);
	pthread_mutex_unlock(&lock);
	close(listener->socket);
	free(listener);
	return NCCL_SUCCESS;
}

__attribute__((visibility("default"))) const struct nccl_net ncclNet_v8 = {
	.name = "swerve",
	.init = net_init,
	.devices = net_devices,
	.get_properties = net_properties,
	.listen = net_listen,
	.connect = net_connect,
	.accept = net_accept,
	.register_memory = net_register,
	.register_dmabuf = net_register_dmabuf,
	.deregister_memory = net_deregister,
	.isend = net_isend,
	.irecv = net_irecv,
	.iflush = net_iflush,
	.test = net_test,
	.close_send = net_close,
	.close_receive = net_close,
	.close_listen = net_close_listen,
};
