/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * STAMP (RFC 8762) at TC: probes are pinned to their path, stamped, reflected and matched here, so no delay of a
 * process is in any figure. Counts congestion marks of peers' packets on the way in. Alters no packet but probes.
 *
 * Egress   a frame of ours that user space sent is handed to its path's gateway, then gets its Timestamp as it leaves
 *          (t1); so does a reply (t3). At egress the hook runs before the queue discipline, so a stamp includes the
 *          time queued on this interface.
 * Ingress  a request of a configured peer becomes its reply (t2) and leaves where it came in; a reply to a probe of
 *          ours becomes one record with four stamps (t4). Everything else on the probe port ends here, counted.
 *
 * SWERVE_PROBE_PORT: the UDP port of reflectors. SWERVE_VIRTUAL_CLOCK: stamp by a lab's clock.
 */
#include "lib/redirect.h"
#include "observe/chain.h"
#include "probe/tables.h"
#include "probe/stamp.h"
#include "probe/siphash.h"
#include "probe/tag.h"
#include "probe/carrier.h"
#include "probe/ecn.h"
#include "probe/reflect.h"
#include "probe/match.h"

/*
 * The frame that user space made: no VLAN tag, no IP option, a STAMP packet with our TLV or a size probe. It begins with
 * an Ethernet header wherever it leaves; what has none loses it in `send_probe`.
 */
struct frame {
	u32 udp;
	struct stamp_base base;
};

static __always_inline bool read_frame(struct __sk_buff *skb, struct frame *frame, u32 link)
{
	frame->udp = link + (skb->protocol == bpf_htons(ETH_P_IPV6) ? sizeof(struct ipv6hdr) : sizeof(struct iphdr));
	return !bpf_skb_load_bytes(skb, frame->udp + sizeof(struct udphdr), &frame->base, sizeof(frame->base));
}

/* Where the probe's numbers are kept; NULL: it is of no session. */
static __always_inline struct swerve_probe_slot *slot_of(const struct frame *frame, u32 *key)
{
	struct swerve_probe_settings *known = settings();
	u32 number;

	if (!known)
		return NULL;
	number = bpf_ntohl(frame->base.seq) - known->seq_base;
	*key = slot_key(number >> SWERVE_PROBE_SEQ_BITS, number & NUMBER_MASK, known->slots);
	return probe_slots.lookup(key);
}

/* Remember a probe before it leaves: while its gateway's address is looked for, it is on its way all the same. */
static __always_inline bool remember(struct __sk_buff *skb, const struct frame *frame)
{
	u32 at = frame->udp + sizeof(struct udphdr) + sizeof(struct stamp_base) + sizeof(struct tlv_header), key = 0;
	struct swerve_probe_slot fresh = { .seq = bpf_ntohl(frame->base.seq), .state = SWERVE_PROBE_PENDING };
	struct swerve_probe_slot *slot;

	if (bpf_skb_load_bytes(skb, at, &fresh.nonce, sizeof(fresh.nonce)))
		return false;
	slot = slot_of(frame, &key);
	if (!slot)
		return !probe_slots.update(&key, &fresh);
	slot->state = 0; /* between two probes, so that a reply finds either or none */
	slot->nonce = fresh.nonce;
	slot->seq = fresh.seq;
	slot->state = SWERVE_PROBE_PENDING;
	return true;
}

/*
 * One more probe without an answer; when the last that is allowed is overdue, the path is silent. That the first is
 * overdue pacer.c may have seen before.
 */
static __always_inline void note_sent(struct swerve_probe_path *path, u64 now)
{
	u64 late_ns = path->grace_ns < SWERVE_PROBE_LATE_NS ? path->grace_ns : SWERVE_PROBE_LATE_NS;
	u32 unanswered = path->unanswered + 1;
	struct swerve_probe_settings *known;

	if (unanswered == 1)
		path->first_ns = now;
	path->unanswered = unanswered;
	if (path->limit && !path->overdue && now > path->first_ns + late_ns) {
		path->overdue = 1;
		wake_agent();
	}
	if (!path->limit || unanswered < path->limit)
		return;
	if (!path->silent_at_ns)
		path->silent_at_ns = now + path->grace_ns;
	known = settings();
	if (known)
		known->silence_ns = now;
}

/* Pin a probe to its path: by that path's gateway, whatever the routes say. TC_ACT_UNSPEC: it leaves right here. */
static __always_inline int send_probe(struct __sk_buff *skb)
{
	struct swerve_probe_path *path;
	struct frame frame;
	u8 pin[3];
	u32 index;

	if (bpf_skb_load_bytes(skb, 3, pin, sizeof(pin)) || !read_frame(skb, &frame, ETH_HLEN))
		return drop(SWERVE_PROBE_FAILED);
	index = pin[1] << 8 | pin[2];
	path = probe_paths.lookup(&index);
	if (!path || !path->ifindex)
		return drop(SWERVE_PROBE_UNPINNED);
	skb->mark = SWERVE_MARK_PLAIN;
	if (frame.base.ssid != bpf_htons(SWERVE_SSID_SIZE)) {
		if (!remember(skb, &frame))
			return drop(SWERVE_PROBE_SLOTS_FULL);
		skb->mark = SWERVE_MARK_STAMP;
		if (pin[0])
			note_sent(path, bpf_ktime_get_ns());
	}
	if (path->bare)
		return bpf_skb_adjust_room(skb, -ETH_HLEN, BPF_ADJ_ROOM_MAC, 0) ? drop(SWERVE_PROBE_FAILED)
										: TC_ACT_UNSPEC;
	if (redirect_by(path->ifindex, path->family, &path->gateway) != TC_ACT_REDIRECT)
		return drop(SWERVE_PROBE_FAILED);
	return TC_ACT_REDIRECT;
}

static __always_inline int stamp_probe(struct __sk_buff *skb)
{
	struct swerve_probe_settings *known = settings();
	struct swerve_probe_slot *slot;
	struct frame frame;
	u32 key = 0;
	u64 now;

	skb->mark = 0;
	if (!read_frame(skb, &frame, link_bytes(skb)))
		return drop(SWERVE_PROBE_FAILED);
	slot = slot_of(&frame, &key);
	if (!slot || slot->seq != bpf_ntohl(frame.base.seq) || slot->state != SWERVE_PROBE_PENDING)
		return drop(SWERVE_PROBE_FAILED); /* kept so long that its slot is another probe's */
	now = bpf_ktime_get_ns();
	slot->sent_ns = now;
	slot->t1_ns = stamping_clock(now);
	slot->state = SWERVE_PROBE_OUTSTANDING;
	if (has_key(known) ? write_signed(skb, known, slot->t1_ns, TAG_REQUEST)
			   : write_time(skb, frame.udp, &frame.base.at, slot->t1_ns))
		return drop(SWERVE_PROBE_FAILED);
	return TC_ACT_UNSPEC;
}

/* Its Timestamp is zero until now. */
static __always_inline int stamp_reply(struct __sk_buff *skb)
{
	struct swerve_probe_settings *known = settings();
	u32 udp = skb->mark & ~SWERVE_MARK_REPLY;
	struct stamp_time none = {};
	u64 now;

	skb->mark = 0;
	now = stamping_clock(bpf_ktime_get_ns());
	if (has_key(known) ? write_signed(skb, known, now, TAG_REPLY) : write_time(skb, udp, &none, now))
		return drop(SWERVE_PROBE_FAILED);
	return TC_ACT_UNSPEC;
}

static __always_inline int look_at_mark(struct __sk_buff *skb)
{
	u32 mark = skb->mark;
	int verdict;

	if (!is_probe(skb))
		LEAVE(TC_ACT_UNSPEC);
	if (mark == SWERVE_MARK_SEND) {
		verdict = send_probe(skb);
		if (verdict != TC_ACT_UNSPEC)
			return verdict;
		mark = skb->mark;
	}
	if (mark == SWERVE_MARK_STAMP)
		return stamp_probe(skb);
	if ((mark & ~0xff) == SWERVE_MARK_REPLY)
		return stamp_reply(skb);
	if (mark == SWERVE_MARK_PLAIN)
		skb->mark = 0;
	return TC_ACT_UNSPEC;
}

int probe_egress(struct __sk_buff *skb)
{
	return unless_decided(skb, look_at_mark(skb), CONNECTIONS, true);
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

/* A packet that is tagged, has options, or is on the probe port. */
static __always_inline int look_closer(struct __sk_buff *skb, bool count_ecn)
{
	struct udp_packet *packet;
	u32 only = 0;
	u64 now;

	now = bpf_ktime_get_ns();
	packet = probe_packet.lookup(&only);
	if (!packet)
		return TC_ACT_UNSPEC;
	if (count_ecn)
		count_hidden_marks(skb);
	if (!find_udp(skb, packet))
		return TC_ACT_UNSPEC;
	if (packet->destination_port == SWERVE_PROBE_PORT)
		return reflect(skb, packet, now);
	return match_reply(skb, packet, now);
}

/*
 * Nearly every packet: neither UDP nor able to be marked, no tag, no option. Ethertype, version, header length and ECN
 * field lie in one word. As few instructions as can be: between two packets they fall out of the caches.
 */
#define PLAIN_IPV4_BITS plain_ipv4_bits(ECN_BITS)
#define PLAIN_IPV6_BITS plain_ipv6_bits(ECN_BITS)

static __always_inline bool plain(struct __sk_buff *skb)
{
	u8 *frame = (u8 *)(long)skb->data, *end = (u8 *)(long)skb->data_end;
	__be32 first;

	if (frame + ETH_HLEN + sizeof(struct iphdr) > end)
		return false;
	first = *(__be32 *)(frame + FIRST_WORD);
	if ((first & PLAIN_IPV4_BITS) == PLAIN_IPV4)
		return frame[ETH_HLEN + __builtin_offsetof(struct iphdr, protocol)] != IPPROTO_UDP;
	if ((first & PLAIN_IPV6_BITS) == PLAIN_IPV6)
		return frame[ETH_HLEN + __builtin_offsetof(struct ipv6hdr, nexthdr)] != IPPROTO_UDP;
	return false;
}

static __always_inline int look_for_probe(struct __sk_buff *skb)
{
	u8 ecn = ECN_UNKNOWN;
	bool no_probe;

	if (plain(skb))
		LEAVE(TC_ACT_UNSPEC);
	no_probe = !is_bare(skb) && ordinary(skb, &ecn);
	if (ecn && ecn != ECN_UNKNOWN)
		count_marks_of(skb, ecn);
	if (no_probe)
		return TC_ACT_UNSPEC;
	return look_closer(skb, ecn == ECN_UNKNOWN);
}

int probe_ingress(struct __sk_buff *skb)
{
	return unless_decided(skb, look_for_probe(skb), CONNECTIONS, false);
}
