/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * When packets to a held destination may leave, from samples of the queueing on their path: arithmetic alone, which
 * steering/hold/law.py repeats and explains.
 *
 * A state is shared by all CPUs without a lock: a race costs one packet's place or one sample, never the order of two
 * packets that one CPU sends. Fields wrap nowhere: times are below 2^62 ns, rates below HOLD_MOST_RATE.
 */
#ifndef SWERVE_STEER_HOLD_LAW_H
#define SWERVE_STEER_HOLD_LAW_H

#define HOLD_SHIFT 20 /* of a gap: ns a byte, times 2^20 */
#define HOLD_SECOND_NS 1000000000ULL
#define HOLD_WINDOW_NS 1000000ULL    /* one's own rate is measured over at least this */
#define HOLD_SPAN_NS 50000000ULL     /* samples further apart tell nothing about what grows between them */
#define HOLD_MEMORY_NS 1000000000ULL /* a rate that has held no packet for so long is forgotten */
#define HOLD_LEAST_RATE 1024ULL	     /* bytes a second */
#define HOLD_MOST_RATE (1ULL << 37)
#define HOLD_MOST_BYTES (1ULL << 33) /* counted in one window */
#define HOLD_UNIT_RATE 125000ULL     /* a rate grows by the root of itself times this within the next time */
#define HOLD_GROWTH_NS 32000000ULL
#define HOLD_MOST 512	   /* of 1024: how much a rate may grow or fall by one sample */
#define HOLD_PAUSE_ABOVE 2 /* times the threshold: only a longer queue is also drained by a pause */

#define HOLD_IDLE_NS 10000000ULL /* a host from which nothing left for so long begins anew */
#define HOLD_START 4		 /* times the floor: the rate at which it then begins, where a queue is */

#define HOLD_SHORT 4		    /* times the threshold: longer queues are not those of held hosts alone */
#define HOLD_OTHERS_NS 300000000ULL /* where a queue has been longer for this time, others keep it so: */
#define HOLD_TRY_NS 100000000ULL    /* only for this time of each second all hold, to see whether it is theirs again */

/* Of 1024, how much one round of the loop corrects: of what the queue grows, of what is too much, of what it lacks. */
#define HOLD_TREND 410
#define HOLD_EXCESS 231
#define HOLD_SHORTFALL 1024

/* What a sample came to. */
enum hold_result {
	HOLD_OFF,	/* the lease has ended */
	HOLD_STALE,	/* too old, or overtaken by a newer one */
	HOLD_CLEAR,	/* queueing at or below the threshold, once the pauses that are made have passed */
	HOLD_CONGESTED, /* above */
};

static inline __attribute__((always_inline)) u64 hold_less(u64 value, u64 by)
{
	return value > by ? value - by : 0;
}

static inline __attribute__((always_inline)) u64 hold_within(u64 value, u64 least, u64 most)
{
	return value < least ? least : value > most ? most : value;
}

/* The square root, at most a thousandth too large: Newton's steps from a power of two. */
static inline __attribute__((always_inline)) u64 hold_root(u64 value)
{
	u64 root = 1, rest = value;

	if (!value)
		return 0;
	for (int bits = 32; bits; bits >>= 1)
		if (rest >> bits) {
			rest >>= bits;
			root <<= bits / 2;
		}
	root <<= rest ? 1 : 0;
	for (int step = 0; step < 4; step++)
		root = (root + value / root) >> 1;
	return root;
}

static inline __attribute__((always_inline)) void hold_set_rate(struct swerve_hold_state *state, u64 rate, u64 floor)
{
	rate = hold_within(rate, hold_within(floor, HOLD_LEAST_RATE, HOLD_MOST_RATE), HOLD_MOST_RATE);
	state->rate = rate;
	state->gap = (HOLD_SECOND_NS << HOLD_SHIFT) / rate;
}

static inline __attribute__((always_inline)) void hold_forget(struct swerve_hold_state *state)
{
	state->rate = 0;
	state->gap = 0;
	state->burst_rate = 0;
}

/* Whether to hold nothing, since hosts without a hold keep the queue long. */
static inline __attribute__((always_inline)) bool hold_is_beside(const struct swerve_hold_state *state,
								 const struct swerve_hold_limits *limits, u64 now_ns)
{
	return now_ns > state->short_ns + HOLD_OTHERS_NS &&
	       hold_less(now_ns, limits->second_ns) % HOLD_SECOND_NS >= HOLD_TRY_NS;
}

/* The largest rate of late at which packets left, whether they were held or not. */
static inline __attribute__((always_inline)) void hold_measure(struct swerve_hold_state *state, u64 now_ns)
{
	u64 bytes = hold_less(state->bytes, state->window_bytes), age = hold_less(now_ns, state->window_ns), rate;

	if (age < HOLD_WINDOW_NS)
		return;
	if (bytes > HOLD_MOST_BYTES)
		bytes = HOLD_MOST_BYTES;
	rate = state->window_ns ? bytes * HOLD_SECOND_NS / age : 0;
	state->own_rate -= state->own_rate >> 3;
	if (rate > state->own_rate)
		state->own_rate = rate;
	state->window_ns = now_ns;
	state->window_bytes = state->bytes;
}

/* How much of the last pause lies between two moments. */
static inline __attribute__((always_inline)) u64 hold_paused(const struct swerve_hold_state *state, u64 since_ns,
							     u64 until_ns)
{
	u64 from = since_ns > state->pause_ns ? since_ns : state->pause_ns;

	return hold_less(until_ns < state->pause_end_ns ? until_ns : state->pause_end_ns, from);
}

/*
 * By how much a rate is to change, of 1024, after a queue has grown by `grown` in `apart` and is off by `excess`; `delay`
 * is how long the whole loop takes. All within a second, so that no product wraps.
 */
static inline __attribute__((always_inline)) s64 hold_step(s64 grown, s64 excess, u64 apart, u64 delay)
{
	u64 trend = grown < 0 ? -grown : grown, off = excess < 0 ? -excess : excess;
	s64 step;

	trend = trend * HOLD_TREND / delay;
	off = off * (excess < 0 ? HOLD_SHORTFALL : HOLD_EXCESS) / delay * apart / delay;
	step = (grown < 0 ? (s64)trend : -(s64)trend) + (excess < 0 ? (s64)off : -(s64)off);
	return step < -HOLD_MOST ? -HOLD_MOST : step > HOLD_MOST ? HOLD_MOST : step;
}

/* Let nothing leave for so long, on top of what waits already. */
static inline __attribute__((always_inline)) void
hold_pause(struct swerve_hold_state *state, const struct swerve_hold_limits *limits, u64 now_ns, u64 pause)
{
	u64 wait = hold_less(state->next_ns, now_ns);

	if (wait + pause > limits->longest_ns)
		pause = hold_less(limits->longest_ns, wait);
	if (!pause)
		return;
	if (state->pause_end_ns <= now_ns) {
		state->pause_ns = now_ns;
		state->pause_end_ns = now_ns;
	}
	state->pause_end_ns += pause;
	state->next_ns = now_ns + wait + pause;
}

/*
 * A probe that left at sent_ns has found queue_ns of queueing; both times are of this host's CLOCK_MONOTONIC. Called
 * when the answer is there.
 */
static inline __attribute__((always_inline)) enum hold_result hold_sample(struct swerve_hold_state *state,
									  const struct swerve_hold_limits *limits,
									  u64 now_ns, u64 sent_ns, u64 queue_ns)
{
	u64 taken_ns = state->taken_ns, before_ns = state->sent_ns, apart = sent_ns - before_ns, rate, more;
	s64 grown, excess, step;
	bool follows, binds;

	if (limits->until_ns <= now_ns) {
		hold_forget(state);
		return HOLD_OFF;
	}
	if (sent_ns <= before_ns || sent_ns > now_ns || now_ns > sent_ns + limits->fresh_ns)
		return HOLD_STALE;
	if (queue_ns > HOLD_SECOND_NS)
		queue_ns = HOLD_SECOND_NS;
	follows = apart <= HOLD_SPAN_NS;
	/* what the pauses of all hosts drained meanwhile would still be there; what they are to drain is not */
	grown = (s64)queue_ns - (s64)state->queue_ns + (s64)hold_paused(state, before_ns, sent_ns);
	excess = (s64)queue_ns - (s64)hold_paused(state, sent_ns, ~0ULL) - (s64)limits->threshold_ns;
	state->sent_ns = sent_ns;
	state->queue_ns = queue_ns;
	state->taken_ns = now_ns;
	if (!follows) /* what nobody looked at does not count as long */
		state->short_ns += apart;
	if (queue_ns <= HOLD_SHORT * limits->threshold_ns || state->short_ns > now_ns)
		state->short_ns = now_ns;
	hold_measure(state, now_ns);
	if (now_ns > state->held_ns + HOLD_MEMORY_NS)
		hold_forget(state);
	if (hold_is_beside(state, limits, now_ns)) {
		state->rate = 0;
		state->gap = 0;
		return excess > 0 ? HOLD_CONGESTED : HOLD_CLEAR;
	}
	rate = state->rate;
	binds = state->last_ns > taken_ns && rate <= 2 * state->own_rate;
	if (!rate) {
		rate = excess > 0 ? hold_within(state->own_rate, 0, HOLD_MOST_RATE) : 0;
		if (rate && follows && grown > 0)
			rate = rate / 1024 * (apart * 1024 / (apart + grown));
		if (rate) {
			hold_set_rate(state, rate, limits->floor);
			state->held_ns = now_ns;
		}
	} else if (follows) {
		step = hold_step(grown, excess, apart, now_ns - before_ns);
		more = hold_root(rate * HOLD_UNIT_RATE) * apart / HOLD_GROWTH_NS;
		if (step < 0)
			rate -= (rate >> 10) * (u64)-step;
		else if (binds)
			rate += (rate >> 10) * (u64)step;
		hold_set_rate(state, rate + (binds ? more : 0), limits->floor);
	}
	if (excess <= 0)
		return HOLD_CLEAR;
	excess -= (s64)limits->threshold_ns * (HOLD_PAUSE_ABOVE - 1);
	if (excess > 0)
		hold_pause(state, limits, now_ns, (u64)excess * limits->gain >> 8);
	return HOLD_CONGESTED;
}

/*
 * Silence has ended. What the last burst came to, from its first packet to the departure of its last, tells what share
 * there was among those who sent with this host, and who will mostly do so again.
 */
static inline __attribute__((always_inline)) void hold_end_burst(struct swerve_hold_state *state, u64 now_ns)
{
	u64 took_ns = hold_less(state->last_ns, state->burst_ns), bytes = hold_less(state->bytes, state->burst_bytes);

	if (took_ns >= HOLD_WINDOW_NS)
		state->burst_rate = hold_within(bytes, 0, HOLD_MOST_BYTES) * HOLD_SECOND_NS / took_ns;
	state->burst_ns = now_ns;
	state->burst_bytes = state->bytes;
}

/* After silence: many hosts may begin at once. */
static inline __attribute__((always_inline)) void hold_begin(struct swerve_hold_state *state,
							     const struct swerve_hold_limits *limits, u64 now_ns)
{
	u64 start = (limits->floor < HOLD_MOST_RATE ? limits->floor : HOLD_MOST_RATE) * HOLD_START;

	hold_set_rate(state, state->burst_rate ? state->burst_rate : start, limits->floor);
	state->held_ns = now_ns;
}

/*
 * The time at which a packet may leave; 0: at once. Never before the packets that were held earlier. Past the lease,
 * and without a fresh sample, packets only wait for those.
 */
static inline __attribute__((always_inline)) u64
hold_release(struct swerve_hold_state *state, const struct swerve_hold_limits *limits, u64 now_ns, u32 wire_bytes)
{
	u64 latest = now_ns + limits->longest_ns, idle_ns, next;

	/* packets that wait are no silence */
	idle_ns = hold_less(now_ns, state->last_ns > state->left_ns ? state->last_ns : state->left_ns);
	if (idle_ns > HOLD_IDLE_NS)
		hold_end_burst(state, now_ns);
	state->left_ns = now_ns;
	__sync_fetch_and_add(&state->bytes, wire_bytes);
	if (limits->until_ns <= now_ns || now_ns > state->taken_ns + limits->fresh_ns)
		return state->last_ns > now_ns ? state->last_ns : 0;
	if (idle_ns > HOLD_IDLE_NS && (state->rate || state->queue_ns > limits->threshold_ns >> 2) &&
	    !hold_is_beside(state, limits, now_ns))
		hold_begin(state, limits, now_ns);
	next = state->next_ns;
	if (next <= now_ns) {
		if (state->gap)
			state->next_ns = now_ns + (wire_bytes * state->gap >> HOLD_SHIFT);
		return 0;
	}
	if (next > latest)
		next = latest;
	state->next_ns = next + (wire_bytes * state->gap >> HOLD_SHIFT);
	state->last_ns = next;
	state->held_ns = now_ns;
	return next;
}

#endif /* SWERVE_STEER_HOLD_LAW_H */
