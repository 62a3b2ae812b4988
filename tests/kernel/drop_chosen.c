// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Tests only: loses chosen packets of IPv4 or IPv6 TCP, without options in front of it, as they arrive. */
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>

struct choice {
	u64 what;  /* 0: nothing, 1: packets with payload, 2: all, 3: those with SYN, 4: those without payload */
	u64 skip;  /* so many of these go by first */
	u64 lose;  /* then so many are lost, in every period */
	u64 every; /* period; 0: there is only one */
	u64 seen;
	u64 lost;
};

BPF_ARRAY(choice, struct choice, 2); /* for each of the two hosts */

static __always_inline int chosen(struct __sk_buff *skb, u64 what)
{
	u32 offset = ETH_HLEN + sizeof(struct iphdr), end;
	struct ipv6hdr ip6;
	struct iphdr ip;
	u8 tcp[14];

	if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip6, sizeof(ip6)) || ip6.nexthdr != 6)
			return 0;
		offset = ETH_HLEN + sizeof(ip6);
		end = offset + bpf_ntohs(ip6.payload_len);
	} else {
		if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.protocol != 6)
			return 0;
		end = ETH_HLEN + bpf_ntohs(ip.tot_len);
	}
	if (bpf_skb_load_bytes(skb, offset, tcp, sizeof(tcp)))
		return 0;
	if (what == 2)
		return 1;
	if (what == 3)
		return tcp[13] & 2;
	return (what == 1) == (end > offset + (tcp[12] >> 4) * 4);
}

static __always_inline int drop_chosen(struct __sk_buff *skb, u32 host)
{
	struct choice *choice_now;
	u64 number;

	choice_now = choice.lookup(&host);
	if (!choice_now || !choice_now->what || !chosen(skb, choice_now->what))
		return TC_ACT_UNSPEC;
	number = choice_now->seen++;
	if (number < choice_now->skip)
		return TC_ACT_UNSPEC;
	number -= choice_now->skip;
	if (choice_now->every)
		number %= choice_now->every;
	if (number >= choice_now->lose)
		return TC_ACT_UNSPEC;
	choice_now->lost++;
	return TC_ACT_SHOT;
}

int drop_near(struct __sk_buff *skb)
{
	return drop_chosen(skb, 0);
}

int drop_far(struct __sk_buff *skb)
{
	return drop_chosen(skb, 1);
}
