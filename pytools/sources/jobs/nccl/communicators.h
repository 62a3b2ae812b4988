/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Communicators come and go, the mask changes, processes fork and end. All but the last two under a lock that is held for
 * microseconds, in calls that make or destroy communicators and in the plugin's own thread; the operation that reaches the
 * limit of its period takes it too, if it is free.
 */
#ifndef SWERVE_NCCL_COMMUNICATORS_H
#define SWERVE_NCCL_COMMUNICATORS_H

#include <signal.h>

#include "events.h"

#define STACK_BYTES (256 << 10)

/* ---- the plugin's thread --------------------------------------------------------------------------------------- */

static void begin_period(void)
{
	store(&plugin.sample, next_sample(plugin.sample, plugin.reached));
	store(&plugin.reached, false);
	store(&plugin.begun, 0);
}

static void apply(struct ring *ring, u32 events, bool begins)
{
	pthread_mutex_lock(&lock);
	if (begins)
		begin_period();
	store(&plugin.events, events);
	ask();
	store(&ring->applied, events);
	pthread_mutex_unlock(&lock);
}

/* The sleep is no longer than the longest period, whatever becomes of the clock. */
static void *watch(void *at)
{
	struct ring *ring = at;
	u64 now_ns, wall_ns, period, last = 0;
	bool begins;
	u32 wanted;

	for (;;) {
		now_ns = clock_ns(CLOCK_MONOTONIC);
		store(&ring->alive_ns, now_ns);
		wanted = now_ns < load(&ring->until_ns) ? load(&ring->events) & EVENTS : 0;
		wall_ns = clock_ns(CLOCK_REALTIME);
		period = period_at(wall_ns);
		begins = period != last && (load(&plugin.begun) || load(&plugin.sample) & 1);
		if (begins || wanted != load(&plugin.events))
			apply(ring, wanted, begins);
		last = period;
		nanosleep(&(struct timespec){ 0, period_begins(period + 1) - wall_ns }, NULL);
	}
	return NULL;
}

/* It takes no signal of the application's. */
static bool start_watching(struct ring *ring)
{
	pthread_attr_t attributes;
	sigset_t all, before;
	pthread_t thread;
	bool started;

	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attributes, STACK_BYTES);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	started = !pthread_create(&thread, &attributes, watch, ring);
	if (started)
		pthread_setname_np(thread, "swerve-nccl");
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attributes);
	return started;
}

/* ---- communicators --------------------------------------------------------------------------------------------- */

struct described {
	const char *name;
	u64 hash;
	int nodes, ranks, rank;
	u32 interface;
};

/* The ring of this process, made with its first communicator; under the lock. */
static struct ring *open_ring(nccl_log_t log)
{
	struct ring *ring = plugin.ring;

	if (ring)
		return ring;
	ring = ring_create(plugin.name, sizeof(plugin.name));
	if (ring && !start_watching(ring)) {
		ring_unlink(plugin.name);
		munmap(ring, sizeof(*ring));
		ring = NULL;
		errno = EAGAIN;
	}
	if (!ring) {
		if (log)
			log(NCCL_LOG_INFO, NCCL_LOG_INIT, __FILE__, __LINE__, "swerve: nothing is recorded: %s",
			    strerror(errno));
		return NULL;
	}
	for (int i = 0; plugin.inherited && i < SLOTS; i++)
		store(&slots[i].state, 0);
	plugin.inherited = false;
	plugin.pid = getpid();
	store_release(&plugin.ring, ring);
	return ring;
}

/* A free row for a communicator: its serial number, or 0; under the lock. */
static u64 free_row(void)
{
	for (int i = 0; i < RING_COMMUNICATORS; i++)
		if (!plugin.communicators[++plugin.serial % RING_COMMUNICATORS].serial)
			return plugin.serial;
	return 0;
}

static int open_communicator(void **context, int *mask, const struct described *what, nccl_log_t log)
{
	int error = errno;
	struct ring_communicator *row;
	struct ring *ring;
	u64 serial = 0;

	if (!context || !mask)
		return 0;
	*context = NULL;
	pthread_mutex_lock(&lock);
	ring = open_ring(log);
	if (ring) {
		serial = free_row();
		if (!serial)
			count(RING_NO_COMMUNICATOR);
	}
	if (serial) {
		row = &ring->rows[serial % RING_COMMUNICATORS];
		__atomic_exchange_n(&row->serial, 0, __ATOMIC_ACQ_REL);
		memset(row, 0, sizeof(*row));
		row->hash = what->hash;
		row->created_ns = clock_ns(CLOCK_MONOTONIC);
		row->rank = what->rank;
		row->ranks = what->ranks;
		row->nodes = what->nodes;
		row->interface = what->interface;
		copy(row->name, sizeof(row->name), what->name);
		store_release(&row->serial, serial);
		plugin.communicators[serial % RING_COMMUNICATORS] =
			(struct communicator){ serial, mask, what->interface >= 4 };
		*context = handle_of(CONTEXT, serial);
	}
	store(mask, plugin.reached ? 0 : (int)load(&plugin.events));
	pthread_mutex_unlock(&lock);
	errno = error;
	return 0;
}

static int finalize(void *context)
{
	u64 serial = number_of(context, CONTEXT), at = serial % RING_COMMUNICATORS, id;

	if (!serial || !load_acquire(&plugin.ring))
		return 0;
	pthread_mutex_lock(&lock);
	if (plugin.communicators[at].serial == serial) {
		store(&plugin.communicators[at].serial, 0);
		store(&plugin.ring->rows[at].closed_ns, clock_ns(CLOCK_MONOTONIC));
		for (int i = 0; i < SLOTS; i++) {
			id = load(&slots[i].state);
			if (!id || id & BUSY || !compare_exchange(&slots[i].state, &id, id | BUSY))
				continue;
			if (slots[i].record.communicator == serial) {
				count(RING_UNFINISHED);
				id = 0;
			}
			store_release(&slots[i].state, id);
		}
	} else {
		count(RING_UNKNOWN);
	}
	pthread_mutex_unlock(&lock);
	return 0;
}

static void in_child(void)
{
	pthread_mutex_init(&lock, NULL); /* whoever held it stayed with the parent */
	plugin.ring = NULL;
	plugin.events = 0;
	plugin.sample = 0;
	plugin.reached = false;
	plugin.begun = 0;
	plugin.inherited = true;
	memset(plugin.communicators, 0, sizeof(plugin.communicators));
}

__attribute__((constructor)) static void begin(void)
{
	pthread_atfork(NULL, NULL, in_child);
}

/* The process ends: what nobody has asked for goes with it, the rest is the reader's. Other threads may still call. */
__attribute__((destructor)) static void finish(void)
{
	struct ring *ring = load_acquire(&plugin.ring);

	if (!ring)
		return;
	store_release(&ring->closed, 1);
	if (!load(&ring->until_ns))
		ring_unlink(plugin.name);
}

#endif /* SWERVE_NCCL_COMMUNICATORS_H */
