/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What a packet is: the tags in front of its network header, its addresses. Pure functions of the packet.
 */
#ifndef SWERVE_LIB_PACKET_H
#define SWERVE_LIB_PACKET_H

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>

#include "swerve.h"

#define VLAN_TAGS 2 /* 802.1ad over 802.1Q */

#define ECN_BITS 3 /* of the traffic class; zero: cannot be marked */
#define ECN_CE 3

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

/* How many packets a buffer is on the wire: before receive offload merged them, once it is cut into segments. */
static __always_inline u32 packets_in(struct __sk_buff *skb)
{
	return skb->gso_segs ?: 1;
}

/* One of ours on its way between our egress hooks. */
static __always_inline bool is_probe(struct __sk_buff *skb)
{
	return (skb->mark & SWERVE_MARK_BITS) == (SWERVE_MARK_SEND & SWERVE_MARK_BITS);
}

static __always_inline bool is_tag(__be16 protocol)
{
	return protocol == bpf_htons(ETH_P_8021Q) || protocol == bpf_htons(ETH_P_8021AD);
}

static __always_inline bool is_ip(__be16 protocol)
{
	return protocol == bpf_htons(ETH_P_IP) || protocol == bpf_htons(ETH_P_IPV6);
}

/*
 * Whether a packet begins with its IP header, as on tunnels (WireGuard, GRE). Ethernet has the Ethertype in front of
 * it; a tunnel's packet has the same bytes there only if it comes from 8.0.64.0/20, or if the third and fourth group of
 * its IPv6 address are 86dd:6xxx, and is then taken for another.
 */
static __always_inline bool is_bare(struct __sk_buff *skb)
{
	u8 *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	u8 version = skb->protocol == bpf_htons(ETH_P_IP) ? 4 : 6;

	if (!is_ip(skb->protocol) || data + ETH_HLEN + 1 > end)
		return false;
	if (*(__be16 *)(data + 2 * ETH_ALEN) == skb->protocol && data[ETH_HLEN] >> 4 == version)
		return false;
	return data[0] >> 4 == version;
}

static __always_inline u32 link_bytes(struct __sk_buff *skb)
{
	return is_bare(skb) ? 0 : ETH_HLEN;
}

/*
 * Where the network header begins and which it is; NO_HEADER when the packet ends before it does. Read from the
 * packet's own bytes, not from skb->protocol: a tag may lie in the packet or beside it.
 */
#define NO_HEADER (~0U)
static __always_inline u32 network_header(struct __sk_buff *skb, __be16 *protocol)
{
	u32 offset = ETH_HLEN;
	struct vlan_tag tag;

	if (is_bare(skb)) {
		*protocol = skb->protocol;
		return 0;
	}
	if (bpf_skb_load_bytes(skb, 2 * ETH_ALEN, protocol, sizeof(*protocol)))
		return NO_HEADER;
#pragma unroll
	for (int i = 0; i < VLAN_TAGS; i++) {
		if (!is_tag(*protocol))
			break;
		if (bpf_skb_load_bytes(skb, offset, &tag, sizeof(tag)))
			return NO_HEADER;
		*protocol = tag.protocol;
		offset += sizeof(tag);
	}
	return offset;
}

/* The first header of an IPv6 packet longer than its length field can tell (BIG TCP); there are such in hosts only. */
struct jumbo_header {
	u8 next;
	u8 words;
	u8 option;
	u8 option_bytes;
	__be32 bytes;
};

static __always_inline bool is_jumbo(const struct jumbo_header *header)
{
	return !header->words && header->option == IPV6_TLV_JUMBO;
}

/* The traffic class lies across the first two bytes. */
static __always_inline u8 ipv6_ecn(const struct ipv6hdr *ip)
{
	return ((u8 *)ip)[1] >> 4 & ECN_BITS;
}

static __always_inline void map_ipv4(struct swerve_addr *to, __be32 address)
{
	__builtin_memset(to->bytes, 0, 10);
	to->bytes[10] = 0xff;
	to->bytes[11] = 0xff;
	__builtin_memcpy(to->bytes + 12, &address, 4);
}

/* What the IP header of a packet says. */
struct ip_packet {
	struct swerve_addr source;
	struct swerve_addr destination;
	u32 transport; /* offset of the transport header */
	u32 bytes;     /* from there to the end of the IP packet */
	u16 fragment;  /* IPV4_FRAGMENT bits; of IPv6 not zero for any fragment */
	u8 protocol;
	u8 ecn;
	bool ipv6;
};

static __always_inline bool read_ipv4(struct __sk_buff *skb, u32 offset, struct ip_packet *packet)
{
	u32 header_bytes, total;
	struct iphdr ip;

	if (bpf_skb_load_bytes(skb, offset, &ip, sizeof(ip)))
		return false;
	header_bytes = ip.ihl * 4;
	if (ip.version != 4 || header_bytes < sizeof(ip))
		return false;
	map_ipv4(&packet->source, ip.saddr);
	map_ipv4(&packet->destination, ip.daddr);
	packet->protocol = ip.protocol;
	packet->ecn = ip.tos & ECN_BITS;
	packet->fragment = ip.frag_off & IPV4_FRAGMENT;
	packet->transport = offset + header_bytes;
	packet->ipv6 = false;
	total = bpf_ntohs(ip.tot_len);
	/* A merged packet may be longer than the field can say, or than its first header says. */
	if (skb->gso_size || !total)
		total = skb->len - offset;
	packet->bytes = total >= header_bytes ? total - header_bytes : 0;
	return true;
}

static __always_inline bool read_ipv6(struct __sk_buff *skb, u32 offset, struct ip_packet *packet)
{
	struct jumbo_header jumbo;
	struct ipv6hdr ip;

	if (bpf_skb_load_bytes(skb, offset, &ip, sizeof(ip)) || ip.version != 6)
		return false;
	__builtin_memcpy(&packet->source, &ip.saddr, sizeof(packet->source));
	__builtin_memcpy(&packet->destination, &ip.daddr, sizeof(packet->destination));
	packet->protocol = ip.nexthdr;
	packet->ecn = ipv6_ecn(&ip);
	packet->transport = offset + sizeof(ip);
	packet->bytes = bpf_ntohs(ip.payload_len);
	packet->ipv6 = true;
	if (ip.nexthdr == IPPROTO_HOPOPTS && !ip.payload_len) {
		if (bpf_skb_load_bytes(skb, packet->transport, &jumbo, sizeof(jumbo)) || !is_jumbo(&jumbo))
			return false;
		packet->protocol = jumbo.next;
		packet->transport += sizeof(jumbo);
	}
	packet->fragment = packet->protocol == IPPROTO_FRAGMENT;
	if (skb->gso_size || !ip.payload_len)
		packet->bytes = skb->len - packet->transport;
	return true;
}

/* Read the IP header of a packet wherever it lies: behind tags, with options, outside the linear part. */
static __always_inline bool read_ip(struct __sk_buff *skb, struct ip_packet *packet)
{
	__be16 protocol;
	u32 offset;

	offset = network_header(skb, &protocol);
	if (offset == NO_HEADER)
		return false;
	if (protocol == bpf_htons(ETH_P_IP))
		return read_ipv4(skb, offset, packet);
	return protocol == bpf_htons(ETH_P_IPV6) && read_ipv6(skb, offset, packet);
}

/*
 * Nearly all packets have plain headers: no tag, no option, no fragment, in the linear part. Ethertype, version, header
 * length and traffic class lie in one word.
 */
#define FIRST_WORD 12 /* the Ethertype and two bytes of the network header */
#define PLAIN_IPV4 bpf_htonl(0x08004500)
#define PLAIN_IPV6 bpf_htonl(0x86dd6000)
#define plain_ipv4_bits(class_bits) bpf_htonl(0xffffff00 | (class_bits))
#define plain_ipv6_bits(class_bits) bpf_htonl(0xfffff000 | (class_bits) << 4)

/*
 * Find the transport header of a packet with plain headers, in which these bits of the traffic class are zero. False
 * also for IPv6 with anything but TCP or UDP right behind the first header.
 */
static __always_inline bool read_plain(struct __sk_buff *skb, struct plain *plain, u32 class_bits)
{
	struct ipv6hdr *ip6;
	struct iphdr *ip;
	__be32 first;

	plain->data = (void *)(long)skb->data;
	plain->end = (void *)(long)skb->data_end;
	ip = plain->data + ETH_HLEN;
	ip6 = plain->data + ETH_HLEN;
	if ((void *)(ip + 1) > plain->end)
		return false;
	first = *(__be32 *)(plain->data + FIRST_WORD);
	if ((first & plain_ipv4_bits(class_bits)) == PLAIN_IPV4) {
		if (ip->frag_off & IPV4_FRAGMENT || bpf_ntohs(ip->tot_len) < sizeof(*ip))
			return false;
		plain->ipv6 = false;
		plain->protocol = ip->protocol;
		plain->transport = ip + 1;
		plain->bytes = bpf_ntohs(ip->tot_len) - sizeof(*ip);
		return true;
	}
	if ((first & plain_ipv6_bits(class_bits)) != PLAIN_IPV6)
		return false;
	if ((void *)(ip6 + 1) > plain->end || !ip6->payload_len)
		return false;
	plain->ipv6 = true;
	plain->protocol = ip6->nexthdr;
	plain->transport = ip6 + 1;
	plain->bytes = bpf_ntohs(ip6->payload_len);
	return plain->protocol == IPPROTO_TCP || plain->protocol == IPPROTO_UDP;
}

#endif /* SWERVE_LIB_PACKET_H */
