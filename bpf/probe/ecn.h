/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Congestion marks (ECN, RFC 3168) of the packets that come in from peers, by the interface they come in by. */
#ifndef SWERVE_PROBE_ECN_H
#define SWERVE_PROBE_ECN_H

#include "probe/tables.h"

#define ECN_UNKNOWN 0xff /* the header has to be looked for first */

/*
 * One buffer that could be marked. GRO merges only packets whose ECN fields are equal, and offloads give every segment
 * its buffer's: so all of them carry the same mark, and they are counted as the kernel's own InCEPkts counts them.
 */
static __always_inline void count_marks(struct __sk_buff *skb, struct swerve_addr *source, u8 ecn)
{
	struct swerve_ecn_key key = { .remote = *source, .ifindex = skb->ifindex };
	struct swerve_ecn first = {}, *seen;
	u64 packets = packets_in(skb);

	seen = path_ecn.lookup(&key);
	if (!seen) {
		if (!probe_peers.lookup(source))
			return;
		path_ecn.insert(&key, &first); /* another CPU may have been first */
		seen = path_ecn.lookup(&key);
		if (!seen) {
			count(SWERVE_PROBE_ECN_FULL, packets);
			return;
		}
	}
	seen->packets += packets;
	if (ecn == ECN_CE)
		seen->ce_packets += packets;
}

static __always_inline void count_ipv4_marks(struct __sk_buff *skb, __be32 from, u8 ecn)
{
	struct swerve_addr source;

	map_ipv4(&source, from);
	count_marks(skb, &source, ecn);
}

static __always_inline void count_ipv6_marks(struct __sk_buff *skb, struct in6_addr *from, u8 ecn)
{
	struct swerve_addr source;

	__builtin_memcpy(&source, from, sizeof(source));
	count_marks(skb, &source, ecn);
}

/* A packet that could be marked and whose header `ordinary` has found: the verifier wants its bounds looked at again. */
static __always_inline void count_marks_of(struct __sk_buff *skb, u8 ecn)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct iphdr *ip = data + ETH_HLEN;
	struct ipv6hdr *ip6 = data + ETH_HLEN;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if ((void *)(ip + 1) <= end)
			count_ipv4_marks(skb, ip->saddr, ecn);
	} else if ((void *)(ip6 + 1) <= end) {
		count_ipv6_marks(skb, &ip6->saddr, ecn);
	}
}

/* The same for a packet whose header lies behind a tag, or not in the linear part. */
static __always_inline void count_hidden_marks(struct __sk_buff *skb)
{
	struct ipv6hdr ip6;
	__be16 protocol;
	struct iphdr ip;
	u32 offset;

	offset = network_header(skb, &protocol);
	if (offset == NO_HEADER)
		return;
	if (protocol == bpf_htons(ETH_P_IP)) {
		if (!bpf_skb_load_bytes(skb, offset, &ip, sizeof(ip)) && ip.version == 4 && ip.tos & ECN_BITS)
			count_ipv4_marks(skb, ip.saddr, ip.tos & ECN_BITS);
	} else if (protocol == bpf_htons(ETH_P_IPV6)) {
		if (!bpf_skb_load_bytes(skb, offset, &ip6, sizeof(ip6)) && ip6.version == 6 && ipv6_ecn(&ip6))
			count_ipv6_marks(skb, &ip6.saddr, ipv6_ecn(&ip6));
	}
}

#endif /* SWERVE_PROBE_ECN_H */
