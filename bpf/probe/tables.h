/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The maps of probe.c, its counters and its clock. */
#ifndef SWERVE_PROBE_TABLES_H
#define SWERVE_PROBE_TABLES_H

#include <linux/udp.h>

#include "lib/clock.h"
#include "lib/counters.h"
#include "lib/packet.h"
#include "swerve.h"

#include "probe/lent.h"

#ifndef SWERVE_PROBE_SLOTS
#define SWERVE_PROBE_SLOTS 65536 /* probes under way, of all sessions */
#endif

BPF_RINGBUF_OUTPUT(probes, 128); /* pages: 7281 records */
SWERVE_RECORD(probe, struct swerve_probe);
BPF_PERCPU_ARRAY(probe_counters, u64, SWERVE_PROBE_COUNTERS);
BPF_HASH(probe_peers, struct swerve_addr, struct swerve_probe_peer, 4096);
BPF_HASH(probe_locals, struct swerve_addr, u8, 4096); /* this host's addresses */
BPF_F_TABLE("array", u32, struct swerve_probe_session, probe_sessions, SWERVE_PROBE_SESSIONS, MAPPABLE);
/* Room is taken when it is first used: most of it never is. */
BPF_F_TABLE("hash", u32, struct swerve_probe_slot, probe_slots, SWERVE_PROBE_SLOTS, BPF_F_NO_PREALLOC);
BPF_F_TABLE("lru_hash", struct swerve_ecn_key, struct swerve_probe_requests, probe_requests, SWERVE_PROBE_PATHS, 0);
BPF_F_TABLE("percpu_hash", struct swerve_ecn_key, struct swerve_ecn, path_ecn, SWERVE_ECN_PATHS, BPF_F_NO_PREALLOC);
/* By which interface of a peer its path is reached: the key has the peer's number of it, the value is the path's row. */
BPF_F_TABLE("lru_hash", struct swerve_ecn_key, u32, probe_peer_interfaces, 2 * SWERVE_PROBE_PATHS, 0);
#ifdef SWERVE_VIRTUAL_CLOCK
BPF_ARRAY(probe_clock, struct swerve_virtual_clock, 1);
#endif

static __always_inline void count(u32 counter, u64 more)
{
	raise(probe_counters.lookup(&counter), more);
}

/* Count a packet that ends here. */
static __always_inline int drop(u32 counter)
{
	count(counter, 1);
	return TC_ACT_SHOT;
}

static __always_inline struct swerve_probe_settings *settings(void)
{
	u32 only = 0;

	return probe_settings.lookup(&only);
}

/* What the stamping clock shows at a moment of CLOCK_MONOTONIC. */
static __always_inline u64 stamping_clock(u64 now)
{
#ifdef SWERVE_VIRTUAL_CLOCK
	u32 only = 0;

	now = virtual_time(now, probe_clock.lookup(&only));
#endif
	return now;
}

#endif /* SWERVE_PROBE_TABLES_H */
