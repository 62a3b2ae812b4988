/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Sums that outlive connections: by path, and by interface. */
#ifndef SWERVE_TCP_TOTALS_H
#define SWERVE_TCP_TOTALS_H

#include "tcp/state.h"

static __always_inline void add(struct swerve_tcp_counts *to, struct swerve_tcp_counts *delta)
{
	u64 *sum = (u64 *)to, *each = (u64 *)delta;

#pragma unroll
	for (int i = 0; i < WORDS; i++)
		if (each[i])
			__sync_fetch_and_add(&sum[i], each[i]);
}

static __always_inline void add_to_path(struct swerve_addr *remote, u32 ifindex, struct swerve_tcp_counts *delta)
{
	struct swerve_tcp_path_key key = { .remote = *remote, .ifindex = ifindex };
	struct swerve_tcp_counts *sum = tcp_paths.lookup(&key);

	if (!sum) {
		if (!tcp_paths.insert(&key, delta))
			return;
		sum = tcp_paths.lookup(&key); /* another CPU was first */
	}
	if (sum)
		add(sum, delta);
	else
		raise_counter(SWERVE_TCP_PATHS_FULL, 1);
}

static __always_inline void add_to_interface(u32 ifindex, struct swerve_tcp_counts *delta)
{
	struct swerve_tcp_counts *sum = tcp_interfaces.lookup(&ifindex);

	if (!sum) {
		if (!tcp_interfaces.insert(&ifindex, delta))
			return;
		sum = tcp_interfaces.lookup(&ifindex);
	}
	if (!sum) {
		ifindex = 0; /* stands for all that find the map full */
		raise_counter(SWERVE_TCP_INTERFACES_FULL, 1);
		sum = tcp_interfaces.lookup(&ifindex);
	}
	if (sum)
		add(sum, delta);
	else
		raise_counter(SWERVE_TCP_LOST, 1);
}

static __always_inline void add_to_totals(struct swerve_addr *remote, u32 ifindex, struct swerve_tcp_counts *delta)
{
	add_to_path(remote, ifindex, delta);
	add_to_interface(ifindex, delta);
}

static __always_inline void add_to_namespace(struct swerve_tcp_flow *row, struct swerve_tcp_counts *delta, bool first)
{
	struct swerve_tcp_namespace nothing = {}, *sum;
	u64 netns = row->netns;

	sum = tcp_namespaces.lookup_or_try_init(&netns, &nothing);
	if (!sum) {
		raise_counter(SWERVE_TCP_NAMESPACES_FULL, 1);
		return;
	}
	add(&sum->counts, delta);
	if (first)
		__sync_fetch_and_add(&sum->connections, 1);
	if (row->cgroup)
		sum->cgroup = row->cgroup;
}

#endif /* SWERVE_TCP_TOTALS_H */
