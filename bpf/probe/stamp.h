/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A STAMP packet (RFC 8762, RFC 8972): its layout, where it lies in a buffer, and how bytes of it are replaced. */
#ifndef SWERVE_PROBE_STAMP_H
#define SWERVE_PROBE_STAMP_H

#include "probe/tables.h"

#define NS_PER_S 1000000000ULL

struct stamp_time {
	__be32 seconds;
	__be32 fraction; /* nanoseconds (PTPv2 truncated), or 2^-32 s (NTP): the Error Estimate says which */
};

/* The base packet of both directions; of a request, all from `received` on is zero. */
struct stamp_base {
	__be32 seq;
	struct stamp_time at;
	__be16 error;
	__be16 ssid;
	struct stamp_time received;
	__be32 sender_seq;
	struct stamp_time sent;
	__be16 sender_error;
	__be16 mbz;
	u8 sender_ttl;
	u8 mbz2[3];
};

#define ERROR_PTP bpf_htons(0x4000) /* Z, RFC 8186 */
#define ERROR_MULTIPLIER bpf_htons(0x00ff)

#define TLV_UNRECOGNISED 0x80 /* flags, RFC 8972 section 4 */
#define TLV_MALFORMED 0x40
#define TLV_PADDING 1
#define TLV_REPLY_SIZE 252 /* this and the next: for private use */
#define TLV_SWERVE 253

struct tlv_header {
	u8 flags;
	u8 type;
	__be16 bytes; /* of what follows */
};

/* What swerve adds to its probes. The reflector sends the nonce back as it came. */
struct swerve_tlv {
	struct tlv_header header;
	u32 nonce[2];
	__be32 agent_age_ms;
	__be32 reserved[3];
};

#define SWERVE_TLV_BYTES (sizeof(struct swerve_tlv) - sizeof(struct tlv_header))

/* Where the parts of a UDP packet lie, and between whom it travels. */
struct udp_packet {
	u32 network;
	u32 udp;
	u32 payload; /* offset */
	u32 bytes;   /* of the payload */
	struct udphdr header;
	struct swerve_addr source;
	struct swerve_addr destination;
	u8 ttl;
	u8 ipv6;
	u8 malformed; /* its lengths contradict each other, it is too short, or the first of several fragments */
};

/*
 * One packet at a time, and outside the stack: what is read back from a map the verifier takes for any number, so it
 * follows what comes after once, not once for every kind of header that was in front.
 */
BPF_PERCPU_ARRAY(probe_packet, struct udp_packet, 1);

static __always_inline struct stamp_time split(u64 ns)
{
	struct stamp_time time = { bpf_htonl((u32)(ns / NS_PER_S)), bpf_htonl((u32)(ns % NS_PER_S)) };

	return time;
}

/* Nanoseconds of a timestamp in the format that the Error Estimate beside it names. */
static __always_inline u64 joined(const struct stamp_time *time, __be16 error)
{
	u64 fraction = bpf_ntohl(time->fraction);

	if (!(error & ERROR_PTP))
		fraction = fraction * NS_PER_S >> 32;
	return bpf_ntohl(time->seconds) * NS_PER_S + fraction;
}

/*
 * Mend the UDP checksum for a change of the payload. A checksum of zero stays (IPv4: none), and so does one that an
 * offload has yet to compute.
 */
static __always_inline long mend_checksum(struct __sk_buff *skb, u32 udp, s64 difference)
{
	return bpf_l4_csum_replace(skb, udp + __builtin_offsetof(struct udphdr, check), 0, difference,
				   BPF_F_MARK_MANGLED_0);
}

/* Write the time into the Timestamp field of a packet, which holds `old`. */
static __always_inline long write_time(struct __sk_buff *skb, u32 udp, struct stamp_time *old, u64 ns)
{
	struct stamp_time time = split(ns);
	s64 difference = bpf_csum_diff((void *)old, sizeof(*old), (void *)&time, sizeof(time), 0);
	u32 at = udp + sizeof(struct udphdr) + __builtin_offsetof(struct stamp_base, at);

	if (bpf_skb_store_bytes(skb, at, &time, sizeof(time), 0))
		return -1;
	return mend_checksum(skb, udp, difference);
}

/* Find the parts of a packet on the probe port, in whichever direction; false when it is none. */
static __always_inline bool find_udp(struct __sk_buff *skb, struct udp_packet *packet)
{
	struct ipv6hdr ip6;
	__be16 protocol;
	struct iphdr ip;
	u32 bytes;

	packet->network = network_header(skb, &protocol);
	if (!packet->network)
		return false;
	if (protocol == bpf_htons(ETH_P_IP)) {
		if (bpf_skb_load_bytes(skb, packet->network, &ip, sizeof(ip)))
			return false;
		if (ip.version != 4 || ip.ihl < 5 || ip.protocol != IPPROTO_UDP || ip.frag_off & IPV4_OFFSET)
			return false;
		packet->udp = packet->network + ip.ihl * 4;
		bytes = bpf_ntohs(ip.tot_len) - ip.ihl * 4;
		packet->malformed = ip.frag_off & IPV4_FRAGMENT || bpf_ntohs(ip.tot_len) < ip.ihl * 4;
		packet->ttl = ip.ttl;
		packet->ipv6 = false;
		map_ipv4(&packet->source, ip.saddr);
		map_ipv4(&packet->destination, ip.daddr);
	} else if (protocol == bpf_htons(ETH_P_IPV6)) {
		if (bpf_skb_load_bytes(skb, packet->network, &ip6, sizeof(ip6)))
			return false;
		if (ip6.version != 6 || ip6.nexthdr != IPPROTO_UDP) /* probes carry no extension headers */
			return false;
		packet->udp = packet->network + sizeof(ip6);
		bytes = bpf_ntohs(ip6.payload_len);
		packet->malformed = false;
		packet->ttl = ip6.hop_limit;
		packet->ipv6 = true;
		__builtin_memcpy(&packet->source, &ip6.saddr, sizeof(packet->source));
		__builtin_memcpy(&packet->destination, &ip6.daddr, sizeof(packet->destination));
	} else {
		return false;
	}
	if (bpf_skb_load_bytes(skb, packet->udp, &packet->header, sizeof(packet->header)))
		return false;
	if (packet->header.dest != bpf_htons(SWERVE_PROBE_PORT) &&
	    packet->header.source != bpf_htons(SWERVE_PROBE_PORT))
		return false;
	packet->payload = packet->udp + sizeof(packet->header);
	packet->bytes = bpf_ntohs(packet->header.len) - sizeof(packet->header);
	packet->malformed |= bpf_ntohs(packet->header.len) < sizeof(packet->header) + sizeof(struct stamp_base) ||
			     bpf_ntohs(packet->header.len) > bytes;
	return true;
}

#endif /* SWERVE_PROBE_STAMP_H */
