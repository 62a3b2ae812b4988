/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Stamps of probes at TC ingress and egress, and congestion marks at ingress.
 *
 * Records when a STAMP probe (RFC 8762) of a configured peer passes, and counts what a peer's packets were marked with
 * on their way (ECN, RFC 3168), by the interface they came in by; alters no packet and decides nothing about it. At
 * egress the hook runs before the queue discipline, so a stamp taken there includes the time queued on this interface.
 *
 * SWERVE_PROBE_PORT: the UDP port on which the reflectors listen. SWERVE_VIRTUAL_CLOCK: stamp by a lab's clock.
 */
#include <linux/udp.h>

#include "clock.h"
#include "packet.h"
#include "swerve.h"

#ifndef SWERVE_PROBE_PORT
#define SWERVE_PROBE_PORT 862
#endif

#define STAMP_BYTES 44 /* the base packet, RFC 8762 sections 4.2.1 and 4.3.1 */
#define STAMP_SEQ 0
#define STAMP_SSID 14	    /* RFC 8972 section 3 */
#define STAMP_SENDER_SEQ 24 /* in a reflected packet */

#define ECN_BITS 3 /* of the TOS or traffic class; zero: cannot be marked */
#define ECN_CE 3
#define ECN_UNKNOWN 0xff /* the header has to be looked for first */

BPF_RINGBUF_OUTPUT(stamps, 128); /* pages: 7281 stamps */
SWERVE_RECORD(stamp, struct swerve_stamp);
BPF_PERCPU_ARRAY(stamp_counters, u64, SWERVE_STAMP_COUNTERS);
BPF_HASH(stamp_peers, struct swerve_addr, u8, 4096);
/* Room is taken when a path's first packet comes: on a machine with many CPUs it would be large. */
BPF_F_TABLE("percpu_hash", struct swerve_ecn_key, struct swerve_ecn, stamp_ecn, SWERVE_ECN_PATHS, BPF_F_NO_PREALLOC);
#ifdef SWERVE_VIRTUAL_CLOCK
BPF_ARRAY(stamp_clock, struct swerve_virtual_clock, 1);
#endif

static __always_inline void count_more(u32 counter, u64 more)
{
	u64 *value = stamp_counters.lookup(&counter);

	if (value)
		*value += more;
}

static __always_inline void count(u32 counter)
{
	count_more(counter, 1);
}

/* What the stamping clock shows at a moment of CLOCK_MONOTONIC. */
static __always_inline u64 stamping_clock(u64 now)
{
#ifdef SWERVE_VIRTUAL_CLOCK
	struct swerve_virtual_clock *clock;
	u32 only = 0;

	clock = stamp_clock.lookup(&only);
	if (clock)
		return virtual_time(now, clock);
#endif
	return now;
}

/*
 * One buffer that could be marked. GRO merges only packets whose ECN fields are equal, and offloads give every segment
 * its buffer's: so all of them carry the same mark, and they are counted as the kernel's own InCEPkts counts them.
 */
static __always_inline void count_marks(struct __sk_buff *skb, struct swerve_addr *source, u8 ecn)
{
	struct swerve_ecn_key key = { .remote = *source, .ifindex = skb->ifindex };
	struct swerve_ecn first = {}, *seen;
	u64 packets = skb->gso_segs ?: 1;

	seen = stamp_ecn.lookup(&key);
	if (!seen) {
		if (!stamp_peers.lookup(source))
			return;
		stamp_ecn.insert(&key, &first); /* another CPU may have been first */
		seen = stamp_ecn.lookup(&key);
		if (!seen) {
			count_more(SWERVE_STAMP_ECN_FULL, packets);
			return;
		}
	}
	seen->packets += packets;
	if (ecn == ECN_CE)
		seen->ce_packets += packets;
}

static __always_inline void count_ipv4_marks(struct __sk_buff *skb, __be32 from, u8 ecn)
{
	struct swerve_addr source;

	map_ipv4(&source, from);
	count_marks(skb, &source, ecn);
}

static __always_inline void count_ipv6_marks(struct __sk_buff *skb, struct in6_addr *from, u8 ecn)
{
	struct swerve_addr source;

	__builtin_memcpy(&source, from, sizeof(source));
	count_marks(skb, &source, ecn);
}

/* The traffic class lies across the first two bytes. */
static __always_inline u8 ipv6_ecn(struct ipv6hdr *ip)
{
	return ((u8 *)ip)[1] >> 4 & ECN_BITS;
}

/* A probe that is whole and of a peer goes to the ring; everything else on the probe port to a counter. */
static __always_inline void record(struct __sk_buff *skb, u32 udp_offset, struct swerve_addr *source,
				   struct swerve_addr *destination, u32 l3_payload_bytes, u8 ttl, bool egress)
{
	struct swerve_stamp *stamp;
	struct swerve_addr *remote;
	u8 base[STAMP_BYTES];
	struct udphdr udp;
	bool request;
	u64 now;

	now = bpf_ktime_get_ns();
	if (bpf_skb_load_bytes(skb, udp_offset, &udp, sizeof(udp)) ||
	    bpf_skb_load_bytes(skb, udp_offset + sizeof(udp), base, sizeof(base)) ||
	    bpf_ntohs(udp.len) < sizeof(udp) + STAMP_BYTES || bpf_ntohs(udp.len) > l3_payload_bytes) {
		count(SWERVE_STAMP_MALFORMED);
		return;
	}
	if (skb->gso_segs > 1) {
		count(SWERVE_STAMP_MERGED);
		return;
	}
	request = udp.dest == bpf_htons(SWERVE_PROBE_PORT);
	remote = egress ? destination : source;
	if (!stamp_peers.lookup(remote)) {
		count(SWERVE_STAMP_FOREIGN);
		return;
	}
	stamp = stamps.ringbuf_reserve(sizeof(*stamp));
	if (!stamp) {
		count(SWERVE_STAMP_RING_FULL);
		return;
	}
	stamp->ts_ns = stamping_clock(now);
	stamp->seen_ns = now;
	stamp->seq = bpf_ntohl(*(__be32 *)(base + (request ? STAMP_SEQ : STAMP_SENDER_SEQ)));
	stamp->ssid = bpf_ntohs(*(__be16 *)(base + STAMP_SSID));
	stamp->ttl = ttl;
	stamp->ifindex = skb->ifindex;
	stamp->sender_port = bpf_ntohs(request ? udp.source : udp.dest);
	stamp->pad = 0;
	stamp->remote = *remote;
	stamp->local = egress ? *source : *destination;
	if (egress)
		stamp->kind = request ? SWERVE_REQUEST_EGRESS : SWERVE_REPLY_EGRESS;
	else
		stamp->kind = request ? SWERVE_REQUEST_INGRESS : SWERVE_REPLY_INGRESS;
	stamps.ringbuf_submit(stamp, BPF_RB_NO_WAKEUP);
	count(SWERVE_STAMP_RECORDED);
}

static __always_inline bool on_probe_port(struct __sk_buff *skb, u32 udp_offset)
{
	__be16 ports[2];

	if (bpf_skb_load_bytes(skb, udp_offset, ports, sizeof(ports)))
		return false;
	return ports[0] == bpf_htons(SWERVE_PROBE_PORT) || ports[1] == bpf_htons(SWERVE_PROBE_PORT);
}

static __always_inline void stamp_ipv4(struct __sk_buff *skb, u32 offset, bool egress, bool marks)
{
	struct swerve_addr source, destination;
	struct iphdr ip;
	u32 udp_offset, header_bytes;

	if (bpf_skb_load_bytes(skb, offset, &ip, sizeof(ip)))
		return;
	if (marks && ip.version == 4 && ip.tos & ECN_BITS)
		count_ipv4_marks(skb, ip.saddr, ip.tos & ECN_BITS);
	if (ip.protocol != IPPROTO_UDP)
		return;
	header_bytes = ip.ihl * 4;
	udp_offset = offset + header_bytes;
	if (ip.version != 4 || header_bytes < sizeof(ip))
		return;
	if (ip.frag_off & IPV4_OFFSET) /* a later fragment has no ports */
		return;
	if (!on_probe_port(skb, udp_offset))
		return;
	if (ip.frag_off & IPV4_FRAGMENT || bpf_ntohs(ip.tot_len) < header_bytes) {
		count(SWERVE_STAMP_MALFORMED);
		return;
	}
	map_ipv4(&source, ip.saddr);
	map_ipv4(&destination, ip.daddr);
	record(skb, udp_offset, &source, &destination, bpf_ntohs(ip.tot_len) - header_bytes, ip.ttl, egress);
}

static __always_inline void stamp_ipv6(struct __sk_buff *skb, u32 offset, bool egress, bool marks)
{
	struct swerve_addr source, destination;
	struct ipv6hdr ip;

	if (bpf_skb_load_bytes(skb, offset, &ip, sizeof(ip)))
		return;
	if (marks && ip.version == 6 && ipv6_ecn(&ip))
		count_ipv6_marks(skb, &ip.saddr, ipv6_ecn(&ip));
	if (ip.nexthdr != IPPROTO_UDP) /* probes carry no extension headers */
		return;
	if (!on_probe_port(skb, offset + sizeof(ip)))
		return;
	__builtin_memcpy(&source, &ip.saddr, sizeof(source));
	__builtin_memcpy(&destination, &ip.daddr, sizeof(destination));
	record(skb, offset + sizeof(ip), &source, &destination, bpf_ntohs(ip.payload_len), ip.hop_limit, egress);
}

/*
 * The way out for everything that is no probe must be short: direct access decides, without a helper call. False means
 * "look closer": a probe, or headers that are tagged, have options or do not lie in the linear part. Sets the packet's
 * ECN field if it has come upon it.
 */
static __always_inline bool ordinary(struct __sk_buff *skb, u8 *ecn)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct iphdr *ip = data + ETH_HLEN;
	struct ipv6hdr *ip6 = data + ETH_HLEN;
	__be16 *ports;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if ((void *)(ip + 1) > end || ip->version != 4)
			return false;
		*ecn = ip->tos & ECN_BITS;
		if (ip->protocol != IPPROTO_UDP)
			return true;
		if (ip->ihl != 5)
			return false;
		ports = (__be16 *)(ip + 1);
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		if ((void *)(ip6 + 1) > end || ip6->version != 6)
			return false;
		*ecn = ipv6_ecn(ip6);
		if (ip6->nexthdr != IPPROTO_UDP)
			return true;
		ports = (__be16 *)(ip6 + 1);
	} else {
		return !is_tag(skb->protocol);
	}
	if ((void *)(ports + 2) > end)
		return false;
	return ports[0] != bpf_htons(SWERVE_PROBE_PORT) && ports[1] != bpf_htons(SWERVE_PROBE_PORT);
}

/* A packet that could be marked and whose header `ordinary` has found: the verifier wants its bounds looked at again. */
static __always_inline void count_marks_of(struct __sk_buff *skb, u8 ecn)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct iphdr *ip = data + ETH_HLEN;
	struct ipv6hdr *ip6 = data + ETH_HLEN;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if ((void *)(ip + 1) <= end)
			count_ipv4_marks(skb, ip->saddr, ecn);
	} else if ((void *)(ip6 + 1) <= end) {
		count_ipv6_marks(skb, &ip6->saddr, ecn);
	}
}

static __always_inline int stamp(struct __sk_buff *skb, bool egress)
{
	u8 ecn = ECN_UNKNOWN;
	__be16 protocol;
	bool no_probe;
	u32 offset;

	no_probe = ordinary(skb, &ecn);
	if (!egress && ecn && ecn != ECN_UNKNOWN)
		count_marks_of(skb, ecn);
	if (no_probe)
		return TC_ACT_UNSPEC;
	offset = network_header(skb, &protocol);
	if (!offset)
		return TC_ACT_UNSPEC;
	if (protocol == bpf_htons(ETH_P_IP))
		stamp_ipv4(skb, offset, egress, !egress && ecn == ECN_UNKNOWN);
	else if (protocol == bpf_htons(ETH_P_IPV6))
		stamp_ipv6(skb, offset, egress, !egress && ecn == ECN_UNKNOWN);
	return TC_ACT_UNSPEC;
}

int stamp_egress(struct __sk_buff *skb)
{
	return stamp(skb, true);
}

int stamp_ingress(struct __sk_buff *skb)
{
	return stamp(skb, false);
}
