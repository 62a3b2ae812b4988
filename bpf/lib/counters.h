/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Count in a row of a per-CPU map. Each program looks its row up: bcc knows a map by its name alone, so that no function
 * or macro can be given one.
 */
#ifndef SWERVE_LIB_COUNTERS_H
#define SWERVE_LIB_COUNTERS_H

static __always_inline void raise(u64 *row, u64 more)
{
	if (row)
		*row += more;
}

/* Where the program may be interrupted on its CPU by another that counts in the same row. */
static __always_inline void raise_atomically(u64 *row, u64 more)
{
	if (row)
		__sync_fetch_and_add(row, more);
}

#endif /* SWERVE_LIB_COUNTERS_H */
