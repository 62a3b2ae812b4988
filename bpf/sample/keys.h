/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What names a byte of a stream, or a datagram, alike at both ends. */
#ifndef SWERVE_SAMPLE_KEYS_H
#define SWERVE_SAMPLE_KEYS_H

#include "lib/hash.h"
#include "sample/tables.h"

/* How many multiples of 2^rate lie in (before, last], sequence numbers that may have wrapped in between. */
static __always_inline u32 anchors_in(u32 before, u32 last, u8 rate)
{
	rate &= 31;
	return ((last >> rate) - (before >> rate)) & (0xffffffff >> rate);
}

/*
 * Of the sequence numbers in (before, last] the one with most zero low bits: the choice that a packet cut elsewhere is
 * most likely to come to as well, when there are several to choose from.
 */
static __always_inline u32 roundest_in(u32 before, u32 last)
{
	u32 differing = before ^ last;

	differing |= differing >> 1;
	differing |= differing >> 2;
	differing |= differing >> 4;
	differing |= differing >> 8;
	differing |= differing >> 16;
	return last & ~(differing >> 1);
}

/* Ports, length and the beginning of the payload: TTL, DSCP, ECN, identifiers and checksums change on the way. */
static __always_inline u64 hash_of(struct transport *ports, u32 payload_bytes, const u64 *words)
{
	u64 hash;

	hash = mixed(payload_bytes, (u64)ports->source << 16 | ports->destination);
#pragma unroll
	for (int i = 0; i < HASHED_WORDS; i++)
		hash = mixed(hash, words[i]);
	return hash;
}

#endif /* SWERVE_SAMPLE_KEYS_H */
