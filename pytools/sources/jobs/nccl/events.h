/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Events between start and stop, whatever the version that tells of them, and the records they become. No lock: a slot
 * belongs to the call that has made it BUSY; another one that wants it at the same time is one that NCCL never makes.
 */
#ifndef SWERVE_NCCL_EVENTS_H
#define SWERVE_NCCL_EVENTS_H

#include <pthread.h>

#include "interface.h"
#include "limit.h"
#include "ring.h"

#define SLOTS 4096 /* events between start and stop; a power of two */
#define TRIES 16
#define OPERATIONS (NCCL_COLLECTIVE | NCCL_P2P)
#define PROXIES (NCCL_PROXY_OP | NCCL_PROXY_STEP)
#define EVENTS (OPERATIONS | PROXIES | NCCL_KERNEL)

enum kind { /* of a handle, in its upper four bits */
	CONTEXT = 1,
	CALL, /* the rest is the time of the call */
	SEEN, /* nothing is kept */
	OPERATION,
	KERNEL,
	PROXY,
	STEP,
};

#define KIND_SHIFT 60
#define REST ((1ULL << KIND_SHIFT) - 1)
#define BUSY (1ULL << 63) /* some call is at this slot */

struct slot {
	u64 state;    /* 0: free; else the event's number, perhaps BUSY */
	u64 since_ns; /* of a step: when its present wait began */
	s32 waiting;  /* which; negative: none */
	struct ring_record record;
} __attribute__((aligned(64)));

struct communicator {
	u64 serial; /* 0: none */
	int *mask;  /* NCCL's own */
	u32 named;
};

static struct {
	struct ring *ring; /* NULL: nothing is recorded */
	u32 events;	   /* mask in force, as far as the limit allows */
	u8 sample;	   /* of operations that begin */
	bool reached;	   /* the limit, in this period: NCCL's mask is 0 */
	pid_t pid;
	bool inherited; /* the slots are those of the parent of fork() */
	u64 serial;	/* of the last communicator */
	struct communicator communicators[RING_COMMUNICATORS];
	char name[48];			       /* of the ring's file */
	u64 next __attribute__((aligned(64))); /* event; written all the time, as begun: in a cache line of their own */
	u64 begun;			       /* operations in this period */
} plugin;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of communicators and the mask */

static struct slot slots[SLOTS];

static void *handle_of(enum kind kind, u64 rest)
{
	return (void *)((u64)kind << KIND_SHIFT | (rest & REST));
}

/* What a handle of this kind stands for, else 0. */
static u64 number_of(const void *handle, enum kind kind)
{
	return (u64)handle >> KIND_SHIFT == kind ? (u64)handle & REST : 0;
}

static void count(enum ring_counter counter)
{
	add(&plugin.ring->counters[counter], 1);
}

/* ---- events between start and stop ----------------------------------------------------------------------------- */

/* The slot of a new event of this communicator, BUSY, or NULL. */
static struct slot *take(const void *context)
{
	u64 serial = number_of(context, CONTEXT), free, id;
	struct slot *slot;

	if (!load_acquire(&plugin.ring) || !context)
		return NULL;
	if (!serial || load(&plugin.communicators[serial % RING_COMMUNICATORS].serial) != serial) {
		count(RING_UNKNOWN);
		return NULL;
	}
	for (int i = 0; i < TRIES; i++) {
		id = (add(&plugin.next, 1) + 1) & REST;
		slot = &slots[id % SLOTS];
		free = 0;
		if (id && compare_exchange(&slot->state, &free, id | BUSY)) {
			memset(&slot->record, 0, sizeof(slot->record));
			slot->record.id = id;
			slot->record.communicator = serial;
			slot->record.start_ns = clock_ns(CLOCK_MONOTONIC);
			slot->waiting = -1;
			return slot;
		}
	}
	count(RING_NO_SLOT);
	return NULL;
}

/* The slot of an event that has not ended, BUSY, or NULL. */
static struct slot *find(u64 id)
{
	struct slot *slot = &slots[id % SLOTS];
	u64 expected = id;

	if (id && compare_exchange(&slot->state, &expected, id | BUSY))
		return slot;
	count(RING_UNKNOWN);
	return NULL;
}

static void *give(struct slot *slot, enum kind kind)
{
	u64 id = slot->record.id;

	store_release(&slot->state, id);
	return handle_of(kind, id);
}

static void end(struct slot *slot)
{
	store_release(&slot->state, 0);
}

/* ---- the mask -------------------------------------------------------------------------------------------------- */

/* Have NCCL report what is in force, or nothing once the limit is reached; under the lock. */
static void ask(void)
{
	int mask = plugin.reached ? 0 : (int)plugin.events;

	for (int i = 0; i < RING_COMMUNICATORS; i++)
		if (plugin.communicators[i].serial)
			store(plugin.communicators[i].mask, mask);
}

/* An operation begins. Who holds the lock is not waited for: the next operation looks again. */
static void spend(void)
{
	if (add(&plugin.begun, 1) + 1 < LIMIT || load(&plugin.reached) || pthread_mutex_trylock(&lock))
		return;
	if (load(&plugin.begun) >= LIMIT && !plugin.reached) {
		store(&plugin.reached, true);
		store(&plugin.sample, plugin.sample | 1);
		ask();
	}
	pthread_mutex_unlock(&lock);
}

/* ---- what NCCL tells, whatever its version --------------------------------------------------------------------- */

struct operation {
	const char *function, *datatype, *algorithm, *protocol;
	u64 number, count;
	s32 peer;
	u8 channels;
};

static void copy(char *to, size_t room, const char *from)
{
	if (from)
		memcpy(to, from, strnlen(from, room - 1));
}

/* Bytes of an element: a type's name has its bits. NCCL names all types but its 8 bit unsigned integer. */
static u64 size_of(const char *datatype)
{
	const char *digit = datatype ? strpbrk(datatype, "0123456789") : NULL;

	return digit ? (atoi(digit) + 7) / 8 : 1;
}

/* What a communicator is called is told by its operations, up to version 3. */
static void name(const void *context, u64 hash, const char *called, s32 rank)
{
	u64 serial = number_of(context, CONTEXT), at = serial % RING_COMMUNICATORS;
	struct ring *ring = load_acquire(&plugin.ring);

	if (!ring || !serial || load(&plugin.communicators[at].serial) != serial ||
	    __atomic_exchange_n(&plugin.communicators[at].named, 1, __ATOMIC_ACQ_REL))
		return;
	store(&ring->rows[at].hash, hash);
	store(&ring->rows[at].rank, rank);
	copy(ring->rows[at].name, sizeof(ring->rows[at].name), called);
}

static void *start_operation(const void *context, enum ring_kind kind, const void *parent, const struct operation *what)
{
	struct ring_record *record;
	struct slot *slot;

	spend(); /* also what has no slot costs the job */
	slot = take(context);
	if (!slot)
		return NULL;
	record = &slot->record;
	record->kind = kind;
	record->sample = load(&plugin.sample);
	record->number = what->number;
	record->bytes = what->count * size_of(what->datatype);
	record->peer = what->peer;
	record->channel = what->channels;
	record->operation.called_ns = number_of(parent, CALL);
	copy(record->operation.function, sizeof(record->operation.function), what->function);
	copy(record->operation.datatype, sizeof(record->operation.datatype), what->datatype);
	copy(record->operation.algorithm, sizeof(record->operation.algorithm), what->algorithm);
	copy(record->operation.protocol, sizeof(record->operation.protocol), what->protocol);
	return give(slot, OPERATION);
}

static void *start_kernel(const void *context, const void *parent, u8 channel, u64 gpu_ns)
{
	struct slot *slot = load(&plugin.events) & NCCL_KERNEL ? take(context) : NULL;

	if (!slot)
		return NULL;
	slot->record.kind = RING_KERNEL;
	slot->record.parent = number_of(parent, OPERATION);
	slot->record.channel = channel;
	slot->record.kernel.gpu_start_ns = gpu_ns;
	return give(slot, KERNEL);
}

static void *start_proxy(const void *context, const void *parent, const struct nccl_proxy_op *what)
{
	struct slot *slot;

	if (!(load(&plugin.events) & PROXIES) || !load_acquire(&plugin.ring))
		return NULL;
	if (what->pid != plugin.pid) {
		count(RING_FOREIGN);
		return NULL;
	}
	slot = take(context);
	if (!slot)
		return NULL;
	slot->record.kind = RING_PROXY;
	slot->record.parent = number_of(parent, OPERATION);
	slot->record.channel = what->channel;
	slot->record.peer = what->peer;
	slot->record.send = !!what->send;
	return give(slot, PROXY);
}

static void *start_step(const void *context, const void *parent)
{
	u64 proxy = number_of(parent, PROXY);
	struct slot *slot = proxy && load(&plugin.events) & PROXIES ? take(context) : NULL;

	if (!slot)
		return NULL;
	slot->record.parent = proxy;
	return give(slot, STEP);
}

/* The call that captured a graph says nothing about when the graph runs. */
static void *start_call(bool captured)
{
	if (!load_acquire(&plugin.ring))
		return NULL;
	return captured ? handle_of(SEEN, 1) : handle_of(CALL, clock_ns(CLOCK_MONOTONIC));
}

/* A step begins to wait for something else, or, with a negative number, for nothing. */
static void wait_for(struct slot *step, s32 next, u64 now_ns)
{
	if (step->waiting >= 0)
		step->record.proxy.wait_ns[step->waiting] += now_ns - step->since_ns;
	step->waiting = next;
	step->since_ns = now_ns;
}

static void stop_step(struct slot *step)
{
	struct slot *proxy = find(step->record.parent);

	wait_for(step, -1, clock_ns(CLOCK_MONOTONIC));
	if (proxy) {
		for (int i = 0; i < 3; i++)
			proxy->record.proxy.wait_ns[i] += step->record.proxy.wait_ns[i];
		proxy->record.proxy.steps++;
		proxy->record.bytes += step->record.bytes;
		store_release(&proxy->state, proxy->record.id);
	}
}

static int stop(void *handle)
{
	u64 kind = (u64)handle >> KIND_SHIFT;
	struct slot *slot;

	if (!handle || kind == CALL || kind == SEEN || !load_acquire(&plugin.ring))
		return 0;
	slot = find(kind >= OPERATION && kind <= STEP ? (u64)handle & REST : 0);
	if (!slot)
		return 0;
	if (kind == STEP) {
		stop_step(slot);
	} else {
		slot->record.stop_ns = clock_ns(CLOCK_MONOTONIC);
		ring_push(plugin.ring, &slot->record);
	}
	end(slot);
	return 0;
}

/* Which of its waits a step is in; negative: in none that is told apart. */
static s32 wait_of(int state)
{
	switch (state) {
	case NCCL_SEND_GPU_WAIT:
	case NCCL_RECEIVE_WAIT:
		return 0;
	case NCCL_SEND_PEER_WAIT:
	case NCCL_RECEIVE_FLUSH_WAIT:
		return 1;
	case NCCL_SEND_WAIT:
	case NCCL_RECEIVE_GPU_WAIT:
		return 2;
	default:
		return -1;
	}
}

static void change_step(void *handle, int state, u64 bytes)
{
	struct slot *step = find(number_of(handle, STEP));

	if (!step)
		return;
	wait_for(step, wait_of(state), clock_ns(CLOCK_MONOTONIC));
	step->record.bytes += bytes;
	store_release(&step->state, step->record.id);
}

/* Up to version 3 the bytes are told of the operation, as a sum. */
static int record_v1(void *handle, int state, const union nccl_v1_state *more)
{
	struct slot *proxy;

	if (!load_acquire(&plugin.ring))
		return 0;
	if (number_of(handle, STEP)) {
		change_step(handle, state, 0);
	} else if (number_of(handle, PROXY) && state >= 0 && state <= NCCL_OP_LAST && more) {
		proxy = find(number_of(handle, PROXY));
		if (!proxy)
			return 0;
		if (more->proxy.bytes > proxy->record.bytes)
			proxy->record.bytes = more->proxy.bytes;
		store_release(&proxy->state, proxy->record.id);
	}
	return 0;
}

static int record_v4(void *handle, int state, const union nccl_v4_state *more)
{
	bool sized = state == NCCL_SEND_WAIT || state == NCCL_RECEIVE_FLUSH_WAIT;
	struct slot *kernel;

	if (!load_acquire(&plugin.ring))
		return 0;
	if (number_of(handle, STEP)) {
		change_step(handle, state, sized && more ? more->bytes : 0);
	} else if (number_of(handle, KERNEL) && state == NCCL_KERNEL_STOP && more) {
		kernel = find(number_of(handle, KERNEL));
		if (!kernel)
			return 0;
		kernel->record.kernel.gpu_stop_ns = more->gpu_ns;
		store_release(&kernel->state, kernel->record.id);
	}
	return 0;
}

#endif /* SWERVE_NCCL_EVENTS_H */
