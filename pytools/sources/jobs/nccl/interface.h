/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * NCCL's profiler plugin interface, versions 1 to 5: the layout of what crosses it, and nothing else of NCCL.
 *
 * A library offers version N in a symbol ncclProfiler_vN; NCCL takes the newest that it knows: 2.23 knows version 1,
 * 2.24 and 2.25 version 2, 2.26 version 3, 2.27 version 4, 2.28 and later version 5. Strings are NCCL's and constant.
 * Members that the plugin does not read are there for the offsets of the others.
 */
#ifndef SWERVE_NCCL_INTERFACE_H
#define SWERVE_NCCL_INTERFACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum nccl_event { /* bits of the mask, and the type of an event */
	NCCL_GROUP = 1 << 0,
	NCCL_COLLECTIVE = 1 << 1,
	NCCL_P2P = 1 << 2,
	NCCL_PROXY_OP = 1 << 3,
	NCCL_PROXY_STEP = 1 << 4,
	NCCL_PROXY_CONTROL = 1 << 5,
	NCCL_KERNEL = 1 << 6,	  /* since version 3 */
	NCCL_NETWORK = 1 << 7,	  /* since version 3 */
	NCCL_GROUP_CALL = 1 << 8, /* this and the next three since version 5 */
	NCCL_COLLECTIVE_CALL = 1 << 9,
	NCCL_P2P_CALL = 1 << 10,
	NCCL_KERNEL_LAUNCH = 1 << 11,
};

enum nccl_state {
	NCCL_OP_LAST = 7, /* 0 to 7: states of proxy operations up to version 3, with the bytes so far */
	NCCL_SEND_GPU_WAIT = 8,
	NCCL_SEND_WAIT = 9,
	NCCL_RECEIVE_WAIT = 10,
	NCCL_RECEIVE_FLUSH_WAIT = 11,
	NCCL_RECEIVE_GPU_WAIT = 12,
	NCCL_SEND_PEER_WAIT = 20, /* since version 4 */
	NCCL_KERNEL_STOP = 22,	  /* since version 4 */
};

/* Functions, types, algorithms and protocols are numbers in version 1 only. */
struct nccl_v1_event {
	uint8_t type;
	void *parent;
	int rank;
	union {
		struct {
			const char *communicator;
			uint64_t hash;
			uint64_t number;
			uint8_t function;
			const void *from;
			void *to;
			size_t count;
			int root;
			uint8_t datatype;
			uint32_t operator;
			size_t traffic_bytes;
			uint8_t channels;
			uint8_t warps;
			uint8_t algorithm;
			uint8_t protocol;
			int collnet;
			int nvls;
		} collective;
		struct {
			const char *communicator;
			uint64_t hash;
			uint8_t function;
			void *at;
			uint8_t datatype;
			size_t count;
			int peer;
		} p2p;
		struct nccl_proxy_op {
			pid_t pid; /* of the process that the operation comes from */
			uint8_t channel;
			int peer;
			int steps;
			int chunk_bytes;
			int send;
		} proxy;
		int step;
	};
};

struct nccl_v2_event {
	uint8_t type;
	void *parent;
	int rank;
	union {
		struct {
			const char *communicator;
			uint64_t hash;
			uint64_t number;
			const char *function;
			const void *from;
			void *to;
			size_t count;
			int root;
			const char *datatype;
			size_t traffic_bytes;
			uint8_t channels;
			uint8_t warps;
			const char *algorithm;
			const char *protocol;
		} collective;
		struct nccl_v2_p2p {
			const char *communicator;
			uint64_t hash;
			const char *function;
			void *at;
			const char *datatype;
			size_t count;
			int peer;
		} p2p;
		struct nccl_proxy_op proxy;
		int step;
	};
};

struct nccl_v3_event {
	uint8_t type;
	void *parent;
	int rank;
	union {
		struct {
			const char *communicator;
			uint64_t hash;
			uint64_t number;
			const char *function;
			const void *from;
			void *to;
			size_t count;
			int root;
			const char *datatype;
			uint8_t channels;
			uint8_t warps;
			const char *algorithm;
			const char *protocol;
		} collective;
		struct nccl_v2_p2p p2p;
		struct nccl_proxy_op proxy;
		int step;
		uint8_t channel; /* of a kernel */
		struct {
			int64_t id;
			void *data;
		} network;
	};
};

struct nccl_kernel {
	uint8_t channel;
	uint64_t gpu_ns; /* globaltimer */
};

struct nccl_v4_event {
	uint8_t type;
	void *parent;
	int rank;
	union {
		struct {
			uint64_t number;
			const char *function;
			const void *from;
			void *to;
			size_t count;
			int root;
			const char *datatype;
			uint8_t channels;
			uint8_t warps;
			const char *algorithm;
			const char *protocol;
		} collective;
		struct {
			const char *function;
			void *at;
			const char *datatype;
			size_t count;
			int peer;
			uint8_t channels;
		} p2p;
		struct nccl_proxy_op proxy;
		int step;
		struct nccl_kernel kernel;
		struct {
			int64_t id;
			void *data;
		} network;
	};
};

struct nccl_v5_event {
	uint64_t type;
	void *parent; /* of a collective or a P2P: its call */
	int rank;
	union {
		struct {
			bool captured;
			int depth;
		} group_call;
		struct {
			const char *function;
			size_t count;
			const char *datatype;
			int root;
			void *stream;
			bool captured;
		} collective_call;
		struct {
			const char *function;
			size_t count;
			const char *datatype;
			void *stream;
			bool captured;
		} p2p_call;
		void *stream; /* of a kernel launch */
		struct {
			uint64_t number;
			const char *function;
			const void *from;
			void *to;
			size_t count;
			int root;
			const char *datatype;
			uint8_t channels;
			uint8_t warps;
			const char *algorithm;
			const char *protocol;
			void *group;
		} collective;
		struct {
			const char *function;
			void *at;
			const char *datatype;
			size_t count;
			int peer;
			uint8_t channels;
			void *group;
		} p2p;
		struct nccl_proxy_op proxy;
		int step;
		struct nccl_kernel kernel;
		struct {
			int64_t id;
			void *data;
		} network;
	};
};

/* What comes with a new state: up to version 3, and since. */
union nccl_v1_state {
	struct {
		size_t bytes; /* of the operation so far */
		int steps;
	} proxy;
	int appended;
};

union nccl_v4_state {
	size_t bytes; /* of this step */
	int appended;
	void *data;
	uint64_t gpu_ns;
};

typedef void (*nccl_log_t)(int level, unsigned long subsystem, const char *file, int line, const char *format, ...);
#define NCCL_LOG_INFO 3
#define NCCL_LOG_INIT 1UL

struct nccl_profiler_v1 { /* versions 1 to 3, but for the event */
	const char *name;
	int (*init)(void **context, int *mask);
	int (*start)(void *context, void **handle, const void *event);
	int (*stop)(void *handle);
	int (*record)(void *handle, int state, const union nccl_v1_state *more);
	int (*finalize)(void *context);
};

struct nccl_profiler_v4 {
	const char *name;
	int (*init)(void **context, int *mask, const char *communicator, uint64_t hash, int nodes, int ranks, int rank,
		    nccl_log_t log);
	int (*start)(void *context, void **handle, const void *event);
	int (*stop)(void *handle);
	int (*record)(void *handle, int state, const union nccl_v4_state *more);
	int (*finalize)(void *context);
};

struct nccl_profiler_v5 {
	const char *name;
	int (*init)(void **context, uint64_t hash, int *mask, const char *communicator, int nodes, int ranks, int rank,
		    nccl_log_t log);
	int (*start)(void *context, void **handle, const void *event);
	int (*stop)(void *handle);
	int (*record)(void *handle, int state, const union nccl_v4_state *more);
	int (*finalize)(void *context);
};

#endif /* SWERVE_NCCL_INTERFACE_H */
