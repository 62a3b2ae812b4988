/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The maps of steer.c and its counters. */
#ifndef SWERVE_STEER_TABLES_H
#define SWERVE_STEER_TABLES_H

#include "lib/counters.h"
#include "lib/packet.h"
#include "swerve.h"

#include "probe/lent.h"

BPF_F_TABLE("array", u32, struct swerve_steer_settings, steer_settings, 1, MAPPABLE);
BPF_F_TABLE("array", u32, struct swerve_steer_set, steer_sets, SWERVE_STEER_SETS, MAPPABLE);
BPF_F_TABLE("array", u32, struct swerve_steer_row, steer_rows, SWERVE_STEER_FLOWS, MAPPABLE);
BPF_F_TABLE("array", u32, struct swerve_steer_target, steer_targets, SWERVE_STEER_TARGETS, MAPPABLE);
BPF_PERCPU_ARRAY(steer_counters, u64, SWERVE_STEER_COUNTERS);
BPF_F_TABLE("array", u32, struct swerve_standby, steer_standbys, SWERVE_STANDBYS, MAPPABLE);
BPF_F_TABLE("lpm_trie", struct swerve_standby_key, u32, steer_prefixes, SWERVE_STANDBY_PREFIXES, BPF_F_NO_PREALLOC);
BPF_F_TABLE("array", u32, struct swerve_hold, steer_holds, SWERVE_HOLDS, MAPPABLE);
BPF_F_TABLE("lpm_trie", struct swerve_standby_key, u32, steer_hold_prefixes, SWERVE_STANDBY_PREFIXES,
	    BPF_F_NO_PREALLOC);
/* The agent's own, while there is one: this program's stay empty, and show what may be lent. */
BPF_ARRAY_OF_MAPS(lent_probe_settings, "probe_settings", 1);
BPF_ARRAY_OF_MAPS(lent_probe_paths, "probe_paths", 1);

static __always_inline void count(struct __sk_buff *skb, u32 counter)
{
	u64 *row = steer_counters.lookup(&counter);

	if (row) /* asked here: packets that nobody counts are not looked at */
		raise(row, packets_in(skb));
}

#endif /* SWERVE_STEER_TABLES_H */
