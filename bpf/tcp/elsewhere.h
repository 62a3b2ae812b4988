/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Connections of other network namespaces. Their packets have no socket by the time they pass an interface of the
 * host, so the kernel calls back for each retransmission and, for the refresh, for each measured round trip. They are
 * in the sums of their namespace only, never in those of a path or an interface. Not seen: closed windows, resets, the
 * bytes of retransmitted segments, connections that precede the agent.
 */
#ifndef SWERVE_TCP_ELSEWHERE_H
#define SWERVE_TCP_ELSEWHERE_H

#include "tcp/fast_path.h"

#define REFRESH_ELSEWHERE_NS 1000000000 /* these are for people: who steers needs none of them */
#define ANY_SIZE 0xffffffff		/* segments whose bytes are nowhere counted */

/* Control group of the process that made a socket. Connections of a listener inherit the listener's. */
struct tcp_creators_table_t {
	int key;
	u64 leaf;
	u64 *(*sk_storage_get)(void *, void *, int);
	int (*sk_storage_delete)(void *);
	u32 flags;
};
__attribute__((section("maps/sk_storage"))) struct tcp_creators_table_t tcp_creators = { .flags = BPF_F_NO_PREALLOC |
												  BPF_F_CLONE };
BPF_ANNOTATE_KV_PAIR(tcp_creators, int, u64);

static __always_inline u64 creator(struct bpf_sock *sk)
{
	u64 *cgroup = tcp_creators.sk_storage_get(sk, 0, 0);

	return cgroup ? *cgroup : 0;
}

/* Without a context the kernel gives the cookie of the initial namespace. */
static __always_inline bool all_are_followed(struct swerve_tcp_settings *settings)
{
	if (settings->namespaces == SWERVE_TCP_AUTO)
		return settings->netns_cookie == bpf_get_netns_cookie(0);
	return settings->namespaces == SWERVE_TCP_ALL;
}

/*
 * Packets of a macvlan or ipvlan come by with their socket. Callbacks count them; here is seen by which interface they
 * leave. Those of a connection that precedes the agent are told from ours where the kernel can (Linux 6.15).
 */
static __always_inline bool is_elsewhere(struct __sk_buff *skb, struct bpf_sock *sk, struct bpf_tcp_sock *tp,
					 struct tcp_truth *truth)
{
#ifdef SWERVE_TCP_NETNS_COOKIE
	struct swerve_tcp_settings *settings;
	u32 only = 0;
	u64 netns;

	if (!truth->met && !(truth->row.flags & SWERVE_TCP_CALLED)) {
		settings = tcp_settings.lookup(&only);
		netns = bpf_get_netns_cookie(skb);
		if (!settings || netns == settings->netns_cookie)
			return false;
		truth->row.netns = netns;
		truth->total = tp->total_retrans; /* nothing will be new for a long time */
		truth->state = sk->state;
		truth->due_ns = ~0ULL;
	}
#endif
	truth->row.ifindex = skb->ifindex;
	return truth->row.netns;
}

static __always_inline void look_elsewhere(struct bpf_sock_ops *ops, struct bpf_sock *sk, struct tcp_truth *truth)
{
	struct bpf_tcp_sock *tp = bpf_tcp_sock(sk);
	struct sight sight = { .segments = ANY_SIZE };
	u64 now;

	if (!tp || (truth->total == tp->total_retrans && !is_due(truth)))
		return;
	if (!take(truth)) {
		raise_counter(SWERVE_TCP_DEFERRED, 1);
		return;
	}
	now = bpf_ktime_get_ns();
	sight.state = sk->state;
	if (!truth->met)
		meet(truth, sk, tp, socket_cookie(ops), now);
	look(truth, tp, &sight, now);
	truth->tick = bpf_jiffies64();
	truth->due_ns = bpf_ktime_get_coarse_ns() + REFRESH_ELSEWHERE_NS;
	give(truth);
}

#endif /* SWERVE_TCP_ELSEWHERE_H */
