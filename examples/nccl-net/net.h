/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * NCCL's network plugin interface, version 8: the layout of what crosses it, and nothing else of NCCL.
 *
 * A library offers it in a symbol ncclNet_v8; NCCL 2.20 and later take it. Calls that would block answer with a null
 * pointer instead, and are made again. Members that this plugin leaves alone are there for the offsets of the others.
 */
#ifndef SWERVE_NCCL_NET_H
#define SWERVE_NCCL_NET_H

#include <stddef.h>
#include <stdint.h>

enum nccl_result {
	NCCL_SUCCESS = 0,
	NCCL_SYSTEM_ERROR = 2,
	NCCL_INTERNAL_ERROR = 3,
	NCCL_INVALID_ARGUMENT = 4,
	NCCL_INVALID_USAGE = 5,
	NCCL_REMOTE_ERROR = 6,
};

enum {
	NCCL_HANDLE_BYTES = 128, /* of what a listener gives to the one that connects */
	NCCL_PTR_HOST = 1,	 /* memory that a plugin can use */
	NCCL_REQUESTS = 32,	 /* of one connection at a time */
	NCCL_LOG_WARN = 2,
	NCCL_LOG_INFO = 3,
	NCCL_LOG_NET = 16, /* subsystem */
};

typedef void (*nccl_logger)(int level, unsigned long subsystems, const char *file, int line, const char *format, ...);

struct nccl_net_properties {
	char *name;
	char *pci_path;
	uint64_t guid;
	int memory; /* NCCL_PTR_HOST */
	int registered_for_all;
	int speed_mbps;
	int port;
	float latency_us;
	int most_connections;
	int most_grouped_receives;
	int offload;
	int offload_version;
};

struct nccl_net {
	const char *name;
	int (*init)(nccl_logger log);
	int (*devices)(int *count);
	int (*get_properties)(int device, struct nccl_net_properties *properties);
	int (*listen)(int device, void *handle, void **listener);
	int (*connect)(int device, void *handle, void **sender, void **offload);
	int (*accept)(void *listener, void **receiver, void **offload);
	int (*register_memory)(void *connection, void *data, size_t size, int type, void **memory);
	int (*register_dmabuf)(void *connection, void *data, size_t size, int type, uint64_t offset, int fd,
			       void **memory);
	int (*deregister_memory)(void *connection, void *memory);
	int (*isend)(void *sender, void *data, int size, int tag, void *memory, void **request);
	int (*irecv)(void *receiver, int count, void **data, int *sizes, int *tags, void **memory, void **request);
	int (*iflush)(void *receiver, int count, void **data, int *sizes, void **memory, void **request);
	int (*test)(void *request, int *done, int *sizes);
	int (*close_send)(void *sender);
	int (*close_receive)(void *receiver);
	int (*close_listen)(void *listener);
	int (*get_device_memory)(void *connection, void *memory, void **device_memory);
	int (*receive_consumed)(void *receiver, int count, void *request);
};

_Static_assert(sizeof(struct nccl_net_properties) == 64 && offsetof(struct nccl_net_properties, latency_us) == 40, "");
_Static_assert(sizeof(struct nccl_net) == 19 * sizeof(void *), "");

#endif
