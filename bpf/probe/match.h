/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The Session-Sender's way in: a reply is matched against the probe that it answers, and becomes one record. */
#ifndef SWERVE_PROBE_MATCH_H
#define SWERVE_PROBE_MATCH_H

#include "probe/carrier.h"
#include "probe/tag.h"

#define NUMBER_MASK ((1 << SWERVE_PROBE_SEQ_BITS) - 1)
#define READING_NS 1000		   /* two readings of one clock, taken in the kernel, agree to this */
#define FOREIGN_READING_NS 1000000 /* the same for a reflector that reads its clock in user space */

static __always_inline u32 slot_key(u32 session, u32 number, u32 slots)
{
	return session << 16 | (number & (slots - 1) & 0xffff);
}

/* Whether a packet to this port is to one of the sender's sockets; without branches, which the verifier would follow. */
static __always_inline bool is_ours(struct swerve_probe_settings *known, u16 port)
{
	u32 equal = 0;

#pragma unroll
	for (int i = 0; i < SWERVE_PROBE_PORTS; i++)
		equal |= (u32)(known->ports[i] ^ port) - 1; /* only of zero is the highest bit set */
	return port && (equal >> 31 | ((u16)(port - known->sweep_port) < known->sweep_ports));
}

/*
 * Whether the times that a reply carries can be true: the peer cannot have kept it longer than it was away. With one
 * clock at both ends neither direction may be shorter than nothing, or longer than the round trip.
 */
static __always_inline bool possible(const struct swerve_probe *record, u64 sent_ns, bool shared)
{
	s64 away = record->seen_ns - sent_ns, kept = record->t3_ns - record->t2_ns;
	s64 slack = record->flags & SWERVE_PROBE_OURS ? READING_NS : FOREIGN_READING_NS;
	s64 there, back;

	slack += away >> 12; /* clocks may run apart by 244 ppm */
	if (kept < -slack || kept > away + slack)
		return false;
	if (!shared)
		return true;
	there = record->t2_ns - record->t1_ns;
	back = record->t4_ns - record->t3_ns;
	return there >= -slack && back >= -slack && there <= away + slack && back <= away + slack;
}

/*
 * The path answers: nothing that was sent before this moment counts as silence any more. True: the agent must know at
 * once, because it is the path's first answer, or one was overdue.
 */
static __always_inline bool note_answer(struct swerve_probe_path *path, u64 now, u64 sent_ns)
{
	bool news = !path->answered_ns || (path->first_ns && now > path->first_ns + path->grace_ns);

	if (path->silent_at_ns && now >= path->silent_at_ns) {
		path->lasted_ns = now - path->first_ns;
		path->waited_ns = now - sent_ns;
		path->back_ns = now;
	}
	path->unanswered = 0;
	path->overdue = 0;
	path->first_ns = 0;
	path->silent_at_ns = 0;
	path->answered_ns = now;
	return news;
}

/* Count slow samples in a row. True: the agent must know at once, because this one is the limit, or ends such a run. */
static __always_inline bool note_delay(struct swerve_probe_path *path, s64 forward_ns)
{
	u32 before = path->slow, limit = path->slow_limit;

	if (!limit)
		return false;
	if (forward_ns <= path->slow_ns) {
		path->slow = 0;
		return before >= limit;
	}
	path->slow = before + 1;
	return before + 1 == limit;
}

/*
 * How long the probe has waited on its way there, beyond what it takes at least. Whatever the clocks do, that is no more
 * than it has waited in both directions together. A sample by which it has waited less than nothing in one of them
 * contradicts the clocks: one was stepped, or the route is another.
 */
static __always_inline void note_queueing(struct swerve_probe_path *path, const struct swerve_probe *record,
					  u64 sent_ns)
{
	s64 there, both, slack = path->base_slack_ns;

	if (record->seen_ns >= path->base_until_ns || sent_ns <= path->queue_sent_ns)
		return;
	there = (s64)(record->t1_ns - path->base_at_ns) * path->base_drift >> 32;
	there = record->t2_ns - record->t1_ns - path->base_ns - there;
	both = record->seen_ns - sent_ns - (record->t3_ns - record->t2_ns) - path->base_round_trip_ns;
	if (there < -slack || both < there - slack) {
		count(SWERVE_PROBE_DOUBTED, 1);
		return;
	}
	if (both < there)
		there = both;
	there -= slack;
	path->queue_ns = there > 0 ? there : 0;
	path->queue_sent_ns = sent_ns;
}

/* What our TLV in a reply says. False: the reply cannot be from the reflector that got the probe. */
static __always_inline bool read_tlv(struct udp_packet *packet, u64 nonce, bool must, struct swerve_probe *record)
{
	struct swerve_tlv *tlv = tlv_of(packet);
	bool ours;

	if (!has_tlv(packet))
		return !must;
	if (((u64)tlv->nonce[1] << 32 | tlv->nonce[0]) != nonce)
		return false;
	ours = !(tlv->header.flags & (TLV_UNRECOGNISED | TLV_MALFORMED));
	if (ours) {
		record->flags |= SWERVE_PROBE_OURS;
		record->agent_age_ms = bpf_ntohl(tlv->agent_age_ms);
		record->other = bpf_ntohl(tlv->other_seq);
	}
	return ours || !must;
}

static __always_inline int accept(struct swerve_probe_slot *slot, struct swerve_probe_path *path,
				  struct swerve_probe_session *session, const struct swerve_probe *found)
{
	u64 wake = BPF_RB_NO_WAKEUP; /* the agent looks by itself now and then */
	struct swerve_probe *record;

	if (session->flags & SWERVE_SESSION_QUEUE) {
		if (slot->state != SWERVE_PROBE_ANSWERED)
			note_queueing(path, found, slot->sent_ns);
		slot->state = SWERVE_PROBE_ANSWERED;
		count(SWERVE_PROBE_WIRE_BYTES, ETH_HLEN + found->bytes);
		return drop(SWERVE_PROBE_SENSED);
	}
	if (slot->state != SWERVE_PROBE_ANSWERED) {
		slot->state = SWERVE_PROBE_ANSWERED;
		if (!(session->flags & SWERVE_SESSION_SWEEP)) {
			if (note_answer(path, found->seen_ns, slot->sent_ns))
				wake = BPF_RB_FORCE_WAKEUP;
			if (note_delay(path, found->t2_ns - found->t1_ns))
				wake = BPF_RB_FORCE_WAKEUP;
			note_queueing(path, found, slot->sent_ns);
		}
		if (found->flags & SWERVE_PROBE_OURS)
			session->ours = 1;
	}
	count(SWERVE_PROBE_WIRE_BYTES, ETH_HLEN + found->bytes);
	record = probes.ringbuf_reserve(sizeof(*record));
	if (!record)
		return drop(SWERVE_PROBE_RING_FULL);
	*record = *found;
	probes.ringbuf_submit(record, wake);
	return drop(SWERVE_PROBE_RECORDED);
}

static __always_inline int match_reply(struct __sk_buff *skb, struct udp_packet *packet, u64 now)
{
	struct swerve_probe_settings *known = settings();
	struct stamp_base *base = base_of(packet);
	u16 port = packet->destination_port;
	struct swerve_probe_session *session;
	struct swerve_probe record = {};
	struct swerve_probe_path *path;
	struct swerve_probe_slot *slot;
	u32 row, number, key;
	__be16 error = base->error;

	if (!known || !is_ours(known, port))
		return TC_ACT_UNSPEC; /* anybody may speak from the probe port */
	if (packet->malformed)
		return drop(SWERVE_PROBE_MALFORMED);
	if (skb->gso_segs > 1)
		return drop(SWERVE_PROBE_MERGED);
	if (!(error & ERROR_MULTIPLIER)) /* RFC 4656, section 4.1.2: corrupt */
		return drop(SWERVE_PROBE_MALFORMED);
	number = bpf_ntohl(base->sender_seq) - known->seq_base;
	row = number >> SWERVE_PROBE_SEQ_BITS;
	number &= NUMBER_MASK;
	session = probe_sessions.lookup(&row);
	if (!session || session->port != port || !same_address(&session->remote, &packet->source) ||
	    (base->ssid && bpf_ntohs(base->ssid) != row + 1))
		return drop(SWERVE_PROBE_STRAY);
	key = session->path;
	path = probe_paths.lookup(&key);
	key = slot_key(row, number, known->slots);
	slot = probe_slots.lookup(&key);
	if (!path || !slot || slot->seq != bpf_ntohl(base->sender_seq) || slot->state < SWERVE_PROBE_OUTSTANDING)
		return drop(SWERVE_PROBE_STRAY);
	if (joined(&base->sent, ERROR_PTP) != slot->t1_ns || !read_tlv(packet, slot->nonce, session->ours, &record))
		return drop(SWERVE_PROBE_FORGED);
	if (has_key(known)) {
		if (!(record.flags & SWERVE_PROBE_OURS) || !tag_in(packet))
			return drop(SWERVE_PROBE_UNSIGNED_REPLY);
		if (tag_in(packet) ^ tag_of(known, packet, TAG_REPLY))
			return drop(SWERVE_PROBE_FORGED);
	}
	if (!is_whole(skb, packet))
		return drop(SWERVE_PROBE_MALFORMED);
	if (path->ifindex != skb->ifindex)
		return drop(SWERVE_PROBE_OTHER_PATH);
	record.t1_ns = slot->t1_ns;
	record.t2_ns = joined(&base->received, error);
	record.t3_ns = joined(&base->at, error);
	record.t4_ns = stamping_clock(now);
	record.seen_ns = now;
	record.number = number;
	record.session = row;
	record.ttl = packet->ttl;
	record.sender_ttl = base->sender_ttl;
	record.bytes = packet->bytes;
	if (!(record.flags & SWERVE_PROBE_OURS)) {
		record.agent_age_ms = ~0;
		record.other = bpf_ntohl(base->sender_seq);
	}
	record.other -= known->seq_base;
	if (!possible(&record, slot->sent_ns, session->flags & SWERVE_SESSION_SHARED))
		return drop(SWERVE_PROBE_IMPOSSIBLE);
	if (slot->state == SWERVE_PROBE_ANSWERED)
		record.flags |= SWERVE_PROBE_DUPLICATE;
	key = session->path;
	if (record.flags & SWERVE_PROBE_OURS && slot->state != SWERVE_PROBE_ANSWERED) {
		learn_interface(packet, path, key, bpf_ntohs(tlv_of(packet)->interface));
		note_lost_carrier(packet, known, bpf_ntohs(tlv_of(packet)->lost_interface), now);
	}
	return accept(slot, path, session, &record);
}

#endif /* SWERVE_PROBE_MATCH_H */
