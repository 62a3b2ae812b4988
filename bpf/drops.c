// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Packets that the kernel drops, of the whole machine, by the number of the reason and by the socket that was about
 * to get them where the kernel says it. The names of the numbers are in the event's own format: user space reads them.
 *
 * SWERVE_DROPS_RX_SK: the event has the socket (6.11 and later).
 */
#include "swerve.h"

#ifndef SWERVE_DROPS_SOCKETS
#define SWERVE_DROPS_SOCKETS 16384
#endif

BPF_PERCPU_ARRAY(drops_by_reason, u64, SWERVE_DROP_REASONS);
BPF_TABLE("lru_hash", struct swerve_drop_key, u64, drops_by_socket, SWERVE_DROPS_SOCKETS);
BPF_PERCPU_ARRAY(drops_counters, u64, SWERVE_DROPS_COUNTERS);

/* Atomic even on one CPU: a packet that is dropped in a process may be interrupted by one that is dropped later. */
static __always_inline void raise_counter(u32 index)
{
	u64 *counter = drops_counters.lookup(&index);

	if (counter)
		__sync_fetch_and_add(counter, 1);
}

static __always_inline void count_for_socket(u64 rx_sk, u32 reason)
{
	struct swerve_drop_key key = { .rx_sk = rx_sk, .reason = reason };
	u64 none = 0, *count = drops_by_socket.lookup_or_try_init(&key, &none);

	if (count)
		__sync_fetch_and_add(count, 1);
	else
		raise_counter(SWERVE_DROPS_SOCKETS_FULL);
}

/*
 * Raw, because programs on ordinary tracepoints are passed over while this CPU is in a system call on a map. Arguments:
 * the packet, where it was dropped, the reason, and the receiving socket where there is one.
 */
RAW_TRACEPOINT_PROBE(kfree_skb)
{
	u32 reason = ctx->args[2];
	u64 *count;

	raise_counter(SWERVE_DROPS_COUNTED);
	if (reason >= SWERVE_DROP_REASONS - 1) {
		reason = SWERVE_DROP_REASONS - 1;
		raise_counter(SWERVE_DROPS_OTHER);
	}
	count = drops_by_reason.lookup(&reason);
	if (count)
		__sync_fetch_and_add(count, 1);
#ifdef SWERVE_DROPS_RX_SK
	if (ctx->args[3])
		count_for_socket(ctx->args[3], reason);
#endif
	return 0;
}
