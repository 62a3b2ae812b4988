/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * CLOCK_MONOTONIC from the processor's counter, without a system call.
 *
 * The counter is tied to the clock anew every 10 ms, at the rate measured since the last time, so that the error is
 * some tens of nanoseconds and slewing is followed. Two anchors take turns: no reader waits for a writer.
 */
#ifndef SWERVE_TAP_CLOCK_H
#define SWERVE_TAP_CLOCK_H

#include "system.h"

#define ANCHOR_NS 10000000
#define RATE_FROM_NS 1000000	 /* a rate measured over less is too coarse, */
#define RATE_TO_NS 2000000000ULL /* over more would not fit below */

struct anchor {
	u64 at_ticks;
	u64 at_ns;
	u64 rate; /* nanoseconds per tick, times 2^32; 0: not known yet */
	u64 valid_ticks;
};

static struct {
	struct anchor anchors[2];
	u64 turn;
	u32 writing;
	u32 usable; /* the kernel itself counts time by this counter */
} tap_clock;

static u64 clock_ns(void)
{
	struct timespec now;

	system_call2(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ULL + now.tv_nsec;
}

static void start_clock(void)
{
	char name[32];

	read_file("/sys/devices/system/clocksource/clocksource0/current_clocksource", name, sizeof(name));
	tap_clock.usable = begins_with(name, "tsc") || begins_with(name, "arch_sys_counter");
}

slow_path static u64 move_anchor(void)
{
	const struct anchor *last = &tap_clock.anchors[load(&tap_clock.turn) & 1];
	struct anchor next = *last;
	u64 before, ns, span;

	if (!tap_clock.usable || __atomic_exchange_n(&tap_clock.writing, 1, __ATOMIC_ACQUIRE))
		return clock_ns();
	before = ticks();
	ns = clock_ns();
	next.at_ticks = before + (ticks() - before) / 2;
	next.at_ns = ns;
	span = ns - last->at_ns;
	if (!last->at_ns || span > RATE_TO_NS) {
		if (!last->rate)
			next.valid_ticks = 0;
	} else if (span >= RATE_FROM_NS && next.at_ticks > last->at_ticks) {
		next.rate = (span << 32) / (next.at_ticks - last->at_ticks);
		next.valid_ticks = (next.at_ticks - last->at_ticks) * (ANCHOR_NS / 1000) / (span / 1000);
	} else {
		goto out; /* too soon: what is there stays */
	}
	tap_clock.anchors[(tap_clock.turn + 1) & 1] = next;
	store_release(&tap_clock.turn, tap_clock.turn + 1);
out:
	store_release(&tap_clock.writing, 0);
	return ns;
}

static inline u64 now_ns(void)
{
	u64 turn = load_acquire(&tap_clock.turn), since, ns;
	const struct anchor *anchor = &tap_clock.anchors[turn & 1];

	since = ticks() - load(&anchor->at_ticks);
	ns = load(&anchor->at_ns) + (since * load(&anchor->rate) >> 32);
	if (unlikely(since >= load(&anchor->valid_ticks)))
		return move_anchor();
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	return likely(load(&tap_clock.turn) == turn) ? ns : clock_ns();
}

#endif /* SWERVE_TAP_CLOCK_H */
