/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * How many operations are recorded: the first LIMIT of each period, and after these NCCL is asked for nothing. Pure; the
 * caller passes counts and CLOCK_REALTIME nanoseconds in.
 *
 * Kernel events cost a small collective microseconds of NCCL's own work. A whole operation is left out, with all of its
 * events: it then costs nothing, and what is recorded is whole. Periods begin at times of the clock that depend on
 * nothing else, so that all ranks, which never talk, record the same operations. A hash of its number delays each, lest a
 * step that lasts as long as a period be seen at one place only.
 */
#ifndef SWERVE_NCCL_LIMIT_H
#define SWERVE_NCCL_LIMIT_H

#include <stdbool.h>
#include <stdint.h>

#define LIMIT 250
#define PERIOD_NS 250000000ULL /* on average; at most twice as long */

/* When a period begins. */
static inline uint64_t period_begins(uint64_t period)
{
	uint64_t mixed = period * 0x9e3779b97f4a7c15ULL; /* a multiplicative hash: its upper bits are the good ones */

	mixed = (mixed ^ mixed >> 32) * 0xd6e8feb86659fd93ULL;
	return period * PERIOD_NS + (mixed >> 32) % PERIOD_NS;
}

/* In which period a time lies. */
static inline uint64_t period_at(uint64_t now_ns)
{
	uint64_t period = now_ns / PERIOD_NS;

	return period && now_ns < period_begins(period) ? period - 1 : period;
}

/*
 * What is written into the records of a period, after that of the one before it: the number of the sample, and, in the
 * lowest bit, whether operations may be missing beside the sample. Within a sample none is missing, but those of graphs.
 * Whoever reaches the limit sets the bit.
 */
static inline uint8_t next_sample(uint8_t sample, bool reached)
{
	return reached ? (sample | 1) + 2 : sample & ~1;
}

#endif /* SWERVE_NCCL_LIMIT_H */
