/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* One step of a hash of 64-bit words. */
#ifndef SWERVE_LIB_HASH_H
#define SWERVE_LIB_HASH_H

static __always_inline u64 mixed(u64 hash, u64 word)
{
	hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL; /* 2^64 over the golden ratio */
	return hash ^ hash >> 32;
}

#endif /* SWERVE_LIB_HASH_H */
