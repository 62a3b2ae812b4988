/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What a TCP packet says: flags, window, payload, whose it is. Pure functions of the packet.
 */
#ifndef SWERVE_LIB_TCP_H
#define SWERVE_LIB_TCP_H

#include "lib/packet.h"
#include "swerve.h"

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
	__be16 check;
	__be16 urgent;
};

static __always_inline u32 tcp_header_bytes(const struct tcp_head *head)
{
	return (head->length >> 4) * 4;
}

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

	if (is_bare(skb))
		return WORD_UNREAD;
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

/* What a TCP packet says, wherever its headers lie. */
struct packet {
	struct ip_packet ip;
	u32 bytes; /* payload */
	u32 acknowledged;
	u16 source_port; /* both in network byte order */
	u16 destination_port;
	u16 window;
	u8 flags;
};

static __always_inline bool parse(struct __sk_buff *skb, struct packet *packet)
{
	struct tcp_head head;
	u32 header_bytes;

	if (!read_ip(skb, &packet->ip) || packet->ip.protocol != IPPROTO_TCP || packet->ip.fragment & IPV4_OFFSET)
		return false;
	if (bpf_skb_load_bytes(skb, packet->ip.transport, &head, sizeof(head)))
		return false;
	header_bytes = tcp_header_bytes(&head);
	packet->bytes = packet->ip.bytes > header_bytes ? packet->ip.bytes - header_bytes : 0;
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
