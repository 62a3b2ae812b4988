/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Send a packet out by another interface than the one it was routed to. */
#ifndef SWERVE_LIB_REDIRECT_H
#define SWERVE_LIB_REDIRECT_H

#include "lib/bcc.h"
#include "swerve.h"

/*
 * By a gateway of this family on that interface. Always with the gateway: without it the kernel takes the packet's
 * destination for on-link, and the packet waits for a neighbour that never answers. TC_ACT_REDIRECT unless it fails.
 */
static __always_inline int redirect_by(u32 ifindex, u32 family, const struct swerve_addr *gateway)
{
	const u8 *bytes = __builtin_assume_aligned(gateway->bytes, sizeof(u64)); /* as in every row of ours */
	struct bpf_redir_neigh hop = { .nh_family = family };

	if (hop.nh_family == SWERVE_FAMILY_IPV4)
		__builtin_memcpy(&hop.ipv4_nh, bytes + 12, sizeof(hop.ipv4_nh));
	else
		__builtin_memcpy(hop.ipv6_nh, bytes, sizeof(hop.ipv6_nh));
	return redirect_neigh(ifindex, &hop, sizeof(hop), 0);
}

#endif /* SWERVE_LIB_REDIRECT_H */
