/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The stateless Session-Reflector (RFC 8762, section 4.3): turns a request into its reply in place and sends it out
 * where it came in. A reply is never longer than its request.
 */
#ifndef SWERVE_PROBE_REFLECT_H
#define SWERVE_PROBE_REFLECT_H

#include "probe/stamp.h"

#define LOWEST_PORT 1024
#define REPLY_NS (NS_PER_S / 20000)    /* one peer gets 20,000 replies a second */
#define REPLY_BURST_NS (NS_PER_S / 10) /* and 2,000 at once */
#define REPLY_TTL 255
#define MOST_TLVS 8 /* later ones go back as they came: senders set U, which is then right */

#define LONGEST_REQUEST 9188 /* of UDP payload: as much as IPv4 carries where frames are longest */
#define SHORT_REPLY_BYTES (sizeof(struct stamp_base) + sizeof(struct size_tlv))

/* Of probes that ask how large a packet may be. */
struct size_tlv {
	struct tlv_header header;
	__be16 short_reply; /* lowest bit: leave the padding out of the reply */
	__be16 longest;	    /* the reflector writes the longest request that it answers */
};

#define SIZE_TLV_BYTES (sizeof(struct size_tlv) - sizeof(struct tlv_header))

/* Whether a packet is for this host, rather than for somebody that it forwards to. */
static __always_inline bool is_local(struct __sk_buff *skb, struct udp_packet *packet)
{
	struct bpf_fib_lookup route = {};
	long found;

	if (skb->pkt_type) /* PACKET_HOST is 0 */
		return false;
	route.ifindex = skb->ifindex;
	if (packet->ipv6) {
		route.family = SWERVE_PROBE_FAMILY_IPV6;
		__builtin_memcpy(route.ipv6_src, &packet->source, sizeof(route.ipv6_src));
		__builtin_memcpy(route.ipv6_dst, &packet->destination, sizeof(route.ipv6_dst));
	} else {
		route.family = SWERVE_PROBE_FAMILY_IPV4;
		__builtin_memcpy(&route.ipv4_src, packet->source.bytes + 12, sizeof(route.ipv4_src));
		__builtin_memcpy(&route.ipv4_dst, packet->destination.bytes + 12, sizeof(route.ipv4_dst));
	}
	found = bpf_fib_lookup(skb, &route, sizeof(route), 0);
	return found == BPF_FIB_LKUP_RET_NOT_FWDED || found == BPF_FIB_LKUP_RET_FWD_DISABLED;
}

/* Whether the peer's share of replies allows one more: each makes the next due later (GCRA, ITU-T I.371). */
static __always_inline bool within_rate(struct swerve_probe_peer *peer, u64 now)
{
	u64 due = peer->due_ns;

	if (due > now + REPLY_BURST_NS)
		return false;
	peer->due_ns = (due > now ? due : now) + REPLY_NS;
	return true;
}

static __always_inline void note_request(struct __sk_buff *skb, struct swerve_addr *source, u64 now)
{
	struct swerve_ecn_key key = { .remote = *source, .ifindex = skb->ifindex };
	struct swerve_probe_requests first = { .last_ns = now, .count = 1 }, *seen;

	seen = probe_requests.lookup(&key);
	if (!seen) {
		probe_requests.update(&key, &first);
		return;
	}
	seen->last_ns = now;
	seen->count++;
}

/* The difference to the checksum when one byte changes: which half of its 16 bits it is depends on the offset. */
static __always_inline s64 byte_difference(u8 before, u8 after, u32 offset, s64 difference)
{
	u32 shift = (offset & 1) * 8;
	__be32 old, new;

	/* no branch: in a loop the verifier would follow both ways of each */
	old = bpf_htonl((u32)before << 24 >> shift);
	new = bpf_htonl((u32)after << 24 >> shift);
	return bpf_csum_diff(&old, sizeof(old), &new, sizeof(new), difference);
}

static __always_inline __be32 agent_age_ms(u64 now)
{
	struct swerve_probe_settings *known = settings();

	if (!known || !known->beat_ns || known->beat_ns > now)
		return ~0;
	return bpf_htonl((u32)((now - known->beat_ns) / 1000000));
}

static __always_inline s64 answer_swerve(struct __sk_buff *skb, u32 at, u64 now, s64 difference)
{
	__be32 before, after = agent_age_ms(now);

	at += __builtin_offsetof(struct swerve_tlv, agent_age_ms);
	if (bpf_skb_load_bytes(skb, at, &before, sizeof(before)) ||
	    bpf_skb_store_bytes(skb, at, &after, sizeof(after), 0))
		return difference;
	return bpf_csum_diff(&before, sizeof(before), &after, sizeof(after), difference);
}

static __always_inline s64 answer_size(struct __sk_buff *skb, u32 at, bool *shorten, s64 difference)
{
	struct {
		__be16 short_reply;
		__be16 longest;
	} before, after;

	at += sizeof(struct tlv_header);
	if (bpf_skb_load_bytes(skb, at, &before, sizeof(before)))
		return difference;
	*shorten = before.short_reply & bpf_htons(1);
	after.short_reply = before.short_reply;
	after.longest = bpf_htons(LONGEST_REQUEST);
	if (bpf_skb_store_bytes(skb, at, &after, sizeof(after), 0))
		return difference;
	return bpf_csum_diff((void *)&before, sizeof(before), (void *)&after, sizeof(after), difference);
}

/* Ours are understood as the first TLV only. */
static __always_inline u8 flags_of_first(const struct tlv_header *tlv)
{
	u16 bytes = bpf_ntohs(tlv->bytes);

	if (tlv->type == TLV_SWERVE)
		return bytes == SWERVE_TLV_BYTES ? 0 : TLV_MALFORMED;
	if (tlv->type == TLV_REPLY_SIZE)
		return bytes == SIZE_TLV_BYTES ? 0 : TLV_MALFORMED;
	return tlv->type == TLV_PADDING ? 0 : TLV_UNRECOGNISED;
}

static __always_inline s64 answer_first(struct __sk_buff *skb, u32 at, u8 type, u64 now, bool *shorten, s64 difference)
{
	if (type == TLV_SWERVE)
		return answer_swerve(skb, at, now, difference);
	if (type == TLV_REPLY_SIZE)
		return answer_size(skb, at, shorten, difference);
	return difference;
}

/* Set the flags of the TLVs (RFC 8972, section 4) and answer ours. */
static __always_inline s64 answer_tlvs(struct __sk_buff *skb, struct udp_packet *packet, u64 now, bool *shorten,
				       s64 difference)
{
	u32 offset = sizeof(struct stamp_base), end;
	struct tlv_header tlv;
	u8 flags;

	for (int i = 0; i < MOST_TLVS; i++) {
		if (offset + sizeof(tlv) > packet->bytes ||
		    bpf_skb_load_bytes(skb, packet->payload + offset, &tlv, sizeof(tlv)))
			break;
		end = offset + sizeof(tlv) + bpf_ntohs(tlv.bytes);
		if (end > packet->bytes)
			flags = TLV_MALFORMED;
		else if (!i)
			flags = flags_of_first(&tlv);
		else
			flags = tlv.type == TLV_PADDING ? 0 : TLV_UNRECOGNISED;
		if (bpf_skb_store_bytes(skb, packet->payload + offset, &flags, sizeof(flags), 0))
			break;
		difference = byte_difference(tlv.flags, flags, offset, difference);
		if (flags & TLV_MALFORMED)
			break;
		if (!i && !flags)
			difference = answer_first(skb, packet->payload + offset, tlv.type, now, shorten, difference);
		offset = end;
	}
	return difference;
}

/* Leave the padding out. Our own senders pad with zeros, so of the checksum only its header is to be taken off. */
static __always_inline long cut_padding(struct __sk_buff *skb, struct udp_packet *packet, s64 difference)
{
	__be16 before = packet->header.len, after = bpf_htons(sizeof(packet->header) + SHORT_REPLY_BYTES);
	u32 check = packet->udp + __builtin_offsetof(struct udphdr, check);
	struct tlv_header padding = {};

	if (packet->bytes >= SHORT_REPLY_BYTES + sizeof(padding) &&
	    bpf_skb_load_bytes(skb, packet->payload + SHORT_REPLY_BYTES, &padding, sizeof(padding)))
		return -1;
	difference = bpf_csum_diff((void *)&padding, sizeof(padding), NULL, 0, difference);
	if (mend_checksum(skb, packet->udp, difference) ||
	    bpf_l4_csum_replace(skb, check, before, after, BPF_F_PSEUDO_HDR | BPF_F_MARK_MANGLED_0 | sizeof(after)) ||
	    bpf_l4_csum_replace(skb, check, before, after, BPF_F_MARK_MANGLED_0 | sizeof(after)) ||
	    bpf_skb_store_bytes(skb, packet->udp + __builtin_offsetof(struct udphdr, len), &after, sizeof(after), 0))
		return -1;
	packet->bytes = SHORT_REPLY_BYTES;
	return bpf_skb_change_tail(skb, packet->payload + SHORT_REPLY_BYTES, 0);
}

/* Back to where it came from, with the class it came with; a mark that a queue on the way set is not ours to repeat. */
static __always_inline long turn_ipv4(struct __sk_buff *skb, struct udp_packet *packet)
{
	struct iphdr old, new;
	s64 difference;

	if (bpf_skb_load_bytes(skb, packet->network, &old, sizeof(old)))
		return -1;
	new = old;
	new.tos = old.tos & ~ECN_BITS;
	new.tot_len = bpf_htons(packet->payload - packet->network + packet->bytes);
	new.ttl = REPLY_TTL;
	new.saddr = old.daddr;
	new.daddr = old.saddr;
	difference = bpf_csum_diff((void *)&old, sizeof(old), (void *)&new, sizeof(new), 0);
	if (bpf_skb_store_bytes(skb, packet->network, &new, sizeof(new), 0))
		return -1;
	return bpf_l3_csum_replace(skb, packet->network + __builtin_offsetof(struct iphdr, check), 0, difference, 0);
}

static __always_inline long turn_ipv6(struct __sk_buff *skb, struct udp_packet *packet)
{
	struct ipv6hdr old, new;

	if (bpf_skb_load_bytes(skb, packet->network, &old, sizeof(old)))
		return -1;
	new = old;
	((u8 *)&new)[1] &= ~(ECN_BITS << 4);
	new.payload_len = bpf_htons(sizeof(packet->header) + packet->bytes);
	new.hop_limit = REPLY_TTL;
	new.saddr = old.daddr;
	new.daddr = old.saddr;
	return bpf_skb_store_bytes(skb, packet->network, &new, sizeof(new), 0);
}

static __always_inline long turn_ends(struct __sk_buff *skb, struct udp_packet *packet)
{
	__be16 ports[2] = { packet->header.dest, packet->header.source };
	struct {
		u8 to[ETH_ALEN];
		u8 from[ETH_ALEN];
	} old, new;

	if (bpf_skb_load_bytes(skb, 0, &old, sizeof(old)))
		return -1;
	__builtin_memcpy(new.to, old.from, ETH_ALEN);
	__builtin_memcpy(new.from, old.to, ETH_ALEN);
	if (bpf_skb_store_bytes(skb, 0, &new, sizeof(new), 0) ||
	    bpf_skb_store_bytes(skb, packet->udp, ports, sizeof(ports), 0))
		return -1;
	return packet->ipv6 ? turn_ipv6(skb, packet) : turn_ipv4(skb, packet);
}

/* The base packet of the reply, over that of the request; its Timestamp is written when it leaves. */
static __always_inline long answer_base(struct __sk_buff *skb, struct udp_packet *packet, __be16 error, u64 now,
					s64 *difference)
{
	struct stamp_base old, new = {};

	if (bpf_skb_load_bytes(skb, packet->payload, &old, sizeof(old)))
		return -1;
	new.seq = old.seq; /* stateless: the sender's own */
	new.received = split(stamping_clock(now));
	new.at = new.received;
	new.error = error;
	new.ssid = old.ssid;
	new.sender_seq = old.seq;
	new.sent = old.at;
	new.sender_error = old.error;
	new.sender_ttl = packet->ttl;
	if (bpf_skb_store_bytes(skb, packet->payload, &new, sizeof(new), 0))
		return -1;
	/* before commit 6a4794d5a3e2 of 6.13 a difference has 32 bits, and may look negative */
	*difference = bpf_csum_diff((void *)&old, sizeof(old), (void *)&new, sizeof(new), 0);
	return 0;
}

static __always_inline int reflect(struct __sk_buff *skb, struct udp_packet *packet, u64 now)
{
	u16 port = bpf_ntohs(packet->header.source);
	struct swerve_probe_peer *peer;
	u32 bytes = skb->len, mtu = 0;
	bool shorten = false;
	s64 difference;

	peer = probe_peers.lookup(&packet->source);
	if (!is_local(skb, packet))
		return TC_ACT_UNSPEC;
	if (!peer)
		return drop(SWERVE_PROBE_NO_PEER);
	if (packet->malformed || packet->bytes > LONGEST_REQUEST)
		return drop(SWERVE_PROBE_MALFORMED);
	if (skb->gso_segs > 1)
		return drop(SWERVE_PROBE_MERGED);
	if (port < LOWEST_PORT || port == SWERVE_PROBE_PORT)
		return drop(SWERVE_PROBE_REFUSED_PORT);
	if (!within_rate(peer, now))
		return drop(SWERVE_PROBE_OVER_RATE);
	note_request(skb, &packet->source, now);
	if (answer_base(skb, packet, bpf_htons(peer->error_estimate), now, &difference))
		return drop(SWERVE_PROBE_FAILED);
	difference = answer_tlvs(skb, packet, now, &shorten, difference);
	if (shorten ? cut_padding(skb, packet, difference) : mend_checksum(skb, packet->udp, difference))
		return drop(SWERVE_PROBE_FAILED);
	if (bpf_check_mtu(skb, skb->ifindex, &mtu, 0, 0))
		return drop(SWERVE_PROBE_TOO_LONG);
	if (turn_ends(skb, packet))
		return drop(SWERVE_PROBE_FAILED);
	count_more(SWERVE_PROBE_REFLECTED, 1);
	count_more(SWERVE_PROBE_WIRE_BYTES, bytes + skb->len);
	skb->mark = SWERVE_MARK_REPLY;
	return bpf_redirect(skb->ifindex, 0);
}

#endif /* SWERVE_PROBE_REFLECT_H */
