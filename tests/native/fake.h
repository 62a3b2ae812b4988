/* SPDX-License-Identifier: Apache-2.0 */
/* A verbs library without hardware: what its two halves (the library, the providers) share. Only for tests. */
#ifndef FAKE_H
#define FAKE_H

#include <infiniband/verbs.h>

/* What a provider implements beyond ibv_context.ops. The library's exported functions call through this. */
struct fake_provider {
	const char *name;
	struct ibv_context *(*open)(struct ibv_device *device);
	int (*close)(struct ibv_context *context);
	struct ibv_cq *(*create_cq)(struct ibv_context *context, int cqe, void *cq_context);
	int (*destroy_cq)(struct ibv_cq *cq);
	struct ibv_qp *(*create_qp)(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
	int (*modify_qp)(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
	int (*destroy_qp)(struct ibv_qp *qp);
	struct ibv_qp_ex *(*to_qp_ex)(struct ibv_qp *qp);
	struct ibv_srq *(*create_srq)(struct ibv_pd *pd, struct ibv_srq_init_attr *attr);
	int (*destroy_srq)(struct ibv_srq *srq);
	int (*control)(struct ibv_qp *qp, int what, long value);
};

struct fake_context {
	const struct fake_provider *provider;
	struct verbs_context verbs; /* last: ibv_context ends it */
};

/* fake_control(qp, what, value): makes trouble on demand. */
enum fake_control {
	FAKE_STALL = 1,	 /* 1: nothing completes any more; 0: what was held completes now */
	FAKE_FAIL = 2,	 /* the next request completes with this status; those after it are flushed */
	FAKE_REFUSE = 3, /* the request after value more of them is refused */
};

int fake_control(struct ibv_qp *qp, int what, long value);

/* Makes a queue pair without any function that an application calls: as providers' own interfaces do. */
struct ibv_qp *fake_hidden_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);

#endif
