/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Fast reroute: whether the path that a packet is routed along is silent, and where it goes instead.
 *
 * Packets stay on their stand-by for a hold time after the path answers again. Two paths that are each other's
 * stand-by never pass a packet to and fro: of two that are silent at most one is better than the other, and who is
 * silent or on hold takes no packets of a path that answers.
 */
#ifndef SWERVE_STEER_STANDBY_H
#define SWERVE_STEER_STANDBY_H

#include "lib/tcp.h"
#include "steer/tables.h"

/* After the last probe along a silent path; longer than its hold time, and than any interval of probes. */
#define ALARM_NS 10000000000ULL

/* What a packet is compared by: where it goes, and by which interface. False: it has no stand-by. */
static __always_inline bool find_destination(struct __sk_buff *skb, u32 ifindex, struct swerve_standby_key *key)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ipv6hdr *ip6 = data + link_bytes(skb);
	struct iphdr *ip = (void *)ip6;

	key->bits = 32 + 128;
	key->ifindex = bpf_htonl(ifindex);
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if ((void *)(ip + 1) > end)
			return false;
		map_ipv4(&key->to, ip->daddr);
		return true;
	}
	if (skb->protocol != bpf_htons(ETH_P_IPV6) || (void *)(ip6 + 1) > end)
		return false;
	__builtin_memcpy(&key->to, &ip6->daddr, sizeof(key->to));
	return true;
}

/* An entry of a map that the agent lends, while it does. */
static __always_inline void *entry_of(void *lent, u32 *key)
{
	return lent ? bpf_map_lookup_elem(lent, key) : NULL;
}

/* Whether any path has been silent of late: nothing else is looked at while none was. */
static __always_inline bool alarmed(void)
{
	struct swerve_probe_settings *agent;
	u32 only = 0;

	agent = entry_of(lent_probe_settings.lookup((int *)&only), &only);
	return agent && agent->silence_ns && bpf_ktime_get_coarse_ns() < agent->silence_ns + ALARM_NS;
}

static __always_inline struct swerve_probe_path *path_of(u32 row, u16 generation)
{
	struct swerve_probe_path *path;
	u32 only = 0;

	path = entry_of(lent_probe_paths.lookup((int *)&only), &row);
	return path && path->ifindex && path->generation == generation ? path : NULL;
}

static __always_inline bool is_silent(struct swerve_probe_path *path, u64 now)
{
	return path->limit && path->silent_at_ns && now >= path->silent_at_ns;
}

/* Silent, or answering again for less than the hold time. */
static __always_inline bool avoided(struct swerve_probe_path *path, u64 now, u64 hold_ns)
{
	return is_silent(path, now) || (path->limit && path->back_ns && now < path->back_ns + hold_ns);
}

/*
 * Whether a path that stands by is heard of while the other is not: it has answered a probe since the other's silence
 * began, and leaves fewer than half as many unanswered. Else the peer itself may be gone. It may be silent itself: the
 * packets that it takes over make a queue there, in which its probes wait.
 */
static __always_inline bool better(struct swerve_probe_path *other, struct swerve_probe_path *path, u64 now,
				   u64 hold_ns)
{
	if (!is_silent(path, now))
		return !avoided(other, now, hold_ns);
	return other->answered_ns > path->first_ns && other->unanswered * 2 < path->unanswered;
}

/* Not silent yet: probes up to the limit are unanswered, the first for longer than any answer has taken of late. */
static __always_inline bool in_doubt(struct swerve_probe_path *path, u64 now)
{
	return path->limit && path->silent_at_ns && now > path->first_ns + path->grace_ns / 2;
}

/*
 * Whether a path that stands by for one in doubt answers: its oldest probe without an answer left less than half as
 * long ago. For no pair of paths does that hold both ways.
 */
static __always_inline bool surer(struct swerve_probe_path *other, struct swerve_probe_path *path, u64 now, u64 hold_ns)
{
	if (avoided(other, now, hold_ns) || other->answered_ns <= path->first_ns)
		return false;
	return !other->first_ns || now - path->first_ns > 2 * (now - other->first_ns);
}

/*
 * Whether a TCP connection sends what an unanswered timer makes it send: something again, or more than its window
 * allows, as a tail loss probe does. Or a mere acknowledgement, on which such a timer of the peer may wait.
 */
static __always_inline bool is_retry(struct __sk_buff *skb)
{
	struct bpf_tcp_sock *tp;
	struct bpf_sock *sk = skb->sk;
	struct tcp_head *head;
	struct plain plain;

	if (!read_plain(skb, &plain, 0) || plain.protocol != IPPROTO_TCP)
		return false;
	head = plain.transport;
	if ((void *)(head + 1) > plain.end || !sk)
		return false;
	tp = bpf_tcp_sock(sk);
	if (!tp)
		return false;
	if ((s32)(bpf_ntohl(head->sequence) - tp->snd_nxt) < 0)
		return true;
	if (plain.bytes == tcp_header_bytes(head))
		return true;
	return tp->packets_out + tp->retrans_out >= tp->snd_cwnd + tp->sacked_out + tp->lost_out;
}

/*
 * The stand-by of a packet that would leave by this interface; NULL: it goes as it is routed. In doubt only what is sent
 * because of a timer has one: where a queue makes a path silent late, a timeout in vain would cost more than the wait.
 */
static __always_inline struct swerve_standby *standby_of(struct __sk_buff *skb, u32 ifindex,
							 struct swerve_steer_settings *settings, u64 now, bool *doubt)
{
	struct swerve_probe_path *path, *other;
	struct swerve_standby_key key = {};
	struct swerve_standby *standby;
	u32 *row;

	if (!find_destination(skb, ifindex, &key))
		return NULL;
	row = steer_prefixes.lookup(&key);
	if (!row)
		return NULL;
	standby = steer_standbys.lookup(row);
	if (!standby)
		return NULL;
	path = path_of(standby->path, standby->generation);
	if (!path || path->ifindex != ifindex)
		return NULL;
	*doubt = !avoided(path, now, settings->hold_ns);
	if (*doubt && (!in_doubt(path, now) || !is_retry(skb)))
		return NULL;
	if (settings->standby_until_ns <= now) {
		count(skb, SWERVE_STEER_UNLEASED);
		return NULL;
	}
	other = path_of(standby->other, standby->other_generation);
	if (!other || !other->answered_ns ||
	    !(*doubt ? surer(other, path, now, settings->hold_ns) : better(other, path, now, settings->hold_ns))) {
		count(skb, SWERVE_STEER_NO_STANDBY);
		return NULL;
	}
	return standby;
}

static __always_inline void note_moved(struct __sk_buff *skb, struct swerve_standby *standby, u64 now, u64 hold_ns)
{
	if (!standby->last_ns || now > standby->last_ns + hold_ns)
		standby->first_ns = now;
	standby->last_ns = now;
	__sync_fetch_and_add(&standby->packets, packets_in(skb));
	__sync_fetch_and_add(&standby->bytes, skb->wire_len);
}

#endif /* SWERVE_STEER_STANDBY_H */
