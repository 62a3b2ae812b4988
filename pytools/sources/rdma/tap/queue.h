/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The send queue of one queue pair as the tap follows it: a ring of the requests that are outstanding, and the record
 * that user space reads.
 *
 * Exact under any number of threads: every request is counted once as posted, and once as completed, by whoever
 * claims its place in the ring. A request is counted before the device is told of it, so no completion is seen first.
 * Where threads post to one queue pair at once, the ring's order may differ from the device's by as many requests as
 * there are threads; then `completed` may run that far ahead or behind until the queue is empty again.
 */
#ifndef SWERVE_TAP_QUEUE_H
#define SWERVE_TAP_QUEUE_H

#include "clock.h"
#include "sides.h"

#define RING_LEAST 256 /* places in a ring */
#define RING_MOST 65536
#define NONE_TIMED (~0ULL)

/* A place's tag is the number of its request, and what became of it. */
#define TAG_OPEN 1
#define TAG_SIGNALLED 2
#define TAG_GONE 4 /* counted as completed, or taken back; with TAG_SIGNALLED: a completion was taken for its own */
#define TAG_SHIFT 3

struct place {
	u64 tag;
	u64 wr_id;
	u64 bytes;
	u64 posted_ns; /* 0: not timed */
};

/* A request between ibv_wr_start and ibv_wr_complete. */
struct staged {
	u64 wr_id;
	u64 bytes;
	u32 opcode;
	u32 signalled;
};

struct queue {
	/* These stay when it is used for another: a thread that found it just before its end may still look. */
	struct place *ring;
	u64 capacity; /* a power of two, or 0: its requests cannot be followed */
	struct staged *stage;
	struct swerve_qp *record; /* in a shared table, or `own` */

	/* What does not change while the queue pair lives. */
	struct ibv_qp *qp;
	struct ibv_context *context;
	const struct ibv_cq *send_cq, *recv_cq;
	struct ibv_srq *srq;
	struct device *device;
	u32 number;
	u32 generation; /* of the process that made it; see alive() */
	bool signal_all;
	bool extended;	   /* its struct ibv_qp_ex has our functions */
	bool atomic_write; /* and its library knows wr_atomic_write */
	struct queue *next_free;
	struct ibv_qp_ex original;
	u64 staged;

	struct side posting;
	u64 tail;
	struct side completing;
	u64 head;

	struct swerve_qp own __attribute__((aligned(64)));
};

/* ---- posting --------------------------------------------------------------------------------------------------- */

/* Requests of one call that are being counted; numbers from first on, those beyond followed found no place. */
struct posting {
	u64 first;
	u64 followed;
	u64 count;
	u64 bytes;
	u64 signalled;
	u64 untracked_bytes;
	u64 now;
	bool alone;
};

static void move_head(struct queue *queue, bool alone, u64 from, u64 to);

/* The ring is full: of places that are free again, perhaps, but wait for a later one to be retired. */
slow_path static void reclaim(struct queue *queue)
{
	bool alone = enter(&queue->completing);
	u64 head = load(&queue->head), number = head;

	while (number < load_acquire(&queue->tail) &&
	       load_acquire(&queue->ring[number & (queue->capacity - 1)].tag) >> TAG_SHIFT == number &&
	       load_acquire(&queue->ring[number & (queue->capacity - 1)].tag) & TAG_GONE)
		number++;
	move_head(queue, alone, head, number);
	leave(&queue->completing, alone);
}

static inline void begin_posting(struct queue *queue, struct posting *posting, u64 count)
{
	u64 tail, room;

	if (unlikely(load(&queue->tail) + count - load(&queue->head) > queue->capacity && queue->capacity))
		reclaim(queue);
	posting->alone = enter(&queue->posting);
	posting->count = count;
	posting->bytes = posting->signalled = posting->untracked_bytes = posting->now = 0;
	tail = load(&queue->tail);
	do {
		room = queue->capacity - (tail - load_acquire(&queue->head));
		if (unlikely(room > queue->capacity))
			room = 0;
		posting->first = tail;
		posting->followed = count < room ? count : room;
		if (likely(posting->alone)) {
			store_release(&queue->tail, tail + posting->followed);
			return;
		}
	} while (!__atomic_compare_exchange_n(&queue->tail, &tail, tail + posting->followed, false, __ATOMIC_ACQ_REL,
					      __ATOMIC_RELAXED));
}

static inline bool is_timed(const struct swerve_qp *record, u64 number)
{
	u64 mask = load(&record->run_mask);

	return !((number >> SWERVE_RUN_SHIFT) & mask) && mask != NONE_TIMED;
}

static inline u32 opcode_index(u32 opcode)
{
	return opcode < SWERVE_OPCODES ? opcode : SWERVE_OPCODES - 1;
}

/* Count the index-th request of the call. */
static inline void post_one(struct queue *queue, struct posting *posting, u64 index, u64 wr_id, u64 bytes, u32 opcode,
			    bool signalled)
{
	u64 number = posting->first + index;
	struct place *place;

	signalled |= queue->signal_all;
	posting->bytes += bytes;
	posting->signalled += signalled;
	add(posting->alone, &queue->record->opcodes[opcode_index(opcode)], 1);
	if (unlikely(index >= posting->followed)) {
		posting->untracked_bytes += bytes;
		return;
	}
	place = &queue->ring[number & (queue->capacity - 1)];
	place->wr_id = wr_id;
	place->bytes = bytes;
	if (is_timed(queue->record, number)) {
		if (!posting->now)
			posting->now = now_ns();
		place->posted_ns = posting->now;
	} else {
		place->posted_ns = 0;
	}
	store_release(&place->tag, number << TAG_SHIFT | TAG_OPEN | (signalled ? TAG_SIGNALLED : 0));
}

/* Count requests as completed that nobody will see complete (or, with negative numbers, as not so). */
slow_path static void complete_unseen(struct queue *queue, u64 requests, u64 bytes)
{
	bool alone = enter(&queue->completing);

	add(alone, &queue->record->completed, requests);
	add(alone, &queue->record->completed_bytes, bytes);
	leave(&queue->completing, alone);
}

static inline void end_posting(struct queue *queue, struct posting *posting)
{
	struct swerve_qp *record = queue->record;
	u64 untracked = posting->count - posting->followed;

	add(posting->alone, &record->posted_bytes, posting->bytes);
	add(posting->alone, &record->posted, posting->count);
	if (posting->signalled)
		add(posting->alone, &record->signalled, posting->signalled);
	if (unlikely(untracked)) {
		add(posting->alone, &record->untracked, untracked);
		complete_unseen(queue, untracked, posting->untracked_bytes);
	}
	leave(&queue->posting, posting->alone);
}

/* ---- completing ------------------------------------------------------------------------------------------------ */

/* What one call to poll has found for one queue pair. */
struct completing {
	u64 requests;
	u64 bytes;
	u64 completions;
	u64 successes;
	u64 received;
	u64 received_bytes;
	u64 now;
	bool alone;
	bool posters_alone; /* only one thread has ever posted: nobody else can be claiming places */
};

static void record_times(struct queue *queue, struct completing *completing, u64 number, u64 bytes, u64 posted_ns)
{
	struct swerve_qp *record = queue->record;
	struct swerve_timed_request *timed;
	u64 at;

	if (!completing->now)
		completing->now = now_ns();
	at = completing->alone ? load(&record->timed) : __atomic_fetch_add(&record->timed, 1, __ATOMIC_RELAXED);
	timed = &record->timed_requests[at % SWERVE_TIMED];
	store(&timed->number, number);
	store(&timed->posted_ns, posted_ns);
	store(&timed->completed_ns, completing->now > posted_ns ? completing->now : posted_ns);
	store(&timed->bytes, bytes);
	if (completing->alone)
		store_release(&record->timed, at + 1); /* last: the reader goes by it */
}

/* Claim a request's place and count it; false when somebody has claimed it. */
static inline bool retire_one(struct queue *queue, struct completing *completing, u64 number, struct place *place,
			      u64 tag, bool matched)
{
	u64 gone = number << TAG_SHIFT | TAG_GONE | (matched ? TAG_SIGNALLED : 0);
	u64 bytes = place->bytes, posted_ns = place->posted_ns;

	if (likely(completing->alone && completing->posters_alone))
		store(&place->tag, gone);
	else if (!__atomic_compare_exchange_n(&place->tag, &tag, gone, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
		return false;
	completing->requests++;
	completing->bytes += bytes;
	if (posted_ns)
		record_times(queue, completing, number, bytes, posted_ns);
	return true;
}

static void move_head(struct queue *queue, bool alone, u64 from, u64 to)
{
	if (likely(alone)) {
		store_release(&queue->head, to);
		return;
	}
	while (from < to &&
	       !__atomic_compare_exchange_n(&queue->head, &from, to, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
		;
}

/*
 * The request that a completion speaks of: the oldest that asked for one and has this wr_id; a failed one may not have
 * asked. All ones: there is none.
 */
static inline u64 find(struct queue *queue, u64 head, u64 wr_id, bool failed)
{
	u64 tail = load_acquire(&queue->tail), tag;
	struct place *place;

	for (u64 number = head; number < tail; number++) {
		place = &queue->ring[number & (queue->capacity - 1)];
		tag = load_acquire(&place->tag);
		if (tag >> TAG_SHIFT != number || !(tag & TAG_OPEN))
			continue;
		if ((tag & TAG_SIGNALLED || failed) && place->wr_id == wr_id)
			return number;
	}
	return ~0ULL;
}

/* Retire the request of this number and all before it; false when another thread has just retired it. */
static inline bool retire_through(struct queue *queue, struct completing *completing, u64 head, u64 last)
{
	bool claimed = false;
	struct place *place;
	u64 number, tag;

	for (number = head; number <= last; number++) {
		place = &queue->ring[number & (queue->capacity - 1)];
		tag = load_acquire(&place->tag);
		if (unlikely(tag >> TAG_SHIFT != number)) /* another thread is about to write it: it stays for later */
			break;
		if (tag & TAG_OPEN)
			claimed = retire_one(queue, completing, number, place, tag, number == last) && number == last;
	}
	move_head(queue, completing->alone, head, number);
	if (unlikely(number < last)) {
		place = &queue->ring[last & (queue->capacity - 1)];
		tag = load_acquire(&place->tag);
		claimed = tag >> TAG_SHIFT == last && tag & TAG_OPEN &&
			  retire_one(queue, completing, last, place, tag, true);
	}
	return claimed;
}

/* Retire the request that a completion speaks of, and those before it, if there is one. */
static inline void retire(struct queue *queue, struct completing *completing, u64 wr_id, bool failed)
{
	u64 head, found;

	do {
		head = load(&queue->head);
		found = find(queue, head, wr_id, failed);
	} while (likely(found != ~0ULL) && unlikely(!retire_through(queue, completing, head, found)));
}

static inline void begin_completing(struct queue *queue, struct completing *completing, u64 now)
{
	*completing = (struct completing){ .now = now };
	completing->alone = enter(&queue->completing);
	completing->posters_alone = load_acquire(&queue->posting.owner) >= SIDE_THREADS;
}

static inline void end_completing(struct queue *queue, struct completing *completing)
{
	struct swerve_qp *record = queue->record;
	bool alone = completing->alone;

	add(alone, &record->completed_bytes, completing->bytes);
	add(alone, &record->completed, completing->requests);
	add(alone, &record->completions, completing->completions);
	if (completing->successes)
		add(alone, &record->statuses[IBV_WC_SUCCESS], completing->successes);
	if (completing->received) {
		add(alone, &record->received_bytes, completing->received_bytes);
		add(alone, &record->receives_completed, completing->received);
	}
	leave(&queue->completing, alone);
}

/* One completion of either queue. Where it failed its opcode is undefined, so the queue is told by CQ or wr_id. */
static inline void complete_one(struct queue *queue, struct completing *completing, const struct ibv_cq *cq, u64 wr_id,
				u32 status, u32 opcode, u64 bytes)
{
	bool receive = opcode & IBV_WC_RECV;

	if (likely(!status)) {
		completing->successes++;
	} else {
		add(completing->alone,
		    &queue->record->statuses[status < SWERVE_STATUSES ? status : SWERVE_STATUSES - 1], 1);
		if (queue->send_cq != queue->recv_cq) {
			receive = cq != queue->send_cq;
		} else {
			receive = find(queue, load(&queue->head), wr_id, true) == ~0ULL;
		}
	}
	if (receive) {
		completing->received++;
		completing->received_bytes += status ? 0 : bytes;
		return;
	}
	completing->completions++;
	retire(queue, completing, wr_id, status);
}

/* ---- what the provider refused --------------------------------------------------------------------------------- */

/*
 * The completion that was taken for that of a refused request is of another one with the same wr_id, which a thread
 * posted at the same time.
 */
slow_path static void pass_on(struct queue *queue, u64 wr_id)
{
	struct completing completing;

	begin_completing(queue, &completing, 0);
	retire(queue, &completing, wr_id, false);
	end_completing(queue, &completing);
}

/* Take back the index-th request of a call, which the provider refused; true when its place is free again. */
slow_path static bool take_back(struct queue *queue, const struct posting *posting, u64 index, u64 wr_id, u64 bytes,
				u32 opcode, bool signalled)
{
	bool alone = enter(&queue->posting), claimed = false;
	struct swerve_qp *record = queue->record;
	u64 number = posting->first + index, tag = 0;
	struct place *place;

	signalled |= queue->signal_all;
	if (index < posting->followed) {
		place = &queue->ring[number & (queue->capacity - 1)];
		tag = number << TAG_SHIFT | TAG_OPEN | (signalled ? TAG_SIGNALLED : 0);
		claimed = __atomic_compare_exchange_n(&place->tag, &tag, number << TAG_SHIFT | TAG_GONE, false,
						      __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
	} else {
		add(alone, &record->untracked, -1ULL);
	}
	if (!claimed) { /* it was counted as completed already */
		complete_unseen(queue, -1ULL, -bytes);
		if (tag == (number << TAG_SHIFT | TAG_GONE | TAG_SIGNALLED))
			pass_on(queue, wr_id);
	}
	add(alone, &record->opcodes[opcode_index(opcode)], -1ULL);
	add(alone, &record->posted, -1ULL);
	add(alone, &record->posted_bytes, -bytes);
	if (signalled)
		add(alone, &record->signalled, -1ULL);
	add(alone, &record->refused, 1);
	leave(&queue->posting, alone);
	return claimed;
}

/*
 * The places of a call's requests from this one on are free again: use them for the next. Else a thread that tries and
 * tries would fill the ring. Only where one thread alone has ever posted: others' requests could lie beyond.
 */
static void reuse_places(struct queue *queue, const struct posting *posting, u64 from)
{
	bool alone = enter(&queue->posting);

	if (alone && queue->tail == posting->first + posting->followed && from < posting->followed)
		store_release(&queue->tail, posting->first + from);
	leave(&queue->posting, alone);
}

/* The queue was emptied without completions. */
slow_path static void drop_outstanding(struct queue *queue)
{
	struct completing completing;
	u64 tail;

	begin_completing(queue, &completing, 0);
	tail = load_acquire(&queue->tail);
	if (queue->capacity && tail != load(&queue->head))
		retire_through(queue, &completing, load(&queue->head), tail - 1);
	end_completing(queue, &completing);
}

/* ---- where the record is --------------------------------------------------------------------------------------- */

/* Keep all threads out of a side, if it can be done; gives who was its owner. */
static u64 hold(struct side *side)
{
	u64 owner = load_acquire(&side->owner);

	for (int i = 0; i < 1000 && owner != SIDE_SHARED; i++) {
		if (owner >= SIDE_THREADS || owner == SIDE_FREE) {
			if (!__atomic_compare_exchange_n(&side->owner, &owner, SIDE_MOVING, false, __ATOMIC_ACQ_REL,
							 __ATOMIC_ACQUIRE))
				continue;
			wait_outside(side);
			return owner;
		}
		system_call0(SYS_sched_yield); /* it is changing */
		owner = load_acquire(&side->owner);
	}
	return owner;
}

static void let_go(struct side *side, u64 owner)
{
	u64 moving = SIDE_MOVING;

	__atomic_compare_exchange_n(&side->owner, &moving, owner, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

/*
 * Count in another record from now on, going on from what was counted. The times wait until user space asks for them.
 * A side that several threads share cannot be held: what such a thread adds in this instant may be lost.
 */
static void move_record(struct queue *queue, struct swerve_qp *to)
{
	u64 posting = hold(&queue->posting), completing = hold(&queue->completing);
	struct swerve_qp *from = queue->record;

	memcpy(to, from, offsetof(struct swerve_qp, run_mask));
	to->timed = 0;
	store_release(&to->state, SWERVE_QP_LIVE); /* last: before, the row is nobody's */
	store_release(&queue->record, to);
	let_go(&queue->completing, completing);
	let_go(&queue->posting, posting);
}

#endif /* SWERVE_TAP_QUEUE_H */
