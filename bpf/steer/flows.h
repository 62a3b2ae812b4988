/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Which flow a packet is of, and the row of that flow. */
#ifndef SWERVE_STEER_FLOWS_H
#define SWERVE_STEER_FLOWS_H

#include "lib/hash.h"
#include "steer/tables.h"

#define HEADERS_BYTES 128 /* more than Ethernet, IP with all options and the ports take */
#define LABEL_BITS 0x000fffff
#define FLOW_WORDS 5

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
	if (protocol == IPPROTO_FRAGMENT)
		return FRAGMENT;
	if (protocol != IPPROTO_HOPOPTS || ip->payload_len)
		return NO_FLOW;
	if ((void *)(jumbo + 1) > end)
		return CUT;
	if (!is_jumbo(jumbo) || !has_ports(jumbo->next))
		return NO_FLOW;
	return take_ports(key, jumbo->next, (__be16 *)(jumbo + 1), end);
}

static __always_inline enum found find_flow(struct __sk_buff *skb, union key *key)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	if (!is_ip(skb->protocol))
		return NO_FLOW;
	data += link_bytes(skb);
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return find_ipv4(key, data, end);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return find_ipv6(key, data, end);
	return NO_FLOW;
}

static __always_inline u64 hash_of(const union key *key, u64 hash)
{
#pragma unroll
	for (int i = 0; i < FLOW_WORDS; i++)
		hash = mixed(hash, key->words[i]);
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

#endif /* SWERVE_STEER_FLOWS_H */
