/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What belongs to no connection yet, or to none at all: SYN-ACKs of requests, and resets. */
#ifndef SWERVE_TCP_REQUESTS_H
#define SWERVE_TCP_REQUESTS_H

#include "tcp/full_update.h"

/* Whether a SYN-ACK answers a SYN that came once more: then it was no timeout that sent it. */
static __always_inline bool answers(struct bpf_sock *request, u64 now)
{
	u64 address = (u64)request, *asked = tcp_repeated_syns.lookup(&address);
	bool soon = asked && now - *asked < ANSWER_NS;

	if (asked)
		tcp_repeated_syns.delete(&address);
	return soon;
}

/*
 * The second SYN-ACK of a request is a retransmission. The connection that follows starts with these in its totals,
 * so they are remembered for meet(); when that cannot be, they are left for it to count.
 */
static __always_inline void count_synack(struct __sk_buff *skb, struct bpf_sock *request)
{
	struct swerve_tcp_accounted nothing = {}, *accounted;
	struct swerve_tcp_counts delta = {};
	u64 cookie = socket_cookie(skb), now;
	struct packet packet;
	u32 ifindex = skb->ifindex, before = 0, *first;

	if (!parse(skb, &packet) || (packet.flags & (SYN | ACK)) != (SYN | ACK))
		return; /* a request also sends challenge ACKs */
	accounted = tcp_accounted.lookup(&cookie);
	first = tcp_synacks.lookup(&cookie);
	if (first) /* into a number: the compiler would join two pointers in one test, which the verifier forbids */
		before = *first;
	if (before && before != ifindex)
		return; /* the same packet, further down; or one by another way, which is left for the connection */
	if (!before && !accounted) {
		tcp_synacks.update(&cookie, &ifindex);
		return;
	}
	accounted = tcp_accounted.lookup_or_try_init(&cookie, &nothing);
	if (!accounted) {
		raise_counter(SWERVE_TCP_SYNACKS_FULL, 1);
		return;
	}
	now = bpf_ktime_get_ns();
	delta.timeouts = !answers(request, now);
	__sync_fetch_and_add(&accounted->segments, 1);
	__sync_fetch_and_add(&accounted->timeouts, delta.timeouts);
	accounted->last_ns = now;
	delta.retransmitted[SWERVE_TCP_SYN] = 1;
	delta.segments_out = 1;
	add_to_totals(&packet.ip.destination, skb->ifindex, &delta);
}

/* A reset that this host sends for what belongs to no connection; one that it forwards came in by an interface. */
static __always_inline void count_refused(struct __sk_buff *skb)
{
	struct swerve_tcp_counts delta = { .resets_refused = 1 };
	struct packet packet;

	if (skb->ingress_ifindex || !parse(skb, &packet) || !(packet.flags & RST))
		return;
	add_to_totals(&packet.ip.destination, skb->ifindex, &delta);
}

#endif /* SWERVE_TCP_REQUESTS_H */
