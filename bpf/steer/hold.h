/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Holds: packets wait here, under the fq of the interface that they leave by, while the queue on their path is long.
 *
 * probe.c writes how long probes wait on the path, hold_law.h says when a packet may leave, and fq keeps the packet until
 * then. Without fq the time in a packet means nothing. Acknowledgements without data are not held: they make no queue,
 * and what they acknowledge goes the other way.
 */
#ifndef SWERVE_STEER_HOLD_H
#define SWERVE_STEER_HOLD_H

#include "lib/tcp.h"
#include "steer/hold_law.h"
#include "steer/standby.h"

#define MOST_ACK_BYTES (ETH_HLEN + sizeof(struct ipv6hdr) + 60)

/* Of TCP, without data, and not the end that comes behind them. */
static __always_inline bool is_bare_ack(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	u32 link = link_bytes(skb), bytes;
	struct ipv6hdr *ip6 = data + link;
	struct iphdr *ip = data + link;
	struct tcp_head *tcp;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		tcp = (void *)(ip + 1);
		if ((void *)(tcp + 1) > end || ip->protocol != IPPROTO_TCP || ip->ihl != 5)
			return false;
		bytes = sizeof(*ip);
	} else {
		tcp = (void *)(ip6 + 1);
		if ((void *)(tcp + 1) > end || ip6->nexthdr != IPPROTO_TCP)
			return false;
		bytes = sizeof(*ip6);
	}
	return !(tcp->flags & FIN) && skb->len <= link + bytes + tcp_header_bytes(tcp);
}

/*
 * Tell the pacer of these bytes, and have the law look at the newest sample of the path. False: nothing is known of the
 * path.
 */
static __always_inline bool look_at_queue(struct swerve_hold *hold, u64 now, u32 wire_bytes)
{
	struct swerve_probe_path *path = path_of(hold->path, hold->generation);
	u64 sent_ns;

	if (!path)
		return false;
	__sync_fetch_and_add(&path->passed_bytes, wire_bytes);
	sent_ns = path->queue_sent_ns;
	if (sent_ns == hold->sample_ns)
		return true;
	hold->sample_ns = sent_ns; /* before: another CPU is not to take it, too */
	if (hold_sample(&hold->state, &hold->limits, now, sent_ns, path->queue_ns) > HOLD_CLEAR)
		hold->above++;
	hold->samples++;
	return true;
}

static __always_inline void hold(struct __sk_buff *skb, struct swerve_steer_settings *settings)
{
	struct swerve_standby_key key = {};
	struct swerve_hold *hold;
	u64 now, release;
	u32 *row;

	if (!find_destination(skb, skb->ifindex, &key) || is_probe(skb) || skb->vlan_present)
		return;
	row = steer_hold_prefixes.lookup(&key);
	if (!row)
		return;
	hold = steer_holds.lookup(row);
	if (!hold)
		return;
	now = bpf_ktime_get_ns();
	if (settings->held_until_ns <= now || hold->limits.until_ns <= now)
		count(skb, SWERVE_STEER_HOLD_UNLEASED); /* hold_release lets it wait for those that wait already */
	else if (!look_at_queue(hold, now, skb->wire_len) || now > hold->state.taken_ns + hold->limits.fresh_ns)
		count(skb, SWERVE_STEER_HOLD_BLIND);
	if (skb->len <= MOST_ACK_BYTES && is_bare_ack(skb))
		return;
	release = hold_release(&hold->state, &hold->limits, now, skb->wire_len);
	if (release <= now || release <= skb->tstamp)
		return;
	skb->tstamp = release;
	__sync_fetch_and_add(&hold->packets, packets_in(skb));
	__sync_fetch_and_add(&hold->bytes, skb->wire_len);
	__sync_fetch_and_add(&hold->waited_ns, release - now);
	count(skb, SWERVE_STEER_HELD);
}

#endif /* SWERVE_STEER_HOLD_H */
