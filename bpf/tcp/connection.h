/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The record of a connection: met, kept, and copied to its row. */
#ifndef SWERVE_TCP_CONNECTION_H
#define SWERVE_TCP_CONNECTION_H

#include "tcp/totals.h"

/* The row of a connection becomes a copy of what its socket has. */
static __always_inline void publish(struct tcp_truth *truth)
{
	struct swerve_tcp_flow *row = tcp_flows.lookup(&truth->key);

	if (!row) {
		if (!tcp_flows.insert(&truth->key, &truth->row)) {
			raise_counter(SWERVE_TCP_FLOWS_CREATED, 1);
			return;
		}
		row = tcp_flows.lookup(&truth->key);
	}
	if (!row) {
		raise_counter(SWERVE_TCP_FLOWS_FULL, 1);
		return;
	}
	if (row->cookie != truth->row.cookie || row->first_ns != truth->row.first_ns) {
		raise_counter(SWERVE_TCP_FLOWS_CREATED, 1);
		raise_counter(SWERVE_TCP_FLOWS_REPLACED, 1);
	}
	*row = truth->row;
}

/*
 * Works for a request socket too: only what every socket has is read. Not an if with an else: the compiler would
 * merge the loads of both and compute with the socket's address, which the verifier forbids.
 */
static __always_inline void fill_key(struct swerve_tcp_key *key, struct bpf_sock *sk)
{
	u32 *local = (u32 *)&key->local, *remote = (u32 *)&key->remote;

	key->local_port = sk->src_port;
	key->remote_port = bpf_ntohs(sk->dst_port);
	local[0] = 0;
	local[1] = 0;
	local[2] = bpf_htonl(0xffff);
	local[3] = sk->src_ip4;
	remote[0] = 0;
	remote[1] = 0;
	remote[2] = bpf_htonl(0xffff);
	remote[3] = sk->dst_ip4;
	if (sk->family != SWERVE_FAMILY_IPV6)
		return;
	local[0] = sk->src_ip6[0];
	local[1] = sk->src_ip6[1];
	local[2] = sk->src_ip6[2];
	local[3] = sk->src_ip6[3];
	remote[0] = sk->dst_ip6[0];
	remote[1] = sk->dst_ip6[1];
	remote[2] = sk->dst_ip6[2];
	remote[3] = sk->dst_ip6[3];
}

/* Two processors never look at one connection at a time: what one leaves undone, the other or the next packet does. */
static __always_inline bool take(struct tcp_truth *truth)
{
	return !__sync_val_compare_and_swap(&truth->busy, 0, 1);
}

static __always_inline void give(struct tcp_truth *truth)
{
	__sync_val_compare_and_swap(&truth->busy, 1, 0);
}

/* Payload in sequence numbers: a SYN and a FIN take one each. */
static __always_inline u64 sent_bytes(struct tcp_truth *truth, struct bpf_tcp_sock *tp)
{
	u64 sent = tp->bytes_acked + (u32)(tp->snd_nxt - tp->snd_una);
	u64 marks = !!(truth->row.flags & SWERVE_TCP_ACTIVE) + !!(truth->row.flags & SWERVE_TCP_FIN_SENT);

	return sent > marks ? sent - marks : 0;
}

/* A new connection has left no state yet: if the end of what had its address before was not seen, that is kept still. */
static __always_inline void forget_congestion(u64 skaddr)
{
	if (tcp_congestion.lookup(&skaddr)) /* rarely: to delete is dearer */
		tcp_congestion.delete(&skaddr);
}

/*
 * Of most connections nothing is kept: they never leave Open. Of one that precedes us it is what user space was told,
 * or what it has become since.
 */
static __always_inline void track(struct tcp_truth *truth, u64 now, u32 state)
{
#ifdef SWERVE_TCP_CONGESTION
	struct swerve_tcp_congestion start = { .since_ns = now, .state = state }, *kept;

	truth->row.congestion = state;
	if (truth->row.flags & SWERVE_TCP_CALLED)
		return;
	if (!(truth->row.flags & SWERVE_TCP_OLDER)) {
		forget_congestion(truth->row.skaddr);
		return;
	}
	kept = tcp_congestion.lookup(&truth->row.skaddr);
	if (kept)
		start.state = kept->state;
	if ((kept || state) && tcp_congestion.update(&truth->row.skaddr, &start))
		raise_counter(SWERVE_TCP_CONGESTION_FULL, 1);
#endif
}

/* What is in the books already: all that precedes the agent, or the SYN-ACKs of the request the connection began as. */
static __always_inline void meet(struct tcp_truth *truth, struct bpf_sock *sk, struct bpf_tcp_sock *tp, u64 cookie,
				 u64 now)
{
	u32 state = 0, again, flags = truth->row.flags;
	struct swerve_tcp_accounted *accounted = 0;

	if (!(flags & SWERVE_TCP_CALLED)) { /* else what it has is of its youth */
		__builtin_memset(&truth->row, 0, sizeof(truth->row));
		truth->row.first_ns = now;
		flags &= SWERVE_TCP_ACTIVE;
	}
	fill_key(&truth->key, sk);
	truth->key.netns = truth->row.netns;
	truth->row.cookie = cookie;
	truth->row.skaddr = (u64)sk;
	truth->row.congestion = SWERVE_TCP_STATE_UNKNOWN;
	truth->sent = truth->received = 0;
	truth->total = truth->segments_out = truth->segments_in = 0;
	truth->delivered = truth->delivered_ce = truth->spurious = 0;
	truth->state = 0;
	truth->due_ns = 0;
	truth->retransmits = 0;
	truth->unacknowledged = tp->snd_una;
	truth->closed = 0;
	if (sk->state == BPF_TCP_SYN_SENT)
		flags |= SWERVE_TCP_ACTIVE;

	/* What calls back began after us; the request that it was has sent nothing again if it has not. */
	if (tp->total_retrans || !(flags & SWERVE_TCP_CALLED))
		accounted = tcp_accounted.lookup(&cookie);
	if (accounted) {
		/* less by now: it connected anew */
		truth->total = accounted->segments < tp->total_retrans ? accounted->segments : tp->total_retrans;
		if (accounted->older) {
			flags |= SWERVE_TCP_OLDER;
			state = accounted->congestion;
			again = tp->total_retrans - truth->total;
			if (tp->icsk_retransmits > again) /* a series of timeouts that has begun before */
				truth->retransmits = tp->icsk_retransmits - again;
			truth->segments_out = tp->segs_out;
			truth->segments_in = tp->segs_in;
			truth->delivered = tp->delivered;
			truth->delivered_ce = tp->delivered_ce;
			truth->spurious = tp->dsack_dups;
			truth->received = tp->bytes_received;
			truth->sent = sent_bytes(truth, tp);
		} else {
			truth->row.counts.retransmitted[SWERVE_TCP_SYN] = accounted->segments;
			truth->row.counts.timeouts = accounted->timeouts;
		}
		tcp_accounted.delete(&cookie);
	}
	truth->row.flags = flags;
	truth->met = 1;
	if (sk->state != BPF_TCP_CLOSE) /* what is kept of it would stay */
		track(truth, now, state);
	raise_counter(SWERVE_TCP_MET, 1);
}

#endif /* SWERVE_TCP_CONNECTION_H */
