/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stands in for libibverbs.so.1: the same names and symbol versions, on providers whose device is memory. Its devices
 * are alpha0, alpha1 and beta0; SWERVE_FAKE_SYSFS names the directory that takes the place of /sys/class/infiniband.
 */
#include <stdio.h>
#include <stdlib.h>

#include "fake.h"

extern const struct fake_provider alpha_provider, beta_provider;

#define DEVICES 3

static struct ibv_device devices[DEVICES] = {
	{ .node_type = IBV_NODE_CA, .name = "alpha0" },
	{ .node_type = IBV_NODE_CA, .name = "alpha1" },
	{ .node_type = IBV_NODE_CA, .name = "beta0" },
};

static const struct fake_provider *provider_of(struct ibv_context *context)
{
	struct verbs_context *verbs = verbs_get_ctx(context);

	return ((struct fake_context *)((char *)verbs - offsetof(struct fake_context, verbs)))->provider;
}

struct ibv_device **ibv_get_device_list(int *count)
{
	struct ibv_device **list = calloc(DEVICES + 1, sizeof(*list));
	const char *sysfs = getenv("SWERVE_FAKE_SYSFS");

	for (int i = 0; i < DEVICES; i++) {
		snprintf(devices[i].ibdev_path, sizeof(devices[i].ibdev_path), "%s/%s",
			 sysfs ? sysfs : "/nonexistent", devices[i].name);
		list[i] = &devices[i];
	}
	if (count)
		*count = DEVICES;
	return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
	free(list);
}

const char *ibv_get_device_name(struct ibv_device *device)
{
	return device->name;
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
	return device->name[0] == 'a' ? alpha_provider.open(device) : beta_provider.open(device);
}

int ibv_close_device(struct ibv_context *context)
{
	return provider_of(context)->close(context);
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	struct ibv_pd *pd = calloc(1, sizeof(*pd));

	pd->context = context;
	return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
	free(pd);
	return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel,
			     int vector)
{
	return provider_of(context)->create_cq(context, cqe, cq_context);
}

int ibv_destroy_cq(struct ibv_cq *cq)
{
	return provider_of(cq->context)->destroy_cq(cq);
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	return provider_of(pd->context)->create_qp(pd, attr);
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	return provider_of(qp->context)->modify_qp(qp, attr, mask);
}

int ibv_destroy_qp(struct ibv_qp *qp)
{
	return provider_of(qp->context)->destroy_qp(qp);
}

struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp)
{
	return provider_of(qp->context)->to_qp_ex(qp);
}

struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
	return provider_of(pd->context)->create_srq(pd, attr);
}

int ibv_destroy_srq(struct ibv_srq *srq)
{
	return provider_of(srq->context)->destroy_srq(srq);
}

int fake_control(struct ibv_qp *qp, int what, long value)
{
	return provider_of(qp->context)->control(qp, what, value);
}

struct ibv_qp *fake_hidden_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	return provider_of(pd->context)->create_qp(pd, attr);
}
