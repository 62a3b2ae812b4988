/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * From one observer of packets to the next: probe.c, tcp.c, sample.c, in this order.
 *
 * In observe.c they are called one from the other, so that a hook has one program of ours. Compiled alone, each is a
 * program on the hook itself, and the kernel calls the next.
 *
 * SWERVE_CHAINED: probe.c is compiled alone, but calls the others.
 */
#ifndef SWERVE_OBSERVE_CHAIN_H
#define SWERVE_OBSERVE_CHAIN_H

#include <linux/pkt_cls.h>

enum observer {
	PROBES,
	CONNECTIONS,
	SAMPLES,
	OBSERVERS,
};

#ifdef SWERVE_OBSERVE
BPF_PROG_ARRAY(observers, 2 * OBSERVERS); /* those at egress, then those at ingress */

/*
 * Have a packet observed by this one and those behind it. A call that succeeds does not come back; an observer that is
 * not there, since this kernel refused it, is passed over.
 */
static __always_inline int observed_by(struct __sk_buff *skb, enum observer first, bool out)
{
	u32 at = out ? 0 : OBSERVERS;

	if (first <= PROBES)
		observers.call(skb, at + PROBES);
	if (first <= CONNECTIONS)
		observers.call(skb, at + CONNECTIONS);
	if (first <= SAMPLES)
		observers.call(skb, at + SAMPLES);
	return TC_ACT_UNSPEC;
}

/* Nobody leaves before the others had their turn. */
#define LEAVE(verdict) return verdict
#elif defined(SWERVE_CHAINED)
BPF_PROG_ARRAY(probe_observers, 2 * OBSERVERS); /* as in observe.c; those behind probe.c */

static __always_inline int observed_by(struct __sk_buff *skb, enum observer first, bool out)
{
	u32 at = out ? 0 : OBSERVERS;

	probe_observers.call(skb, at + CONNECTIONS);
	probe_observers.call(skb, at + SAMPLES);
	return TC_ACT_UNSPEC;
}

#define LEAVE(verdict) return verdict
#else
static __always_inline int observed_by(struct __sk_buff *skb, enum observer first, bool out)
{
	return TC_ACT_UNSPEC;
}

#define LEAVE(verdict) EXIT(verdict)
#endif

/* What an observer has come to: a verdict, or none, and then the others go on. */
static __always_inline int unless_decided(struct __sk_buff *skb, int verdict, enum observer next, bool out)
{
	return verdict == TC_ACT_UNSPEC ? observed_by(skb, next, out) : verdict;
}

#endif /* SWERVE_OBSERVE_CHAIN_H */
