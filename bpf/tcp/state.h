/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The tables of tcp.c, what is known of a connection, and how it counts what goes wrong. */
#ifndef SWERVE_TCP_STATE_H
#define SWERVE_TCP_STATE_H

#include "lib/counters.h"
#include "lib/bcc.h"
#include "lib/packet.h"
#include "swerve.h"
#include "lib/tcp.h"

#ifndef SWERVE_TCP_FLOWS
#define SWERVE_TCP_FLOWS 131072
#endif
#ifndef SWERVE_TCP_PATHS
#define SWERVE_TCP_PATHS 16384
#endif
#ifndef SWERVE_TCP_INTERFACES
#define SWERVE_TCP_INTERFACES 256
#endif
#ifndef SWERVE_TCP_NETNS
#define SWERVE_TCP_NETNS 4096
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
#define ANSWER_NS 10000000 /* a SYN-ACK within this time of a repeated SYN answers it */
#define YOUNG 8		   /* segments sent, below which a connection has no row yet: most end before */
#define CA_OPEN 0	   /* enum tcp_ca_state */
#define CA_DISORDER 1
#define CA_CWR 2
#define CA_RECOVERY 3
#define CA_LOSS 4
#define WORDS (sizeof(struct swerve_tcp_counts) / sizeof(u64))
#define CALLBACKS (BPF_SOCK_OPS_RTO_CB_FLAG | BPF_SOCK_OPS_STATE_CB_FLAG)
#define CALLBACKS_ELSEWHERE (CALLBACKS | BPF_SOCK_OPS_RETRANS_CB_FLAG | BPF_SOCK_OPS_RTT_CB_FLAG)

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

/* A connection of which nothing was new at this tick, when this CPU last looked. */
struct fresh {
	u64 skaddr;
	u64 tick;
	u32 total;
	u32 state;
};

#define FRESH_ROWS 64 /* per CPU; a power of two */

BPF_PERCPU_ARRAY(tcp_fresh, struct fresh, FRESH_ROWS);
BPF_SK_STORAGE(tcp_truths, struct tcp_truth);
BPF_TABLE("lru_hash", struct swerve_tcp_key, struct swerve_tcp_flow, tcp_flows, SWERVE_TCP_FLOWS);
BPF_HASH(tcp_paths, struct swerve_tcp_path_key, struct swerve_tcp_counts, SWERVE_TCP_PATHS);
BPF_TABLE("percpu_hash", u32, struct swerve_tcp_counts, tcp_interfaces, SWERVE_TCP_INTERFACES);
BPF_F_TABLE("hash", u64, struct swerve_tcp_namespace, tcp_namespaces, SWERVE_TCP_NETNS, BPF_F_NO_PREALLOC);
BPF_F_TABLE("hash", u64, struct swerve_tcp_accounted, tcp_accounted, SWERVE_TCP_ACCOUNTED, BPF_F_NO_PREALLOC);
BPF_F_TABLE("hash", u64, struct swerve_tcp_congestion, tcp_congestion, SWERVE_TCP_TRACKED, BPF_F_NO_PREALLOC);
BPF_TABLE("lru_hash", u64, u32, tcp_synacks, SWERVE_TCP_SYNACKS);	/* by which interface the first one left */
BPF_TABLE("lru_hash", u64, u64, tcp_repeated_syns, SWERVE_TCP_SYNACKS); /* address of a request -> when */
BPF_ARRAY(tcp_settings, struct swerve_tcp_settings, 1);
BPF_PERCPU_ARRAY(tcp_counters, u64, SWERVE_TCP_COUNTERS);

/* Atomic even on one CPU: callbacks run in processes, which packets interrupt. */
static __always_inline void raise_counter(u32 index, u64 by)
{
	raise_atomically(tcp_counters.lookup(&index), by);
}

#endif /* SWERVE_TCP_STATE_H */
