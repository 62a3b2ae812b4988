/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Flow pins, IPv6 flow labels, fast reroute and holds at TC egress: leases, whose end is looked at here for every packet.
 *
 * A pin sends a flow's packets to another nexthop than routing has chosen, between two packets and without a reset. It
 * holds only while its target is alive, as user space is told by the kernel, and takes packets of the target's size;
 * in every other case the packet goes as it is routed, and the reason is counted. A label makes the fabric's own ECMP
 * choose again. A stand-by takes the packets to a destination while the path that they are routed along is silent, as
 * probe.c has found it. A hold lets packets wait in front of a path whose queue is long. None of these touches a port, an address, the TTL or a checksum.
 *
 * A redirected packet passes the egress hooks of its target too, this one included: there it is where it shall be, and
 * is counted. So this program comes before those that observe: they see a packet once, on the interface it leaves by.
 *
 * Our probes measure a path, and are never moved away from it.
 */
#include "lib/packet.h"
#include "lib/redirect.h"
#include "swerve.h"

#include "steer/tables.h"
#include "steer/flows.h"
#include "steer/standby.h"
#include "steer/hold.h"

/* Packets that stay where they are, whatever a pin says: moved, a probe would measure another path than it names. */
static __always_inline bool exempt(struct __sk_buff *skb, const struct swerve_flow *flow)
{
	u8 first = skb->protocol == bpf_htons(ETH_P_IP) ? flow->remote.bytes[12] : flow->remote.bytes[0];

	if (is_probe(skb) || skb->vlan_present)
		return true;
	return skb->protocol == bpf_htons(ETH_P_IP) ? first >= 224 : first == 0xff;
}

/*
 * The label lies in the header's first word, is in no checksum, and segmentation gives it to every segment. A packet
 * that has ours already was redirected: what it came with was seen where it was.
 */
static __always_inline void relabel(struct __sk_buff *skb, struct swerve_steer_row *row, u64 now)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	u32 link = link_bytes(skb), seen;
	__be32 *first = data + link, word;

	if (!(row->label_until_ns | row->watch_until_ns) || skb->protocol != bpf_htons(ETH_P_IPV6))
		return;
	if ((void *)(first + 1) > end)
		return;
	word = (*first & bpf_htonl(~LABEL_BITS)) | bpf_htonl(row->label & LABEL_BITS);
	if (row->label_until_ns > now && word == *first)
		return;
	seen = (bpf_ntohl(*first) & LABEL_BITS) | SWERVE_STEER_SEEN;
	if (row->seen != seen)
		row->seen = seen;
	if (row->label_until_ns <= now) {
		if (row->label_until_ns)
			count(skb, SWERVE_STEER_LABEL_EXPIRED);
		return;
	}
	if (bpf_skb_store_bytes(skb, link, &word, sizeof(word), 0)) {
		count(skb, SWERVE_STEER_REFUSED);
		return;
	}
	__sync_fetch_and_add(&row->relabelled, packets_in(skb));
	count(skb, SWERVE_STEER_RELABELLED);
}

/*
 * Whether a packet, or each that segmentation will make of it, is no larger than the target takes. What a buffer has on
 * the wire beyond its own length is the headers of all segments but the first.
 */
static __always_inline bool fits(struct __sk_buff *skb, u32 mtu)
{
	u32 frame = mtu + link_bytes(skb), others = skb->gso_segs - 1;

	if (!skb->gso_size)
		return skb->len <= frame;
	return skb->gso_size < frame && skb->wire_len - skb->len <= (u64)others * (frame - skb->gso_size);
}

/* The interface's MTU as it was at the last tick: asking for it costs more than all the rest. */
static __always_inline u32 mtu_of(struct __sk_buff *skb, struct swerve_steer_target *target, u32 tick)
{
	u32 mtu = 0;

	if (target->tick != tick) {
		if (bpf_check_mtu(skb, target->ifindex, &mtu, 0, 0) < 0)
			mtu = 0;
		target->mtu = mtu;
		target->tick = tick;
	}
	return target->mtu;
}

static __always_inline int redirect(struct __sk_buff *skb, struct swerve_steer_target *target, u32 tick)
{
	u32 mtu;

	mtu = mtu_of(skb, target, tick);
	if (!mtu || !target->alive) {
		count(skb, SWERVE_STEER_DEAD);
		return TC_ACT_UNSPEC;
	}
	if (!fits(skb, mtu)) {
		count(skb, SWERVE_STEER_TOO_LARGE);
		return TC_ACT_UNSPEC;
	}
	/* the kernel takes an Ethernet header off, which a tunnel's packet has not */
	if (is_bare(skb) && bpf_skb_change_head(skb, ETH_HLEN, 0)) {
		count(skb, SWERVE_STEER_REFUSED);
		return TC_ACT_UNSPEC;
	}
	if (redirect_by(target->ifindex, target->family, &target->gateway) != TC_ACT_REDIRECT) {
		count(skb, SWERVE_STEER_REFUSED);
		return TC_ACT_UNSPEC;
	}
	count(skb, SWERVE_STEER_REDIRECTED);
	return TC_ACT_REDIRECT;
}

static __always_inline int follow_pin(struct __sk_buff *skb, struct swerve_steer_settings *settings,
				      struct swerve_steer_row *row, u64 now)
{
	struct swerve_steer_target *target;
	u32 index = row->target;
	bool doubt;

	if (!row->pin_until_ns)
		return TC_ACT_UNSPEC;
	if (row->pin_until_ns <= now) {
		count(skb, SWERVE_STEER_EXPIRED);
		return TC_ACT_UNSPEC;
	}
	target = steer_targets.lookup(&index);
	if (!target || !target->ifindex) {
		count(skb, SWERVE_STEER_MISSING);
		return TC_ACT_UNSPEC;
	}
	if (target->ifindex == skb->ifindex) {
		__sync_fetch_and_add(&row->packets, packets_in(skb));
		__sync_fetch_and_add(&row->bytes, skb->wire_len);
		row->last_ns = now;
		count(skb, SWERVE_STEER_ON_TARGET);
		return TC_ACT_UNSPEC;
	}
	/* there it would be sent back here, or elsewhere: the path behind the pin's target is silent */
	if (settings->standby_until_ns && alarmed() &&
	    standby_of(skb, target->ifindex, settings, bpf_ktime_get_ns(), &doubt)) {
		count(skb, SWERVE_STEER_DEAD);
		return TC_ACT_UNSPEC;
	}
	return redirect(skb, target, row->tick);
}

/* The time at the last tick: the clock that is read here goes no finer, and is read once a tick. */
static __always_inline u64 now_of(struct swerve_steer_row *row)
{
	u64 tick = bpf_jiffies64();

	if (row->tick != tick) {
		row->now_ns = bpf_ktime_get_coarse_ns();
		row->tick = tick;
	}
	return row->now_ns;
}

static __always_inline int steer_flow(struct __sk_buff *skb, struct swerve_steer_settings *settings)
{
	struct swerve_steer_row *row;
	enum found found;
	union key key;
	u64 now;

	found = find_flow(skb, &key);
	if (found == CUT) {
		bpf_skb_pull_data(skb, skb->len < HEADERS_BYTES ? skb->len : HEADERS_BYTES);
		found = find_flow(skb, &key);
	}
	if (found == FRAGMENT)
		count(skb, SWERVE_STEER_FRAGMENTS);
	else if (found == CUT)
		count(skb, SWERVE_STEER_UNREADABLE);
	if (found != FLOW)
		return TC_ACT_UNSPEC;
	row = row_of(&key, settings->seed);
	if (!row)
		return TC_ACT_UNSPEC;
	if (exempt(skb, &key.flow)) {
		count(skb, SWERVE_STEER_EXEMPT);
		return TC_ACT_UNSPEC;
	}
	now = now_of(row);
	relabel(skb, row, now);
	return follow_pin(skb, settings, row, now);
}

/* Probes find out whether a path answers again: they are not moved away from it. */
static __always_inline bool stays(struct __sk_buff *skb)
{
	union key key;

	return is_probe(skb) || skb->vlan_present || (find_flow(skb, &key) == FLOW && exempt(skb, &key.flow));
}

/* Packets of a silent path, or retries on one that may be, while its stand-by is heard of. */
static __always_inline int reroute(struct __sk_buff *skb, struct swerve_steer_settings *settings)
{
	struct swerve_steer_target *target;
	struct swerve_standby *standby;
	u64 now = bpf_ktime_get_ns();
	u32 index;
	int verdict;
	bool doubt;

	standby = standby_of(skb, skb->ifindex, settings, now, &doubt);
	if (!standby || stays(skb))
		return TC_ACT_UNSPEC;
	index = standby->target;
	target = steer_targets.lookup(&index);
	if (!target || !target->ifindex || target->ifindex == skb->ifindex) {
		count(skb, SWERVE_STEER_NO_STANDBY);
		return TC_ACT_UNSPEC;
	}
	verdict = redirect(skb, target, bpf_jiffies64());
	if (verdict != TC_ACT_REDIRECT)
		return verdict;
	if (!doubt)
		note_moved(skb, standby, now, settings->hold_ns);
	count(skb, doubt ? SWERVE_STEER_RETRIED : SWERVE_STEER_REROUTED);
	return verdict;
}

int steer_egress(struct __sk_buff *skb)
{
	struct swerve_steer_settings *settings;
	int verdict = TC_ACT_UNSPEC;
	u32 only = 0;

	settings = steer_settings.lookup(&only);
	if (!settings)
		return TC_ACT_UNSPEC;
	if (settings->flows)
		verdict = steer_flow(skb, settings);
	if (verdict == TC_ACT_UNSPEC && settings->standby_until_ns && alarmed())
		verdict = reroute(skb, settings);
	if (verdict == TC_ACT_UNSPEC &&
	    settings->held_until_ns) /* else it comes by on the interface that it leaves by */
		hold(skb, settings);
	return verdict;
}
