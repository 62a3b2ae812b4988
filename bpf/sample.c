/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Samples of application packets at TC ingress and egress: the same bytes at both hosts, whatever segmentation and
 * receive offload made of the packets in between.
 *
 * TCP: a byte whose sequence number is a multiple of 2^rate is in exactly one packet at each hook, however the stream
 * was cut. UDP: a datagram whose hash, over what no hop alters, ends in zeros; merged datagrams are looked at one by
 * one. Alters no packet and decides nothing about it. At egress the hook runs before the queue discipline.
 *
 * SWERVE_PROBE_PORT: UDP to or from there is no application's. SWERVE_VIRTUAL_CLOCK: stamp by a lab's clock.
 */
#include <linux/udp.h>

#include "lib/packet.h"
#include "swerve.h"

#include "observe/chain.h"
#include "sample/tables.h"
#include "sample/keys.h"
#include "sample/closer.h"

enum verdict {
	NOTHING, /* to sample */
	SAMPLE,	 /* of a packet with plain headers that lie in the linear part */
	UNCLEAR, /* look closer */
};

static __always_inline enum verdict quick_tcp(struct __sk_buff *skb, struct plain *plain, u8 rate, u64 *key)
{
	u32 before, last, anchors, header_bytes, bytes = plain->bytes;
	struct tcp_head *tcp = plain->transport;

	if ((void *)(tcp + 1) > plain->end)
		return UNCLEAR;
	if (skb->gso_size)
		bytes = skb->len - (u32)(plain->transport - plain->data);
	header_bytes = tcp_header_bytes(tcp);
	if (bytes < header_bytes || header_bytes < sizeof(*tcp))
		return UNCLEAR;
	before = bpf_ntohl(tcp->sequence) - 1;
	last = before + bytes - header_bytes;
	anchors = anchors_in(before, last, rate);
	if (!anchors)
		return NOTHING;
	if (tcp->flags & SYN)
		return NOTHING;
	if (anchors > 1)
		return UNCLEAR;
	*key = roundest_in(before, last);
	return SAMPLE;
}

static __always_inline enum verdict quick_udp(struct __sk_buff *skb, struct plain *plain, u8 rate, u64 *key)
{
	struct udphdr *udp = plain->transport;
	u32 bytes = plain->bytes;

	if ((void *)(udp + 1) + HASHED_BYTES > plain->end)
		return UNCLEAR;
	if (udp->source == bpf_htons(SWERVE_PROBE_PORT) || udp->dest == bpf_htons(SWERVE_PROBE_PORT))
		return NOTHING;
	if (skb->gso_size || bytes < sizeof(*udp) + HASHED_BYTES || bpf_ntohs(udp->len) != bytes)
		return UNCLEAR;
	*key = hash_of((struct transport *)udp, bytes - sizeof(*udp), (u64 *)(udp + 1));
	return is_sampled(*key, rate) ? SAMPLE : NOTHING;
}

/* Decides about nearly every packet, without a helper call. */
static __always_inline enum verdict quick(struct __sk_buff *skb, const struct swerve_sample_settings *settings,
					  struct plain *plain, u64 *key)
{
	if (!read_plain(skb, plain, 0))
		return is_ip(skb->protocol) || is_tag(skb->protocol) ? UNCLEAR : NOTHING;
	if (plain->protocol == IPPROTO_TCP)
		return quick_tcp(skb, plain, settings->tcp_rate, key);
	if (plain->protocol == IPPROTO_UDP)
		return quick_udp(skb, plain, settings->udp_rate, key);
	return NOTHING;
}

static __always_inline void record_plain(struct __sk_buff *skb, struct plain *plain,
					 const struct swerve_sample_settings *settings, u64 key, u8 direction)
{
	struct ipv6hdr *ip6 = plain->data + ETH_HLEN;
	struct iphdr *ip = plain->data + ETH_HLEN;
	struct transport ports;
	struct ip_packet packet;

	/* What was checked before is checked again: the verifier does not remember it of both families at once. */
	if (plain->ipv6) {
		if ((void *)(ip6 + 1) + sizeof(ports) > plain->end)
			return;
		__builtin_memcpy(&packet.source, &ip6->saddr, sizeof(packet.source));
		__builtin_memcpy(&packet.destination, &ip6->daddr, sizeof(packet.destination));
		ports = *(struct transport *)(ip6 + 1);
	} else {
		if ((void *)(ip + 1) + sizeof(ports) > plain->end)
			return;
		map_ipv4(&packet.source, ip->saddr);
		map_ipv4(&packet.destination, ip->daddr);
		ports = *(struct transport *)(ip + 1);
	}
	packet.protocol = plain->protocol;
	if (wanted(&packet, direction))
		record(skb, &packet, &ports, key,
		       plain->protocol == IPPROTO_TCP ? settings->tcp_rate : settings->udp_rate, direction);
}

static __always_inline int sample(struct __sk_buff *skb, u8 direction)
{
	const struct swerve_sample_settings *settings;
	struct plain plain;
	u32 only = 0;
	u64 key = 0;

	settings = sample_settings.lookup(&only);
	if (!settings || !(settings->directions & direction))
		LEAVE(TC_ACT_UNSPEC);
	switch (quick(skb, settings, &plain, &key)) {
	case NOTHING:
		LEAVE(TC_ACT_UNSPEC);
	case SAMPLE:
		record_plain(skb, &plain, settings, key, direction);
		break;
	case UNCLEAR:
		sample_closely(skb, settings, direction);
		break;
	}
	return TC_ACT_UNSPEC;
}

int sample_egress(struct __sk_buff *skb)
{
	return sample(skb, SWERVE_SAMPLE_EGRESS);
}

int sample_ingress(struct __sk_buff *skb)
{
	return sample(skb, SWERVE_SAMPLE_INGRESS);
}
