/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The contract: every key, record and counter that crosses from the kernel programs to user space.
 *
 * Fixed widths, named padding, natural alignment. User space never mirrors these types by hand: the loader reads
 * their layout back from the compiled program and hands it on as numpy record types.
 *
 * Times are CLOCK_MONOTONIC nanoseconds. Numbers are in host byte order, addresses in network byte order; an IPv4
 * address is kept IPv4-mapped (::ffff:a.b.c.d), so that one key fits both families.
 */
#ifndef SWERVE_H
#define SWERVE_H

struct swerve_addr {
	u8 bytes[16];
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
	u64 ts_ns;
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
