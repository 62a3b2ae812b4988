/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The tap's tables of what the application has made: found by address (queue pairs also by device and number) with
 * open addressing. Looking up takes no lock and waits for nobody; changes are made under the slow lock.
 */
#ifndef SWERVE_TAP_TABLES_H
#define SWERVE_TAP_TABLES_H

#include "queue.h"

#define DEVICES 64
#define QUEUES_SHIFT 14
#define QUEUES_MOST 8192 /* half of the places */
#define CQS_SHIFT 12
#define SRQS_SHIFT 10
#define FREE_KINDS 32

/* An open device, and what its provider had in the places of our functions. */
struct device {
	struct ibv_context *context;
	u32 generation;
	struct ibv_context_ops ops;
	struct ibv_qp *(*create_qp_ex)(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);
	struct ibv_cq_ex *(*create_cq_ex)(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr);
	char name[SWERVE_DEVICE_BYTES];
	char path[IBV_SYSFS_PATH_MAX]; /* in sysfs */
};

/* An extended completion queue. */
struct extended_cq {
	struct device *device;
	int (*start_poll)(struct ibv_cq_ex *cq, struct ibv_poll_cq_attr *attr);
	int (*next_poll)(struct ibv_cq_ex *cq);
};

/* A shared receive queue. */
struct shared {
	u64 waiting;	     /* posted while it had no queue pair */
	struct queue *queue; /* of its queue pairs, that which its posts are counted for */
};

struct slot {
	u64 key; /* 0: never used, 1: used no more */
	void *value;
};

#define SLOT_GONE 1

static struct slot queues_by_address[1 << QUEUES_SHIFT], queues_by_number[1 << QUEUES_SHIFT];
static struct slot cqs_by_address[1 << CQS_SHIFT], srqs_by_address[1 << SRQS_SHIFT];
static struct device devices[DEVICES];
static u32 devices_used, queues_used;

static inline u64 spread(u64 key, u32 shift)
{
	return key * 0x9e3779b97f4a7c15ULL >> (64 - shift);
}

static inline void *look_up(const struct slot *slots, u32 shift, u64 key)
{
	u64 mask = (1ULL << shift) - 1, at = spread(key, shift), found;

	for (u64 i = 0; i <= mask; i++) {
		found = load_acquire(&slots[(at + i) & mask].key);
		if (likely(found == key))
			return load(&slots[(at + i) & mask].value);
		if (!found)
			return NULL;
	}
	return NULL;
}

/* Put a value under a key, in the place of what was there; false when there is no room. */
slow_path static bool put(struct slot *slots, u32 shift, u64 key, void *value)
{
	u64 mask = (1ULL << shift) - 1, at = spread(key, shift);
	struct slot *room = NULL, *slot;

	for (u64 i = 0; i <= mask; i++) {
		slot = &slots[(at + i) & mask];
		if (slot->key == key) {
			store_release(&slot->value, value);
			return true;
		}
		if (slot->key <= SLOT_GONE && !room)
			room = slot;
		if (!slot->key)
			break;
	}
	if (!room)
		return false;
	store(&room->value, value);
	store_release(&room->key, key);
	return true;
}

/* Take a key out, if it still has this value. */
slow_path static void take_out(struct slot *slots, u32 shift, u64 key, const void *value)
{
	u64 mask = (1ULL << shift) - 1, at = spread(key, shift);
	struct slot *slot;

	for (u64 i = 0; i <= mask; i++) {
		slot = &slots[(at + i) & mask];
		if (!slot->key)
			return;
		if (slot->key != key)
			continue;
		if (slot->value == value) /* a chain that ends here needs no mark */
			store_release(&slot->key, slots[(at + i + 1) & mask].key ? SLOT_GONE : 0);
		return;
	}
}

static inline struct queue *queue_of(const struct ibv_qp *qp)
{
	return look_up(queues_by_address, QUEUES_SHIFT, (u64)qp);
}

static inline u64 number_key(const struct ibv_context *context, u32 number)
{
	return (u64)context ^ (u64)number << 40 ^ number;
}

static inline struct queue *queue_of_number(const struct ibv_context *context, u32 number)
{
	struct queue *queue = look_up(queues_by_number, QUEUES_SHIFT, number_key(context, number));

	return likely(queue && queue->number == number && queue->context == context) ? queue : NULL;
}

/*
 * The device of a context. One that we have not seen (its creator copied our functions out of another) is taken for one
 * of the same hardware.
 */
static inline struct device *device_of(const struct ibv_context *context)
{
	u32 used = load_acquire(&devices_used);

	for (u32 i = 0; i < used; i++)
		if (likely(load(&devices[i].context) == context))
			return &devices[i];
	for (u32 i = 0; i < used; i++)
		if (devices[i].context && devices[i].context->device == context->device)
			return &devices[i];
	return &devices[0];
}

/* ---- memory ---------------------------------------------------------------------------------------------------- */

/* Queues that were given back, by the logarithm of their capacity: never unmapped, for a thread may still look. */
static struct queue *free_queues[FREE_KINDS];

static u32 kind_of(u64 capacity)
{
	u32 kind = 0;

	while (capacity >> kind > 1)
		kind++;
	return capacity ? kind : FREE_KINDS - 1;
}

/*
 * A zeroed queue for this many outstanding requests (0: with no places). It has twice the places: one is free again only
 * after the application has been told of its request, when another thread may have posted already.
 */
static struct queue *take_queue(u64 wanted)
{
	u64 capacity = wanted ? RING_LEAST : 0, size;
	struct queue *queue;
	char *memory;

	while (capacity && capacity < 2 * wanted && capacity < RING_MOST)
		capacity *= 2;
	queue = free_queues[kind_of(capacity)];
	if (queue) {
		free_queues[kind_of(capacity)] = queue->next_free;
		memory = (char *)queue;
		memset(memory + offsetof(struct queue, qp), 0, sizeof(*queue) - offsetof(struct queue, qp));
		for (u64 i = 0; i < capacity; i++)
			((struct place *)(memory + sizeof(*queue)))[i].tag = 0;
	} else {
		size = sizeof(*queue) + capacity * (sizeof(struct place) + sizeof(struct staged));
		memory = pages(size);
		if (!memory)
			return NULL;
		queue = (struct queue *)memory;
	}
	queue->capacity = capacity;
	queue->ring = (struct place *)(memory + sizeof(*queue));
	queue->stage = (struct staged *)(queue->ring + capacity);
	if (capacity) /* all other places have numbers that differ from their zeroed tag's */
		queue->ring[0].tag = ~0ULL;
	return queue;
}

static void give_queue(struct queue *queue)
{
	struct queue **last = &free_queues[kind_of(queue->capacity)];

	while (*last) /* to the end, so that it rests longest */
		last = &(*last)->next_free;
	queue->next_free = NULL;
	*last = queue;
}

#endif /* SWERVE_TAP_TABLES_H */
