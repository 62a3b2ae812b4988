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
 * tcp_cong_state_set, a tracepoint: the congestion state that tells why a segment is sent again.
 *
 * The record of a connection lives in its socket and dies with it. Rows of tcp_flows are copies, so that the least
 * recently used may go without a loss to any total.
 *
 * SYN-ACKs are sent for request sockets, which keep no total: see count_synack().
 */
#include "packet.h"
#include "swerve.h"
#include "tcp_packet.h"

#ifndef SWERVE_TCP_FLOWS
#define SWERVE_TCP_FLOWS 131072
#endif
#ifndef SWERVE_TCP_PATHS
#define SWERVE_TCP_PATHS 16384
#endif
#ifndef SWERVE_TCP_INTERFACES
#define SWERVE_TCP_INTERFACES 256
#endif
#ifndef SWERVE_TCP_ACCOUNTED
#define SWERVE_TCP_ACCOUNTED (SWERVE_TCP_FLOWS + 16384)
#endif
#ifndef SWERVE_TCP_SYNACKS
#define SWERVE_TCP_SYNACKS 16384
#endif
#ifndef SWERVE_TCP_TRACKED
#define SWERVE_TCP_TRACKED (2 * SWERVE_TCP_FLOWS)
#endif

#define STREAM 1	   /* SOCK_STREAM; UAPI has no name for it */
#define INET6 10	   /* AF_INET6 */
#define ANSWER_NS 10000000 /* a SYN-ACK within this time of a repeated SYN answers it */
#define YOUNG 8		   /* segments sent, below which a connection has no row yet: most end before */
#define CA_OPEN 0	   /* enum tcp_ca_state */
#define CA_DISORDER 1
#define CA_CWR 2
#define CA_RECOVERY 3
#define CA_LOSS 4
#define WORDS (sizeof(struct swerve_tcp_counts) / sizeof(u64))
#define CALLBACKS (BPF_SOCK_OPS_RTO_CB_FLAG | BPF_SOCK_OPS_STATE_CB_FLAG)

/* bcc declares the first with 32 bits of its 64, and may lack the others. */
static u64 (*socket_cookie)(void *context) = (void *)BPF_FUNC_get_socket_cookie;
static u64 (*netns_cookie)(void *context) = (void *)BPF_FUNC_get_netns_cookie;
static u64 (*ticks)(void) = (void *)BPF_FUNC_jiffies64; /* compiled to a load */
static u64 (*coarse_clock)(void) = (void *)BPF_FUNC_ktime_get_coarse_ns;
static u64 (*cgroup_of)(void *context) = (void *)BPF_FUNC_skb_cgroup_id;
static struct bpf_sock *(*find_socket)(void *context, struct bpf_sock_tuple *tuple, u32 size, u64 netns,
				       u64 flags) = (void *)BPF_FUNC_skc_lookup_tcp;
static long (*put_socket)(void *sk) = (void *)BPF_FUNC_sk_release;

/* All that is known of a connection; lives and dies with its socket. `row` is what tcp_flows has a copy of. */
struct tcp_truth {
	u64 tick;   /* jiffies when the clock was asked last */
	u64 due_ns; /* of the coarse clock: when to look again */
	u32 total;  /* total_retrans; compared for every packet, as is the state */
	u8 state;
	u8 met;	   /* the key and what precedes us are known */
	u8 closed; /* `closed_at` is one */
	u8 pad;
	struct swerve_tcp_flow row;
	struct swerve_tcp_key key;
	struct swerve_tcp_counts
		delta; /* of the present look; on the stack the verifier would follow every word of it */
	u64 sent;      /* of the socket's counters, what is in the counts already */
	u64 received;
	u64 timeouts; /* called back and not in the counts yet */
	u64 busy;
	u32 segments_out;
	u32 segments_in;
	u32 delivered;
	u32 delivered_ce;
	u32 spurious;
	u32 retransmits; /* without callbacks: timeouts since snd_una was `unacknowledged` */
	u32 unacknowledged;
	u32 closed_at; /* acknowledgement number of the last packet that closed the window */
};

/* What a packet adds to what its socket tells. */
struct sight {
	u32 bytes; /* payload */
	u32 segments;
	u8 flags; /* of the TCP header */
	u8 state;
};

BPF_SK_STORAGE(tcp_truths, struct tcp_truth);
BPF_TABLE("lru_hash", struct swerve_tcp_key, struct swerve_tcp_flow, tcp_flows, SWERVE_TCP_FLOWS);
BPF_HASH(tcp_paths, struct swerve_tcp_path_key, struct swerve_tcp_counts, SWERVE_TCP_PATHS);
BPF_TABLE("percpu_hash", u32, struct swerve_tcp_counts, tcp_interfaces, SWERVE_TCP_INTERFACES);
BPF_F_TABLE("hash", u64, struct swerve_tcp_accounted, tcp_accounted, SWERVE_TCP_ACCOUNTED, BPF_F_NO_PREALLOC);
BPF_F_TABLE("hash", u64, struct swerve_tcp_congestion, tcp_congestion, SWERVE_TCP_TRACKED, BPF_F_NO_PREALLOC);
BPF_TABLE("lru_hash", u64, u32, tcp_synacks, SWERVE_TCP_SYNACKS);	/* by which interface the first one left */
BPF_TABLE("lru_hash", u64, u64, tcp_repeated_syns, SWERVE_TCP_SYNACKS); /* address of a request -> when */
BPF_ARRAY(tcp_settings, struct swerve_tcp_settings, 1);
BPF_PERCPU_ARRAY(tcp_counters, u64, SWERVE_TCP_COUNTERS);

/* Atomic even on one CPU: callbacks run in processes, which packets interrupt. */
static __always_inline void raise_counter(u32 index, u64 by)
{
	u64 *counter = tcp_counters.lookup(&index);

	if (counter)
		__sync_fetch_and_add(counter, by);
}

static __always_inline void add(struct swerve_tcp_counts *to, struct swerve_tcp_counts *delta)
{
	u64 *sum = (u64 *)to, *each = (u64 *)delta;

#pragma unroll
	for (int i = 0; i < WORDS; i++)
		if (each[i])
			__sync_fetch_and_add(&sum[i], each[i]);
}

static __always_inline void add_to_path(struct swerve_addr *remote, u32 ifindex, struct swerve_tcp_counts *delta)
{
	struct swerve_tcp_path_key key = { .remote = *remote, .ifindex = ifindex };
	struct swerve_tcp_counts *sum = tcp_paths.lookup(&key);

	if (!sum) {
		if (!tcp_paths.insert(&key, delta))
			return;
		sum = tcp_paths.lookup(&key); /* another CPU was first */
	}
	if (sum)
		add(sum, delta);
	else
		raise_counter(SWERVE_TCP_PATHS_FULL, 1);
}

static __always_inline void add_to_interface(u32 ifindex, struct swerve_tcp_counts *delta)
{
	struct swerve_tcp_counts *sum = tcp_interfaces.lookup(&ifindex);

	if (!sum) {
		if (!tcp_interfaces.insert(&ifindex, delta))
			return;
		sum = tcp_interfaces.lookup(&ifindex);
	}
	if (!sum) {
		ifindex = 0; /* stands for all that find the map full */
		raise_counter(SWERVE_TCP_INTERFACES_FULL, 1);
		sum = tcp_interfaces.lookup(&ifindex);
	}
	if (sum)
		add(sum, delta);
	else
		raise_counter(SWERVE_TCP_LOST, 1);
}

static __always_inline void add_to_totals(struct swerve_addr *remote, u32 ifindex, struct swerve_tcp_counts *delta)
{
	add_to_path(remote, ifindex, delta);
	add_to_interface(ifindex, delta);
}

/* The row of a connection becomes a copy of what its socket has. */
static __always_inline void publish(struct tcp_truth *truth)
{
	struct swerve_tcp_flow *row = tcp_flows.lookup(&truth->key);

	if (!row) {
		if (!tcp_flows.insert(&truth->key, &truth->row)) {
			raise_counter(SWERVE_TCP_FLOWS_CREATED, 1);
			return;
		}
		row = tcp_flows.lookup(&truth->key);
	}
	if (!row) {
		raise_counter(SWERVE_TCP_FLOWS_FULL, 1);
		return;
	}
	if (row->cookie != truth->row.cookie || row->first_ns != truth->row.first_ns) {
		raise_counter(SWERVE_TCP_FLOWS_CREATED, 1);
		raise_counter(SWERVE_TCP_FLOWS_REPLACED, 1);
	}
	*row = truth->row;
}

/*
 * Works for a request socket too: only what every socket has is read. Not an if with an else: the compiler would
 * merge the loads of both and compute with the socket's address, which the verifier forbids.
 */
static __always_inline void fill_key(struct swerve_tcp_key *key, struct bpf_sock *sk)
{
	u32 *local = (u32 *)&key->local, *remote = (u32 *)&key->remote;

	key->local_port = sk->src_port;
	key->remote_port = bpf_ntohs(sk->dst_port);
	key->pad = 0;
	local[0] = 0;
	local[1] = 0;
	local[2] = bpf_htonl(0xffff);
	local[3] = sk->src_ip4;
	remote[0] = 0;
	remote[1] = 0;
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

/* Two processors never look at one connection at a time: what one leaves undone, the other or the next packet does. */
static __always_inline bool take(struct tcp_truth *truth)
{
	return !__sync_val_compare_and_swap(&truth->busy, 0, 1);
}

static __always_inline void give(struct tcp_truth *truth)
{
	__sync_val_compare_and_swap(&truth->busy, 1, 0);
}

/* Payload in sequence numbers: a SYN and a FIN take one each. */
static __always_inline u64 sent_bytes(struct tcp_truth *truth, struct bpf_tcp_sock *tp)
{
	u64 sent = tp->bytes_acked + (u32)(tp->snd_nxt - tp->snd_una);
	u64 marks = !!(truth->row.flags & SWERVE_TCP_ACTIVE) + !!(truth->row.flags & SWERVE_TCP_FIN_SENT);

	return sent > marks ? sent - marks : 0;
}

/* A new connection has left no state yet: if the end of what had its address before was not seen, that is kept still. */
static __always_inline void forget_congestion(u64 skaddr)
{
	if (tcp_congestion.lookup(&skaddr)) /* rarely: to delete is dearer */
		tcp_congestion.delete(&skaddr);
}

/*
 * Of most connections nothing is kept: they never leave Open. Of one that precedes us it is what user space was told,
 * or what it has become since.
 */
static __always_inline void track(struct tcp_truth *truth, u64 now, u32 state)
{
#ifdef SWERVE_TCP_CONGESTION
	struct swerve_tcp_congestion start = { .since_ns = now, .state = state }, *kept;

	truth->row.congestion = state;
	if (truth->row.flags & SWERVE_TCP_CALLED)
		return;
	if (!(truth->row.flags & SWERVE_TCP_OLDER)) {
		forget_congestion(truth->row.skaddr);
		return;
	}
	kept = tcp_congestion.lookup(&truth->row.skaddr);
	if (kept)
		start.state = kept->state;
	if ((kept || state) && tcp_congestion.update(&truth->row.skaddr, &start))
		raise_counter(SWERVE_TCP_CONGESTION_FULL, 1);
#endif
}

/* What is in the books already: all that precedes the agent, or the SYN-ACKs of the request the connection began as. */
static __always_inline void meet(struct tcp_truth *truth, struct bpf_sock *sk, struct bpf_tcp_sock *tp, u64 cookie,
				 u64 now)
{
	u32 state = 0, again, flags = truth->row.flags;
	struct swerve_tcp_accounted *accounted = 0;

	if (!(flags & SWERVE_TCP_CALLED)) { /* else what it has is of its youth */
		__builtin_memset(&truth->row, 0, sizeof(truth->row));
		truth->row.first_ns = now;
		flags &= SWERVE_TCP_ACTIVE;
	}
	fill_key(&truth->key, sk);
	truth->row.cookie = cookie;
	truth->row.skaddr = (u64)sk;
	truth->row.congestion = SWERVE_TCP_STATE_UNKNOWN;
	truth->sent = truth->received = 0;
	truth->total = truth->segments_out = truth->segments_in = 0;
	truth->delivered = truth->delivered_ce = truth->spurious = 0;
	truth->state = 0;
	truth->due_ns = 0;
	truth->retransmits = 0;
	truth->unacknowledged = tp->snd_una;
	truth->closed = 0;
	if (sk->state == BPF_TCP_SYN_SENT)
		flags |= SWERVE_TCP_ACTIVE;

	/* What calls back began after us; the request that it was has sent nothing again if it has not. */
	if (tp->total_retrans || !(flags & SWERVE_TCP_CALLED))
		accounted = tcp_accounted.lookup(&cookie);
	if (accounted) {
		/* less by now: it connected anew */
		truth->total = accounted->segments < tp->total_retrans ? accounted->segments : tp->total_retrans;
		if (accounted->older) {
			flags |= SWERVE_TCP_OLDER;
			state = accounted->congestion;
			again = tp->total_retrans - truth->total;
			if (tp->icsk_retransmits > again) /* a series of timeouts that has begun before */
				truth->retransmits = tp->icsk_retransmits - again;
			truth->segments_out = tp->segs_out;
			truth->segments_in = tp->segs_in;
			truth->delivered = tp->delivered;
			truth->delivered_ce = tp->delivered_ce;
			truth->spurious = tp->dsack_dups;
			truth->received = tp->bytes_received;
			truth->sent = sent_bytes(truth, tp);
		} else {
			truth->row.counts.retransmitted[SWERVE_TCP_SYN] = accounted->segments;
			truth->row.counts.timeouts = accounted->timeouts;
		}
		tcp_accounted.delete(&cookie);
	}
	truth->row.flags = flags;
	truth->met = 1;
	if (sk->state != BPF_TCP_CLOSE) /* what is kept of it would stay */
		track(truth, now, state);
	raise_counter(SWERVE_TCP_MET, 1);
}

/* The congestion state, and how long it and the others have lasted: Open is what is left of the connection's time. */
static __always_inline void read_congestion(struct tcp_truth *truth, u64 now)
{
#ifdef SWERVE_TCP_CONGESTION
	struct swerve_tcp_congestion *kept = tcp_congestion.lookup(&truth->row.skaddr);
	u64 state = CA_OPEN, spent, elsewhere = 0, lasted = now - truth->row.first_ns;

	if (kept) {
		state = kept->state;
#pragma unroll
		for (int i = CA_OPEN + 1; i < SWERVE_TCP_STATES; i++) {
			spent = kept->spent_ns[i];
			if (state == i && now > kept->since_ns)
				spent += now - kept->since_ns;
			truth->row.congestion_ns[i] = spent;
			elsewhere += spent;
		}
	}
	truth->row.congestion_ns[CA_OPEN] = lasted > elsewhere ? lasted - elsewhere : 0;
	truth->row.congestion = state;
#endif
}

/* From now on the connection is in this state. */
static __always_inline void keep(u64 skaddr, struct swerve_tcp_congestion *kept, u64 state, u64 now)
{
	struct swerve_tcp_congestion start = { .since_ns = now, .state = state };
	u64 before;

	if (!kept) {
		if (state != CA_OPEN && tcp_congestion.update(&skaddr, &start))
			raise_counter(SWERVE_TCP_CONGESTION_FULL, 1);
		return;
	}
	before = kept->state;
	if (before == state || before >= SWERVE_TCP_STATES)
		return;
	kept->spent_ns[before] += now - kept->since_ns;
	kept->since_ns = now;
	kept->state = state;
}

/*
 * A change of state that the tracepoint's program was not run for is made up for by a second witness: only what is
 * marked lost is sent again in Recovery and Loss, and a tail probe is sent only while nothing is.
 */
static __always_inline void correct(struct tcp_truth *truth, struct bpf_tcp_sock *tp, u64 timeouts, u64 now)
{
	struct swerve_tcp_congestion *kept;
	u64 before = truth->row.congestion, state = timeouts ? CA_LOSS : CA_RECOVERY;

	if (before >= CA_RECOVERY + !!timeouts || !tp->lost_out)
		return;
	truth->row.congestion = state;
	kept = tcp_congestion.lookup(&truth->row.skaddr);
	if (kept && kept->state != before)
		return;
	keep(truth->row.skaddr, kept, state, now);
	raise_counter(SWERVE_TCP_CONGESTION_MISSED, 1);
}

static __always_inline u32 cause(struct tcp_truth *truth, u8 state, u64 timeouts)
{
	if (state == BPF_TCP_SYN_SENT || state == BPF_TCP_SYN_RECV)
		return SWERVE_TCP_SYN;
	if (timeouts) /* since the last packet */
		return SWERVE_TCP_TIMEOUT;
	switch (truth->row.congestion) {
	case CA_OPEN:
	case CA_DISORDER:
	case CA_CWR:
		return SWERVE_TCP_TAIL_PROBE;
	case CA_RECOVERY:
		return SWERVE_TCP_FAST;
	case CA_LOSS:
		return SWERVE_TCP_TIMEOUT;
	}
	return SWERVE_TCP_UNKNOWN;
}

/* Timeouts since the last look. Without callbacks: a timeout that sends nothing again here is not seen. */
static __always_inline u64 new_timeouts(struct tcp_truth *truth, struct bpf_tcp_sock *tp, u32 again)
{
	u32 before, now = tp->icsk_retransmits;

	if (truth->row.flags & SWERVE_TCP_CALLED)
		return truth->timeouts ? __sync_lock_test_and_set(&truth->timeouts, 0) : 0;
	if (!again)
		return 0;
	if (truth->unacknowledged != tp->snd_una) { /* the kernel counts anew once something is acknowledged */
		truth->unacknowledged = tp->snd_una;
		truth->retransmits = 0;
	}
	before = truth->retransmits;
	truth->retransmits = now;
	return now > before ? now - before : 0;
}

/* Segments sent again since the last look. A packet shows its own size; those that never came here showed none. */
static __always_inline void count_again(struct tcp_truth *truth, struct swerve_tcp_counts *delta, u32 again,
					struct sight *sight)
{
	u32 why = cause(truth, sight->state, delta->timeouts), seen = sight->segments;

	delta->retransmitted[SWERVE_TCP_FAST] = why == SWERVE_TCP_FAST ? again : 0;
	delta->retransmitted[SWERVE_TCP_TIMEOUT] = why == SWERVE_TCP_TIMEOUT ? again : 0;
	delta->retransmitted[SWERVE_TCP_TAIL_PROBE] = why == SWERVE_TCP_TAIL_PROBE ? again : 0;
	delta->retransmitted[SWERVE_TCP_SYN] = why == SWERVE_TCP_SYN ? again : 0;
	delta->retransmitted[SWERVE_TCP_UNKNOWN] = why == SWERVE_TCP_UNKNOWN ? again : 0;
	delta->retransmitted_bytes = sight->bytes;
	if (again > seen)
		raise_counter(SWERVE_TCP_UNSIZED, again - seen);
}

/* Bring a connection's record, the totals and its row up to date. */
static __always_inline void look(struct tcp_truth *truth, struct bpf_tcp_sock *tp, struct sight *sight, u64 now)
{
	struct swerve_tcp_counts *delta = &truth->delta;
	u64 sent, received;
	u32 again;

	__builtin_memset(delta, 0, sizeof(*delta));
	read_congestion(truth, now);
	again = tp->total_retrans - truth->total;
	delta->timeouts = new_timeouts(truth, tp, again);
	if (again) {
		correct(truth, tp, delta->timeouts, now);
		count_again(truth, delta, again, sight);
	}
	truth->total += again;

	if (sight->flags & RST)
		delta->resets_sent = 1;
	sent = sent_bytes(truth, tp);
	if (sent > truth->sent) {
		delta->sent_bytes = sent - truth->sent;
		truth->sent = sent;
	}
	if (sight->flags & FIN) /* the sequence numbers of a packet are the socket's only once it has left */
		truth->row.flags |= SWERVE_TCP_FIN_SENT;
	received = tp->bytes_received;
	delta->received_bytes = received - truth->received;
	truth->received = received;
	delta->segments_out = (u32)(tp->segs_out - truth->segments_out);
	truth->segments_out += delta->segments_out;
	delta->segments_in = (u32)(tp->segs_in - truth->segments_in);
	truth->segments_in += delta->segments_in;
	delta->delivered = (u32)(tp->delivered - truth->delivered);
	truth->delivered += delta->delivered;
	delta->delivered_ce = (u32)(tp->delivered_ce - truth->delivered_ce);
	truth->delivered_ce += delta->delivered_ce;
	delta->spurious = (u32)(tp->dsack_dups - truth->spurious);
	truth->spurious += delta->spurious;

	add(&truth->row.counts, delta);
	add_to_totals(&truth->key.remote, truth->row.ifindex, delta);

	truth->row.last_ns = now;
	truth->row.acknowledged_bytes = tp->bytes_acked;
	truth->row.srtt_us = tp->srtt_us >> 3;
	truth->row.min_rtt_us = tp->rtt_min;
	truth->row.cwnd = tp->snd_cwnd;
	truth->row.ssthresh = tp->snd_ssthresh;
	truth->row.mss = tp->mss_cache;
	truth->row.rate_delivered = tp->rate_delivered;
	truth->row.rate_interval_us = tp->rate_interval_us;
	truth->row.ecn_flags = tp->ecn_flags;
	truth->row.retrans_out = tp->retrans_out;
	truth->row.state = truth->state = sight->state;
	publish(truth);
}

static __always_inline u64 refresh_ns(void)
{
	struct swerve_tcp_settings *settings;
	u32 only = 0;

	settings = tcp_settings.lookup(&only);
	return settings ? settings->refresh_ns : 0;
}

/* Whether a SYN-ACK answers a SYN that came once more: then it was no timeout that sent it. */
static __always_inline bool answers(struct bpf_sock *request, u64 now)
{
	u64 address = (u64)request, *asked = tcp_repeated_syns.lookup(&address);
	bool soon = asked && now - *asked < ANSWER_NS;

	if (asked)
		tcp_repeated_syns.delete(&address);
	return soon;
}

/*
 * The second SYN-ACK of a request is a retransmission. The connection that follows starts with these in its totals,
 * so they are remembered for meet(); when that cannot be, they are left for it to count.
 */
static __always_inline void count_synack(struct __sk_buff *skb, struct bpf_sock *request)
{
	struct swerve_tcp_accounted nothing = {}, *accounted;
	struct swerve_tcp_counts delta = {};
	u64 cookie = socket_cookie(skb), now;
	struct packet packet = {};
	u32 ifindex = skb->ifindex, before = 0, *first;

	if (!parse(skb, &packet) || (packet.flags & (SYN | ACK)) != (SYN | ACK))
		return; /* a request also sends challenge ACKs */
	accounted = tcp_accounted.lookup(&cookie);
	first = tcp_synacks.lookup(&cookie);
	if (first) /* into a number: the compiler would join two pointers in one test, which the verifier forbids */
		before = *first;
	if (before && before != ifindex)
		return; /* the same packet, further down; or one by another way, which is left for the connection */
	if (!before && !accounted) {
		tcp_synacks.update(&cookie, &ifindex);
		return;
	}
	accounted = tcp_accounted.lookup_or_try_init(&cookie, &nothing);
	if (!accounted) {
		raise_counter(SWERVE_TCP_SYNACKS_FULL, 1);
		return;
	}
	now = bpf_ktime_get_ns();
	delta.timeouts = !answers(request, now);
	__sync_fetch_and_add(&accounted->segments, 1);
	__sync_fetch_and_add(&accounted->timeouts, delta.timeouts);
	accounted->last_ns = now;
	delta.retransmitted[SWERVE_TCP_SYN] = 1;
	delta.segments_out = 1;
	add_to_totals(&packet.destination, skb->ifindex, &delta);
}

/* A reset that this host sends for what belongs to no connection; one that it forwards came in by an interface. */
static __always_inline void count_refused(struct __sk_buff *skb)
{
	struct swerve_tcp_counts delta = { .resets_refused = 1 };
	struct packet packet = {};

	if (skb->ingress_ifindex || !parse(skb, &packet) || !(packet.flags & RST))
		return;
	add_to_totals(&packet.destination, skb->ifindex, &delta);
}

/*
 * Whether it is enough to show the connection's new state: all else comes with the next look, and one comes for sure,
 * if only when the connection ends.
 */
static __always_inline bool glance_will_do(struct tcp_truth *truth, struct bpf_tcp_sock *tp, struct sight *sight)
{
	if (truth->total != tp->total_retrans || sight->flags & RST)
		return false;
	if (!truth->state || truth->state == sight->state) /* the first look is a whole one */
		return false;
	return truth->row.flags & SWERVE_TCP_CALLED || sight->state == BPF_TCP_ESTABLISHED;
}

static __always_inline void glance(struct tcp_truth *truth, struct sight *sight, u64 now)
{
	truth->row.last_ns = now;
	truth->row.state = truth->state = sight->state;
	if (sight->flags & FIN)
		truth->row.flags |= SWERVE_TCP_FIN_SENT;
	publish(truth);
}

/* The clock is asked once per tick at most: that costs as much as all the rest. */
static __always_inline bool is_due(struct tcp_truth *truth)
{
	u64 tick = ticks();

	if (truth->tick == tick)
		return false;
	truth->tick = tick;
	return coarse_clock() >= truth->due_ns;
}

/* Whether nothing is new of a connection but what can wait for the next look. */
static __always_inline bool is_fresh(struct tcp_truth *truth, struct bpf_sock *sk, struct bpf_tcp_sock *tp)
{
	return truth->total == tp->total_retrans && truth->state == sk->state && !is_due(truth);
}

/*
 * Whether a connection can be left alone for now: it has sent nothing again, and another look comes for sure, if only
 * when it ends. Most have ended by then, so that nothing but that last look is paid for them.
 */
static __always_inline bool is_young(struct __sk_buff *skb, struct tcp_truth *truth, struct bpf_tcp_sock *tp, u32 word)
{
	if (truth->met || !(truth->row.flags & SWERVE_TCP_CALLED) || tp->total_retrans || tp->segs_out >= YOUNG)
		return false;
	if (!word || word & WORD_RST || is_due(truth))
		return false;
	if (word & WORD_FIN)
		truth->row.flags |= SWERVE_TCP_FIN_SENT;
	truth->row.ifindex = skb->ifindex;
	if (!truth->row.cgroup)
		truth->row.cgroup = cgroup_of(skb);
	return true;
}

static __always_inline void observe(struct __sk_buff *skb, struct bpf_sock *sk, struct bpf_tcp_sock *tp, u32 word)
{
	struct packet packet = {};
	struct tcp_truth *truth;
	struct sight sight = {};
	u64 now;

	if (!parse(skb, &packet))
		return;
	truth = tcp_truths.sk_storage_get(tp, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (word == WORD_UNREAD && truth && !(packet.flags & (FIN | RST)) && is_fresh(truth, sk, tp))
		return; /* only its headers were out of sight */
	if (!truth || !take(truth)) {
		raise_counter(SWERVE_TCP_DEFERRED, 1);
		return;
	}
	now = bpf_ktime_get_ns();
	sight.bytes = packet.bytes;
	sight.segments = skb->gso_segs ? skb->gso_segs : 1;
	sight.flags = packet.flags;
	sight.state = sk->state;
	/* A socket that connects anew starts anew. */
	if (!truth->met || (sight.state == BPF_TCP_SYN_SENT && truth->state != BPF_TCP_SYN_SENT))
		meet(truth, sk, tp, socket_cookie(skb), now);
	truth->row.ifindex = skb->ifindex;
	truth->row.cgroup = cgroup_of(skb);
	if (glance_will_do(truth, tp, &sight)) {
		glance(truth, &sight, now);
	} else {
		look(truth, tp, &sight, now);
		truth->tick = ticks();
		truth->due_ns = coarse_clock() + refresh_ns();
	}
	give(truth);
}

int tcp_egress(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;
	struct tcp_truth *truth;
	struct bpf_tcp_sock *tp;
	u32 word;

	if (!sk) {
		if (tcp_word(skb) & WORD_RST)
			count_refused(skb);
		return TC_ACT_UNSPEC;
	}
	tp = bpf_tcp_sock(sk);
	if (!tp) {
		if (sk->state == BPF_TCP_NEW_SYN_RECV)
			count_synack(skb, sk);
		if (tcp_word(skb) & WORD_RST)
			count_refused(skb);
		return TC_ACT_UNSPEC;
	}
	word = tcp_word(skb);
	truth = tcp_truths.sk_storage_get(tp, 0, 0);
	if (truth && !(word & (WORD_FIN | WORD_RST)) && is_fresh(truth, sk, tp))
		return TC_ACT_UNSPEC;
	if (truth && is_young(skb, truth, tp, word))
		return TC_ACT_UNSPEC;

	/* A raw socket that speaks TCP passes for one on kernels before 6.6, and has no total. */
	sk = bpf_sk_fullsock(sk);
	if (sk && sk->type == STREAM && sk->state != BPF_TCP_LISTEN)
		observe(skb, sk, tp, word);
	else
		count_refused(skb);
	return TC_ACT_UNSPEC;
}

/* The connection or request of this host that a packet is for. */
static __always_inline struct bpf_sock *receiver(struct __sk_buff *skb, struct packet *packet)
{
	u32 *source = (u32 *)&packet->source, *destination = (u32 *)&packet->destination;
	struct bpf_sock_tuple tuple = {};

	if (!packet->ipv6) {
		tuple.ipv4.saddr = source[3];
		tuple.ipv4.daddr = destination[3];
		tuple.ipv4.sport = packet->source_port;
		tuple.ipv4.dport = packet->destination_port;
		return find_socket(skb, &tuple, sizeof(tuple.ipv4), BPF_F_CURRENT_NETNS, 0);
	}
	__builtin_memcpy(tuple.ipv6.saddr, source, sizeof(tuple.ipv6.saddr));
	__builtin_memcpy(tuple.ipv6.daddr, destination, sizeof(tuple.ipv6.daddr));
	tuple.ipv6.sport = packet->source_port;
	tuple.ipv6.dport = packet->destination_port;
	return find_socket(skb, &tuple, sizeof(tuple.ipv6), BPF_F_CURRENT_NETNS, 0);
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
	struct packet packet = {};
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
		add_to_totals(&packet.source, skb->ifindex, &delta);
	}
	put_socket(sk);
}

int tcp_ingress(struct __sk_buff *skb)
{
	u32 word = tcp_word(skb);

	if (word && tells_something(word >> 16, word))
		receive(skb);
	return TC_ACT_UNSPEC;
}

/* The last look at a connection, often the only one: nothing of it passes any more but a reset. */
static __always_inline void end(struct bpf_sock_ops *ops, struct bpf_sock *sk, struct tcp_truth *truth)
{
	struct bpf_tcp_sock *tp = bpf_tcp_sock(sk);
	struct sight sight = { .state = BPF_TCP_CLOSE };
	u64 now;

	if (!tp || !truth->row.ifindex)
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

static __always_inline void call_back(struct bpf_sock_ops *ops, u64 refresh_ns)
{
	bool opening = ops->op == BPF_SOCK_OPS_TCP_CONNECT_CB || ops->op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB;
	struct bpf_sock *sk = ops->sk;
	struct tcp_truth *truth;

	if (!sk)
		return;
	if (opening && bpf_sock_ops_cb_flags_set(ops, ops->bpf_sock_ops_cb_flags | CALLBACKS))
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
		truth->due_ns = coarse_clock() + refresh_ns;
		truth->state = 0;
		truth->met = 0;
		truth->timeouts = 0;
	} else if (ops->op == BPF_SOCK_OPS_RTO_CB) {
		__sync_fetch_and_add(&truth->timeouts, 1);
	} else {
		end(ops, sk, truth);
	}
}

/* Whatever a callback could decide is left as it is. */
int tcp_callbacks(struct bpf_sock_ops *ops)
{
	struct swerve_tcp_settings *settings;
	u32 only = 0;

	switch (ops->op) {
	case BPF_SOCK_OPS_STATE_CB:
		if (ops->args[1] != BPF_TCP_CLOSE)
			return 1;
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
	case BPF_SOCK_OPS_RTO_CB:
		settings = tcp_settings.lookup(&only);
		if (settings && settings->netns_cookie == netns_cookie(ops))
			call_back(ops, settings->refresh_ns);
	}
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
