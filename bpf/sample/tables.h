/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The tables of sample.c, what is found of a packet, and how it counts what goes wrong. */
#ifndef SWERVE_SAMPLE_TABLES_H
#define SWERVE_SAMPLE_TABLES_H

#include "lib/clock.h"
#include "lib/counters.h"
#include "lib/packet.h"
#include "swerve.h"

#define HASHED_WORDS 4
#define HASHED_BYTES (8 * HASHED_WORDS) /* of a datagram's payload */
#define MOST_DATAGRAMS 128		/* in one buffer; the kernel's own limit is 64, since 6.9 128 */

#define TCP_FIXED_BYTES 20
#define TCP_WORDS 12 /* offset of the byte whose upper half is the header's length in 32-bit words */
#define TCP_FLAGS 13
#define TCP_SYN 0x02

#define NEXT_FRAGMENT 44
#define JUMBO_BYTES 8
#define JUMBO_OPTION 0xc2

BPF_RINGBUF_OUTPUT(samples, 128); /* pages: 6553 samples; a small ring stays in the caches */
SWERVE_RECORD(sample, struct swerve_sample);
BPF_PERCPU_ARRAY(sample_counters, u64, SWERVE_SAMPLE_COUNTERS);
BPF_HASH(sample_peers, struct swerve_addr, u8, 4096);
BPF_ARRAY(sample_settings, struct swerve_sample_settings, 1);
#ifdef SWERVE_VIRTUAL_CLOCK
BPF_ARRAY(sample_clock, struct swerve_virtual_clock, 1);
#endif

/* What is known of a packet of a peer once its IP header is read. */
struct found {
	struct swerve_addr source;
	struct swerve_addr destination;
	u32 offset; /* of the transport header */
	u32 bytes;  /* from there to the end of the IP packet */
	u8 protocol;
	bool fragment;
};

struct transport {
	__be16 source;
	__be16 destination;
};

/* The first header of an IPv6 packet that is longer than its length field can say; such packets exist in hosts only. */
struct jumbo_header {
	u8 next;
	u8 words;
	u8 option;
	u8 option_bytes;
	__be32 bytes;
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
