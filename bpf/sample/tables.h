/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The tables of sample.c, what is found of a packet, and how it counts what goes wrong. */
#ifndef SWERVE_SAMPLE_TABLES_H
#define SWERVE_SAMPLE_TABLES_H

#include "lib/clock.h"
#include "lib/counters.h"
#include "lib/packet.h"
#include "lib/tcp.h"
#include "swerve.h"

#define HASHED_WORDS 4
#define HASHED_BYTES (8 * HASHED_WORDS) /* of a datagram's payload */
#define MOST_DATAGRAMS 128		/* in one buffer; the kernel's own limit is 64, since 6.9 128 */

BPF_RINGBUF_OUTPUT(samples, 128); /* pages: 6553 samples; a small ring stays in the caches */
SWERVE_RECORD(sample, struct swerve_sample);
BPF_PERCPU_ARRAY(sample_counters, u64, SWERVE_SAMPLE_COUNTERS);
BPF_HASH(sample_peers, struct swerve_addr, u8, 4096);
BPF_ARRAY(sample_settings, struct swerve_sample_settings, 1);
/* Samples of one CPU lately. */
struct burst {
	u64 began_ns;
	u64 samples;
};
BPF_PERCPU_ARRAY(sample_burst, struct burst, 1);
#ifdef SWERVE_VIRTUAL_CLOCK
BPF_ARRAY(sample_clock, struct swerve_virtual_clock, 1);
#endif

struct transport {
	__be16 source;
	__be16 destination;
};

static __always_inline void count(u32 counter, u64 more)
{
	raise(sample_counters.lookup(&counter), more);
}

/* What the stamping clock shows at a moment of CLOCK_MONOTONIC. */
static __always_inline u64 stamping_clock(u64 now)
{
#ifdef SWERVE_VIRTUAL_CLOCK
	u32 only = 0;

	now = virtual_time(now, sample_clock.lookup(&only));
#endif
	return now;
}

static __always_inline bool is_sampled(u64 key, u8 rate)
{
	return !(key & ((1ULL << (rate & 63)) - 1));
}

#endif /* SWERVE_SAMPLE_TABLES_H */
