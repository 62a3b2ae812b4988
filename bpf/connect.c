/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Local ports of new IPv4 TCP connections: for destinations in a table, one whose connection takes a good way behind the
 * first router, as user space has learnt (docs/ports.md).
 *
 * connect_ipv4, connect_mapped: connect() in the root control group. They bind the socket as the application could,
 * so that no other socket has the port, and connect() cannot fail for it. If all ports that are tried are taken, the
 * kernel chooses as ever. Sockets that the application has bound, routes otherwise, or lets share a port are left alone.
 */
#include <linux/in.h>

#include "lib/bcc.h"
#include "lib/counters.h"
#include "swerve.h"

#define STREAM 1 /* SOCK_STREAM, which the kernel's UAPI does not name */
#define SOL_SOCKET 1
#define SO_REUSEADDR 2
#define SO_REUSEPORT 15

BPF_F_TABLE("array", u32, struct swerve_connect_settings, connect_settings, 1, MAPPABLE);
BPF_HASH(connect_ports, struct swerve_connect_to, struct swerve_connect_ports, SWERVE_CONNECT_DESTINATIONS);
BPF_PERCPU_ARRAY(connect_counters, u64, SWERVE_CONNECT_COUNTERS);

/* As struct sockaddr_in and sockaddr_in6, of any local address. */
struct local_port {
	u16 family;
	__be16 port;
	u32 zeros[6];
};

static __always_inline void count(u32 counter)
{
	raise_atomically(connect_counters.lookup(&counter), 1);
}

/* Chosen by the application: its port or address, or by which interface or table its packets go. */
static __always_inline bool is_bound(struct bpf_sock *sk)
{
	u32 address = sk->src_ip4 | sk->src_ip6[0] | sk->src_ip6[1] | sk->src_ip6[2] | sk->src_ip6[3];

	return sk->src_port || address || sk->bound_dev_if || sk->mark;
}

/* With these two sockets can have one port, and the second connect() from it to one destination fails. */
static __always_inline bool may_share(struct bpf_sock_addr *connecting)
{
	int address = 0, port = 0;

	return bpf_getsockopt(connecting, SOL_SOCKET, SO_REUSEADDR, &address, sizeof(address)) || address ||
	       bpf_getsockopt(connecting, SOL_SOCKET, SO_REUSEPORT, &port, sizeof(port)) || port;
}

static __always_inline void choose(struct bpf_sock_addr *connecting, struct swerve_connect_ports *known, u16 family)
{
	struct local_port local = { .family = family };
	u32 place = bpf_get_prandom_u32(), count_of = known->count;

	if (!count_of) {
		count(SWERVE_CONNECT_NO_PORT);
		return;
	}
#pragma unroll
	for (int i = 0; i < SWERVE_CONNECT_TRIES; i++) {
		local.port = bpf_htons(known->ports[(place + i) % count_of & (SWERVE_CONNECT_PORTS - 1)]);
		if (!bpf_bind(connecting, (void *)&local, sizeof(local))) {
			count(SWERVE_CONNECT_CHOSEN);
			return;
		}
	}
	count(SWERVE_CONNECT_IN_USE);
}

static __always_inline void steer(struct bpf_sock_addr *connecting, u32 address, u16 family)
{
	struct swerve_connect_to to = { .address = address, .port = connecting->user_port };
	struct swerve_connect_settings *settings;
	struct swerve_connect_ports *known;
	u32 only = 0;

	if (connecting->type != STREAM || connecting->protocol != IPPROTO_TCP)
		return;
	known = connect_ports.lookup(&to);
	if (!known || !connecting->sk)
		return;
	settings = connect_settings.lookup(&only);
	if (!settings || settings->netns_cookie != bpf_get_netns_cookie(connecting))
		return;
	if (settings->until_ns <= bpf_ktime_get_coarse_ns())
		count(SWERVE_CONNECT_EXPIRED);
	else if (is_bound(connecting->sk) || may_share(connecting))
		count(SWERVE_CONNECT_BOUND);
	else
		choose(connecting, known, family);
}

/* Both always give 1: a connection is never refused. */
int connect_ipv4(struct bpf_sock_addr *connecting)
{
	steer(connecting, connecting->user_ip4, SWERVE_FAMILY_IPV4);
	return 1;
}

/* Sockets of IPv6 that connect to an IPv4-mapped address. */
int connect_mapped(struct bpf_sock_addr *connecting)
{
	if (!connecting->user_ip6[0] && !connecting->user_ip6[1] && connecting->user_ip6[2] == bpf_htonl(0xffff))
		steer(connecting, connecting->user_ip6[3], SWERVE_FAMILY_IPV6);
	return 1;
}
