/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Faults of a lab's rail that the kernel has no queue discipline for, at TC egress of the rail's ports, before their
 * queues: congestion marks on every n-th packet that can be marked, and the silent loss of packets that are too long,
 * or of a random share.
 * At egress and ingress: a cable that carries nothing, although both its ends believe in it.
 *
 * SWERVE_LAB_EVERY: which packets lab_mark marks. SWERVE_LAB_BYTES: the longest IP packet that lab_narrow lets pass.
 * SWERVE_LAB_SHARE: how many of 2^32 packets lab_random loses.
 */
#include <linux/udp.h>

#include "lib/counters.h"
#include "lib/packet.h"
#include "lib/tcp.h"
#include "swerve.h"

#ifndef SWERVE_LAB_EVERY
#define SWERVE_LAB_EVERY 1
#endif
#ifndef SWERVE_LAB_BYTES
#define SWERVE_LAB_BYTES 1280
#endif

#ifndef SWERVE_LAB_SHARE
#define SWERVE_LAB_SHARE 0
#endif

BPF_PERCPU_ARRAY(lab_counts, u64, SWERVE_LAB_COUNTERS);

static __always_inline void count(u32 counter, u64 more)
{
	raise(lab_counts.lookup(&counter), more);
}

/* Counts per CPU. A buffer that is to become several packets is marked, or not, as a whole. */
int lab_mark(struct __sk_buff *skb)
{
	u64 *able, before, packets = packets_in(skb);
	u32 counter = SWERVE_LAB_ABLE;
	struct ip_packet packet;

	able = lab_counts.lookup(&counter);
	if (!able || !read_ip(skb, &packet) || !packet.ecn)
		return TC_ACT_UNSPEC;
	before = *able;
	*able += packets;
	if (before / SWERVE_LAB_EVERY == *able / SWERVE_LAB_EVERY || packet.ecn == ECN_CE)
		return TC_ACT_UNSPEC;
	if (bpf_skb_ecn_set_ce(skb))
		count(SWERVE_LAB_MARKED, packets);
	return TC_ACT_UNSPEC;
}

/* Headers in front of what is cut into segments; 0 when they cannot be read. */
static __always_inline u32 header_bytes(struct __sk_buff *skb)
{
	struct ip_packet packet;
	struct tcp_head head;

	if (!read_ip(skb, &packet))
		return 0;
	if (packet.protocol == IPPROTO_UDP)
		return packet.transport - ETH_HLEN + sizeof(struct udphdr);
	if (packet.protocol != IPPROTO_TCP || bpf_skb_load_bytes(skb, packet.transport, &head, sizeof(head)))
		return 0;
	return packet.transport - ETH_HLEN + tcp_header_bytes(&head);
}

/* Of a buffer that is to become several packets the longest counts, and all of it is lost. */
int lab_narrow(struct __sk_buff *skb)
{
	u32 segment = skb->gso_size, bytes; /* read once: the verifier takes no computed pointer into the context */

	if (!is_ip(skb->protocol))
		return TC_ACT_UNSPEC;
	bytes = skb->len - ETH_HLEN;
	if (segment)
		bytes = header_bytes(skb) + segment;
	if (bytes <= SWERVE_LAB_BYTES)
		return TC_ACT_UNSPEC;
	count(SWERVE_LAB_TOO_LONG, packets_in(skb));
	return TC_ACT_SHOT;
}

/* Whatever it is: ARP and what is meant for the rail itself, too. */
int lab_lose(struct __sk_buff *skb)
{
	count(SWERVE_LAB_LOST, packets_in(skb));
	return TC_ACT_SHOT;
}

/* Whatever it is, independently of all others. A buffer that is to become several packets is lost as a whole. */
int lab_random(struct __sk_buff *skb)
{
	if (bpf_get_prandom_u32() >= SWERVE_LAB_SHARE)
		return TC_ACT_UNSPEC;
	count(SWERVE_LAB_RANDOM, packets_in(skb));
	return TC_ACT_SHOT;
}
