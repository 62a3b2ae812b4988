/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * All observers of packets in one program per hook: probe.c, tcp.c and sample.c share one look at the headers. What
 * nobody wants, nearly every packet, leaves here; any other one is handed on (a tail call), and the observers call each
 * other in their order. probe.c is compiled by itself, beside this one: it takes as long as all the rest.
 *
 * Each program on a hook costs a packet some 15 to 20 ns before it does anything: an indirect call, and caches.
 *
 * SWERVE_OBSERVE_SAMPLED: with sample.c. The observers' own constants as there.
 */
#define SWERVE_OBSERVE

#include "tcp.c"
#ifdef SWERVE_OBSERVE_SAMPLED
#include "sample.c"
#endif
#include "observe/front.h"

static __always_inline int observe_packet(struct __sk_buff *skb, bool out)
{
	enum observer first = wanted_by(skb, out);

	if (first == NOBODY)
		EXIT(TC_ACT_UNSPEC);
	return observed_by(skb, first, out);
}

int observe_egress(struct __sk_buff *skb)
{
	return observe_packet(skb, true);
}

int observe_ingress(struct __sk_buff *skb)
{
	return observe_packet(skb, false);
}
