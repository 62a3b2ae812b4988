/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded into perftest: has it take any device for one of those with which it posts by the extended API
 * (ibv_wr_*). It chooses by the device's part number, although Soft-RoCE has that API as well. Only for tests.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>

#define MELLANOX 0x02c9
#define CONNECTX5 4119

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attributes)
{
	static __typeof__(ibv_query_device) *real;
	int error;

	if (!real)
		real = dlsym(RTLD_NEXT, "ibv_query_device");
	error = real(context, attributes);
	attributes->vendor_id = MELLANOX;
	attributes->vendor_part_id = CONNECTX5;
	return error;
}
