/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The contract: every key, record and counter that crosses from the kernel programs to user space.
 *
 * Fixed widths, named padding, natural alignment. User space never mirrors these types by hand: the loader reads
 * their layout back from the compiled program and hands it on as numpy record types.
 *
 * Times are nanoseconds of CLOCK_MONOTONIC, but for those of a host's stamping clock (ts_ns): that is CLOCK_MONOTONIC
 * too, except in lab builds, which give each host a clock of its own. Numbers are in host byte order, addresses in network byte order; an IPv4
 * address is kept IPv4-mapped (::ffff:a.b.c.d), so that one key fits both families.
 */
#ifndef SWERVE_H
#define SWERVE_H

struct swerve_addr {
	u8 bytes[16];
};

/* ---- clock.h: lab builds only ------------------------------------------------------------------------------- */

#define SWERVE_KNOTS 4096
#define SWERVE_KNOT_SHIFT 30 /* knots are 2^30 ns apart, so the table lasts 73 minutes; then the last knot holds */

/* A lab host's clock: ahead of CLOCK_MONOTONIC by offset, by the knots (linear in between), and by one step. */
struct swerve_virtual_clock {
	u64 origin_ns; /* of the first knot */
	s64 offset_ns;
	u64 step_at_ns; /* all ones: no step */
	s64 step_ns;
	s64 knots[SWERVE_KNOTS];
};

/* ---- stamp.c ------------------------------------------------------------------------------------------------ */

/* The four places on a probe's way, in the order in which it passes them. */
enum swerve_stamp_kind {
	SWERVE_REQUEST_EGRESS = 1,  /* the sender's hook, on the way out */
	SWERVE_REQUEST_INGRESS = 2, /* the reflector's hook, on the way in */
	SWERVE_REPLY_EGRESS = 3,    /* the reflector's hook, on the way out */
	SWERVE_REPLY_INGRESS = 4,   /* the sender's hook, on the way in */
};

/* One probe seen at one hook. (remote, ssid, seq, kind) names it; seq is always the Session-Sender's. */
struct swerve_stamp {
	u64 ts_ns;   /* stamping clock: what delays are computed from */
	u64 seen_ns; /* CLOCK_MONOTONIC of the same instant: what windows are made of */
	u32 seq;
	u16 ssid;
	u8 kind;
	u8 ttl; /* TTL or hop limit as seen at this hook */
	u32 ifindex;
	u16 sender_port; /* UDP port of the Session-Sender, whichever way the packet goes */
	u16 pad;
	struct swerve_addr remote; /* the peer's address, whichever way the packet goes */
	struct swerve_addr local;
};

/* Per-CPU counters of stamp.c, by index. Names in user space are these, in lower case, without the prefix. */
enum swerve_stamp_counter {
	SWERVE_STAMP_RECORDED = 0,  /* stamps written to the ring */
	SWERVE_STAMP_RING_FULL = 1, /* stamps lost because the ring was full */
	SWERVE_STAMP_MALFORMED = 2, /* packets to or from the probe port that are not a whole STAMP packet */
	SWERVE_STAMP_FOREIGN = 3,   /* well-formed probes to or from an address that is no configured peer */
	SWERVE_STAMP_MERGED = 4,    /* several probes merged into one buffer by GRO or GSO: cannot be told apart */
	SWERVE_STAMP_COUNTERS = 5,
};

/* ---- sample.c ----------------------------------------------------------------------------------------------- */

/* Which packets of a peer are sampled: bits of sample_peers' values and of the settings. */
enum swerve_sample_direction {
	SWERVE_SAMPLE_EGRESS = 1,  /* sent to it */
	SWERVE_SAMPLE_INGRESS = 2, /* received from it */
};

/*
 * How often to sample. A key with that many zero low bits is sampled, so each rate takes every other sample of the
 * next finer one, and two hosts with different rates share the samples of the coarser.
 */
struct swerve_sample_settings {
	u32 directions; /* wanted of any peer; 0: look at nothing */
	u8 tcp_rate;	/* a sample per 2^tcp_rate bytes */
	u8 udp_rate;	/* a sample per 2^udp_rate datagrams */
	u16 pad;
};

/* One byte of a TCP stream, or one UDP datagram, seen at one hook. (flow, key) is the same at both hosts. */
struct swerve_sample {
	u64 ts_ns;   /* stamping clock: what delays are computed from */
	u64 seen_ns; /* CLOCK_MONOTONIC of the same instant: what windows are made of */
	u64 key;     /* TCP: sequence number of the byte; UDP: hash of what no hop alters in the datagram */
	struct swerve_addr local;
	struct swerve_addr remote;
	u16 local_port;
	u16 remote_port;
	u32 ifindex;
	u8 protocol;  /* IPPROTO_TCP or IPPROTO_UDP */
	u8 direction; /* SWERVE_SAMPLE_EGRESS or SWERVE_SAMPLE_INGRESS */
	u8 rate;      /* that was in force */
	u8 pad[5];
};

/* Per-CPU counters of sample.c, by index. Names in user space are these, in lower case, without the prefix. */
enum swerve_sample_counter {
	SWERVE_SAMPLE_RECORDED = 0,  /* samples written to the ring */
	SWERVE_SAMPLE_RING_FULL = 1, /* samples lost because the ring was full */
	SWERVE_SAMPLE_FRAGMENTS = 2, /* IP fragments of peers: left out, they lack ports or share their datagram's */
	SWERVE_SAMPLE_MALFORMED = 3, /* packets of peers whose lengths contradict each other */
	SWERVE_SAMPLE_MULTIPLE = 4,  /* TCP buffers with several bytes to sample, of which one was */
	SWERVE_SAMPLE_SEGMENTS = 5,  /* datagrams merged into one buffer beyond those that are looked at */
	SWERVE_SAMPLE_COUNTERS = 6,
};

/* ---- tcp.c -------------------------------------------------------------------------------------------------- */

/* One TCP flow leaving by one interface: the interface tells the path, so a flow that moved has two rows. */
struct swerve_tcp_key {
	struct swerve_addr local;
	struct swerve_addr remote;
	u16 local_port;
	u16 remote_port;
	u32 ifindex;
};

struct swerve_tcp_flow {
	u64 retransmitted_segments; /* left by this interface since first_ns */
	u64 first_ns;
	u64 last_ns;
};

/* All flows that leave by one interface. */
struct swerve_tcp_interface {
	u64 retransmitted_segments; /* exact, whatever became of the rows of single flows */
	u64 unrecorded_segments;    /* of these, those that found the flow map full */
};

/*
 * By socket cookie: segments of a socket that are counted already, or precede the agent, when its first
 * retransmission as a full socket is seen. User space writes those that precede it, the kernel those of SYN-ACKs.
 */
struct swerve_tcp_accounted {
	u64 segments;
	u64 last_ns; /* of the last SYN-ACK; 0 in what user space wrote */
};

/* Per-CPU counters of tcp.c, by index. */
enum swerve_tcp_counter {
	SWERVE_TCP_RETRANSMITTED = 0,	/* segments retransmitted, all flows, pruned ones included */
	SWERVE_TCP_FLOWS_FULL = 1,	/* segments not recorded per flow: the flow map was full */
	SWERVE_TCP_INTERFACES_FULL = 2, /* segments not recorded per interface: the interface map was full */
	SWERVE_TCP_SYNACKS_FULL = 3,	/* SYN-ACKs counted only once their connection is there, if ever */
	SWERVE_TCP_DEFERRED = 4,	/* packets of sockets without storage: counted with a later packet */
	SWERVE_TCP_COUNTERS = 5,
};

/*
 * Rings carry no type that the loader could read back, so each record type is declared by an array map that is never
 * used otherwise.
 */
#define SWERVE_RECORD(name, type) BPF_ARRAY(layout_##name, type, 1)

#endif /* SWERVE_H */
