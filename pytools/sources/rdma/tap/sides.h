/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Who may change a queue pair's counters: no locks, and in the usual case no atomic operations either.
 *
 * Posting and completing are a side each. A side belongs to the thread that does it, its owner, which uses plain loads
 * and stores. Another thread that comes makes the side shared, for good, by a barrier that the kernel makes all threads
 * pass (membarrier): from then on all use atomic operations. The wait is bounded, and there is but one.
 */
#ifndef SWERVE_TAP_SIDES_H
#define SWERVE_TAP_SIDES_H

#include "system.h"

/* A side's owner is a thread, or one of these. */
enum {
	SIDE_FREE = 0,
	SIDE_SHARED = 1,
	SIDE_CHANGING = 2,
	SIDE_MOVING = 3,   /* its record is being moved */
	SIDE_THREADS = 16, /* from here on it is a thread */
};

struct side {
	u64 owner;
	u32 inside; /* the owner is at work */
} __attribute__((aligned(64)));

static u32 tap_can_own; /* the kernel has membarrier */

static void barrier_for_all(void)
{
	system_call3(SYS_membarrier, 1 << 3, 0, 0); /* MEMBARRIER_CMD_PRIVATE_EXPEDITED */
}

/*
 * Wait until the owner has left: it needs some nanoseconds, or its turn on a processor. At most 20 ms: an owner that was
 * held up for longer, just there and just then, may lose one count; the application is not held up for it.
 */
static bool wait_outside(struct side *side)
{
	barrier_for_all();
	for (int i = 0; i < 1000 && load_acquire(&side->inside); i++)
		system_call0(SYS_sched_yield);
	for (int i = 0; i < 200 && load_acquire(&side->inside); i++)
		pause_ns(100000);
	return !load_acquire(&side->inside);
}

slow_path static bool enter_slowly(struct side *side, u64 me)
{
	u64 owner, next;

	for (int waits = 0;; waits++) {
		owner = load_acquire(&side->owner);
		if (owner == SIDE_SHARED)
			return false;
		if (owner == SIDE_FREE) {
			__atomic_compare_exchange_n(&side->owner, &owner, tap_can_own ? me : SIDE_SHARED, false,
						    __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
		} else if (owner == me) {
			store(&side->inside, 1);
			barrier();
			if (load(&side->owner) == me)
				return true;
			store_release(&side->inside, 0);
		} else if (owner == SIDE_MOVING && waits < 1000) {
			system_call0(SYS_sched_yield);
		} else if (owner == SIDE_CHANGING || owner == SIDE_MOVING) {
			wait_outside(side);
			next = SIDE_SHARED; /* no second owner: what the first one stores late would hide it */
			__atomic_compare_exchange_n(&side->owner, &owner, next, false, __ATOMIC_ACQ_REL,
						    __ATOMIC_ACQUIRE);
		} else {
			__atomic_compare_exchange_n(&side->owner, &owner, SIDE_CHANGING, false, __ATOMIC_ACQ_REL,
						    __ATOMIC_ACQUIRE);
		}
	}
}

/* Begin to change what belongs to a side; true when no other thread can be there until leave(). */
static inline bool enter(struct side *side)
{
	u64 me = this_thread();

	if (likely(load(&side->owner) == me)) {
		store(&side->inside, 1);
		barrier(); /* whoever takes the side away makes the processor pass a barrier here */
		if (likely(load(&side->owner) == me))
			return true;
		store_release(&side->inside, 0);
	}
	return enter_slowly(side, me);
}

static inline void leave(struct side *side, bool alone)
{
	if (likely(alone))
		store_release(&side->inside, 0);
}

static inline void add(bool alone, u64 *to, u64 more)
{
	if (likely(alone))
		store(to, load(to) + more);
	else
		__atomic_fetch_add(to, more, __ATOMIC_RELAXED);
}

#endif /* SWERVE_TAP_SIDES_H */
