/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Count the outer packets of tunnels by the interface that they leave by. Only where they leave can this be seen: the
 * kernel remembers the route of a tunnel per CPU, so the outer ports do not tell which way it chose.
 */
#ifndef SWERVE_OBSERVE_TUNNELS_H
#define SWERVE_OBSERVE_TUNNELS_H

#include <linux/udp.h>

#include "lib/counters.h"
#include "lib/packet.h"

BPF_ARRAY(tunnels_known, u32, 1); /* how many rows tunnel_packets has; 0: look for none */
BPF_F_TABLE("percpu_hash", struct swerve_tunnel, u64, tunnel_packets, SWERVE_TUNNELS, BPF_F_NO_PREALLOC);

static __always_inline void count_tunnel(struct __sk_buff *skb, const struct plain *plain)
{
	struct swerve_tunnel key = { .ifindex = skb->ifindex, .protocol = plain->protocol };
	const struct ipv6hdr *ip6 = plain->data + ETH_HLEN;
	const struct iphdr *ip = plain->data + ETH_HLEN;
	const struct udphdr *udp = plain->transport;
	u32 only = 0, *known;

	known = tunnels_known.lookup(&only);
	if (!known || !*known)
		return;
	if (plain->ipv6) {
		if ((void *)(ip6 + 1) > plain->end)
			return;
		__builtin_memcpy(&key.remote, &ip6->daddr, sizeof(key.remote));
	} else {
		if ((void *)(ip + 1) > plain->end)
			return;
		map_ipv4(&key.remote, ip->daddr);
	}
	if (plain->protocol == IPPROTO_UDP) {
		if ((void *)(udp + 1) > plain->end)
			return;
		key.port = bpf_ntohs(udp->dest);
	}
	raise(tunnel_packets.lookup(&key), packets_in(skb));
}

#endif /* SWERVE_OBSERVE_TUNNELS_H */
