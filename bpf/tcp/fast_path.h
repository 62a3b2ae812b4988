/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Nearly every packet tells nothing that cannot wait: it is glanced at, or not even that. */
#ifndef SWERVE_TCP_FAST_PATH_H
#define SWERVE_TCP_FAST_PATH_H

#include "tcp/requests.h"

/*
 * Whether it is enough to show the connection's new state: all else comes with the next look, and one comes for sure,
 * if only when the connection ends.
 */
static __always_inline bool glance_will_do(struct tcp_truth *truth, struct bpf_tcp_sock *tp, struct sight *sight)
{
	if (truth->total != tp->total_retrans || sight->flags & RST)
		return false;
	if (!truth->state || truth->state == sight->state) /* the first look is a whole one */
		return false;
	return truth->row.flags & SWERVE_TCP_CALLED || sight->state == BPF_TCP_ESTABLISHED;
}

static __always_inline void glance(struct tcp_truth *truth, struct sight *sight, u64 now)
{
	truth->row.last_ns = now;
	truth->row.state = truth->state = sight->state;
	if (sight->flags & FIN)
		truth->row.flags |= SWERVE_TCP_FIN_SENT;
	publish(truth);
}

/* The clock is asked once per tick at most: that costs as much as all the rest. */
static __always_inline bool is_due(struct tcp_truth *truth)
{
	u64 tick = bpf_jiffies64();

	if (truth->tick == tick)
		return false;
	truth->tick = tick;
	return bpf_ktime_get_coarse_ns() >= truth->due_ns;
}

/* Whether nothing is new of a connection but what can wait for the next look. */
static __always_inline bool is_fresh(struct tcp_truth *truth, struct bpf_sock *sk, struct bpf_tcp_sock *tp)
{
	return truth->total == tp->total_retrans && truth->state == sk->state && !is_due(truth);
}

/*
 * Where this CPU remembers that a connection was fresh: that is in the caches while a connection sends, unlike what is
 * kept with its socket. Another socket at the same address is taken for it until the next tick at most.
 */
static __always_inline struct fresh *fresh_row(struct bpf_sock *sk)
{
	u32 row = (sk->src_port ^ sk->dst_port ^ sk->dst_port >> 8) & (FRESH_ROWS - 1);

	return tcp_fresh.lookup(&row);
}

static __always_inline bool is_still_fresh(struct fresh *row, struct bpf_sock *sk, struct bpf_tcp_sock *tp)
{
	return row->skaddr == (u64)sk && row->total == tp->total_retrans && row->state == sk->state &&
	       row->tick == bpf_jiffies64();
}

static __always_inline void keep_fresh(struct fresh *row, struct bpf_sock *sk, struct tcp_truth *truth)
{
	row->skaddr = (u64)sk;
	row->tick = truth->tick;
	row->total = truth->total;
	row->state = truth->state;
}

/*
 * Whether a connection can be left alone for now: it has sent nothing again, and another look comes for sure, if only
 * when it ends. Most have ended by then, so that nothing but that last look is paid for them.
 */
static __always_inline bool is_young(struct __sk_buff *skb, struct tcp_truth *truth, struct bpf_tcp_sock *tp, u32 word)
{
	if (truth->met || !(truth->row.flags & SWERVE_TCP_CALLED) || tp->total_retrans || tp->segs_out >= YOUNG)
		return false;
	if (!word || word & WORD_RST || is_due(truth))
		return false;
	if (word & WORD_FIN)
		truth->row.flags |= SWERVE_TCP_FIN_SENT;
	truth->row.ifindex = skb->ifindex;
	if (!truth->row.cgroup)
		truth->row.cgroup = bpf_skb_cgroup_id(skb);
	return true;
}

#endif /* SWERVE_TCP_FAST_PATH_H */
