/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The long way: packets to be sampled, and headers that the short one does not understand. */
#ifndef SWERVE_SAMPLE_CLOSER_H
#define SWERVE_SAMPLE_CLOSER_H

#include "sample/keys.h"

/*
 * Traffic that begins is sampled at the rate that fitted what was there before, which may have been nothing. Wake the
 * agent, once in a while, when far more is sampled than it has asked for; it looks by itself only twice a second.
 */
static __always_inline u64 whether_to_wake(u64 now)
{
	struct burst *burst;
	u32 only = 0;

	burst = sample_burst.lookup(&only);
	if (!burst)
		return BPF_RB_NO_WAKEUP;
	if (now > burst->began_ns + SWERVE_SAMPLE_BURST_NS) {
		burst->began_ns = now;
		burst->samples = 0;
	}
	burst->samples++;
	return burst->samples == SWERVE_SAMPLE_BURST ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP;
}

static __always_inline void record(struct __sk_buff *skb, struct ip_packet *packet, struct transport *ports, u64 key,
				   u8 rate, u8 direction)
{
	struct swerve_sample *sample;
	u64 now;

	now = bpf_ktime_get_ns();
	sample = samples.ringbuf_reserve(sizeof(*sample));
	if (!sample) {
		count(SWERVE_SAMPLE_RING_FULL, 1);
		return;
	}
	sample->ts_ns = stamping_clock(now);
	sample->seen_ns = now;
	sample->key = key;
	if (direction == SWERVE_SAMPLE_EGRESS) {
		sample->local = packet->source;
		sample->remote = packet->destination;
		sample->local_port = bpf_ntohs(ports->source);
		sample->remote_port = bpf_ntohs(ports->destination);
	} else {
		sample->local = packet->destination;
		sample->remote = packet->source;
		sample->local_port = bpf_ntohs(ports->destination);
		sample->remote_port = bpf_ntohs(ports->source);
	}
	sample->ifindex = skb->ifindex;
	sample->protocol = packet->protocol;
	sample->direction = direction;
	sample->rate = rate;
	__builtin_memset(sample->pad, 0, sizeof(sample->pad));
	samples.ringbuf_submit(sample, whether_to_wake(now));
	count(SWERVE_SAMPLE_RECORDED, 1);
}

static __always_inline void sample_tcp(struct __sk_buff *skb, struct ip_packet *packet, u8 rate, u8 direction)
{
	u32 header_bytes, before, last, anchors;
	struct tcp_head head;

	if (bpf_skb_load_bytes(skb, packet->transport, &head, sizeof(head))) {
		count(SWERVE_SAMPLE_MALFORMED, 1);
		return;
	}
	header_bytes = tcp_header_bytes(&head);
	if (header_bytes < sizeof(head) || packet->bytes < header_bytes) {
		count(SWERVE_SAMPLE_MALFORMED, 1);
		return;
	}
	if (head.flags & SYN) /* its sequence number is not its payload's */
		return;
	before = bpf_ntohl(head.sequence) - 1;
	last = before + packet->bytes - header_bytes;
	anchors = anchors_in(before, last, rate);
	if (!anchors)
		return;
	if (anchors > 1)
		count(SWERVE_SAMPLE_MULTIPLE, 1);
	record(skb, packet, (struct transport *)&head, roundest_in(before, last), rate, direction);
}

/* How many bytes of a payload enter its hash; at least one, which the verifier wants to see. */
static __always_inline u32 hashed_bytes(u32 payload_bytes)
{
	return ((payload_bytes < HASHED_BYTES ? payload_bytes - 1 : HASHED_BYTES - 1) & (HASHED_BYTES - 1)) + 1;
}

/* Those of a buffer's datagrams that have all the same length. */
static __always_inline void sample_merged(struct __sk_buff *skb, struct ip_packet *packet, struct transport *ports,
					  u32 offset, u32 datagrams, u32 each, u8 rate, u8 direction)
{
	u64 words[HASHED_WORDS] = {}, key;
	u32 hashed = hashed_bytes(each);

	/* Nothing but i may change from one turn to the next: the verifier has to walk through all of them. */
#pragma clang loop unroll(disable)
	for (int i = 0; i < MOST_DATAGRAMS; i++) {
		if (i >= datagrams)
			return;
		if (bpf_skb_load_bytes(skb, offset + i * each, words, hashed)) {
			count(SWERVE_SAMPLE_MALFORMED, 1);
			return;
		}
		key = hash_of(ports, each, words);
		if (is_sampled(key, rate))
			record(skb, packet, ports, key, rate, direction);
	}
	if (datagrams > MOST_DATAGRAMS)
		count(SWERVE_SAMPLE_SEGMENTS, datagrams - MOST_DATAGRAMS);
}

static __always_inline void sample_datagram(struct __sk_buff *skb, struct ip_packet *packet, struct transport *ports,
					    u32 offset, u32 bytes, u8 rate, u8 direction)
{
	u64 words[HASHED_WORDS] = {}, key;

	if (bytes && bpf_skb_load_bytes(skb, offset, words, hashed_bytes(bytes))) {
		count(SWERVE_SAMPLE_MALFORMED, 1);
		return;
	}
	key = hash_of(ports, bytes, words);
	if (is_sampled(key, rate))
		record(skb, packet, ports, key, rate, direction);
}

static __always_inline void sample_udp(struct __sk_buff *skb, struct ip_packet *packet, u8 rate, u8 direction)
{
	u32 offset = packet->transport + sizeof(struct udphdr), each = skb->gso_size, datagrams = 0, bytes;
	struct transport ports;
	struct udphdr udp;

	if (bpf_skb_load_bytes(skb, packet->transport, &udp, sizeof(udp))) {
		count(SWERVE_SAMPLE_MALFORMED, 1);
		return;
	}
	if (udp.source == bpf_htons(SWERVE_PROBE_PORT) || udp.dest == bpf_htons(SWERVE_PROBE_PORT))
		return;
	bytes = each ? packet->bytes : bpf_ntohs(udp.len);
	if (bytes < sizeof(udp) || bytes > packet->bytes) {
		count(SWERVE_SAMPLE_MALFORMED, 1);
		return;
	}
	ports.source = udp.source;
	ports.destination = udp.dest;
	bytes -= sizeof(udp);
	if (each && each <= bytes) {
		datagrams = bytes / each;
		sample_merged(skb, packet, &ports, offset, datagrams, each, rate, direction);
		offset += datagrams * each;
		bytes -= datagrams * each;
	}
	if (bytes || !datagrams)
		sample_datagram(skb, packet, &ports, offset, bytes, rate, direction);
}

static __always_inline bool wanted(struct ip_packet *packet, u8 direction)
{
	u8 *directions;

	if (direction == SWERVE_SAMPLE_EGRESS)
		directions = sample_peers.lookup(&packet->destination);
	else
		directions = sample_peers.lookup(&packet->source);
	return directions && *directions & direction;
}

static __always_inline void sample_closely(struct __sk_buff *skb, const struct swerve_sample_settings *settings,
					   u8 direction)
{
	struct ip_packet packet;

	if (!read_ip(skb, &packet))
		return;
	if (!packet.fragment && packet.protocol != IPPROTO_TCP && packet.protocol != IPPROTO_UDP)
		return;
	if (!wanted(&packet, direction))
		return;
	if (packet.fragment)
		count(SWERVE_SAMPLE_FRAGMENTS, 1);
	else if (packet.protocol == IPPROTO_TCP)
		sample_tcp(skb, &packet, settings->tcp_rate, direction);
	else
		sample_udp(skb, &packet, settings->udp_rate, direction);
}

#endif /* SWERVE_SAMPLE_CLOSER_H */
