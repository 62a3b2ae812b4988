/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Flow pins and IPv6 flow labels at TC egress: leases, whose end is looked at here for every packet.
 *
 * A pin sends a flow's packets to another nexthop than routing has chosen, between two packets and without a reset. It
 * holds only while its target is alive, as user space is told by the kernel, and takes packets of the target's size;
 * in every other case the packet goes as it is routed, and the reason is counted. A label makes the fabric's own ECMP
 * choose again. Neither touches a port, an address, the TTL or a checksum.
 *
 * A redirected packet passes the egress hooks of its target too, this one included: there it is where it shall be, and
 * is counted. So this program comes before those that observe: they see a packet once, on the interface it leaves by.
 *
 * SWERVE_PROBE_PORT: UDP to or from there measures a path, and is never moved away from it.
 */
#include "packet.h"
#include "swerve.h"

#ifndef SWERVE_PROBE_PORT
#define SWERVE_PROBE_PORT 862
#endif

#ifndef NULL
#define NULL ((void *)0)
#endif

#define MAPPABLE 1024 /* BPF_F_MMAPABLE */

#define HEADERS_BYTES 128 /* more than Ethernet, IP with all options and the ports take */
#define NEXT_FRAGMENT 44
#define JUMBO_BYTES 8 /* the option of packets beyond 65,535 bytes (BIG TCP), which exist in hosts only */
#define JUMBO_OPTION 0xc2
#define LABEL_BITS 0x000fffff
#define FLOW_WORDS 5
#define GOLDEN_RATIO 0x9e3779b97f4a7c15ULL /* 2^64 over it */

BPF_ARRAY(steer_settings, struct swerve_steer_settings, 1);
BPF_F_TABLE("array", u32, struct swerve_steer_set, steer_sets, SWERVE_STEER_SETS, MAPPABLE);
BPF_F_TABLE("array", u32, struct swerve_steer_row, steer_rows, SWERVE_STEER_FLOWS, MAPPABLE);
BPF_F_TABLE("array", u32, struct swerve_steer_target, steer_targets, SWERVE_STEER_TARGETS, MAPPABLE);
BPF_PERCPU_ARRAY(steer_counters, u64, SWERVE_STEER_COUNTERS);

/* bcc 0.26 declares the helper with a parameter less than it has. */
static long (*redirect_neigh)(u32 ifindex, struct bpf_redir_neigh *hop, int bytes,
			      u64 flags) = (void *)BPF_FUNC_redirect_neigh;

enum found {
	FLOW,
	NO_FLOW,  /* neither TCP nor UDP, or headers that no flow of ours has */
	FRAGMENT, /* of TCP or UDP */
	CUT,	  /* the headers do not lie in the linear part */
};

/* Written and compared by words: what is stored in bytes and loaded in words has to wait for the store. */
union key {
	struct swerve_flow flow;
	u64 words[FLOW_WORDS];
};

struct jumbo_header {
	u8 next;
	u8 words;
	u8 option;
	u8 option_bytes;
	__be32 bytes;
};

static __always_inline void count(struct __sk_buff *skb, u32 counter)
{
	u64 *value = steer_counters.lookup(&counter);

	if (value)
		*value += skb->gso_segs ?: 1;
}

/* ---- which flow a packet is of ------------------------------------------------------------------------------ */

static __always_inline bool has_ports(u8 protocol)
{
	return protocol == IPPROTO_TCP || protocol == IPPROTO_UDP;
}

/* The second word of an IPv4-mapped address. */
static __always_inline u64 mapped_word(__be32 address)
{
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
	return (u64)address << 32 | 0xffff0000;
#else
	return 0x0000ffff00000000ULL | address;
#endif
}

/* The last word of a flow. */
static __always_inline u64 ports_word(u16 local, u16 remote, u8 protocol)
{
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
	return local | (u64)remote << 16 | (u64)protocol << 32;
#else
	return (u64)local << 48 | (u64)remote << 32 | (u64)protocol << 24;
#endif
}

static __always_inline enum found take_ports(union key *key, u8 protocol, __be16 *ports, void *end)
{
	if ((void *)(ports + 2) > end)
		return CUT;
	key->words[FLOW_WORDS - 1] = ports_word(bpf_ntohs(ports[0]), bpf_ntohs(ports[1]), protocol);
	return FLOW;
}

static __always_inline enum found find_ipv4(union key *key, struct iphdr *ip, void *end)
{
	if ((void *)(ip + 1) > end)
		return CUT;
	if (!has_ports(ip->protocol) || ip->version != 4 || ip->ihl < 5)
		return NO_FLOW;
	if (ip->frag_off & IPV4_FRAGMENT)
		return FRAGMENT;
	key->words[0] = 0;
	key->words[1] = mapped_word(ip->saddr);
	key->words[2] = 0;
	key->words[3] = mapped_word(ip->daddr);
	return take_ports(key, ip->protocol, (void *)ip + ip->ihl * 4, end);
}

static __always_inline enum found find_ipv6(union key *key, struct ipv6hdr *ip, void *end)
{
	struct jumbo_header *jumbo = (void *)(ip + 1);
	u64 *addresses = (u64 *)&ip->saddr;
	u8 protocol;

	if ((void *)(ip + 1) > end)
		return CUT;
	if (ip->version != 6)
		return NO_FLOW;
	key->words[0] = addresses[0];
	key->words[1] = addresses[1];
	key->words[2] = addresses[2];
	key->words[3] = addresses[3];
	protocol = ip->nexthdr;
	if (has_ports(protocol))
		return take_ports(key, protocol, (__be16 *)(ip + 1), end);
	if (protocol == NEXT_FRAGMENT)
		return FRAGMENT;
	if (protocol != IPPROTO_HOPOPTS || ip->payload_len)
		return NO_FLOW;
	if ((void *)(jumbo + 1) > end)
		return CUT;
	if (jumbo->words || jumbo->option != JUMBO_OPTION || !has_ports(jumbo->next))
		return NO_FLOW;
	return take_ports(key, jumbo->next, (__be16 *)(jumbo + 1), end);
}

static __always_inline enum found find_flow(struct __sk_buff *skb, union key *key)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	if (skb->protocol == bpf_htons(ETH_P_IP))
		return find_ipv4(key, data + ETH_HLEN, end);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return find_ipv6(key, data + ETH_HLEN, end);
	return NO_FLOW;
}

static __always_inline u64 hash_of(const union key *key, u64 hash)
{
#pragma unroll
	for (int i = 0; i < FLOW_WORDS; i++) {
		hash = (hash ^ key->words[i]) * GOLDEN_RATIO;
		hash ^= hash >> 32;
	}
	return hash;
}

static __always_inline bool is_of(const struct swerve_steer_row *row, const union key *key)
{
	const u64 *words = (const u64 *)&row->flow;
	u64 differing = 0;

#pragma unroll
	for (int i = 0; i < FLOW_WORDS; i++)
		differing |= words[i] ^ key->words[i];
	return !differing;
}

static __always_inline struct swerve_steer_row *row_of(const union key *key, u64 seed)
{
	u64 hash = hash_of(key, seed), entry, found = 0;
	u32 place = hash & (SWERVE_STEER_SETS - 1), tag = hash >> 32 | 1, number;
	struct swerve_steer_row *row;
	struct swerve_steer_set *set;

	set = steer_sets.lookup(&place);
	if (!set)
		return NULL;
#pragma unroll
	for (int i = 0; i < SWERVE_STEER_WAYS; i++) {
		entry = *(volatile u64 *)&set->entries[i];
		if (entry >> 32 == tag)
			found = entry;
	}
	if (!found)
		return NULL;
	number = found;
	row = steer_rows.lookup(&number);
	return row && is_of(row, key) ? row : NULL;
}

/* ---- what is done with it ----------------------------------------------------------------------------------- */

/* Packets that stay where they are, whatever a pin says: moved, a probe would measure another path than it names. */
static __always_inline bool exempt(struct __sk_buff *skb, const struct swerve_flow *flow)
{
	u8 first = skb->protocol == bpf_htons(ETH_P_IP) ? flow->remote.bytes[12] : flow->remote.bytes[0];

	if (flow->protocol == IPPROTO_UDP &&
	    (flow->local_port == SWERVE_PROBE_PORT || flow->remote_port == SWERVE_PROBE_PORT))
		return true;
	if (skb->vlan_present)
		return true;
	return skb->protocol == bpf_htons(ETH_P_IP) ? first >= 224 : first == 0xff;
}

/* The label lies in the header's first word, is in no checksum, and segmentation gives it to every segment. */
static __always_inline void relabel(struct __sk_buff *skb, struct swerve_steer_row *row, u64 now)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	__be32 *first = data + ETH_HLEN, word;

	if (!row->label_until_ns || skb->protocol != bpf_htons(ETH_P_IPV6))
		return;
	if (row->label_until_ns <= now) {
		count(skb, SWERVE_STEER_LABEL_EXPIRED);
		return;
	}
	if ((void *)(first + 1) > end)
		return;
	word = (*first & bpf_htonl(~LABEL_BITS)) | bpf_htonl(row->label & LABEL_BITS);
	if (word == *first)
		return;
	if (bpf_skb_store_bytes(skb, ETH_HLEN, &word, sizeof(word), 0)) {
		count(skb, SWERVE_STEER_REFUSED);
		return;
	}
	__sync_fetch_and_add(&row->relabelled, skb->gso_segs ?: 1);
	count(skb, SWERVE_STEER_RELABELLED);
}

/*
 * Whether a packet, or each that segmentation will make of it, is no larger than the target takes. What a buffer has on
 * the wire beyond its own length is the headers of all segments but the first.
 */
static __always_inline bool fits(struct __sk_buff *skb, u32 mtu)
{
	u32 frame = mtu + ETH_HLEN, others = skb->gso_segs - 1;

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
	struct bpf_redir_neigh hop = { .nh_family = target->family };
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
	if (hop.nh_family == SWERVE_STEER_FAMILY_IPV4)
		__builtin_memcpy(&hop.ipv4_nh, target->gateway.bytes + 12, sizeof(hop.ipv4_nh));
	else
		__builtin_memcpy(hop.ipv6_nh, target->gateway.bytes, sizeof(hop.ipv6_nh));
	if (redirect_neigh(target->ifindex, &hop, sizeof(hop), 0) != TC_ACT_REDIRECT) {
		count(skb, SWERVE_STEER_REFUSED);
		return TC_ACT_UNSPEC;
	}
	count(skb, SWERVE_STEER_REDIRECTED);
	return TC_ACT_REDIRECT;
}

static __always_inline int follow_pin(struct __sk_buff *skb, struct swerve_steer_row *row, u64 now)
{
	struct swerve_steer_target *target;
	u32 index = row->target;

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
		__sync_fetch_and_add(&row->packets, skb->gso_segs ?: 1);
		__sync_fetch_and_add(&row->bytes, skb->wire_len);
		row->last_ns = now;
		count(skb, SWERVE_STEER_ON_TARGET);
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

int steer_egress(struct __sk_buff *skb)
{
	struct swerve_steer_settings *settings;
	struct swerve_steer_row *row;
	enum found found;
	union key key;
	u32 only = 0;
	u64 now;

	settings = steer_settings.lookup(&only);
	if (!settings || !settings->flows)
		return TC_ACT_UNSPEC;
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
	return follow_pin(skb, row, now);
}
