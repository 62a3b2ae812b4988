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
#include <linux/tcp.h>
#include <linux/udp.h>

#include "clock.h"
#include "packet.h"
#include "swerve.h"

#ifndef SWERVE_PROBE_PORT
#define SWERVE_PROBE_PORT 862
#endif

#define HASHED_WORDS 4
#define HASHED_BYTES (8 * HASHED_WORDS) /* of a datagram's payload */
#define MOST_DATAGRAMS 128		/* in one buffer; the kernel's own limit is 64, since 6.9 128 */

#define TCP_FIXED_BYTES 20
#define TCP_WORDS 12 /* offset of the byte whose upper half is the header's length in 32-bit words */
#define TCP_FLAGS 13
#define TCP_SYN 0x02

#define NEXT_FRAGMENT 44
#define JUMBO_BYTES 8
#define JUMBO_OPTION 0xc2

BPF_RINGBUF_OUTPUT(samples, 64); /* pages: 3276 samples; a small ring stays in the caches */
SWERVE_RECORD(sample, struct swerve_sample);
BPF_PERCPU_ARRAY(sample_counters, u64, SWERVE_SAMPLE_COUNTERS);
BPF_HASH(sample_peers, struct swerve_addr, u8, 4096);
BPF_ARRAY(sample_settings, struct swerve_sample_settings, 1);
#ifdef SWERVE_VIRTUAL_CLOCK
BPF_ARRAY(sample_clock, struct swerve_virtual_clock, 1);
#endif

/* What is known of a packet of a peer once its IP header is read. */
struct found {
	struct swerve_addr source;
	struct swerve_addr destination;
	u32 offset; /* of the transport header */
	u32 bytes;  /* from there to the end of the IP packet */
	u8 protocol;
	bool fragment;
};

struct transport {
	__be16 source;
	__be16 destination;
};

/* The first header of an IPv6 packet that is longer than its length field can say; such packets exist in hosts only. */
struct jumbo_header {
	u8 next;
	u8 words;
	u8 option;
	u8 option_bytes;
	__be32 bytes;
};

static __always_inline void count(u32 counter, u64 more)
{
	u64 *value = sample_counters.lookup(&counter);

	if (value)
		*value += more;
}

/* What the stamping clock shows at a moment of CLOCK_MONOTONIC. */
static __always_inline u64 stamping_clock(u64 now)
{
#ifdef SWERVE_VIRTUAL_CLOCK
	struct swerve_virtual_clock *clock;
	u32 only = 0;

	clock = sample_clock.lookup(&only);
	if (clock)
		return virtual_time(now, clock);
#endif
	return now;
}

static __always_inline bool is_sampled(u64 key, u8 rate)
{
	return !(key & ((1ULL << (rate & 63)) - 1));
}

/* ---- what names a byte or a datagram ------------------------------------------------------------------------ */

/* How many multiples of 2^rate lie in (before, last], sequence numbers that may have wrapped in between. */
static __always_inline u32 anchors_in(u32 before, u32 last, u8 rate)
{
	rate &= 31;
	return ((last >> rate) - (before >> rate)) & (0xffffffff >> rate);
}

/*
 * Of the sequence numbers in (before, last] the one with most zero low bits: the choice that a packet cut elsewhere is
 * most likely to come to as well, when there are several to choose from.
 */
static __always_inline u32 roundest_in(u32 before, u32 last)
{
	u32 differing = before ^ last;

	differing |= differing >> 1;
	differing |= differing >> 2;
	differing |= differing >> 4;
	differing |= differing >> 8;
	differing |= differing >> 16;
	return last & ~(differing >> 1);
}

static __always_inline u64 mixed(u64 hash, u64 word)
{
	hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL; /* 2^64 over the golden ratio */
	return hash ^ hash >> 32;
}

/* Ports, length and the beginning of the payload: TTL, DSCP, ECN, identifiers and checksums change on the way. */
static __always_inline u64 hash_of(struct transport *ports, u32 payload_bytes, const u64 *words)
{
	u64 hash;

	hash = mixed(payload_bytes, (u64)ports->source << 16 | ports->destination);
#pragma unroll
	for (int i = 0; i < HASHED_WORDS; i++)
		hash = mixed(hash, words[i]);
	return hash;
}

/* ---- the long way: packets to be sampled, and headers that the short one does not understand ------------------ */

static __always_inline void record(struct __sk_buff *skb, struct found *packet, struct transport *ports, u64 key,
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
	samples.ringbuf_submit(sample, BPF_RB_NO_WAKEUP);
	count(SWERVE_SAMPLE_RECORDED, 1);
}

static __always_inline bool find_ipv4(struct __sk_buff *skb, u32 offset, struct found *packet)
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
	packet->fragment = ip.frag_off & IPV4_FRAGMENT;
	packet->offset = offset + header_bytes;
	total = bpf_ntohs(ip.tot_len);
	/* A merged packet may be longer than the field can say, or than its first header says. */
	if (skb->gso_size || !total)
		total = skb->len - offset;
	packet->bytes = total >= header_bytes ? total - header_bytes : 0;
	return true;
}

static __always_inline bool find_ipv6(struct __sk_buff *skb, u32 offset, struct found *packet)
{
	struct jumbo_header jumbo;
	struct ipv6hdr ip;

	if (bpf_skb_load_bytes(skb, offset, &ip, sizeof(ip)))
		return false;
	__builtin_memcpy(&packet->source, &ip.saddr, sizeof(packet->source));
	__builtin_memcpy(&packet->destination, &ip.daddr, sizeof(packet->destination));
	packet->protocol = ip.nexthdr;
	packet->offset = offset + sizeof(ip);
	packet->bytes = bpf_ntohs(ip.payload_len);
	if (ip.nexthdr == IPPROTO_HOPOPTS && !ip.payload_len) {
		if (bpf_skb_load_bytes(skb, packet->offset, &jumbo, sizeof(jumbo)) || jumbo.words ||
		    jumbo.option != JUMBO_OPTION)
			return false;
		packet->protocol = jumbo.next;
		packet->offset += JUMBO_BYTES;
	}
	packet->fragment = packet->protocol == NEXT_FRAGMENT;
	if (skb->gso_size || !ip.payload_len)
		packet->bytes = skb->len - packet->offset;
	return true;
}

static __always_inline void sample_tcp(struct __sk_buff *skb, struct found *packet, u8 rate, u8 direction)
{
	u8 fixed[TCP_FIXED_BYTES];
	u32 header_bytes, before, last, anchors;

	if (bpf_skb_load_bytes(skb, packet->offset, fixed, sizeof(fixed))) {
		count(SWERVE_SAMPLE_MALFORMED, 1);
		return;
	}
	header_bytes = (fixed[TCP_WORDS] >> 4) * 4;
	if (header_bytes < sizeof(fixed) || packet->bytes < header_bytes) {
		count(SWERVE_SAMPLE_MALFORMED, 1);
		return;
	}
	if (fixed[TCP_FLAGS] & TCP_SYN) /* its sequence number is not its payload's */
		return;
	before = bpf_ntohl(*(__be32 *)(fixed + 4)) - 1;
	last = before + packet->bytes - header_bytes;
	anchors = anchors_in(before, last, rate);
	if (!anchors)
		return;
	if (anchors > 1)
		count(SWERVE_SAMPLE_MULTIPLE, 1);
	record(skb, packet, (struct transport *)fixed, roundest_in(before, last), rate, direction);
}

/* How many bytes of a payload enter its hash; at least one, which the verifier wants to see. */
static __always_inline u32 hashed_bytes(u32 payload_bytes)
{
	return ((payload_bytes < HASHED_BYTES ? payload_bytes - 1 : HASHED_BYTES - 1) & (HASHED_BYTES - 1)) + 1;
}

/* Those of a buffer's datagrams that have all the same length. */
static __always_inline void sample_merged(struct __sk_buff *skb, struct found *packet, struct transport *ports,
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

static __always_inline void sample_datagram(struct __sk_buff *skb, struct found *packet, struct transport *ports,
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

static __always_inline void sample_udp(struct __sk_buff *skb, struct found *packet, u8 rate, u8 direction)
{
	u32 offset = packet->offset + sizeof(struct udphdr), each = skb->gso_size, datagrams = 0, bytes;
	struct transport ports;
	struct udphdr udp;

	if (bpf_skb_load_bytes(skb, packet->offset, &udp, sizeof(udp))) {
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

static __always_inline bool wanted(struct found *packet, u8 direction)
{
	u8 *directions;

	if (direction == SWERVE_SAMPLE_EGRESS)
		directions = sample_peers.lookup(&packet->destination);
	else
		directions = sample_peers.lookup(&packet->source);
	return directions && *directions & direction;
}

static __always_inline void look_closer(struct __sk_buff *skb, const struct swerve_sample_settings *settings,
					u8 direction)
{
	struct found packet = {};
	__be16 protocol;
	u32 offset;

	offset = network_header(skb, &protocol);
	if (!offset)
		return;
	if (protocol == bpf_htons(ETH_P_IP)) {
		if (!find_ipv4(skb, offset, &packet))
			return;
	} else if (protocol == bpf_htons(ETH_P_IPV6)) {
		if (!find_ipv6(skb, offset, &packet))
			return;
	} else {
		return;
	}
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

/* ---- the short way ------------------------------------------------------------------------------------------ */

enum verdict {
	NOTHING, /* to sample */
	SAMPLE,	 /* of a packet with plain headers that lie in the linear part */
	UNCLEAR, /* look closer */
};

/* A packet with plain headers, by direct access. */
struct plain {
	void *data;
	void *end;
	void *transport;
	u32 bytes; /* from the transport header to the end of the IP packet; 0: not known */
	u8 protocol;
	bool ipv6;
};

static __always_inline enum verdict quick_tcp(struct __sk_buff *skb, struct plain *plain, u8 rate, u64 *key)
{
	u32 before, last, anchors, header_bytes, bytes = plain->bytes;
	u8 *tcp = plain->transport;

	if ((void *)(tcp + TCP_FIXED_BYTES) > plain->end)
		return UNCLEAR;
	if (skb->gso_size)
		bytes = skb->len - (u32)(plain->transport - plain->data);
	header_bytes = (tcp[TCP_WORDS] >> 4) * 4;
	if (bytes < header_bytes || header_bytes < TCP_FIXED_BYTES)
		return UNCLEAR;
	before = bpf_ntohl(*(__be32 *)(tcp + 4)) - 1;
	last = before + bytes - header_bytes;
	anchors = anchors_in(before, last, rate);
	if (!anchors)
		return NOTHING;
	if (tcp[TCP_FLAGS] & TCP_SYN)
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
	struct ipv6hdr *ip6;
	struct iphdr *ip;

	plain->data = (void *)(long)skb->data;
	plain->end = (void *)(long)skb->data_end;
	ip = plain->data + ETH_HLEN;
	ip6 = plain->data + ETH_HLEN;
	plain->ipv6 = skb->protocol == bpf_htons(ETH_P_IPV6);
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if ((void *)(ip + 1) > plain->end || ip->version != 4 || ip->ihl != 5)
			return UNCLEAR;
		if (ip->frag_off & IPV4_FRAGMENT || bpf_ntohs(ip->tot_len) < sizeof(*ip))
			return UNCLEAR;
		plain->protocol = ip->protocol;
		plain->transport = ip + 1;
		plain->bytes = bpf_ntohs(ip->tot_len) - sizeof(*ip);
	} else if (plain->ipv6) {
		if ((void *)(ip6 + 1) > plain->end || ip6->version != 6 || !ip6->payload_len)
			return UNCLEAR;
		plain->protocol = ip6->nexthdr;
		plain->transport = ip6 + 1;
		plain->bytes = bpf_ntohs(ip6->payload_len);
		if (plain->protocol == NEXT_FRAGMENT)
			return UNCLEAR;
	} else {
		return is_tag(skb->protocol) ? UNCLEAR : NOTHING;
	}
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
	struct found packet;

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
		return TC_ACT_UNSPEC;
	switch (quick(skb, settings, &plain, &key)) {
	case NOTHING:
		break;
	case SAMPLE:
		record_plain(skb, &plain, settings, key, direction);
		break;
	case UNCLEAR:
		look_closer(skb, settings, direction);
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
