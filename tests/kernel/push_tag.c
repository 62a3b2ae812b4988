// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Puts a VLAN tag beside every packet, as a VLAN interface does. */
#include <linux/if_ether.h>
#include <linux/pkt_cls.h>

int push_tag(struct __sk_buff *skb)
{
	bpf_skb_vlan_push(skb, bpf_htons(ETH_P_8021Q), 7);
	return TC_ACT_UNSPEC;
}
