// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * TCP retransmissions by flow and interface, at TC egress of every interface of a path.
 *
 * The kernel raises a socket's total_retrans, in segments, before it hands the retransmitted packet down. So the
 * first packet that shows a higher total is the retransmission itself, and the interface it leaves by is the path
 * that carried it. Counting is exact without a look at the packet: what a program misses (a packet that a firewall
 * dropped on its way here) is in the total that the next packet shows. docs/tcp.md has the rejected ways.
 *
 * SYN-ACKs are sent for request sockets, which keep no total: see count_synack().
 */
#include <linux/pkt_cls.h>
#include "swerve.h"

#ifndef SWERVE_TCP_FLOWS
#define SWERVE_TCP_FLOWS 16384
#endif
#ifndef SWERVE_TCP_INTERFACES
#define SWERVE_TCP_INTERFACES 256
#endif
#ifndef SWERVE_TCP_ACCOUNTED
#define SWERVE_TCP_ACCOUNTED 16384
#endif
#ifndef SWERVE_TCP_SYNACKS
#define SWERVE_TCP_SYNACKS 16384
#endif

#define STREAM 1	    /* SOCK_STREAM; UAPI has no name for it */
#define INET6 10	    /* AF_INET6 */
#define PROTOCOL_TCP 6	    /* IPPROTO_TCP */
#define TCP_FLAGS_OFFSET 13 /* within the TCP header */
#define TCP_SYN_AND_ACK 0x12
#define IP6_NEXT_HEADER_OFFSET 6
#define IP6_HEADER_BYTES 40
#define TRIES 4

/* bcc declares this one with 32 bits of its 64. */
static u64 (*socket_cookie)(void *skb) = (void *)BPF_FUNC_get_socket_cookie;

/* The total of a socket that has been counted so far; lives and dies with the socket. */
struct tcp_seen {
	u64 segments;
};

BPF_SK_STORAGE(tcp_seen, struct tcp_seen);
BPF_HASH(tcp_flows, struct swerve_tcp_key, struct swerve_tcp_flow, SWERVE_TCP_FLOWS);
BPF_HASH(tcp_interfaces, u32, struct swerve_tcp_interface, SWERVE_TCP_INTERFACES);
BPF_HASH(tcp_accounted, u64, struct swerve_tcp_accounted, SWERVE_TCP_ACCOUNTED);
BPF_TABLE("lru_hash", u64, u8, tcp_synacks, SWERVE_TCP_SYNACKS);
BPF_PERCPU_ARRAY(tcp_counters, u64, SWERVE_TCP_COUNTERS);

static __always_inline void raise_counter(u32 index, u64 by)
{
	u64 *counter = tcp_counters.lookup(&index);

	if (counter)
		*counter += by;
}

/*
 * Works for a request socket too: only what every socket has is read. Not an if with an else: the compiler would
 * merge the loads of both and compute with the socket's address, which the verifier forbids.
 */
static __always_inline void fill_key(struct swerve_tcp_key *key, struct bpf_sock *sk, u32 ifindex)
{
	u32 *local = (u32 *)&key->local, *remote = (u32 *)&key->remote;

	key->local_port = sk->src_port;
	key->remote_port = bpf_ntohs(sk->dst_port);
	key->ifindex = ifindex;
	local[2] = bpf_htonl(0xffff);
	local[3] = sk->src_ip4;
	remote[2] = bpf_htonl(0xffff);
	remote[3] = sk->dst_ip4;
	if (sk->family != INET6)
		return;
	local[0] = sk->src_ip6[0];
	local[1] = sk->src_ip6[1];
	local[2] = sk->src_ip6[2];
	local[3] = sk->src_ip6[3];
	remote[0] = sk->dst_ip6[0];
	remote[1] = sk->dst_ip6[1];
	remote[2] = sk->dst_ip6[2];
	remote[3] = sk->dst_ip6[3];
}

static __always_inline void record(struct __sk_buff *skb, struct bpf_sock *sk, u64 segments)
{
	struct swerve_tcp_interface no_interface = {}, *interface;
	struct swerve_tcp_flow no_flow = {}, *flow;
	struct swerve_tcp_key key = {};
	u32 ifindex = skb->ifindex;
	u64 now = bpf_ktime_get_ns();

	raise_counter(SWERVE_TCP_RETRANSMITTED, segments);
	interface = tcp_interfaces.lookup_or_try_init(&ifindex, &no_interface);
	if (interface)
		__sync_fetch_and_add(&interface->retransmitted_segments, segments);
	else
		raise_counter(SWERVE_TCP_INTERFACES_FULL, segments);

	fill_key(&key, sk, ifindex);
	no_flow.first_ns = now;
	flow = tcp_flows.lookup_or_try_init(&key, &no_flow);
	if (!flow) {
		raise_counter(SWERVE_TCP_FLOWS_FULL, segments);
		if (interface)
			__sync_fetch_and_add(&interface->unrecorded_segments, segments);
		return;
	}
	__sync_fetch_and_add(&flow->retransmitted_segments, segments);
	flow->last_ns = now;
}

/*
 * What is already in the books for a socket seen for the first time: its total when the agent started, or the
 * SYN-ACKs counted while it was a request (the request's cookie passes to the connection).
 */
static __always_inline struct tcp_seen *first_sight(struct __sk_buff *skb, struct bpf_tcp_sock *tp)
{
	u64 cookie = socket_cookie(skb);
	struct swerve_tcp_accounted *accounted = tcp_accounted.lookup(&cookie);
	struct tcp_seen start = {}, *seen;

	if (accounted)
		start.segments = accounted->segments;
	seen = tcp_seen.sk_storage_get(tp, &start, BPF_SK_STORAGE_GET_F_CREATE);
	if (seen && accounted)
		tcp_accounted.delete(&cookie);
	return seen;
}

/*
 * Claim what the total holds beyond what was claimed before; two CPUs never claim the same segment. `seen` is read
 * before the total, which only grows: a smaller total is that of a socket disconnected and connected anew.
 */
static __always_inline u64 claim(struct tcp_seen *seen, struct bpf_tcp_sock *tp)
{
#pragma unroll
	for (int try = 0; try < TRIES; try++) {
		u64 before = *(volatile u64 *)&seen->segments;
		u64 total = *(volatile u32 *)&tp->total_retrans;

		if (total == before)
			return 0;
		if (__sync_val_compare_and_swap(&seen->segments, before, total) == before)
			return total > before ? total - before : total;
	}
	return 0; /* the others will have claimed it, or the next packet does */
}

/* Whether this packet is a SYN-ACK: a request socket also sends challenge ACKs. */
static __always_inline int is_synack(struct __sk_buff *skb)
{
	u32 offset;
	u8 byte;

	if (bpf_skb_load_bytes_relative(skb, 0, &byte, 1, BPF_HDR_START_NET))
		return 0;
	if (byte >> 4 == 4) {
		offset = (byte & 0xf) * 4;
	} else {
		offset = IP6_HEADER_BYTES;
		if (bpf_skb_load_bytes_relative(skb, IP6_NEXT_HEADER_OFFSET, &byte, 1, BPF_HDR_START_NET) ||
		    byte != PROTOCOL_TCP)
			return 0;
	}
	if (bpf_skb_load_bytes_relative(skb, offset + TCP_FLAGS_OFFSET, &byte, 1, BPF_HDR_START_NET))
		return 0;
	return (byte & TCP_SYN_AND_ACK) == TCP_SYN_AND_ACK;
}

/*
 * The second SYN-ACK of a request is a retransmission. The connection that follows starts with these in its
 * total, so they are remembered for first_sight(); when that cannot be, they are left for it to count.
 */
static __always_inline void count_synack(struct __sk_buff *skb, struct bpf_sock *request)
{
	struct swerve_tcp_accounted nothing = {}, *accounted;
	u64 cookie = socket_cookie(skb);
	u8 once = 1;

	if (!is_synack(skb))
		return;
	accounted = tcp_accounted.lookup(&cookie);
	if (!accounted && !tcp_synacks.lookup(&cookie)) {
		tcp_synacks.update(&cookie, &once);
		return;
	}
	accounted = tcp_accounted.lookup_or_try_init(&cookie, &nothing);
	if (!accounted) {
		raise_counter(SWERVE_TCP_SYNACKS_FULL, 1);
		return;
	}
	__sync_fetch_and_add(&accounted->segments, 1);
	accounted->last_ns = bpf_ktime_get_ns();
	record(skb, request, 1);
}

int tcp_egress(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;
	struct bpf_tcp_sock *tp;
	struct tcp_seen *seen;
	u64 segments;

	if (!sk)
		return TC_ACT_UNSPEC;
	tp = bpf_tcp_sock(sk);
	if (!tp) {
		if (sk->state == BPF_TCP_NEW_SYN_RECV)
			count_synack(skb, sk);
		return TC_ACT_UNSPEC;
	}
	if (!tp->total_retrans)
		return TC_ACT_UNSPEC;

	seen = tcp_seen.sk_storage_get(tp, 0, 0);
	if (seen && seen->segments == tp->total_retrans)
		return TC_ACT_UNSPEC;

	/* A raw socket that speaks TCP passes for one on kernels before 6.6, and has no total. */
	sk = bpf_sk_fullsock(sk);
	if (!sk || sk->type != STREAM)
		return TC_ACT_UNSPEC;
	if (!seen)
		seen = first_sight(skb, tp);
	if (!seen) {
		raise_counter(SWERVE_TCP_DEFERRED, 1);
		return TC_ACT_UNSPEC;
	}
	segments = claim(seen, tp);
	if (segments)
		record(skb, sk, segments);
	return TC_ACT_UNSPEC;
}
