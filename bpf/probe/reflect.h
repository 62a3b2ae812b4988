/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The stateless Session-Reflector (RFC 8762, section 4.3): turns a request into its reply in place and sends it out
 * where it came in. A reply is never longer than its request.
 */
#ifndef SWERVE_PROBE_REFLECT_H
#define SWERVE_PROBE_REFLECT_H

#include "probe/tag.h"

#define LOWEST_PORT 1024
#define REPLY_NS (NS_PER_S / 20000)    /* one peer gets 20,000 replies a second */
#define REPLY_BURST_NS (NS_PER_S / 10) /* and 2,000 at once */
#define REPLY_TTL 255
#define ANY_MTU 576 /* no interface that carries probes takes less */
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

/*
 * Whether a packet is for this host, rather than for somebody that it forwards to. The kernel's own look-up does not
 * say: on a host that does not forward it ends before the route is known.
 */
static __always_inline bool is_local(struct __sk_buff *skb, struct udp_packet *packet)
{
	return !skb->pkt_type && probe_locals.lookup(&packet->destination); /* PACKET_HOST is 0 */
}

/* Whether the peer's share of replies allows one more: each makes the next due later (GCRA, ITU-T I.371). */
static __always_inline bool within_rate(u64 *due_ns, u64 now)
{
	u64 due = *due_ns;

	if (due > now + REPLY_BURST_NS)
		return false;
	*due_ns = (due > now ? due : now) + REPLY_NS;
	return true;
}

/* A signed request may name an interface that has lost its carrier; believed once, so that a recorded one says nothing. */
static __always_inline void take_notice(struct udp_packet *packet, struct swerve_probe_settings *known,
					struct swerve_probe_peer *peer, u64 now)
{
	u16 lost_interface = bpf_ntohs(tlv_of(packet)->lost_interface);
	u64 sent_ns = joined(&base_of(packet)->at, ERROR_PTP);

	if (!lost_interface || sent_ns <= peer->told_ns)
		return;
	peer->told_ns = sent_ns;
	note_lost_carrier(packet, known, lost_interface, now);
}

/*
 * Whether a request may be answered: TC_ACT_UNSPEC if so. With a key, what anybody could have sent in a peer's name does
 * not use up the share of that peer's own probes.
 */
static __always_inline int admitted(struct udp_packet *packet, struct swerve_probe_peer *peer, u64 now)
{
	struct swerve_probe_settings *known = settings();
	u64 *due_ns = &peer->due_ns;

	if (has_key(known) && has_tlv(packet)) {
		if (!tag_in(packet))
			return drop(SWERVE_PROBE_UNSIGNED_REQUEST);
		if (tag_in(packet) ^ tag_of(known, packet, TAG_REQUEST))
			return drop(SWERVE_PROBE_FORGED_REQUEST);
	} else if (has_key(known)) {
		due_ns = &peer->unsigned_due_ns;
	}
	if (!within_rate(due_ns, now))
		return drop(SWERVE_PROBE_OVER_RATE);
	if (due_ns == &peer->due_ns && has_key(known))
		take_notice(packet, known, peer, now);
	return TC_ACT_UNSPEC;
}

/* The difference to the checksum when one byte changes: which half of its 16 bits it is depends on the offset. */
static __always_inline u64 byte_difference(u8 before, u8 after, u32 offset)
{
	u32 shift = (offset & 1) * 8;

	/* no branch: in a loop the verifier would follow both ways of each */
	return (u64)bpf_htonl((u32)after << 24 >> shift) + (u32)~bpf_htonl((u32)before << 24 >> shift);
}

/* A checksum of a header for a change of it (RFC 1624). */
static __always_inline __sum16 mended(__sum16 check, u32 difference)
{
	u32 sum = (u16)~check + (difference & 0xffff) + (difference >> 16);

	sum = (sum & 0xffff) + (sum >> 16);
	return ~(sum + (sum >> 16));
}

static __always_inline __be32 agent_age_ms(const struct swerve_probe_settings *known, u64 now)
{
	if (!known->beat_ns || known->beat_ns > now)
		return ~0;
	return bpf_htonl((u32)((now - known->beat_ns) / 1000000));
}

/* Remember a request as the newest by its interface, unless a newer one came before it; after a step of the clock, any. */
static __always_inline void note_newest(struct udp_packet *packet, struct swerve_probe_peer *peer, u32 ifindex)
{
	u64 sent_ns = joined(&base_of(packet)->at, base_of(packet)->error);
	struct swerve_probe_newest *row = &peer->newest[0];

#pragma unroll
	for (int i = 0; i < SWERVE_PROBE_NEWEST; i++) {
		if (peer->newest[i].ifindex == ifindex) {
			row = &peer->newest[i];
			break;
		}
		if (peer->newest[i].t1_ns < row->t1_ns)
			row = &peer->newest[i];
	}
	if (row->ifindex == ifindex && sent_ns < row->t1_ns && sent_ns + NS_PER_S > row->t1_ns)
		return;
	row->ifindex = ifindex;
	row->seq = base_of(packet)->seq;
	row->t1_ns = sent_ns;
}

/* The peer's newest request by another interface than this one, by each of them in turn. */
static __always_inline __be32 newest_of_others(struct swerve_probe_peer *peer, u32 ifindex, __be32 none)
{
	struct swerve_probe_newest *row;
	u32 turn = peer->turn;

#pragma unroll
	for (u32 i = 0; i < SWERVE_PROBE_NEWEST; i++) {
		row = &peer->newest[(turn + i) & (SWERVE_PROBE_NEWEST - 1)];
		if (!row->ifindex || row->ifindex == ifindex)
			continue;
		peer->turn = turn + i + 1;
		return row->seq;
	}
	return none;
}

/* What our TLV in a reply says. Returns how much of the checksum changes. */
static __always_inline u64 answer_ours(struct swerve_tlv *tlv, struct swerve_probe_peer *peer, __be32 seq, u32 ifindex,
				       u64 now)
{
	const struct swerve_probe_settings *known = settings();
	u64 difference = words_taken(&tlv->agent_age_ms, 5);

	tlv->agent_age_ms = known ? agent_age_ms(known, now) : ~0;
	tlv->interface = bpf_htons(ifindex);
	tlv->lost_interface = known ? bpf_htons(known->lost_interface) : 0;
	tlv->other_seq = newest_of_others(peer, ifindex, seq);
	tlv->tag[0] = tlv->tag[1] = 0; /* of the request; the reply gets its own when it leaves */
	return difference + words_added(&tlv->agent_age_ms, 3);
}

/* Ours are understood as the first TLV only. */
static __always_inline u8 flags_of_first(const struct tlv_header *tlv, u32 room)
{
	u16 bytes = bpf_ntohs(tlv->bytes);

	if (bytes > room)
		return TLV_MALFORMED;
	if (tlv->type == TLV_SWERVE)
		return bytes == SWERVE_TLV_BYTES ? 0 : TLV_MALFORMED;
	if (tlv->type == TLV_REPLY_SIZE)
		return bytes == SIZE_TLV_BYTES ? 0 : TLV_MALFORMED;
	return tlv->type == TLV_PADDING ? 0 : TLV_UNRECOGNISED;
}

/* Set the flags of the first TLV, and answer it if it is ours. Returns how much of the checksum changes. */
static __always_inline u64 answer_first(struct udp_packet *packet, struct swerve_probe_peer *peer, u32 ifindex, u64 now,
					bool *shorten)
{
	struct swerve_tlv *ours = tlv_of(packet);
	struct tlv_header *tlv = &ours->header, before = *tlv;
	struct size_tlv *size = (void *)tlv;
	u64 difference;
	u32 word;

	tlv->flags = flags_of_first(tlv, packet->bytes - sizeof(struct stamp_base) - sizeof(*tlv));
	difference = words_difference((u32 *)&before, (u32 *)tlv, 1, 0);
	if (tlv->flags)
		return difference;
	if (tlv->type == TLV_SWERVE)
		return difference + answer_ours(ours, peer, base_of(packet)->sender_seq, ifindex, now);
	if (tlv->type == TLV_REPLY_SIZE) {
		word = *(u32 *)(tlv + 1);
		*shorten = size->short_reply & bpf_htons(1);
		size->longest = bpf_htons(LONGEST_REQUEST);
		return words_difference(&word, (u32 *)(tlv + 1), 1, difference);
	}
	return difference;
}

/* Set the flags of the TLVs behind the first (RFC 8972, section 4), none of which we know. */
static __always_inline u64 flag_others(struct __sk_buff *skb, struct udp_packet *packet, u64 difference)
{
	struct tlv_header *first = &tlv_of(packet)->header, tlv;
	u32 offset = sizeof(struct stamp_base) + sizeof(tlv) + bpf_ntohs(first->bytes), end;
	u32 payload = in_buffer(packet, packet->payload);
	u8 flags;

	if (first->flags & TLV_MALFORMED)
		return difference;
	for (int i = 1; i < MOST_TLVS; i++) {
		if (offset + sizeof(tlv) > packet->bytes ||
		    bpf_skb_load_bytes(skb, payload + offset, &tlv, sizeof(tlv)))
			break;
		end = offset + sizeof(tlv) + bpf_ntohs(tlv.bytes);
		if (end > packet->bytes)
			flags = TLV_MALFORMED;
		else
			flags = tlv.type == TLV_PADDING ? 0 : TLV_UNRECOGNISED;
		if (bpf_skb_store_bytes(skb, payload + offset, &flags, sizeof(flags), 0))
			break;
		difference += byte_difference(tlv.flags, flags, offset);
		if (flags & TLV_MALFORMED)
			break;
		offset = end;
	}
	return difference;
}

/*
 * Leave the padding out: the packet's IP header says so already. What is left is so short that its checksum is added up
 * anew, unless there was none or an offload has yet to compute it.
 */
static __always_inline long cut_padding(struct __sk_buff *skb, struct udp_packet *packet)
{
	__be16 before = bpf_htons(sizeof(struct udphdr) + packet->bytes);
	__be16 after = bpf_htons(sizeof(struct udphdr) + SHORT_REPLY_BYTES);
	u32 check = in_buffer(packet, packet->udp) + __builtin_offsetof(struct udphdr, check);
	struct udphdr *udp = part_of(packet, packet->udp);
	__sum16 came_with = udp->check;
	u16 sum;

	udp->len = after;
	if (came_with && !packet->partial) {
		udp->check = 0;
		sum = ~sum_of_head(packet, sizeof(*udp) + SHORT_REPLY_BYTES);
		udp->check = sum ?: 0xffff; /* zero means none */
	}
	if (bpf_skb_store_bytes(skb, in_buffer(packet, packet->udp), udp, sizeof(*udp), 0) ||
	    (packet->partial && bpf_l4_csum_replace(skb, check, before, after, BPF_F_PSEUDO_HDR | sizeof(after))))
		return -1;
	return bpf_skb_change_tail(skb, in_buffer(packet, packet->payload) + SHORT_REPLY_BYTES, 0);
}

/* Back to where it came from, with the class it came with; a mark that a queue on the way set is not ours to repeat. */
static __always_inline void turn_ipv4(struct udp_packet *packet, u32 bytes)
{
	struct iphdr *ip = part_of(packet, packet->network);
	__be32 from = ip->saddr;
	u32 before[2], after[2];

	before[0] = *(u32 *)ip;
	before[1] = *(u32 *)&ip->ttl; /* and the protocol and the checksum, which is taken for zero below */
	ip->tos &= ~ECN_BITS;
	ip->tot_len = bpf_htons(packet->payload - packet->network + bytes);
	ip->ttl = REPLY_TTL;
	after[0] = *(u32 *)ip;
	after[1] = *(u32 *)&ip->ttl;
	ip->check = mended(ip->check, folded(words_difference(before, after, 2, 0)));
	ip->saddr = ip->daddr;
	ip->daddr = from;
}

static __always_inline void turn_ipv6(struct udp_packet *packet, u32 bytes)
{
	struct ipv6hdr *ip = part_of(packet, packet->network);

	((u8 *)ip)[1] &= ~(ECN_BITS << 4);
	ip->payload_len = bpf_htons(sizeof(struct udphdr) + bytes);
	ip->hop_limit = REPLY_TTL;
	__builtin_memcpy(&ip->saddr, &packet->destination, sizeof(ip->saddr));
	__builtin_memcpy(&ip->daddr, &packet->source, sizeof(ip->daddr));
}

/* Swapped addresses and ports leave the checksums as they are. `bytes`: of the reply's payload. */
static __always_inline void turn_ends(struct udp_packet *packet, u32 bytes)
{
	struct udphdr *udp = part_of(packet, packet->udp);
	__be16 *mac = (void *)packet->frame, word;

#pragma unroll
	for (int i = 0; i < ETH_ALEN / 2; i++) {
		word = mac[i];
		mac[i] = mac[i + ETH_ALEN / 2];
		mac[i + ETH_ALEN / 2] = word;
	}
	udp->source = bpf_htons(packet->destination_port);
	udp->dest = bpf_htons(packet->source_port);
	if (packet->ipv6)
		turn_ipv6(packet, bytes);
	else
		turn_ipv4(packet, bytes);
}

/* The base packet of the reply, over that of the request; its Timestamp is written when it leaves, over zero. */
static __always_inline u64 answer_base(struct udp_packet *packet, __be16 error, u64 now)
{
	struct stamp_base *base = base_of(packet);
	struct stamp_time none = {};
	u64 difference;

	difference = words_taken((u32 *)base, sizeof(*base) / sizeof(u32));
	base->received = split(stamping_clock(now));
	base->sender_seq = base->seq; /* the reply's own is the sender's: stateless */
	base->sent = base->at;
	base->at = none;
	base->sender_error = base->error;
	base->error = error;
	base->mbz = 0;
	*(u32 *)&base->sender_ttl = 0;
	base->sender_ttl = packet->ttl;
	return difference + words_added((u32 *)base, sizeof(*base) / sizeof(u32));
}

/* Make the reply of a request, and count what of it is on the wire. */
static __always_inline int answer(struct __sk_buff *skb, struct udp_packet *packet, struct swerve_probe_peer *peer,
				  u64 now)
{
	u32 came = skb->len, seen = sizeof(struct stamp_base) + sizeof(struct swerve_tlv), bytes, mtu = 0;
	bool shorten = false, tlvs;
	u64 difference;

	bytes = packet->bytes;
	tlvs = bytes >= sizeof(struct stamp_base) + sizeof(struct tlv_header);
	difference = answer_base(packet, bpf_htons(peer->error_estimate), now);
	if (tlvs)
		difference += answer_first(packet, peer, skb->ifindex, now, &shorten);
	turn_ends(packet, shorten ? SHORT_REPLY_BYTES : bytes);
	bytes = in_buffer(packet, packet->payload) + (bytes < seen ? bytes : seen);
	bytes = ((bytes - 1) & 0xff) + 1; /* which the verifier can follow */
	if (bpf_skb_store_bytes(skb, 0, buffer_of(packet), bytes, 0))
		return drop(SWERVE_PROBE_FAILED);
	if (tlvs)
		difference = flag_others(skb, packet, difference);
	if (shorten ? cut_padding(skb, packet) : mend_checksum(skb, in_buffer(packet, packet->udp), folded(difference)))
		return drop(SWERVE_PROBE_FAILED);
	if (skb->len > ETH_HLEN + ANY_MTU && bpf_check_mtu(skb, skb->ifindex, &mtu, 0, 0))
		return drop(SWERVE_PROBE_TOO_LONG);
	count(SWERVE_PROBE_REFLECTED, 1);
	count(SWERVE_PROBE_WIRE_BYTES, came + skb->len);
	skb->mark = SWERVE_MARK_REPLY | in_buffer(packet, packet->udp);
	return bpf_redirect(skb->ifindex, 0);
}

static __always_inline int reflect(struct __sk_buff *skb, struct udp_packet *packet, u64 now)
{
	struct swerve_ecn_key key = { .remote = packet->source, .ifindex = skb->ifindex };
	struct swerve_probe_requests first = { .last_ns = now, .count = 1 }, *seen;
	struct swerve_probe_peer *peer;

	if (!is_local(skb, packet))
		return TC_ACT_UNSPEC;
	peer = probe_peers.lookup(&key.remote);
	if (!peer)
		return drop(SWERVE_PROBE_NO_PEER);
	if (packet->malformed || packet->bytes > LONGEST_REQUEST)
		return drop(SWERVE_PROBE_MALFORMED);
	if (skb->gso_segs > 1)
		return drop(SWERVE_PROBE_MERGED);
	if (packet->source_port < LOWEST_PORT || packet->source_port == SWERVE_PROBE_PORT)
		return drop(SWERVE_PROBE_REFUSED_PORT);
	if (!is_whole(skb, packet))
		return drop(SWERVE_PROBE_MALFORMED);
	if (admitted(packet, peer, now) != TC_ACT_UNSPEC)
		return TC_ACT_SHOT;
	seen = probe_requests.lookup(&key);
	if (seen) {
		seen->last_ns = now;
		seen->count++;
	} else {
		probe_requests.update(&key, &first);
	}
	if (has_tlv(packet) && base_of(packet)->ssid) /* sweeps have none: they are no sessions */
		note_newest(packet, peer, skb->ifindex);
	return answer(skb, packet, peer, now);
}

#endif /* SWERVE_PROBE_REFLECT_H */
