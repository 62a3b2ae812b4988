/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Where the hosts share a key, probes and replies carry a SipHash-2-4 tag in our TLV. It covers what a figure is made
 * of and whom it is about, and differs by direction, so that no request can be sent back as a reply.
 */
#ifndef SWERVE_PROBE_TAG_H
#define SWERVE_PROBE_TAG_H

#include "probe/siphash.h"
#include "probe/stamp.h"

#define TAG_REQUEST 1 /* the direction, as the first word of what is hashed has it */
#define TAG_REPLY 2
#define TAG_REQUEST_WORDS 10
#define TAG_REPLY_WORDS 13

static __always_inline bool has_key(const struct swerve_probe_settings *known)
{
	return known && known->keyed;
}

/* The TLV of ours that a packet begins with; what follows it in the frame is the packet's only if this is true. */
static __always_inline bool has_tlv(struct udp_packet *packet)
{
	struct swerve_tlv *tlv = tlv_of(packet);

	return packet->bytes >= sizeof(struct stamp_base) + sizeof(*tlv) && tlv->header.type == TLV_SWERVE &&
	       tlv->header.bytes == bpf_htons(SWERVE_TLV_BYTES);
}

/* Of a request, in which it was zero. Returns how much of the checksum changes. */
static __always_inline u32 set_lost_interface(struct swerve_tlv *tlv, u16 lost_interface)
{
	tlv->lost_interface = bpf_htons(lost_interface);
	return *(u32 *)&tlv->interface;
}

/*
 * In order: direction and ports, source and destination address, the base packet up to the session identifier; of a
 * reply up to the sender's Error Estimate; our TLV up to the tag.
 */
static __always_inline u64 tag_of(const struct swerve_probe_settings *known, struct udp_packet *packet, u64 direction)
{
	u32 words = direction == TAG_REPLY ? TAG_REPLY_WORDS : TAG_REQUEST_WORDS;
	u64 *said = (u64 *)packet->chunk;

	said[0] = SIP_LITTLE(direction << 32 | (u32)packet->source_port << 16 | packet->destination_port);
	__builtin_memcpy(&said[1], &packet->source, sizeof(packet->source));
	__builtin_memcpy(&said[3], &packet->destination, sizeof(packet->destination));
	__builtin_memcpy(&said[5], base_of(packet), (words - 8) * sizeof(u64));
	__builtin_memcpy(&said[words - 3], tlv_of(packet)->nonce, 2 * sizeof(u64)); /* and what follows it */
	said[words - 1] = SIP_LITTLE(bpf_ntohl(tlv_of(packet)->other_seq));
	return SIP_LITTLE(siphash(known->key, said, words));
}

static __always_inline u64 tag_in(struct udp_packet *packet)
{
	struct swerve_tlv *tlv = tlv_of(packet);

	return (u64)tlv->tag[1] << 32 | tlv->tag[0];
}

/* Write the time into the Timestamp field of a probe or reply that leaves, and the tag that this makes. */
static __always_inline long write_signed(struct __sk_buff *skb, const struct swerve_probe_settings *known, u64 ns,
					 u64 direction)
{
	struct udp_packet *packet;
	struct stamp_base *base;
	struct swerve_tlv *tlv;
	struct stamp_time time;
	u64 difference, tag;
	u32 only = 0, after[2];

	packet = probe_packet.lookup(&only);
	if (!packet || !find_udp(skb, packet) || packet->malformed)
		return -1;
	base = base_of(packet);
	tlv = tlv_of(packet);
	time = split(ns);
	if (!has_tlv(packet) || tlv->header.flags & TLV_MALFORMED)
		return write_time(skb, in_buffer(packet, packet->udp), &base->at, ns);
	difference = words_difference((u32 *)&base->at, (u32 *)&time, sizeof(time) / sizeof(u32), 0);
	base->at = time;
	if (direction == TAG_REQUEST)
		difference += set_lost_interface(tlv, known->lost_interface);
	tag = tag_of(known, packet, direction);
	after[0] = tag;
	after[1] = tag >> 32;
	difference = words_difference(tlv->tag, after, 2, difference);
	tlv->tag[0] = after[0];
	tlv->tag[1] = after[1];
	if (bpf_skb_store_bytes(skb, in_buffer(packet, packet->payload), base, sizeof(*base) + sizeof(*tlv), 0))
		return -1;
	return mend_checksum(skb, in_buffer(packet, packet->udp), folded(difference));
}

#endif /* SWERVE_PROBE_TAG_H */
