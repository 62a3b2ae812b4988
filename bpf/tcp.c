// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * TCP connections by cause, flow, path and interface; docs/tcp.md explains and has the rejected ways.
 *
 * tcp_egress, TC egress of every interface of a path: the kernel raises a socket's total_retrans, in segments, before
 * it hands the retransmitted packet down. So the first packet that shows a higher total is the retransmission itself,
 * and the interface it leaves by is the path that carried it. All else of the connection is read on the way, at most
 * once per refresh interval.
 * tcp_ingress, TC ingress: windows that close, and resets.
 * tcp_callbacks, socket operations of the root cgroup: timeouts, the last one of a connection included, and its end.
 * They are called for the sockets of all network namespaces; for those of others (pods, containers) they tell all:
 * see tcp/elsewhere.h.
 * tcp_cong_state_set, a tracepoint: the congestion state that tells why a segment is sent again.
 *
 * The record of a connection lives in its socket and dies with it. Rows of tcp_flows are copies, so that the least
 * recently used may go without a loss to any total.
 *
 * SYN-ACKs are sent for request sockets, which keep no total: see count_synack().
 */
#include "lib/packet.h"
#include "swerve.h"
#include "lib/tcp.h"

#include "observe/chain.h"

#include "tcp/state.h"
#include "tcp/totals.h"
#include "tcp/connection.h"
#include "tcp/causes.h"
#include "tcp/full_update.h"
#include "tcp/requests.h"
#include "tcp/fast_path.h"
#include "tcp/elsewhere.h"

static __always_inline void observe(struct __sk_buff *skb, struct bpf_sock *sk, struct bpf_tcp_sock *tp, u32 word)
{
	struct packet packet;
	struct tcp_truth *truth;
	struct sight sight = {};
	u64 now;

	if (!parse(skb, &packet))
		return;
	truth = tcp_truths.sk_storage_get(tp, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (truth && is_elsewhere(skb, sk, tp, truth))
		return;
	if (word == WORD_UNREAD && truth && !(packet.flags & (FIN | RST)) && is_fresh(truth, sk, tp))
		return; /* only its headers were out of sight */
	if (!truth || !take(truth)) {
		raise_counter(SWERVE_TCP_DEFERRED, 1);
		return;
	}
	now = bpf_ktime_get_ns();
	sight.bytes = packet.bytes;
	sight.segments = packets_in(skb);
	sight.flags = packet.flags;
	sight.state = sk->state;
	/* A socket that connects anew starts anew. */
	if (!truth->met || (sight.state == BPF_TCP_SYN_SENT && truth->state != BPF_TCP_SYN_SENT))
		meet(truth, sk, tp, socket_cookie(skb), now);
	truth->row.ifindex = skb->ifindex;
	truth->row.cgroup = bpf_skb_cgroup_id(skb);
	if (glance_will_do(truth, tp, &sight)) {
		glance(truth, &sight, now);
	} else {
		look(truth, tp, &sight, now);
		truth->tick = bpf_jiffies64();
		truth->due_ns = bpf_ktime_get_coarse_ns() + refresh_ns();
	}
	give(truth);
}

static __always_inline int look_at_sent(struct __sk_buff *skb)
{
	struct bpf_tcp_sock *tp = 0;
	u32 word = tcp_word(skb);
	struct tcp_truth *truth;
	struct bpf_sock *sk;
	struct fresh *row;

	if (!word)
		LEAVE(TC_ACT_UNSPEC);
	sk = skb->sk;
	if (sk)
		tp = bpf_tcp_sock(sk);
	if (tp) { /* first what nearly every packet comes to: the compiler keeps this order */
		row = fresh_row(sk);
		if (row && !(word & (WORD_FIN | WORD_RST)) && is_still_fresh(row, sk, tp))
			LEAVE(TC_ACT_UNSPEC);
		truth = tcp_truths.sk_storage_get(tp, 0, 0);
		if (truth && !(word & (WORD_FIN | WORD_RST)) && is_fresh(truth, sk, tp)) {
			if (row)
				keep_fresh(row, sk, truth);
			return TC_ACT_UNSPEC;
		}
		if (truth && is_young(skb, truth, tp, word))
			return TC_ACT_UNSPEC;
	} else {
		if (sk && sk->state == BPF_TCP_NEW_SYN_RECV)
			count_synack(skb, sk);
		if (word & WORD_RST)
			count_refused(skb);
		return TC_ACT_UNSPEC;
	}

	/* A raw socket that speaks TCP passes for one on kernels before 6.6, and has no total. */
	sk = bpf_sk_fullsock(sk);
	if (sk && sk->type == STREAM && sk->state != BPF_TCP_LISTEN)
		observe(skb, sk, tp, word);
	else
		count_refused(skb);
	return TC_ACT_UNSPEC;
}

int tcp_egress(struct __sk_buff *skb)
{
	return unless_decided(skb, look_at_sent(skb), SAMPLES, true);
}

/* The connection or request of this host that a packet is for. */
static __always_inline struct bpf_sock *receiver(struct __sk_buff *skb, struct packet *packet)
{
	u32 *source = (u32 *)&packet->ip.source, *destination = (u32 *)&packet->ip.destination;
	struct bpf_sock_tuple tuple = {};

	if (!packet->ip.ipv6) {
		tuple.ipv4.saddr = source[3];
		tuple.ipv4.daddr = destination[3];
		tuple.ipv4.sport = packet->source_port;
		tuple.ipv4.dport = packet->destination_port;
		return bpf_skc_lookup_tcp(skb, &tuple, sizeof(tuple.ipv4), BPF_F_CURRENT_NETNS, 0);
	}
	__builtin_memcpy(tuple.ipv6.saddr, source, sizeof(tuple.ipv6.saddr));
	__builtin_memcpy(tuple.ipv6.daddr, destination, sizeof(tuple.ipv6.daddr));
	tuple.ipv6.sport = packet->source_port;
	tuple.ipv6.dport = packet->destination_port;
	return bpf_skc_lookup_tcp(skb, &tuple, sizeof(tuple.ipv6), BPF_F_CURRENT_NETNS, 0);
}

/* A reset, or a window that is closed; answers to probes of a closed window acknowledge what was acknowledged. */
static __always_inline void count_received(struct tcp_truth *truth, struct packet *packet,
					   struct swerve_tcp_counts *delta)
{
	struct swerve_tcp_flow *row;

	if (!(packet->flags & RST)) {
		if (truth->closed && truth->closed_at == packet->acknowledged)
			return;
		truth->closed = 1;
		truth->closed_at = packet->acknowledged;
		delta->zero_windows = 1;
	}
	add(&truth->row.counts, delta);
	if (!truth->met)
		return;
	row = tcp_flows.lookup(&truth->key);
	if (row && row->cookie == truth->row.cookie)
		add(&row->counts, delta);
}

static __always_inline void note_repeated_syn(struct bpf_sock *request)
{
	u64 address = (u64)request, now = bpf_ktime_get_ns();

	tcp_repeated_syns.update(&address, &now);
}

static __always_inline void receive(struct __sk_buff *skb)
{
	struct swerve_tcp_counts delta = {};
	struct packet packet;
	struct bpf_tcp_sock *tp;
	struct tcp_truth *truth;
	struct bpf_sock *sk;

	if (!parse(skb, &packet) || !tells_something(packet.flags, packet.window))
		return;
	sk = receiver(skb, &packet);
	if (!sk)
		return; /* forwarded, or for no connection */
	if (packet.flags & SYN) {
		if (sk->state == BPF_TCP_NEW_SYN_RECV)
			note_repeated_syn(sk);
	} else if (sk->state != BPF_TCP_LISTEN) {
		if (packet.flags & RST)
			delta.resets_received = 1;
		tp = bpf_tcp_sock(sk);
		if (tp) {
			truth = tcp_truths.sk_storage_get(tp, 0, BPF_SK_STORAGE_GET_F_CREATE);
			if (truth)
				count_received(truth, &packet, &delta);
			else
				raise_counter(SWERVE_TCP_DEFERRED, 1);
		}
		add_to_totals(&packet.ip.source, skb->ifindex, &delta);
	}
	bpf_sk_release(sk);
}

static __always_inline int look_at_received(struct __sk_buff *skb)
{
	u32 word = tcp_word(skb);

	if (!word || !tells_something(word >> 16, word))
		LEAVE(TC_ACT_UNSPEC);
	receive(skb);
	return TC_ACT_UNSPEC;
}

int tcp_ingress(struct __sk_buff *skb)
{
	return unless_decided(skb, look_at_received(skb), SAMPLES, false);
}

/* The last look at a connection, often the only one: nothing of it passes any more but a reset. */
static __always_inline void end(struct bpf_sock_ops *ops, struct bpf_sock *sk, struct tcp_truth *truth)
{
	struct bpf_tcp_sock *tp = bpf_tcp_sock(sk);
	struct sight sight = { .state = BPF_TCP_CLOSE, .segments = truth->row.netns ? ANY_SIZE : 0 };
	u64 now;

	if (!tp || !(truth->row.ifindex || truth->row.netns))
		return; /* it never left by an interface of a path */
	if (!take(truth)) {
		raise_counter(SWERVE_TCP_DEFERRED, 1);
		return;
	}
	now = bpf_ktime_get_ns();
	if (!truth->met)
		meet(truth, sk, tp, socket_cookie(ops), now);
	truth->row.flags |= SWERVE_TCP_CLOSED;
	look(truth, tp, &sight, now);
	give(truth);
}

static __always_inline void call_back(struct bpf_sock_ops *ops, u64 refresh_ns, u64 netns)
{
	bool opening = ops->op == BPF_SOCK_OPS_TCP_CONNECT_CB || ops->op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB;
	struct bpf_sock *sk = ops->sk;
	struct tcp_truth *truth;

	if (!sk)
		return;
	if (opening &&
	    bpf_sock_ops_cb_flags_set(ops, ops->bpf_sock_ops_cb_flags | (netns ? CALLBACKS_ELSEWHERE : CALLBACKS)))
		return;
	truth = tcp_truths.sk_storage_get(sk, 0, opening ? BPF_SK_STORAGE_GET_F_CREATE : 0);
	if (!truth)
		return;
	if (opening) { /* maybe not the first connection of this socket */
		forget_congestion((u64)sk);
		__builtin_memset(&truth->row, 0, sizeof(truth->row));
		truth->row.flags = SWERVE_TCP_CALLED;
		if (ops->op == BPF_SOCK_OPS_TCP_CONNECT_CB)
			truth->row.flags |= SWERVE_TCP_ACTIVE;
		truth->row.first_ns = bpf_ktime_get_ns();
		truth->row.netns = netns;
		truth->row.cgroup = netns ? creator(sk) : 0;
		truth->due_ns = bpf_ktime_get_coarse_ns() + (netns ? REFRESH_ELSEWHERE_NS : refresh_ns);
		truth->state = 0;
		truth->met = 0;
		truth->timeouts = 0;
	} else if (ops->op == BPF_SOCK_OPS_RTO_CB) {
		__sync_fetch_and_add(&truth->timeouts, 1);
	} else if (ops->op == BPF_SOCK_OPS_STATE_CB) {
		if (ops->args[1] == BPF_TCP_CLOSE)
			end(ops, sk, truth);
		else if (truth->row.netns) /* else its packet tells */
			truth->row.flags |= SWERVE_TCP_FIN_SENT;
	} else if (truth->row.netns) {
		look_elsewhere(ops, sk, truth);
	}
}

/* Whatever a callback could decide is left as it is. */
int tcp_callbacks(struct bpf_sock_ops *ops)
{
	struct swerve_tcp_settings *settings;
	u32 only = 0;
	u64 netns;

	switch (ops->op) {
	case BPF_SOCK_OPS_STATE_CB:
		if (ops->args[1] != BPF_TCP_CLOSE && ops->args[1] != BPF_TCP_FIN_WAIT1 &&
		    ops->args[1] != BPF_TCP_LAST_ACK)
			return 1;
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
	case BPF_SOCK_OPS_RTO_CB:
	case BPF_SOCK_OPS_RETRANS_CB:
	case BPF_SOCK_OPS_RTT_CB:
		settings = tcp_settings.lookup(&only);
		if (!settings)
			break;
		netns = bpf_get_netns_cookie(ops);
		if (netns == settings->netns_cookie)
			call_back(ops, settings->refresh_ns, 0);
		else if (all_are_followed(settings))
			call_back(ops, settings->refresh_ns, netns);
	}
	return 1;
}

/* Who made a socket of another namespace: socket operations cannot ask for its control group. */
int tcp_created(struct bpf_sock *sk)
{
	struct swerve_tcp_settings *settings;
	u64 *cgroup;
	u32 only = 0;

	if (sk->type != STREAM)
		return 1;
	settings = tcp_settings.lookup(&only);
	if (!settings || settings->netns_cookie == bpf_get_netns_cookie(sk) || !all_are_followed(settings))
		return 1;
	cgroup = tcp_creators.sk_storage_get(sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (cgroup)
		*cgroup = bpf_get_current_cgroup_id();
	return 1;
}

#ifdef SWERVE_TCP_CONGESTION
/*
 * Raw, because programs on ordinary tracepoints are passed over while this CPU is in a system call on a map, reading
 * the flows for one. Arguments: the socket, the new state.
 */
RAW_TRACEPOINT_PROBE(tcp_cong_state_set)
{
	u64 skaddr = ctx->args[0], state = (u8)ctx->args[1];
	struct swerve_tcp_congestion *kept = tcp_congestion.lookup(&skaddr);

	if (kept || state != CA_OPEN)
		keep(skaddr, kept, state, bpf_ktime_get_ns());
	return 0;
}

/*
 * What is kept by address must be gone before the address belongs to another socket. Arguments: the socket, of any
 * protocol, the state before, the new one.
 */
RAW_TRACEPOINT_PROBE(inet_sock_set_state)
{
	u64 skaddr = ctx->args[0];

	if ((u32)ctx->args[2] == BPF_TCP_CLOSE)
		tcp_congestion.delete(&skaddr);
	return 0;
}
#endif
