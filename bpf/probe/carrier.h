/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A peer that loses the carrier of an interface says so over its other paths, and the path that leads to that interface
 * is silent at once: nobody waits for probes that cannot be answered.
 *
 * A reply names the interface that its request came in by, so each host learns which interface of the peer a path leads
 * to. Interfaces go by the low 16 bits of their index; zero is none.
 */
#ifndef SWERVE_PROBE_CARRIER_H
#define SWERVE_PROBE_CARRIER_H

#include "probe/stamp.h"

/* There is nothing to read, but the agent is to look at once. */
static __always_inline void wake_agent(void)
{
	struct swerve_probe *none = probes.ringbuf_reserve(sizeof(*none));

	if (none)
		probes.ringbuf_discard(none, BPF_RB_FORCE_WAKEUP);
}

/* The path that this reply came along, a row of probe_paths, leads to this interface of the peer. */
static __always_inline void learn_interface(struct udp_packet *packet, struct swerve_probe_path *path, u32 row,
					    u16 interface)
{
	if (!interface || path->peer_interface == interface)
		return;
	packet->interface.remote = packet->source;
	packet->interface.ifindex = interface;
	if (!probe_peer_interfaces.update(&packet->interface, &row))
		path->peer_interface = interface;
}

/* No packet arrives at the sender of this one by this interface any more; to be called for what is authenticated alone. */
static __always_inline void note_lost_carrier(struct udp_packet *packet, struct swerve_probe_settings *known,
					      u16 interface, u64 now)
{
	struct swerve_probe_path *path;
	u32 *row;

	if (!interface)
		return;
	packet->interface.remote = packet->source;
	packet->interface.ifindex = interface;
	row = probe_peer_interfaces.lookup(&packet->interface);
	if (!row)
		return;
	path = probe_paths.lookup(row);
	if (!path || path->peer_interface != interface || !same_address(&path->remote, &packet->source))
		return;
	if (!path->limit || (path->silent_at_ns && path->silent_at_ns <= now))
		return; /* never answered, or silent already */
	/* The peer answers its other paths, as far as their last answers are no older than this one's. */
	path->first_ns = path->answered_ns - path->grace_ns;
	if (path->unanswered < path->limit)
		path->unanswered = path->limit;
	path->silent_at_ns = now;
	known->silence_ns = now;
	count(SWERVE_PROBE_LOST_CARRIERS, 1);
	wake_agent();
}

#endif /* SWERVE_PROBE_CARRIER_H */
