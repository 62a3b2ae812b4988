/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The contract: every key, record and counter that crosses from the kernel programs to user space. Programs of user
 * space that write such records themselves, the tap, or read such maps, the pacer, include it too.
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

/* Of an address: AF_INET and AF_INET6, which the kernel's UAPI does not name. */
#define SWERVE_FAMILY_IPV4 2
#define SWERVE_FAMILY_IPV6 10

/* The UDP port of the reflectors. */
#ifndef SWERVE_PROBE_PORT
#define SWERVE_PROBE_PORT 862
#endif

/* ---- lib/clock.h: lab builds only --------------------------------------------------------------------------- */

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

/* ---- probe.c ------------------------------------------------------------------------------------------------ */

#define SWERVE_PROBE_PATHS 4096
#define SWERVE_PROBE_LATE_NS 9000000	    /* without an answer: worth a look, however long round trips were of late */
#define SWERVE_PROBE_MOST_GRACE_NS 16000000 /* with a longer one, not before the next probe leaves */
#define SWERVE_PROBE_SESSIONS 4096	    /* a path and a source port each */
#define SWERVE_PROBE_PORTS 16

/*
 * Firewall marks of packets on their way between two hooks of ours; no packet leaves the host with one. User space
 * gives the first to the frames it sends: the low half of the destination MAC address is then the path's number, and
 * the byte before it says whether the probe counts for silence.
 */
#define SWERVE_MARK_SEND 0x5e770001  /* to be pinned to its path */
#define SWERVE_MARK_STAMP 0x5e770002 /* pinned; to be stamped on its way out */
#define SWERVE_MARK_PLAIN 0x5e770003 /* pinned; to leave as it is */
#define SWERVE_MARK_REPLY 0x5e770100 /* reflected; to be stamped on its way out; lowest byte: where its UDP header is */
#define SWERVE_MARK_BITS 0xffff0000  /* which all of them share */

/*
 * The sequence number of a session's n-th probe is base + session * 2^20 + n, n modulo 2^20: so a reflector that sends
 * no session identifier back still names the session. The base is random.
 */
#define SWERVE_PROBE_SEQ_BITS 20
#define SWERVE_SSID_SIZE 0xffff /* of probes that ask how large a packet may be: not recorded */

/* The only entry of probe_settings, written by user space but for `silence_ns`. */
struct swerve_probe_settings {
	u64 beat_ns;	/* when the agent last showed that it works */
	u64 silence_ns; /* kernel: when a probe was last sent along a path that leaves its limit unanswered; 0: never */
	u32 seq_base;
	u32 slots;		       /* probes of one session that are remembered: a power of two, at most 2^16 */
	u16 ports[SWERVE_PROBE_PORTS]; /* of the sender's sockets; 0: none */
	u64 key[2];		       /* of SipHash */
	u32 keyed;		       /* 1: probes and replies carry a tag, and are to carry it */
	u16 lost_interface;	       /* low bits of the index of one that has lost its carrier; 0: none */
	u16 sweep_port;		       /* the first of those that sweeps leave by */
	u32 sweep_ports;	       /* so many that follow each other; 0: none */
	u32 pad;
};

#define SWERVE_PROBE_NEWEST 8 /* interfaces of ours that one peer's requests are told apart by */

/* The newest request of a peer that came in by one interface. */
struct swerve_probe_newest {
	u64 t1_ns;   /* when it left, by the peer's clock */
	u32 ifindex; /* 0: an empty row */
	u32 seq;     /* as on the wire */
};

/* A host whose probes are answered, by its address. */
struct swerve_probe_peer {
	u64 due_ns;	    /* kernel: when its next reply would be due at the rate allowed */
	u16 error_estimate; /* of our timestamps, as replies carry it */
	u16 pad;
	u32 turn;	     /* kernel, and the following: row of `newest` that the next reply may tell of */
	u64 unsigned_due_ns; /* with a key, the same as due_ns of requests that are no probes of swerve */
	u64 told_ns;	     /* t1 of its latest request that named a lost interface; others are replays */
	struct swerve_probe_newest newest[SWERVE_PROBE_NEWEST];
};

/* Where the probes of a path go, and whether answers come back. User space writes the first half. */
struct swerve_probe_path {
	struct swerve_addr remote;  /* the peer's address */
	struct swerve_addr gateway; /* or the same */
	u32 ifindex;		    /* 0: none */
	u16 family;		    /* of the gateway: SWERVE_FAMILY_* */
	u16 generation;		    /* another one for each path that has this row */
	u64 grace_ns;		    /* how late the answer to a probe may be */
	s64 slow_ns;		    /* a sample is slow when its t2 - t1 is longer than this, whatever the clocks */
	u32 limit;		    /* unanswered probes in a row that make the path silent; 0: never */
	u32 slow_limit;		    /* slow samples in a row that wake the agent; 0: never */
	s64 base_ns;		    /* t2 - t1 of a probe that waits for nothing, at base_at_ns */
	s64 base_round_trip_ns;	    /* what such a probe is away, less the time that the peer keeps it */
	u64 base_at_ns;		    /* of the stamping clock */
	u64 base_until_ns;	    /* CLOCK_MONOTONIC; 0: the clocks do not allow to say how long a probe waits */
	s64 base_drift;		    /* base_ns grows by so many 2^-32 ns a nanosecond */
	u64 base_slack_ns;	    /* samples that contradict the bases by more are left out */
	u32 unanswered;		    /* kernel, and the following: probes sent since the last answer came */
	u32 slow;		    /* slow samples in a row */
	u64 first_ns;		    /* when the first of the unanswered was sent; 0: there is none */
	u64 silent_at_ns;	    /* from when on the path is silent unless an answer comes; 0: not known */
	u64 answered_ns;	    /* when the last answer came; 0: none yet */
	u64 back_ns;		    /* when the answer came that ended the last silence; 0: there was none */
	u64 lasted_ns;		    /* that silence, from its first probe on */
	u64 waited_ns;		    /* from probe to that answer: most of the silence, if it was a queue */
	u32 overdue;		    /* 1: the agent was woken because the first of the unanswered is overdue */
	u16 peer_interface;	    /* low bits of the index of the peer's interface that it leads to; 0: not known */
	u16 bare;		    /* 1: its interface has no Ethernet header */
	u64 queue_ns;		    /* how long the newest probe has waited on its way there; see base_until_ns */
	u64 queue_sent_ns;	    /* when that probe left; 0: there is none */
	u64 passed_bytes;	    /* that steer.c has let pass under a hold: how often to probe follows them */
};

enum swerve_probe_session_flag {
	SWERVE_SESSION_SHARED = 1, /* both ends read one clock */
	SWERVE_SESSION_SWEEP = 2,  /* of a sweep: its answers say nothing of whether the path is silent, or slow */
	SWERVE_SESSION_QUEUE = 4,  /* its answers say how long the queue is, to the kernel alone */
};

/* A path and a source port. User space writes all but the last. */
struct swerve_probe_session {
	struct swerve_addr remote;
	u32 path;
	u16 port; /* of ours; 0: no session */
	u16 pad;
	u32 flags; /* enum swerve_probe_session_flag */
	u32 ours;  /* kernel: 1 once the peer is known to run swerve, so that a reply without our TLV is forged */
};

enum swerve_probe_state {
	SWERVE_PROBE_PENDING = 1,     /* handed over, not seen to leave */
	SWERVE_PROBE_OUTSTANDING = 2, /* left */
	SWERVE_PROBE_ANSWERED = 3,
};

/* A probe under way, by session * 2^16 + number modulo slots. */
struct swerve_probe_slot {
	u64 t1_ns;   /* stamping clock when it left */
	u64 sent_ns; /* CLOCK_MONOTONIC of the same instant */
	u64 nonce;
	u32 seq;   /* as on the wire */
	u32 state; /* enum swerve_probe_state */
};

enum swerve_probe_flag {
	SWERVE_PROBE_DUPLICATE = 1, /* another reply to this probe was accepted before */
	SWERVE_PROBE_OURS = 2,	    /* the reflector took its stamps in the kernel, as swerve does */
};

/* A reply that was accepted: the four stamps of a probe. */
struct swerve_probe {
	u64 t1_ns;   /* request left; our stamping clock */
	u64 t2_ns;   /* request came in; the peer's */
	u64 t3_ns;   /* reply left; the peer's */
	u64 t4_ns;   /* reply came in; ours */
	u64 seen_ns; /* CLOCK_MONOTONIC of t4 */
	u32 number;  /* of the probe in its session, modulo 2^20 */
	u16 session;
	u8 ttl;	       /* TTL or hop limit of the reply on arrival */
	u8 sender_ttl; /* of the request on arrival, as the reply says; not covered by a tag */
	u16 bytes;     /* of the reply's UDP payload */
	u8 flags;      /* enum swerve_probe_flag */
	u8 pad;
	u32 agent_age_ms; /* how long ago the peer's agent last showed that it works; all ones: not known */
	u32 other; /* session * 2^20 + number of our newest probe that had come in at another interface; its own: none */
	u32 pad2;
};

/* When a peer's requests came in by an interface. */
struct swerve_probe_requests {
	u64 last_ns;
	u64 count;
};

/* Per-CPU counters of probe.c, by index. Names in user space are these, in lower case, without the prefix. */
enum swerve_probe_counter {
	SWERVE_PROBE_RECORDED = 0,	    /* replies accepted and written to the ring */
	SWERVE_PROBE_REFLECTED = 1,	    /* requests answered */
	SWERVE_PROBE_WIRE_BYTES = 2,	    /* of requests answered, their replies, and replies taken: whole frames */
	SWERVE_PROBE_RING_FULL = 3,	    /* replies accepted, but lost because the ring was full */
	SWERVE_PROBE_SLOTS_FULL = 4,	    /* probes not sent: probe_slots is full */
	SWERVE_PROBE_UNPINNED = 5,	    /* probes not sent: their path is gone */
	SWERVE_PROBE_MALFORMED = 6,	    /* this and the following: taken in on the probe port and dropped */
	SWERVE_PROBE_NO_PEER = 7,	    /* requests of an address that is no configured peer */
	SWERVE_PROBE_REFUSED_PORT = 8,	    /* requests from a port that might answer a reply */
	SWERVE_PROBE_OVER_RATE = 9,	    /* requests beyond the rate allowed to one peer */
	SWERVE_PROBE_MERGED = 10,	    /* several probes merged into one buffer by GRO or GSO */
	SWERVE_PROBE_STRAY = 11,	    /* replies to no probe that is remembered */
	SWERVE_PROBE_FORGED = 12,	    /* replies with another timestamp or nonce than the probe had */
	SWERVE_PROBE_OTHER_PATH = 13,	    /* replies by another interface than the probe's path */
	SWERVE_PROBE_IMPOSSIBLE = 14,	    /* replies whose times cannot be true */
	SWERVE_PROBE_FAILED = 15,	    /* the kernel refused to change or redirect a probe */
	SWERVE_PROBE_ECN_FULL = 16,	    /* packets of peers not counted in path_ecn: it was full */
	SWERVE_PROBE_TOO_LONG = 17,	    /* requests whose reply is longer than the interface takes */
	SWERVE_PROBE_UNSIGNED_REQUEST = 18, /* with a key: probes of a swerve that has none */
	SWERVE_PROBE_FORGED_REQUEST = 19,   /* with a key: probes with a wrong tag */
	SWERVE_PROBE_UNSIGNED_REPLY = 20,   /* with a key: replies without a tag */
	SWERVE_PROBE_LOST_CARRIERS = 21,    /* paths silent because the peer said that its interface lost the carrier */
	SWERVE_PROBE_DOUBTED = 22,	    /* samples that contradict the base delays: not taken for queueing */
	SWERVE_PROBE_SENSED = 23,	    /* replies of sessions that only look at a queue: not recorded */
	SWERVE_PROBE_COUNTERS = 24,
};

#define SWERVE_ECN_PATHS 4096 /* as many as there may be paths */

/* Packets of one peer that came in by one interface: the way back of a path. */
struct swerve_ecn_key {
	struct swerve_addr remote;
	u32 ifindex;
};

/* Counted since the program was loaded, per CPU; a merged buffer is as many packets as it was merged from. */
struct swerve_ecn {
	u64 packets;	/* that can be marked: ECT(0), ECT(1) or CE */
	u64 ce_packets; /* of these, marked */
};

/* ---- observe.c ---------------------------------------------------------------------------------------------- */

#define SWERVE_TUNNELS 4096

/* Outer packets of a tunnel to one peer that leave by one interface. User space says which are counted. */
struct swerve_tunnel {
	struct swerve_addr remote; /* the peer's outer address */
	u32 ifindex;
	u16 port;    /* destination port of UDP; else 0 */
	u8 protocol; /* IPPROTO_* of the outer packets */
	u8 pad;
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

/* So many samples on one CPU within this time: the agent is woken, and has less sampled. */
#define SWERVE_SAMPLE_BURST 1024
#define SWERVE_SAMPLE_BURST_NS 250000000

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

/* What made the kernel send a segment again. */
enum swerve_tcp_cause {
	SWERVE_TCP_FAST = 0,	   /* in Recovery: acknowledgements showed the loss */
	SWERVE_TCP_TIMEOUT = 1,	   /* in Loss: from a timeout until what was outstanding then is acknowledged */
	SWERVE_TCP_TAIL_PROBE = 2, /* in any other state: a probe that repeats the last segment */
	SWERVE_TCP_SYN = 3,	   /* of the handshake: SYN or SYN-ACK */
	SWERVE_TCP_UNKNOWN = 4,	   /* the connection's state is not known */
	SWERVE_TCP_CAUSES = 5,
};

/* What is counted of a connection, and summed over those of a path and of an interface. Counters only grow. */
struct swerve_tcp_counts {
	u64 retransmitted[SWERVE_TCP_CAUSES]; /* segments */
	u64 retransmitted_bytes;	      /* their payload */
	u64 timeouts;
	u64 spurious;	/* segments repeated needlessly, as the peer's DSACKs say */
	u64 sent_bytes; /* payload handed to the network, what was sent again counted once */
	u64 received_bytes;
	u64 segments_out; /* what was sent again included */
	u64 segments_in;
	u64 delivered; /* segments acknowledged */
	u64 delivered_ce;
	u64 zero_windows;    /* times that the peer closed its window */
	u64 resets_sent;     /* by a connection */
	u64 resets_refused;  /* sent for what no connection expected; of paths and interfaces only */
	u64 resets_received; /* those of paths and interfaces also count the ones for a request or in TIME-WAIT */
};

struct swerve_tcp_key {
	struct swerve_addr local;
	struct swerve_addr remote;
	u16 local_port;
	u16 remote_port;
	u32 netns; /* lower half of the row's: two namespaces may use the same addresses */
};

enum swerve_tcp_flag {
	SWERVE_TCP_OLDER = 1,	 /* precedes the agent: counts begin where it was met, not at its beginning */
	SWERVE_TCP_CALLED = 2,	 /* the kernel calls back about its timeouts and its end */
	SWERVE_TCP_ACTIVE = 4,	 /* this host opened it */
	SWERVE_TCP_FIN_SENT = 8, /* what it sent ends with a FIN, which is no payload */
	SWERVE_TCP_CLOSED = 16,	 /* its end was seen: nothing changes any more */
};

#define SWERVE_TCP_STATES 5	      /* Open, Disorder, CWR, Recovery, Loss: enum tcp_ca_state */
#define SWERVE_TCP_STATE_UNKNOWN 0xff /* of `congestion` */

/* A connection as it was when last looked at. Copies of a socket's own record, so losing one loses no count. */
struct swerve_tcp_flow {
	struct swerve_tcp_counts counts;
	u64 congestion_ns[SWERVE_TCP_STATES]; /* time in each congestion state, the present one up to last_ns */
	u64 cookie;			      /* of the socket: tells two connections of one key apart */
	u64 skaddr;			      /* of the socket in the kernel; only to compare with tcp_drops.rx_sk */
	u64 cgroup;			      /* id of the socket's cgroup, 0 when there is none */
	u64 netns;			      /* cookie of its network namespace; 0: the agent's */
	u64 first_ns;
	u64 last_ns;
	u64 acknowledged_bytes;
	u32 ifindex; /* by which it left last */
	u32 srtt_us;
	u32 min_rtt_us; /* all ones: none yet */
	u32 cwnd;
	u32 ssthresh; /* 0x7fffffff and above: not met congestion */
	u32 mss;
	u32 rate_delivered; /* segments within rate_interval_us */
	u32 rate_interval_us;
	u8 state;      /* enum of the kernel: 1 ESTABLISHED ... 12 NEW_SYN_RECV */
	u8 congestion; /* enum tcp_ca_state, or SWERVE_TCP_STATE_UNKNOWN */
	u8 ecn_flags;  /* 1: negotiated */
	u8 flags;      /* enum swerve_tcp_flag */
	u32 pad;
};

/* All connections with one address by one interface. */
struct swerve_tcp_path_key {
	struct swerve_addr remote;
	u32 ifindex;
};

/* All connections of another network namespace, by its cookie. */
struct swerve_tcp_namespace {
	struct swerve_tcp_counts counts;
	u64 connections; /* seen, each once */
	u64 cgroup;	 /* of a socket in it; 0: not known */
};

/*
 * By socket cookie, what is to be taken off a socket's totals when it is met first. User space writes an entry for
 * every socket that precedes the agent, the kernel those of requests whose SYN-ACK it saw sent again.
 */
struct swerve_tcp_accounted {
	u64 segments;	/* total_retrans so far */
	u64 timeouts;	/* of these, SYN-ACKs that a timeout sent; user space writes 0 */
	u64 last_ns;	/* of the last SYN-ACK; 0 in what user space wrote */
	u32 older;	/* 1: precedes the agent, whatever else it has counted is not ours */
	u32 congestion; /* enum tcp_ca_state as tcpi_ca_state has it; with `older` only */
};

/* Congestion state by socket address, kept by a tracepoint. */
struct swerve_tcp_congestion {
	u64 since_ns;
	u64 spent_ns[SWERVE_TCP_STATES];
	u64 state;
};

/* The only entry of tcp_settings. */
struct swerve_tcp_settings {
	u64 netns_cookie; /* SO_NETNS_COOKIE of the agent's namespace */
	u64 refresh_ns;	  /* how often a busy connection is looked at */
	u64 namespaces;	  /* enum swerve_tcp_namespaces */
};

/* Whose connections are followed. */
enum swerve_tcp_namespaces {
	SWERVE_TCP_OWN = 0,
	SWERVE_TCP_ALL = 1,
	SWERVE_TCP_AUTO = 2, /* all for an agent in the initial network namespace, else its own */
};

/* Per-CPU counters of tcp.c, by index. */
enum swerve_tcp_counter {
	SWERVE_TCP_FLOWS_CREATED = 0,	/* rows made; a live connection whose row was evicted gets another */
	SWERVE_TCP_FLOWS_REPLACED = 1,	/* of these, in the row of an earlier connection with the same key */
	SWERVE_TCP_FLOWS_FULL = 2,	/* looks at connections that got no row */
	SWERVE_TCP_PATHS_FULL = 3,	/* additions that are in an interface's counts only: tcp_paths is full */
	SWERVE_TCP_INTERFACES_FULL = 4, /* additions to the counts of interface 0, which stands for all without a row */
	SWERVE_TCP_LOST = 5,		/* additions that found no row at all: missing from every total */
	SWERVE_TCP_SYNACKS_FULL = 6,	/* SYN-ACKs counted only once their connection is there, if ever */
	SWERVE_TCP_DEFERRED = 7,	/* looks put off: no storage for the socket, or another CPU was at it */
	SWERVE_TCP_CONGESTION_FULL = 8, /* changes of congestion state not kept: tcp_congestion is full */
	SWERVE_TCP_UNSIZED = 9,		/* segments sent again whose bytes were not seen: they never came by here */
	SWERVE_TCP_MET = 10,		/* connections seen, each once */
	SWERVE_TCP_CONGESTION_MISSED = 11, /* changes of state that were not seen, but showed in what was sent again */
	SWERVE_TCP_NAMESPACES_FULL = 12,   /* looks that are in the counts of no namespace: tcp_namespaces is full */
	SWERVE_TCP_COUNTERS = 13,
};

/* ---- drops.c ------------------------------------------------------------------------------------------------ */

#define SWERVE_DROP_REASONS 1024 /* numbers at and above are counted under the last one */

/* Packets dropped for one reason that were about to be delivered to one socket. */
struct swerve_drop_key {
	u64 rx_sk; /* address of the socket, as in swerve_tcp_flow.skaddr */
	u64 reason;
};

/* The latest such packets of a CPU, all of one key, which are not in drops_by_socket yet. */
struct swerve_drop_run {
	struct swerve_drop_key key;
	u64 packets;
};

/* ---- steer.c ------------------------------------------------------------------------------------------------ */

#define SWERVE_STEER_FLOWS 4096 /* flows that can be pinned or relabelled at once */
#define SWERVE_STEER_SETS 8192	/* a power of two; chance fills a set in 1 of 40,000 full tables (4096: in 1 of 220) */
#define SWERVE_STEER_WAYS 8
#define SWERVE_STEER_TARGETS 4096
#define SWERVE_STEER_SEEN 0x80000000

/* A flow by its five fields, as the host sees it that sends it. */
struct swerve_flow {
	struct swerve_addr local;
	struct swerve_addr remote;
	u16 local_port;
	u16 remote_port;
	u8 protocol; /* IPPROTO_TCP or IPPROTO_UDP */
	u8 pad[3];
};

/*
 * Where a flow's row is: an entry in the set that the lower half of its hash names, which is the upper half of the hash
 * (with its lowest bit set) over the number of the row. 0: no entry. The hash of the flow's five 64-bit words w, from
 * h = seed: h = (h ^ w) * 0x9e3779b97f4a7c15, then h = h ^ h >> 32, word by word.
 */
struct swerve_steer_set {
	u64 entries[SWERVE_STEER_WAYS];
};

/*
 * What is wanted of one flow, and what came of it. User space writes the first half in place, a row before its entry;
 * the kernel writes the other. A lease holds until a moment of CLOCK_MONOTONIC, which the kernel looks at for every
 * packet (to two ticks: at most 20 ms late); 0: there is none.
 */
struct swerve_steer_row {
	struct swerve_flow flow;
	u64 pin_until_ns;
	u64 label_until_ns;
	u32 target; /* row of steer_targets */
	u32 label;  /* IPv6 flow label, 20 bits */
	u64 tick;   /* of the clock reading that follows */
	u64 now_ns;
	u64 packets; /* that left by the target while the pin held, by routing or redirected; segments, not buffers */
	u64 bytes;   /* the same, with the headers of each segment */
	u64 last_ns; /* when the last of them left */
	u64 relabelled;	    /* packets that left with another label than they came with */
	u64 watch_until_ns; /* a lease that only keeps the row: which label its packets come with is to be known */
	u32 seen;	    /* that label and SWERVE_STEER_SEEN; 0: no packet has come */
	u32 pad;
};

/* A nexthop that flows can be pinned to. Written by user space, filled before it is alive; the last two by the kernel. */
struct swerve_steer_target {
	struct swerve_addr gateway;
	u32 ifindex; /* 0: an empty row */
	u32 family;  /* of the gateway: SWERVE_FAMILY_* */
	u32 alive;   /* 0: its neighbour, its link or the way behind is dead, so its flows go as they are routed */
	u32 nexthop_id;
	u32 pad[6];
	u32 mtu; /* of the interface, at this tick; 0: there is none */
	u32 tick;
};

#define SWERVE_STANDBYS 4096
#define SWERVE_STANDBY_PREFIXES 65536

/* Packets to a prefix that leave by an interface, and which stand-by they have. The prefix is of both fields. */
struct swerve_standby_key {
	u32 bits;    /* 32, and those of the prefix: of an IPv4 prefix 96 more than it has */
	u32 ifindex; /* in network byte order, as a prefix wants it */
	struct swerve_addr to;
};

/*
 * Where packets go while the path that they are routed along is silent. User space writes the first half, and writes
 * it anew under another row when something in it changes: the kernel may be reading it.
 */
struct swerve_standby {
	u32 path;	/* row of probe_paths */
	u32 other;	/* the same of the path that stands by */
	u16 generation; /* of the rows' paths: with another one in the row, nothing is moved */
	u16 other_generation;
	u32 target;   /* row of steer_targets */
	u64 packets;  /* kernel, and the following: moved so far; segments, not buffers */
	u64 bytes;    /* the same, with the headers of each segment */
	u64 first_ns; /* the first packet of the present or last move */
	u64 last_ns;  /* and the last */
};

/* The only entry of steer_settings. */
struct swerve_steer_settings {
	u64 flows;	      /* how many are pinned or relabelled; 0: look for none */
	u64 seed;	      /* of the hash */
	u64 standby_until_ns; /* the lease of all stand-bys; 0: there are none */
	u64 hold_ns;	      /* for so long after a silent path answers again its packets stay on the stand-by */
	u64 held_until_ns;    /* the lease of all holds; 0: there are none */
};

/* How packets to a destination are held on a path, as steer/hold_law.h takes it. Written by user space. */
struct swerve_hold_limits {
	u64 until_ns;	  /* the lease; past it nothing is held */
	u64 second_ns;	  /* when a second of CLOCK_REALTIME began: what is done in turns all hosts do at once */
	u64 threshold_ns; /* the queueing that is wanted on the path; more than 0 */
	u64 longest_ns;	  /* no packet waits longer; at most a second */
	u64 fresh_ns;	  /* for how long a sample counts; at most a second */
	u64 floor;	  /* bytes a second that may always leave */
	u64 gain;	  /* of 256: how much of the queueing above the threshold a pause is to drain */
};

/* What steer/hold_law.h keeps between packets and samples, of one destination and path. User space only clears it. */
struct swerve_hold_state {
	u64 next_ns;  /* when the next packet may leave */
	u64 last_ns;  /* when the last held one may */
	u64 held_ns;  /* when a packet was held last */
	u64 rate;     /* bytes a second; 0: as many as come */
	u64 gap;      /* the same as ns a byte, times 2^20 */
	u64 bytes;    /* that have come by */
	u64 taken_ns; /* the newest sample: when it came */
	u64 sent_ns;  /* when its probe left */
	u64 queue_ns; /* what it says */
	u64 pause_ns; /* the last pause: its begin and its end */
	u64 pause_end_ns;
	u64 window_ns; /* since when the own rate is measured, and from which count */
	u64 window_bytes;
	u64 own_rate; /* bytes a second: the largest of late */
	u64 left_ns;  /* when a packet came last */
	u64 burst_ns; /* since the last silence: when the first packet came, and after which count */
	u64 burst_bytes;
	u64 burst_rate; /* bytes a second, of the last burst of which packets were held; 0: unknown */
	u64 short_ns;	/* when the queue was last as short as held hosts alone keep it */
};

#define SWERVE_HOLDS 1024

/* Packets along a path, which are held while its queue is long. User space writes path, generation and limits. */
struct swerve_hold {
	u32 path;	/* row of probe_paths */
	u16 generation; /* of the path in that row: with another one there, nothing is held */
	u16 pad;
	struct swerve_hold_limits limits;
	u64 sample_ns; /* kernel, and the following: when the probe left that was looked at last */
	struct swerve_hold_state state;
	u64 packets;   /* held so far; segments, not buffers */
	u64 bytes;     /* the same, with the headers of each segment */
	u64 waited_ns; /* the sum of the times that these buffers were held for */
	u64 samples;   /* taken */
	u64 above;     /* of these, above the threshold */
};

/* Per-CPU counters of steer.c, by index; of packets, not of the buffers that they travel in. */
enum swerve_steer_counter {
	SWERVE_STEER_REDIRECTED = 0, /* to the target of their pin */
	SWERVE_STEER_ON_TARGET = 1,  /* left by the target of their pin: redirected there before, or routed there */
	SWERVE_STEER_EXPIRED = 2,    /* this and the next: of a pinned flow, but left to routing */
	SWERVE_STEER_DEAD = 3,	     /* the target is */
	SWERVE_STEER_MISSING = 4,    /* the pin names no target */
	SWERVE_STEER_TOO_LARGE = 5,  /* for the target's MTU */
	SWERVE_STEER_EXEMPT = 6,     /* probes of ours, multicast, under a VLAN tag */
	SWERVE_STEER_REFUSED = 7,    /* the kernel would not redirect it, or not write into it */
	SWERVE_STEER_FRAGMENTS = 8,  /* of any flow: they lack ports, or their others do */
	SWERVE_STEER_UNREADABLE = 9, /* headers that are cut off */
	SWERVE_STEER_RELABELLED = 10,
	SWERVE_STEER_LABEL_EXPIRED = 11, /* of a relabelled flow, but left as they are */
	SWERVE_STEER_REROUTED = 12,	 /* to a stand-by */
	SWERVE_STEER_NO_STANDBY = 13,	 /* this and the next: routed along a silent path; its stand-by is no better */
	SWERVE_STEER_UNLEASED = 14,	 /* nobody has renewed the lease */
	SWERVE_STEER_HELD = 15,		 /* given a later time to leave at */
	SWERVE_STEER_HOLD_UNLEASED = 16, /* this and the next: to a held destination, but not held: no lease */
	SWERVE_STEER_HOLD_BLIND = 17,	 /* nothing is known of the path's queue, or nothing new */
	SWERVE_STEER_RETRIED = 18,	 /* TCP's retries, to a stand-by, while the path may be silent */
	SWERVE_STEER_COUNTERS = 19,
};

/* ---- connect.c ---------------------------------------------------------------------------------------------- */

#define SWERVE_CONNECT_DESTINATIONS 256
#define SWERVE_CONNECT_PORTS 256 /* of one destination; a power of two */
#define SWERVE_CONNECT_TRIES 8	 /* ports that are tried for one connection */

/* An IPv4 address and a TCP port that this host connects to; both in network byte order. */
struct swerve_connect_to {
	u32 address;
	u16 port;
	u16 pad;
};

/* The local ports whose connections to a destination take a good way behind the first router. */
struct swerve_connect_ports {
	u32 count; /* of ports; 0: none is known yet */
	u16 ports[SWERVE_CONNECT_PORTS];
};

/* The only entry of connect_settings. */
struct swerve_connect_settings {
	u64 until_ns;	  /* the lease of all ports */
	u64 netns_cookie; /* of the network namespace that is steered */
};

/* Per-CPU counters of connect.c, by index; of connections to destinations in the table. */
enum swerve_connect_counter {
	SWERVE_CONNECT_CHOSEN = 0,  /* given a port; the others keep what they have, or take what the kernel gives */
	SWERVE_CONNECT_IN_USE = 1,  /* all ports that were tried are */
	SWERVE_CONNECT_NO_PORT = 2, /* none is known */
	SWERVE_CONNECT_EXPIRED = 3, /* nobody has renewed the lease */
	SWERVE_CONNECT_BOUND = 4,   /* the application chose port, source address, interface or mark, or reuses ports */
	SWERVE_CONNECT_COUNTERS = 5,
};

/* ---- lab_faults.c -------------------------------------------------------------------------------------------- */

/* Per-CPU counters of lab_faults.c, by index; of packets, not of the buffers that they travel in. */
enum swerve_lab_counter {
	SWERVE_LAB_ABLE = 0,	 /* that could be marked */
	SWERVE_LAB_MARKED = 1,	 /* of these, marked here */
	SWERVE_LAB_TOO_LONG = 2, /* lost because they were too long */
	SWERVE_LAB_LOST = 3,	 /* lost on a cut cable */
	SWERVE_LAB_RANDOM = 4,	 /* lost at random */
	SWERVE_LAB_COUNTERS = 5,
};

/* ---- rdma.c, and the tap (pytools/sources/rdma/tap) ---------------------------------------------------------- */

#define SWERVE_QPS 512	       /* queue pairs in one table; a table is one mappable array map */
#define SWERVE_TIMED 64	       /* requests whose times are kept, per queue pair */
#define SWERVE_RUN_SHIFT 6     /* requests are timed in runs of 64 that follow each other */
#define SWERVE_OPCODES 16      /* enum ibv_wr_opcode; the last is "other" */
#define SWERVE_STATUSES 24     /* enum ibv_wc_status; the last is "other" */
#define SWERVE_DEVICE_BYTES 16 /* of a device's name, cut to fit */

enum swerve_qp_state {
	SWERVE_QP_FREE = 0,
	SWERVE_QP_LIVE = 1,
	SWERVE_QP_CLOSED = 2, /* destroyed; its counts stay until user space frees the slot */
};

/* One work request of a send queue that has been completed, by itself or by a later signalled one. */
struct swerve_timed_request {
	u64 number; /* counted from 0 in the order of posting */
	u64 posted_ns;
	u64 completed_ns;
	u64 bytes;
};

/*
 * One queue pair. Counters only grow, but for what the provider refuses, which is taken back; user space reads them while
 * they are written, each of 64 bits at once.
 * Outstanding is posted less completed: both raised before and after the device is told, so it is never negative.
 * Times are CLOCK_MONOTONIC.
 */
struct swerve_qp {
	u64 context; /* address of the process' struct ibv_context: tells two devices of one process apart */
	u32 tgid;
	u32 qp_number;
	u32 remote_qp_number; /* all ones: not known */
	u16 state;
	u8 qp_type; /* enum ibv_qp_type */
	u8 srq;	    /* receives come from a shared receive queue */
	char device[SWERVE_DEVICE_BYTES];
	struct swerve_addr remote; /* GID of the peer, zero when not known */
	struct swerve_addr local;  /* GID of ours, zero when not known */
	u64 created_ns;
	u64 posted; /* send queue: work requests, less those that the provider refused */
	u64 posted_bytes;
	u64 completed; /* retired, unsignalled ones included */
	u64 completed_bytes;
	u64 completions; /* entries polled for the send queue */
	u64 signalled;	 /* of the posted, those that ask for a completion: others may stay outstanding for ever */
	u64 refused;	 /* requests that the provider did not take */
	u64 receives_posted;
	u64 receives_completed;
	u64 received_bytes;
	u64 untracked; /* requests that found no room to be followed: counted as posted and completed at once */
	u64 opcodes[SWERVE_OPCODES];
	u64 statuses[SWERVE_STATUSES]; /* completions of both queues; index 0 is success */
	u64 run_mask; /* written by user space: a run is timed when its number & run_mask is 0; all ones: none */
	u64 timed;    /* requests ever written to timed_requests; the newest is at (timed - 1) % SWERVE_TIMED */
	struct swerve_timed_request timed_requests[SWERVE_TIMED];
};

/* Per-CPU counters of rdma.c, by index. Names in user space are these, in lower case, without the prefix. */
enum swerve_rdma_counter {
	SWERVE_RDMA_HITS = 0,	    /* of all probes */
	SWERVE_RDMA_TABLE_FULL = 1, /* calls and completions of queue pairs that found no row */
	SWERVE_RDMA_FAULTS = 2,	    /* the application's memory could not be read: not counted */
	SWERVE_RDMA_TOO_LONG = 3,   /* lists, or completions of one poll, beyond what is looked at */
	SWERVE_RDMA_CALLS_LOST = 4, /* calls whose entry or return was not seen */
	SWERVE_RDMA_UNMATCHED = 5,  /* completions of requests posted before the probes were there */
	SWERVE_RDMA_UNNAMED = 6,    /* completions of extended queues whose queue pair nobody asked for */
	SWERVE_RDMA_COUNTERS = 7,
};

/*
 * Rings carry no type that the loader could read back, so each record type is declared by an array map that is never
 * used otherwise.
 */
#define SWERVE_RECORD(name, type) BPF_ARRAY(layout_##name, type, 1)

#endif /* SWERVE_H */
