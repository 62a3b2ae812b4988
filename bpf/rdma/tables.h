/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The tables of rdma.c, and how it counts what goes wrong. */
#ifndef SWERVE_RDMA_TABLES_H
#define SWERVE_RDMA_TABLES_H

#include "lib/bcc.h"
#include "lib/counters.h"
#include "rdma/state.h"
#include "rdma/verbs.h"
#include "swerve.h"

BPF_TABLE("array", u32, struct queue, rdma_queues, SWERVE_QPS);
BPF_F_TABLE("array", u32, struct swerve_qp, rdma_table, SWERVE_QPS, MAPPABLE);
BPF_HASH(rdma_slots, struct qp_key, u32, 2 * SWERVE_QPS);
BPF_QUEUE(rdma_free, u32, SWERVE_QPS);
BPF_TABLE("lru_hash", u32, struct call, rdma_calls, 16384);
BPF_TABLE("lru_hash", u32, struct control, rdma_controls, 1024);
BPF_TABLE("lru_hash", u32, struct poll, rdma_polls, 16384);
BPF_TABLE("lru_hash", struct qp_key, u32, rdma_cqs,
	  2 * SWERVE_QPS); /* completion queue (context: its address) -> row */
BPF_TABLE("lru_hash", struct qp_key, struct shared, rdma_shared, 2 * SWERVE_QPS); /* by a shared queue's address */
BPF_ARRAY(rdma_ports, struct qp_port, SWERVE_QPS);
BPF_PERCPU_ARRAY(rdma_counters, u64, SWERVE_RDMA_COUNTERS);
BPF_PROG_ARRAY(rdma_more, 8);

/*
 * The first and the last statement of a loop's body, with what it counts by: a jump, and no instruction can be moved
 * past it. Before 6.2 the verifier takes a loop for one without end when something else than a jump leads to its head.
 */
#define AROUND(counter) asm volatile("goto +0" : "+r"(counter) : : "memory")

/* Hide from the compiler what it knows of a variable, so that it keeps the checks that the verifier looks for. */
#define OPAQUE(variable) asm volatile("" : "+r"(variable))

static __always_inline void count(u32 counter, u64 more)
{
	raise(rdma_counters.lookup(&counter), more);
}

static __always_inline void add(u64 *value, u64 more)
{
	__sync_fetch_and_add(value, more);
}

#endif /* SWERVE_RDMA_TABLES_H */
