/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What rdma.c keeps beside the rows that user space reads: send queues, calls under way, where addresses are. */
#ifndef SWERVE_RDMA_STATE_H
#define SWERVE_RDMA_STATE_H

#include "rdma/verbs.h"
#include "swerve.h"

#define DEPTH 1024 /* signalled requests remembered per queue pair */
#define STAGED 64  /* requests between ibv_wr_start and ibv_wr_complete */
#define NEAR 8	   /* rows that a thread finds without searching */
#define NO_ROW 0xffffffff

/* A signalled request, and the sums of all that its completion retires. */
struct signalled {
	u64 wr_id;
	u64 bytes;
	u64 number;
	u64 requests;
	u64 gap; /* completions to come before its own, of requests that found no room */
};

struct posted {
	u64 at_ns; /* 0: not timed */
	u64 bytes;
	u64 wr_id;
};

struct staged {
	u64 wr_id;
	u64 bytes;
	u32 opcode;
	u32 signalled;
};

/* What the kernel side alone needs of a queue pair; its index is the row's. */
struct queue {
	u64 number;	/* of the next request */
	u64 oldest;	/* of the first that is outstanding */
	u64 head;	/* signalled requests retired */
	u64 tail;	/* and ever remembered */
	u64 open_bytes; /* of unsignalled requests that no signalled one follows yet */
	u64 open_requests;
	u64 address; /* of the struct ibv_qp; 0: not known */
	u64 send_cq;
	u64 receive_cq;
	u64 srq;
	u64 gap;	   /* signalled requests without room since the last one with */
	u64 gap_bytes;	   /* of them; exact where all are of one call */
	u32 all_signalled; /* sq_sig_all */
	u32 told;	   /* whether all_signalled was learned from the call that made it */
	u32 staging;	   /* requests staged */
	u32 published;	   /* staged ones were given to the device: the next begins anew */
	u32 pad;
	struct signalled ring[DEPTH];
	struct posted posts[DEPTH];
	struct staged staged[STAGED];
};

struct qp_key {
	u64 context;
	u32 tgid;
	u32 number;
};

/* Where a program goes on when there is more than it looks at: places in rdma_more. */
enum more {
	MORE_POSTS = 0,
	MORE_POLLS = 1,
	MORE_STAGED = 2,
	MORE_REFUSED = 3,
	TAKE_BACK = 4,
};

enum call_kind {
	CALL_NONE = 0,
	CALL_SEND = 1,
	CALL_RECEIVE = 2,
	CALL_POLL = 3,
	CALL_COMPLETE = 4,
	CALL_SRQ = 5,
};

/* A thread's call under way. */
struct call {
	u32 kind;
	u32 slot;
	u64 object; /* queue pair, shared receive queue or completion queue */
	u64 next;   /* request or completion to look at */
	u64 bad;    /* where the provider says what it refused */
	u64 tail;   /* of the queue's ring, once all were posted */
	u64 now_ns;
	u64 bytes;
	u64 signalled_bytes;
	u64 rest; /* from this request on the list was too long to be followed; 0: it was not */
	u32 left; /* completions */
	u32 requests;
	u32 full; /* one of its requests found no room */
	u32 pad;
	u64 stage; /* the extended queue pair whose request is being built; 0: none */
	u32 stage_slot;
	u32 stage_index;
	u32 rows[NEAR]; /* that this thread has posted to, or has had completions of: a cache */
};

/* A completion of an extended queue, while the application reads it. */
struct poll {
	u64 cq;
	u32 pending;
	u32 pad;
	struct verbs_completion completion;
	u32 rows[NEAR];
};

enum control_kind {
	CONTROL_NONE = 0,
	CONTROL_CREATE = 1,
	CONTROL_MODIFY = 2,
	CONTROL_DESTROY = 3,
};

/* A call that makes, changes or destroys a queue pair. */
struct control {
	u32 kind;
	u32 all_signalled;
	struct qp_key key;
	u32 mask;
	u32 state;
	u32 remote_qp_number;
	u8 sgid_index;
	u8 port;
	u16 pad;
	struct swerve_addr remote;
};

/* A shared receive queue. What is posted to it is told by the oldest of its queue pairs. */
struct shared {
	u64 receives; /* posted while it has none */
	u32 slot;     /* NO_ROW: none */
	u32 pad;
};

/* Where user space finds the local address of a queue pair. */
struct qp_port {
	u32 known;
	u16 port;
	u16 gid_index;
};

#endif /* SWERVE_RDMA_STATE_H */
