/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Why a segment was sent again: by the congestion state, and by the timeouts since the last look. */
#ifndef SWERVE_TCP_CAUSES_H
#define SWERVE_TCP_CAUSES_H

#include "tcp/connection.h"

/* The congestion state, and how long it and the others have lasted: Open is what is left of the connection's time. */
static __always_inline void read_congestion(struct tcp_truth *truth, u64 now)
{
#ifdef SWERVE_TCP_CONGESTION
	struct swerve_tcp_congestion *kept = tcp_congestion.lookup(&truth->row.skaddr);
	u64 state = CA_OPEN, spent, elsewhere = 0, lasted = now - truth->row.first_ns;

	if (kept) {
		state = kept->state;
#pragma unroll
		for (int i = CA_OPEN + 1; i < SWERVE_TCP_STATES; i++) {
			spent = kept->spent_ns[i];
			if (state == i && now > kept->since_ns)
				spent += now - kept->since_ns;
			truth->row.congestion_ns[i] = spent;
			elsewhere += spent;
		}
	}
	truth->row.congestion_ns[CA_OPEN] = lasted > elsewhere ? lasted - elsewhere : 0;
	truth->row.congestion = state;
#endif
}

/* From now on the connection is in this state. */
static __always_inline void keep(u64 skaddr, struct swerve_tcp_congestion *kept, u64 state, u64 now)
{
	struct swerve_tcp_congestion start = { .since_ns = now, .state = state };
	u64 before;

	if (!kept) {
		if (state != CA_OPEN && tcp_congestion.update(&skaddr, &start))
			raise_counter(SWERVE_TCP_CONGESTION_FULL, 1);
		return;
	}
	before = kept->state;
	if (before == state || before >= SWERVE_TCP_STATES)
		return;
	kept->spent_ns[before] += now - kept->since_ns;
	kept->since_ns = now;
	kept->state = state;
}

/*
 * A change of state that the tracepoint's program was not run for is made up for by a second witness: only what is
 * marked lost is sent again in Recovery and Loss, and a tail probe is sent only while nothing is.
 */
static __always_inline void correct(struct tcp_truth *truth, struct bpf_tcp_sock *tp, u64 timeouts, u64 now)
{
	struct swerve_tcp_congestion *kept;
	u64 before = truth->row.congestion, state = timeouts ? CA_LOSS : CA_RECOVERY;

	if (before >= CA_RECOVERY + !!timeouts || !tp->lost_out)
		return;
	truth->row.congestion = state;
	kept = tcp_congestion.lookup(&truth->row.skaddr);
	if (kept && kept->state != before)
		return;
	keep(truth->row.skaddr, kept, state, now);
	raise_counter(SWERVE_TCP_CONGESTION_MISSED, 1);
}

static __always_inline u32 cause(struct tcp_truth *truth, u8 state, u64 timeouts)
{
	if (state == BPF_TCP_SYN_SENT || state == BPF_TCP_SYN_RECV)
		return SWERVE_TCP_SYN;
	if (timeouts) /* since the last packet */
		return SWERVE_TCP_TIMEOUT;
	switch (truth->row.congestion) {
	case CA_OPEN:
	case CA_DISORDER:
	case CA_CWR:
		return SWERVE_TCP_TAIL_PROBE;
	case CA_RECOVERY:
		return SWERVE_TCP_FAST;
	case CA_LOSS:
		return SWERVE_TCP_TIMEOUT;
	}
	return SWERVE_TCP_UNKNOWN;
}

/* Timeouts since the last look. Without callbacks: a timeout that sends nothing again here is not seen. */
static __always_inline u64 new_timeouts(struct tcp_truth *truth, struct bpf_tcp_sock *tp, u32 again)
{
	u32 before, now = tp->icsk_retransmits;

	if (truth->row.flags & SWERVE_TCP_CALLED)
		return truth->timeouts ? __sync_lock_test_and_set(&truth->timeouts, 0) : 0;
	if (!again)
		return 0;
	if (truth->unacknowledged != tp->snd_una) { /* the kernel counts anew once something is acknowledged */
		truth->unacknowledged = tp->snd_una;
		truth->retransmits = 0;
	}
	before = truth->retransmits;
	truth->retransmits = now;
	return now > before ? now - before : 0;
}

/* Segments sent again since the last look. A packet shows its own size; those that never came here showed none. */
static __always_inline void count_again(struct tcp_truth *truth, struct swerve_tcp_counts *delta, u32 again,
					struct sight *sight)
{
	u32 why = cause(truth, sight->state, delta->timeouts), seen = sight->segments;

	delta->retransmitted[SWERVE_TCP_FAST] = why == SWERVE_TCP_FAST ? again : 0;
	delta->retransmitted[SWERVE_TCP_TIMEOUT] = why == SWERVE_TCP_TIMEOUT ? again : 0;
	delta->retransmitted[SWERVE_TCP_TAIL_PROBE] = why == SWERVE_TCP_TAIL_PROBE ? again : 0;
	delta->retransmitted[SWERVE_TCP_SYN] = why == SWERVE_TCP_SYN ? again : 0;
	delta->retransmitted[SWERVE_TCP_UNKNOWN] = why == SWERVE_TCP_UNKNOWN ? again : 0;
	delta->retransmitted_bytes = sight->bytes;
	if (again > seen)
		raise_counter(SWERVE_TCP_UNSIZED, again - seen);
}

#endif /* SWERVE_TCP_CAUSES_H */
