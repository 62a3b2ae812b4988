/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the observers would make of a packet, found with one look at its headers: nearly always nothing. */
#ifndef SWERVE_OBSERVE_FRONT_H
#define SWERVE_OBSERVE_FRONT_H

#include <linux/udp.h>

#include "observe/chain.h"
#include "observe/tunnels.h"

#define NOBODY OBSERVERS

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
static __always_inline enum observer wanted_by(struct __sk_buff *skb, bool out)
{
#ifdef SWERVE_OBSERVE_SAMPLED
	const struct swerve_sample_settings *sampled;
	u32 only = 0;
	u64 key;
#endif
	struct plain plain;
	struct udphdr *udp;
	bool is_tcp;

	if (out && is_probe(skb))
		return PROBES;
	if (!read_plain(skb, &plain, out ? 0 : ECN_BITS))
		return is_ip(skb->protocol) || is_tag(skb->protocol) ? PROBES : NOBODY;
	is_tcp = plain.protocol == IPPROTO_TCP;
	if (out && !is_tcp)
		count_tunnel(skb, &plain);
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
