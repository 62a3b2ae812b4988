// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Packets that the kernel drops, of the whole machine, by the number of the reason and by the socket that was about
 * to get them where the kernel says it. The names of the numbers are in the event's own format: user space reads them.
 *
 * SWERVE_DROPS_RX_SK: the event has the socket (6.11 and later).
 */
#include "lib/counters.h"
#include "swerve.h"

#ifndef SWERVE_DROPS_SOCKETS
#define SWERVE_DROPS_SOCKETS 16384
#endif

BPF_PERCPU_ARRAY(drops_by_reason, u64, SWERVE_DROP_REASONS);
BPF_TABLE("lru_hash", struct swerve_drop_key, u64, drops_by_socket, SWERVE_DROPS_SOCKETS);
BPF_PERCPU_ARRAY(drops_latest, struct swerve_drop_run, 1);
BPF_PERCPU_ARRAY(drops_sockets_full, u64, 1); /* not counted by socket: drops_by_socket has no room */

static __always_inline void add_to_socket(const struct swerve_drop_run *run)
{
	struct swerve_drop_key key = run->key;
	u64 none = 0, *count;
	u32 only = 0;

	count = drops_by_socket.lookup_or_try_init(&key, &none);
	if (!count)
		count = drops_sockets_full.lookup(&only);
	raise_atomically(count, run->packets);
}

/*
 * A queue that overflows drops packet after packet: the table is asked once for all of them. Needs no atomic operation:
 * kernels that name the socket let no drop interrupt this program on its CPU.
 */
static __always_inline void count_for_socket(u64 rx_sk, u32 reason)
{
	struct swerve_drop_run *run;
	u32 only = 0;

	run = drops_latest.lookup(&only);
	if (!run)
		return;
	if (run->key.rx_sk != rx_sk || run->key.reason != reason) {
		if (run->packets)
			add_to_socket(run);
		run->key.rx_sk = rx_sk;
		run->key.reason = reason;
		run->packets = 0;
	}
	run->packets++;
}

/*
 * Raw, because programs on ordinary tracepoints are passed over while this CPU is in a system call on a map. Arguments:
 * the packet, where it was dropped, the reason, and the receiving socket where there is one.
 */
RAW_TRACEPOINT_PROBE(kfree_skb)
{
	u32 reason = ctx->args[2];

	if (reason >= SWERVE_DROP_REASONS)
		reason = SWERVE_DROP_REASONS - 1;
	raise_atomically(drops_by_reason.lookup(&reason), 1); /* in older kernels a drop may interrupt another */
#ifdef SWERVE_DROPS_RX_SK
	if (ctx->args[3])
		count_for_socket(ctx->args[3], reason);
#endif
	return 0;
}
