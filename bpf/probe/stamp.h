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
	__be16 interface;      /* reply: of the reflector, the one that the request came in by */
	__be16 lost_interface; /* of whoever sends this, one that has lost its carrier; 0: none */
	__be32 other_seq;      /* reply: the sender's newest request that came in by another interface; its own: none */
	u32 tag[2];	       /* little-endian; zero: none */
};

#define SWERVE_TLV_BYTES (sizeof(struct swerve_tlv) - sizeof(struct tlv_header))

#define SEEN_BYTES 192	/* of a frame: all headers, the base packet and our TLV */
#define CHUNK_BYTES 512 /* as much as bpf_csum_diff takes */
#define MOST_HEAD_BYTES 120
#define MOST_CHUNKS 18 /* of the longest request */

/* A UDP packet: the beginning of its frame, where the parts lie, and between whom it travels. */
struct udp_packet {
	u16 pad; /* so that what follows the Ethernet header is aligned */
	u8 frame[272];
	u32 missing; /* bytes of the Ethernet header, which is here all the same; offsets count it */
	u32 network; /* offsets */
	u32 udp;
	u32 payload;
	u32 bytes; /* of the payload */
	u16 source_port;
	u16 destination_port;
	struct swerve_addr source;
	struct swerve_addr destination;
	struct swerve_ecn_key interface; /* of the peer: a key to look up, outside the stack */
	u8 ttl;
	u8 ipv6;
	u8 malformed; /* its lengths contradict each other, it is too short, or the first of several fragments */
	u8 partial;   /* its checksum is of addresses and length alone: an offload has yet to compute the rest */
	u8 chunk[520] __attribute__((aligned(8))); /* CHUNK_BYTES, and as far as the verifier believes that they go */
};

/*
 * One packet at a time, and outside the stack: what is read back from a map the verifier takes for any number, so it
 * follows what comes after once, not once for every kind of header that was in front.
 */
BPF_PERCPU_ARRAY(probe_packet, struct udp_packet, 1);

static __always_inline bool same_address(const struct swerve_addr *one, const struct swerve_addr *other)
{
	const u32 *a = (const u32 *)one, *b = (const u32 *)other;

	return a[0] == b[0] && a[1] == b[1] && a[2] == b[2] && a[3] == b[3];
}

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

/* Of a checksum's change what words of 32 bits take with them, and what they bring: a helper costs as much as all. */
static __always_inline u64 words_taken(const u32 *before, u32 words)
{
	u64 difference = 0;

#pragma unroll
	for (u32 i = 0; i < words; i++)
		difference += (u32)~before[i];
	return difference;
}

static __always_inline u64 words_added(const u32 *after, u32 words)
{
	u64 difference = 0;

#pragma unroll
	for (u32 i = 0; i < words; i++)
		difference += after[i];
	return difference;
}

static __always_inline u64 words_difference(const u32 *before, const u32 *after, u32 words, u64 difference)
{
	return difference + words_taken(before, words) + words_added(after, words);
}

/* The same in 32 bits: what the helpers take. */
static __always_inline u32 folded(u64 difference)
{
	difference = (difference & 0xffffffff) + (difference >> 32);
	return difference + (difference >> 32);
}

static __always_inline u32 folded_to_16(u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

/* Write the time into the Timestamp field of a packet, which holds `old`. */
static __always_inline long write_time(struct __sk_buff *skb, u32 udp, struct stamp_time *old, u64 ns)
{
	struct stamp_time time = split(ns);
	u64 difference = words_difference((u32 *)old, (u32 *)&time, sizeof(time) / sizeof(u32), 0);
	u32 at = udp + sizeof(struct udphdr) + __builtin_offsetof(struct stamp_base, at);

	if (bpf_skb_store_bytes(skb, at, &time, sizeof(time), 0))
		return -1;
	return mend_checksum(skb, udp, folded(difference));
}

/* A header in the frame. The mask is for the verifier: no header begins later. */
static __always_inline void *part_of(struct udp_packet *packet, u32 offset)
{
	return packet->frame + (offset & 0x7f);
}

static __always_inline struct stamp_base *base_of(struct udp_packet *packet)
{
	return part_of(packet, packet->payload);
}

/* What follows the base packet, if anything does. */
static __always_inline struct swerve_tlv *tlv_of(struct udp_packet *packet)
{
	return (void *)(base_of(packet) + 1);
}

/* Where in the buffer something lies. */
static __always_inline u32 in_buffer(const struct udp_packet *packet, u32 offset)
{
	return offset - packet->missing;
}

/* The beginning of what the buffer has of the frame. */
static __always_inline u8 *buffer_of(struct udp_packet *packet)
{
	return packet->frame + (packet->missing & 0xf);
}

/* Read the beginning of a frame in one go; of a shorter one all. */
static __always_inline bool read_frame_of(struct __sk_buff *skb, struct udp_packet *packet)
{
	u32 bytes = skb->len < SEEN_BYTES ? skb->len : SEEN_BYTES;

	bytes = ((bytes - 1) & 0xff) + 1; /* which the verifier can follow */
	packet->missing = ETH_HLEN - link_bytes(skb);
	if (packet->missing)
		*(__be16 *)(packet->frame + 2 * ETH_ALEN) = skb->protocol;
	return skb->len >= ETH_HLEN && !bpf_skb_load_bytes(skb, 0, buffer_of(packet), bytes);
}

/* Find the parts of a packet on the probe port, in whichever direction; false when it is none. */
static __always_inline bool find_udp(struct __sk_buff *skb, struct udp_packet *packet)
{
	u32 offset = ETH_HLEN, whole, length, frame_bytes;
	struct vlan_tag *tag;
	struct ipv6hdr *ip6;
	struct udphdr *udp;
	struct iphdr *ip;
	__be16 protocol;

	if (!read_frame_of(skb, packet))
		return false;
	frame_bytes = skb->len + packet->missing;
	protocol = *(__be16 *)(packet->frame + 2 * ETH_ALEN);
#pragma unroll
	for (int i = 0; i < VLAN_TAGS; i++) {
		if (!is_tag(protocol))
			break;
		tag = (void *)packet->frame + offset;
		protocol = tag->protocol;
		offset += sizeof(*tag);
	}
	packet->network = offset;
	packet->malformed = false;
	if (protocol == bpf_htons(ETH_P_IP)) {
		ip = (void *)packet->frame + offset;
		if (frame_bytes < offset + sizeof(*ip))
			return false;
		if (ip->version != 4 || ip->ihl < 5 || ip->protocol != IPPROTO_UDP || ip->frag_off & IPV4_OFFSET)
			return false;
		packet->udp = offset + ip->ihl * 4;
		whole = offset + bpf_ntohs(ip->tot_len);
		packet->malformed = !!(ip->frag_off & IPV4_FRAGMENT);
		packet->ttl = ip->ttl;
		packet->ipv6 = false;
		map_ipv4(&packet->source, ip->saddr);
		map_ipv4(&packet->destination, ip->daddr);
	} else if (protocol == bpf_htons(ETH_P_IPV6)) {
		ip6 = (void *)packet->frame + offset;
		if (frame_bytes < offset + sizeof(*ip6))
			return false;
		if (ip6->version != 6 || ip6->nexthdr != IPPROTO_UDP) /* probes carry no extension headers */
			return false;
		packet->udp = offset + sizeof(*ip6);
		whole = packet->udp + bpf_ntohs(ip6->payload_len);
		packet->ttl = ip6->hop_limit;
		packet->ipv6 = true;
		__builtin_memcpy(&packet->source, &ip6->saddr, sizeof(packet->source));
		__builtin_memcpy(&packet->destination, &ip6->daddr, sizeof(packet->destination));
	} else {
		return false;
	}
	offset = packet->udp;
	if (frame_bytes < offset + sizeof(*udp))
		return false;
	udp = part_of(packet, offset);
	if (udp->dest != bpf_htons(SWERVE_PROBE_PORT) && udp->source != bpf_htons(SWERVE_PROBE_PORT))
		return false;
	packet->source_port = bpf_ntohs(udp->source);
	packet->destination_port = bpf_ntohs(udp->dest);
	length = bpf_ntohs(udp->len);
	packet->payload = offset + sizeof(*udp);
	packet->bytes = length - sizeof(*udp);
	packet->malformed |=
		length < sizeof(*udp) + sizeof(struct stamp_base) || offset + length > whole || whole > frame_bytes;
	return true;
}

/* The sum of addresses, protocol and length that is part of a UDP checksum. */
static __always_inline u32 sum_of_ends(struct udp_packet *packet, u32 length)
{
	const u32 *from = (u32 *)&packet->source, *to = (u32 *)&packet->destination;
	u64 sum = bpf_htons(IPPROTO_UDP) + bpf_htons(length);

	/* the words in front of an IPv4 address add up to nothing: zeros, and all ones */
#pragma unroll
	for (int i = 0; i < 4; i++)
		sum += (u64)from[i] + to[i];
	return folded_to_16(folded(sum));
}

/* The sum of a UDP packet whose first so many bytes, header included, lie in the frame: of all of them. */
static __always_inline u16 sum_of_head(struct udp_packet *packet, u32 length)
{
	u32 words = (length + 3) / 4 * 4, *end;
	s64 sum;

	end = part_of(packet, packet->udp) + (length & 0x7c);
	if (length & 3)
		*end &= bpf_htonl(0xffffffffULL << (32 - (length & 3) * 8));
	sum = bpf_csum_diff(NULL, 0, part_of(packet, packet->udp), words & 0x7c, 0);
	return folded_to_16(folded((u64)(u32)sum + sum_of_ends(packet, length)));
}

/* The sum of a longer packet, read in pieces. */
static __always_inline u16 sum_of_all(struct __sk_buff *skb, struct udp_packet *packet, u32 length)
{
	u64 sum = sum_of_ends(packet, length);
	u32 bytes, at;

	for (u32 i = 0; i < MOST_CHUNKS; i++) {
		if (i * CHUNK_BYTES >= length)
			break;
		bytes = length - i * CHUNK_BYTES;
		if (bytes >= CHUNK_BYTES)
			bytes = CHUNK_BYTES;
		at = bytes;
		asm volatile("" : "+r"(at)); /* the mask is for the verifier: the compiler would leave it out */
		*(u32 *)(packet->chunk + (at & (CHUNK_BYTES - 4))) = 0; /* behind the last byte, or what is read over */
		bytes = ((bytes - 1) & (CHUNK_BYTES - 1)) + 1;
		if (bpf_skb_load_bytes(skb, in_buffer(packet, packet->udp) + i * CHUNK_BYTES, packet->chunk, bytes))
			break;
		sum += (u32)bpf_csum_diff(NULL, 0, (void *)packet->chunk, (bytes + 3) & 0x3fc, 0);
	}
	return folded_to_16(folded(sum));
}

/* Whether the checksum of an IPv4 header is right: no offload computes that one. */
static __always_inline bool is_whole_header(struct udp_packet *packet)
{
	const u32 *words = part_of(packet, packet->network);
	u32 bytes = packet->udp - packet->network;
	u64 sum = 0;

	if (bytes != sizeof(struct iphdr))
		return folded_to_16(bpf_csum_diff(NULL, 0, (void *)words, bytes & 0x3c, 0)) == 0xffff;
#pragma unroll
	for (u32 i = 0; i < sizeof(struct iphdr) / sizeof(u32); i++)
		sum += words[i];
	return folded_to_16(folded(sum)) == 0xffff;
}

/*
 * Whether a packet is as it was sent: the kernel looks at checksums only on their way to a socket. One that an offload
 * has yet to compute (between namespaces of one host) is taken as it is, and so is none, which IPv4 allows.
 */
static __always_inline bool is_whole(struct __sk_buff *skb, struct udp_packet *packet)
{
	struct udphdr *udp = part_of(packet, packet->udp);
	u32 length = sizeof(*udp) + packet->bytes;
	u16 sum;

	packet->partial = false;
	if (!packet->ipv6 && !is_whole_header(packet))
		return false;
	if (!udp->check)
		return !packet->ipv6;
	if (length <= MOST_HEAD_BYTES && packet->udp + length <= SEEN_BYTES)
		sum = sum_of_head(packet, length);
	else
		sum = sum_of_all(skb, packet, length);
	if (sum == 0xffff)
		return true;
	packet->partial = udp->check == sum_of_ends(packet, length);
	return packet->partial;
}

#endif /* SWERVE_PROBE_STAMP_H */
