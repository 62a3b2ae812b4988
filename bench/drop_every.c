// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Loses one in EVERY of the full packets that arrive, in turn. */
#include <linux/pkt_cls.h>

#define FULL_BYTES 1000

BPF_ARRAY(drop_seen, u64, 1);

int drop_every(struct __sk_buff *skb)
{
	u32 only = 0;
	u64 *seen = drop_seen.lookup(&only);

	if (!seen || skb->len < FULL_BYTES)
		return TC_ACT_UNSPEC;
	*seen += 1;
	return *seen % EVERY ? TC_ACT_UNSPEC : TC_ACT_SHOT;
}
