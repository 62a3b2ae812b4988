/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the observers would make of a packet, found with one look at its headers: nearly always nothing. */
#ifndef SWERVE_OBSERVE_FRONT_H
#define SWERVE_OBSERVE_FRONT_H

#include "observe/chain.h"

#define NOBODY OBSERVERS

/*
 * Headers that all observers understand at once: no tag, no option, no fragment, in the linear part; on the way in no
 * congestion mark either. Everything else goes the long way, through all of them.
 */
static __always_inline bool read_plain(struct __sk_buff *skb, struct plain *plain, bool out)
{
	__be32 first, any_mark = out ? 0 : bpf_htonl(ECN_BITS), any_mark6 = out ? 0 : bpf_htonl(ECN_BITS << 4);
	struct ipv6hdr *ip6;
	struct iphdr *ip;
	u8 *frame;

	plain->data = (void *)(long)skb->data;
	plain->end = (void *)(long)skb->data_end;
	frame = plain->data;
	ip = plain->data + ETH_HLEN;
	ip6 = plain->data + ETH_HLEN;
	if ((void *)(ip + 1) > plain->end)
		return false;
	first = *(__be32 *)(frame + FIRST_WORD);
	if ((first & (bpf_htonl(0xffffff00) | any_mark)) == PLAIN_IPV4) {
		if (ip->frag_off & IPV4_FRAGMENT || bpf_ntohs(ip->tot_len) < sizeof(*ip))
			return false;
		plain->ipv6 = false;
		plain->protocol = ip->protocol;
		plain->transport = ip + 1;
		plain->bytes = bpf_ntohs(ip->tot_len) - sizeof(*ip);
		return true;
	}
	if ((first & (bpf_htonl(0xfffff000) | any_mark6)) != PLAIN_IPV6)
		return false;
	if ((void *)(ip6 + 1) > plain->end || !ip6->payload_len)
		return false;
	plain->ipv6 = true;
	plain->protocol = ip6->nexthdr;
	plain->transport = ip6 + 1;
	plain->bytes = bpf_ntohs(ip6->payload_len);
	return plain->protocol == IPPROTO_TCP || plain->protocol == IPPROTO_UDP;
}

/* Whether tcp.c has anything to do; a segment whose headers are plain. */
static __always_inline bool tells_connection(struct __sk_buff *skb, u32 word, bool out)
{
	struct bpf_tcp_sock *tp;
	struct bpf_sock *sk;
	struct fresh *row;

	if (!out)
		return tells_something(word >> 16, word);
	if (word & (WORD_FIN | WORD_RST))
		return true;
	sk = skb->sk;
	if (!sk)
		return false; /* forwarded: of no connection of this host */
	tp = bpf_tcp_sock(sk);
	if (!tp)
		return true;
	row = fresh_row(sk);
	return !row || !is_still_fresh(row, sk, tp);
}

/* The first observer that wants a packet; NOBODY: none does. */
static __always_inline u32 wanted_by(struct __sk_buff *skb, bool out)
{
#ifdef SWERVE_OBSERVE_SAMPLED
	const struct swerve_sample_settings *sampled;
	u32 only = 0;
	u64 key;
#endif
	struct plain plain;
	struct udphdr *udp;
	bool is_tcp;

	if (out && (skb->mark & SWERVE_MARK_BITS) == (SWERVE_MARK_SEND & SWERVE_MARK_BITS))
		return PROBES;
	if (!read_plain(skb, &plain, out))
		return skb->protocol == bpf_htons(ETH_P_ARP) ? NOBODY : PROBES;
	is_tcp = plain.protocol == IPPROTO_TCP;
	if (is_tcp) {
		if (plain.transport + sizeof(struct tcp_head) > plain.end)
			return CONNECTIONS;
		if (tells_connection(skb, bpf_ntohl(((struct tcp_head *)plain.transport)->word), out))
			return CONNECTIONS;
	} else if (plain.protocol == IPPROTO_UDP) {
		udp = plain.transport;
		if ((void *)(udp + 1) > plain.end)
			return PROBES;
		if (!out && (udp->source == bpf_htons(SWERVE_PROBE_PORT) || udp->dest == bpf_htons(SWERVE_PROBE_PORT)))
			return PROBES;
	} else {
		return NOBODY;
	}
#ifdef SWERVE_OBSERVE_SAMPLED
	sampled = sample_settings.lookup(&only);
	if (!sampled || !(sampled->directions & (out ? SWERVE_SAMPLE_EGRESS : SWERVE_SAMPLE_INGRESS)))
		return NOBODY;
	if (is_tcp ? quick_tcp(skb, &plain, sampled->tcp_rate, &key) : quick_udp(skb, &plain, sampled->udp_rate, &key))
		return SAMPLES;
#endif
	return NOBODY;
}

#endif /* SWERVE_OBSERVE_FRONT_H */
