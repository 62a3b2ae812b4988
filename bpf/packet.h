/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What a packet is: the tags in front of its network header, its addresses. Pure functions of the packet.
 */
#ifndef SWERVE_PACKET_H
#define SWERVE_PACKET_H

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>

#include "swerve.h"

#define VLAN_TAGS 2 /* 802.1ad over 802.1Q */

#define IPV4_OFFSET bpf_htons(0x1fff)	/* where in its packet a fragment lies */
#define IPV4_FRAGMENT bpf_htons(0x3fff) /* more fragments, or an offset */

/*
 * End the program here. The kernel's compiler puts what ends a program where it meets the first exit, which in a large
 * one is pages away from the few instructions that nearly every packet takes: a cache miss for each of them.
 */
#define EXIT(verdict)                                             \
	do {                                                      \
		asm volatile("r0 = %0\n\texit" : : "i"(verdict)); \
		__builtin_unreachable();                          \
	} while (0)

/* A packet with plain headers, by direct access. */
struct plain {
	void *data;
	void *end;
	void *transport;
	u32 bytes; /* from the transport header to the end of the IP packet; 0: not known */
	u8 protocol;
	bool ipv6;
};

struct vlan_tag {
	__be16 tci;
	__be16 protocol;
};

static __always_inline bool is_tag(__be16 protocol)
{
	return protocol == bpf_htons(ETH_P_8021Q) || protocol == bpf_htons(ETH_P_8021AD);
}

/*
 * Where the network header begins and which it is; 0 when the packet ends before it does. Read from the packet's own
 * bytes, not from skb->protocol: a tag may lie in the packet or beside it.
 */
static __always_inline u32 network_header(struct __sk_buff *skb, __be16 *protocol)
{
	u32 offset = ETH_HLEN;
	struct vlan_tag tag;

	if (bpf_skb_load_bytes(skb, 2 * ETH_ALEN, protocol, sizeof(*protocol)))
		return 0;
#pragma unroll
	for (int i = 0; i < VLAN_TAGS; i++) {
		if (!is_tag(*protocol))
			break;
		if (bpf_skb_load_bytes(skb, offset, &tag, sizeof(tag)))
			return 0;
		*protocol = tag.protocol;
		offset += sizeof(tag);
	}
	return offset;
}

static __always_inline void map_ipv4(struct swerve_addr *to, __be32 address)
{
	__builtin_memset(to->bytes, 0, 10);
	to->bytes[10] = 0xff;
	to->bytes[11] = 0xff;
	__builtin_memcpy(to->bytes + 12, &address, 4);
}

#endif /* SWERVE_PACKET_H */
