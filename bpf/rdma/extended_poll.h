/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The extended way to poll: ibv_start_poll, ibv_next_poll, ibv_end_poll, and a call for each field. */
#ifndef SWERVE_RDMA_EXTENDED_POLL_H
#define SWERVE_RDMA_EXTENDED_POLL_H

#include "rdma/complete.h"

/*
 * The verbs' structure shows a completion's number and status. Whose it is, the application asks the provider, and we
 * listen to the answer; if it does not ask, the completion queue tells it as long as one queue pair alone uses it.
 */
static __always_inline struct poll *poll_of_thread(void)
{
	u32 thread = bpf_get_current_pid_tgid();

	count(SWERVE_RDMA_HITS, 1);
	return rdma_polls.lookup(&thread);
}

/* The application has done with a completion. */
static __always_inline void settle(struct poll *poll)
{
	struct qp_key key = { .context = poll->cq };
	struct verbs_completion completion;
	struct swerve_qp *row;
	u32 *there, slot;
	u64 now_ns = 0;

	if (!poll->pending)
		return;
	poll->pending = 0;
	completion = poll->completion;
	if (completion.qp_number == UNKNOWN) {
		key.tgid = bpf_get_current_pid_tgid() >> 32;
		there = rdma_cqs.lookup(&key);
		slot = there ? *there : NO_ROW;
		row = rdma_table.lookup(&slot);
		if (!row) {
			count(SWERVE_RDMA_UNNAMED, 1);
			return;
		}
		completion.qp_number = row->qp_number;
	}
	complete(poll->rows, poll->cq, &completion, &now_ns);
}

static __always_inline int settle_last(void)
{
	struct poll *poll = poll_of_thread();

	if (poll)
		settle(poll);
	return 0;
}

/* Take what the structure shows of the completion that the provider has moved on to. */
static __always_inline int take(struct pt_regs *ctx)
{
	struct poll *poll = poll_of_thread();
	struct {
		u32 status;
		u64 wr_id;
	} __attribute__((packed)) shown;

	if (!poll || (u32)PT_REGS_RC(ctx))
		return 0;
	if (bpf_probe_read_user(&shown, sizeof(shown), (void *)poll->cq + CQ_EX_STATUS)) {
		count(SWERVE_RDMA_FAULTS, 1);
		return 0;
	}
	poll->completion.wr_id = shown.wr_id;
	poll->completion.status = shown.status;
	poll->completion.opcode = UNKNOWN;
	poll->completion.qp_number = UNKNOWN;
	poll->completion.bytes = 0;
	poll->pending = 1;
	return 0;
}

int rdma_start_poll(struct pt_regs *ctx)
{
	u32 thread = bpf_get_current_pid_tgid();
	struct poll *poll = poll_of_thread(), fresh = { .cq = PT_REGS_PARM1(ctx) };

	if (!poll) {
		rdma_polls.update(&thread, &fresh);
		return 0;
	}
	poll->cq = fresh.cq;
	poll->pending = 0;
	return 0;
}

int rdma_start_poll_return(struct pt_regs *ctx)
{
	return take(ctx);
}

int rdma_next_poll(struct pt_regs *ctx)
{
	return settle_last();
}

int rdma_next_poll_return(struct pt_regs *ctx)
{
	return take(ctx);
}

int rdma_end_poll(struct pt_regs *ctx)
{
	return settle_last();
}

int rdma_read_opcode_return(struct pt_regs *ctx)
{
	struct poll *poll = poll_of_thread();

	if (poll)
		poll->completion.opcode = PT_REGS_RC(ctx);
	return 0;
}

int rdma_read_qp_num_return(struct pt_regs *ctx)
{
	struct poll *poll = poll_of_thread();

	if (poll)
		poll->completion.qp_number = PT_REGS_RC(ctx);
	return 0;
}

int rdma_read_byte_len_return(struct pt_regs *ctx)
{
	struct poll *poll = poll_of_thread();

	if (poll)
		poll->completion.bytes = PT_REGS_RC(ctx);
	return 0;
}

#endif /* SWERVE_RDMA_EXTENDED_POLL_H */
