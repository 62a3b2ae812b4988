/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The virtual clock of a lab host: a known function of CLOCK_MONOTONIC, so that estimates can be compared with the
 * truth. Only lab builds (SWERVE_VIRTUAL_CLOCK) have it; pytools/lab/clocks.py computes the same, bit for bit.
 *
 * Each program looks its clock up: bcc knows a map by its name alone. NULL: it has none.
 */
#ifndef SWERVE_LIB_CLOCK_H
#define SWERVE_LIB_CLOCK_H

#include "swerve.h"

#ifdef SWERVE_VIRTUAL_CLOCK
static __always_inline u64 virtual_time(u64 now, const struct swerve_virtual_clock *clock)
{
	u64 age, knot;
	s64 ahead;

	if (!clock)
		return now;
	age = now - clock->origin_ns;
	knot = age >> SWERVE_KNOT_SHIFT;
	if (now < clock->origin_ns) {
		ahead = clock->knots[0];
	} else if (knot >= SWERVE_KNOTS - 1) {
		ahead = clock->knots[SWERVE_KNOTS - 1];
	} else {
		s64 from = clock->knots[knot], grown = clock->knots[knot + 1] - from;

		ahead = from + (grown * (s64)(age & ((1ULL << SWERVE_KNOT_SHIFT) - 1)) >> SWERVE_KNOT_SHIFT);
	}
	if (now >= clock->step_at_ns)
		ahead += clock->step_ns;
	return now + clock->offset_ns + ahead;
}
#endif

#endif /* SWERVE_LIB_CLOCK_H */
