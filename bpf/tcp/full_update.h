/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Bring a connection's record, the totals and its row up to date. */
#ifndef SWERVE_TCP_FULL_UPDATE_H
#define SWERVE_TCP_FULL_UPDATE_H

#include "tcp/causes.h"

static __always_inline void look(struct tcp_truth *truth, struct bpf_tcp_sock *tp, struct sight *sight, u64 now)
{
	struct swerve_tcp_counts *delta = &truth->delta;
	u64 sent, received;
	u32 again;

	__builtin_memset(delta, 0, sizeof(*delta));
	read_congestion(truth, now);
	again = tp->total_retrans - truth->total;
	delta->timeouts = new_timeouts(truth, tp, again);
	if (again) {
		correct(truth, tp, delta->timeouts, now);
		count_again(truth, delta, again, sight);
	}
	truth->total += again;

	if (sight->flags & RST)
		delta->resets_sent = 1;
	sent = sent_bytes(truth, tp);
	if (sent > truth->sent) {
		delta->sent_bytes = sent - truth->sent;
		truth->sent = sent;
	}
	if (sight->flags & FIN) /* the sequence numbers of a packet are the socket's only once it has left */
		truth->row.flags |= SWERVE_TCP_FIN_SENT;
	received = tp->bytes_received;
	delta->received_bytes = received - truth->received;
	truth->received = received;
	delta->segments_out = (u32)(tp->segs_out - truth->segments_out);
	truth->segments_out += delta->segments_out;
	delta->segments_in = (u32)(tp->segs_in - truth->segments_in);
	truth->segments_in += delta->segments_in;
	delta->delivered = (u32)(tp->delivered - truth->delivered);
	truth->delivered += delta->delivered;
	delta->delivered_ce = (u32)(tp->delivered_ce - truth->delivered_ce);
	truth->delivered_ce += delta->delivered_ce;
	delta->spurious = (u32)(tp->dsack_dups - truth->spurious);
	truth->spurious += delta->spurious;

	add(&truth->row.counts, delta);
	if (truth->row.netns)
		add_to_namespace(&truth->row, delta, !truth->row.last_ns);
	else
		add_to_totals(&truth->key.remote, truth->row.ifindex, delta);

	truth->row.last_ns = now;
	truth->row.acknowledged_bytes = tp->bytes_acked;
	truth->row.srtt_us = tp->srtt_us >> 3;
	truth->row.min_rtt_us = tp->rtt_min;
	truth->row.cwnd = tp->snd_cwnd;
	truth->row.ssthresh = tp->snd_ssthresh;
	truth->row.mss = tp->mss_cache;
	truth->row.rate_delivered = tp->rate_delivered;
	truth->row.rate_interval_us = tp->rate_interval_us;
	truth->row.ecn_flags = tp->ecn_flags;
	truth->row.state = truth->state = sight->state;
	publish(truth);
}

static __always_inline u64 refresh_ns(void)
{
	struct swerve_tcp_settings *settings;
	u32 only = 0;

	settings = tcp_settings.lookup(&only);
	return settings ? settings->refresh_ns : 0;
}

#endif /* SWERVE_TCP_FULL_UPDATE_H */
