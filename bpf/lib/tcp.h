/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What a TCP packet says: flags, window, payload, whose it is. Pure functions of the packet.
 */
#ifndef SWERVE_LIB_TCP_H
#define SWERVE_LIB_TCP_H

#include "lib/packet.h"
#include "swerve.h"

#define IP6_JUMBO_BYTES 8
#define FIN 0x01
#define SYN 0x02
#define RST 0x04
#define ACK 0x10
#define WORD_FIN (FIN << 16) /* in the fourth word of a TCP header: length, flags, window */
#define WORD_RST (RST << 16)
#define WORD_UNREAD 0xffffffff

struct tcp_head {
	__be16 source;
	__be16 destination;
	__be32 sequence;
	__be32 acknowledged;
	union {
		__be32 word;
		struct {
			u8 length; /* upper half, in words */
			u8 flags;
			__be16 window;
		};
	};
};

/*
 * The fourth word of a TCP header, in host order: length, flags, window. Read directly, as every packet asks for it;
 * 0 for what is no TCP, all ones for what parse() must look at.
 */
static __always_inline u32 tcp_word(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ipv6hdr *ip6 = data + ETH_HLEN;
	struct iphdr *ip = data + ETH_HLEN;
	void *tcp;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		tcp = ip + 1;
		if (tcp > end)
			return WORD_UNREAD;
		if (ip->protocol != IPPROTO_TCP)
			return 0;
		if (*(u8 *)ip != 0x45)
			return WORD_UNREAD;
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		tcp = ip6 + 1;
		if (tcp > end || ip6->nexthdr == IPPROTO_HOPOPTS)
			return WORD_UNREAD;
		if (ip6->nexthdr != IPPROTO_TCP)
			return 0;
	} else {
		return is_tag(skb->protocol) ? WORD_UNREAD : 0;
	}
	if (tcp + sizeof(struct tcp_head) > end)
		return WORD_UNREAD;
	return bpf_ntohl(((struct tcp_head *)tcp)->word);
}

/* What is asked of a packet, wherever its headers lie. */
struct packet {
	struct swerve_addr source;
	struct swerve_addr destination;
	u32 bytes; /* payload */
	u32 acknowledged;
	u16 source_port;
	u16 destination_port;
	u16 window;
	u8 flags;
	u8 ipv6;
};

static __always_inline bool parse(struct __sk_buff *skb, struct packet *packet)
{
	u32 offset, end, tcp;
	struct tcp_head head;
	struct ipv6hdr ip6;
	struct iphdr ip;
	__be16 protocol;
	u8 next[2];

	offset = network_header(skb, &protocol);
	end = skb->len;
	if (!offset)
		return false;
	if (protocol == bpf_htons(ETH_P_IP)) {
		if (bpf_skb_load_bytes(skb, offset, &ip, sizeof(ip)) || ip.protocol != IPPROTO_TCP ||
		    ip.frag_off & IPV4_OFFSET)
			return false;
		tcp = offset + ip.ihl * 4;
		if (ip.tot_len) /* else longer than the field can tell */
			end = offset + bpf_ntohs(ip.tot_len);
		map_ipv4(&packet->source, ip.saddr);
		map_ipv4(&packet->destination, ip.daddr);
		packet->ipv6 = 0;
	} else if (protocol == bpf_htons(ETH_P_IPV6)) {
		if (bpf_skb_load_bytes(skb, offset, &ip6, sizeof(ip6)))
			return false;
		tcp = offset + sizeof(ip6);
		if (ip6.payload_len)
			end = tcp + bpf_ntohs(ip6.payload_len);
		if (ip6.nexthdr == IPPROTO_HOPOPTS) { /* of a packet longer than the field can tell; never sent out */
			if (bpf_skb_load_bytes(skb, tcp, next, sizeof(next)) || next[1])
				return false;
			ip6.nexthdr = next[0];
			tcp += IP6_JUMBO_BYTES;
		}
		if (ip6.nexthdr != IPPROTO_TCP)
			return false;
		__builtin_memcpy(&packet->source, &ip6.saddr, sizeof(packet->source));
		__builtin_memcpy(&packet->destination, &ip6.daddr, sizeof(packet->destination));
		packet->ipv6 = 1;
	} else {
		return false;
	}
	if (bpf_skb_load_bytes(skb, tcp, &head, sizeof(head)))
		return false;
	tcp += (head.length >> 4) * 4;
	packet->bytes = end > tcp ? end - tcp : 0;
	packet->acknowledged = bpf_ntohl(head.acknowledged);
	packet->source_port = head.source;
	packet->destination_port = head.destination;
	packet->window = bpf_ntohs(head.window);
	packet->flags = head.flags;
	return true;
}

/* A reset, a request to connect, a window that is closed. */
static __always_inline bool tells_something(u8 flags, u16 window)
{
	return flags & RST || (flags & (SYN | ACK)) == SYN || !(window || flags & SYN);
}

#endif /* SWERVE_LIB_TCP_H */
