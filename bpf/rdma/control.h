/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Queue pairs are made, connected, reset and destroyed. */
#ifndef SWERVE_RDMA_CONTROL_H
#define SWERVE_RDMA_CONTROL_H

#include "rdma/rows.h"

static __always_inline struct control *end_control(u32 kind)
{
	u32 thread = bpf_get_current_pid_tgid();
	struct control *control = rdma_controls.lookup(&thread);

	count(SWERVE_RDMA_HITS, 1);
	if (!control || control->kind != kind)
		return NULL;
	control->kind = CONTROL_NONE;
	return control;
}

/* ibv_create_qp and ibv_create_qp_ex: the attributes begin alike. */
int rdma_create_qp(struct pt_regs *ctx)
{
	struct control control = { .kind = CONTROL_CREATE };
	u32 thread = bpf_get_current_pid_tgid();

	count(SWERVE_RDMA_HITS, 1);
	if (bpf_probe_read_user(&control.all_signalled, sizeof(control.all_signalled),
				(void *)PT_REGS_PARM2(ctx) + INIT_SIGNAL_ALL))
		count(SWERVE_RDMA_FAULTS, 1);
	rdma_controls.update(&thread, &control);
	return 0;
}

int rdma_create_qp_return(struct pt_regs *ctx)
{
	struct control *control = end_control(CONTROL_CREATE);
	struct swerve_qp *row;
	struct verbs_qp qp;
	struct queue *queue;
	struct qp_key key;
	u32 slot, *there;

	if (!control || !PT_REGS_RC(ctx) || !read_qp(&qp, PT_REGS_RC(ctx)))
		return 0;
	name_qp(&key, qp.context, qp.number);
	there = rdma_slots.lookup(&key);
	slot = there ? *there : NO_ROW;
	row = rdma_table.lookup(&slot);
	if (row && (row->posted || row->receives_posted || row->completions)) {
		close_row(&key); /* its end was not seen */
		row = NULL;
	}
	if (!row)
		slot = open_row(&qp, &key);
	queue = rdma_queues.lookup(&slot);
	if (!queue)
		return 0;
	queue->all_signalled = control->all_signalled;
	queue->told = 1;
	return 0;
}

static __always_inline bool name_of(struct qp_key *key, u64 address)
{
	struct verbs_qp qp;

	if (!read_qp(&qp, address))
		return false;
	name_qp(key, qp.context, qp.number);
	return true;
}

int rdma_destroy_qp(struct pt_regs *ctx)
{
	struct control control = { .kind = CONTROL_DESTROY };
	u32 thread = bpf_get_current_pid_tgid();

	count(SWERVE_RDMA_HITS, 1);
	if (name_of(&control.key, PT_REGS_PARM1(ctx)))
		rdma_controls.update(&thread, &control);
	return 0;
}

int rdma_destroy_qp_return(struct pt_regs *ctx)
{
	struct control *control = end_control(CONTROL_DESTROY);
	struct qp_key key;

	if (!control || (u32)PT_REGS_RC(ctx))
		return 0;
	key = control->key;
	close_row(&key);
	return 0;
}

int rdma_modify_qp(struct pt_regs *ctx)
{
	struct control control = { .kind = CONTROL_MODIFY, .mask = PT_REGS_PARM3(ctx) };
	u32 thread = bpf_get_current_pid_tgid();
	void *attributes = (void *)PT_REGS_PARM2(ctx);

	count(SWERVE_RDMA_HITS, 1);
	if (!name_of(&control.key, PT_REGS_PARM1(ctx)))
		return 0;
	if (bpf_probe_read_user(&control.state, sizeof(control.state), attributes) ||
	    bpf_probe_read_user(&control.remote_qp_number, sizeof(u32), attributes + ATTR_DEST_QPN) ||
	    bpf_probe_read_user(&control.remote, sizeof(control.remote), attributes + ATTR_DGID) ||
	    bpf_probe_read_user(&control.sgid_index, sizeof(u8), attributes + ATTR_SGID_INDEX) ||
	    bpf_probe_read_user(&control.port, sizeof(u8), attributes + ATTR_PORT)) {
		count(SWERVE_RDMA_FAULTS, 1);
		return 0;
	}
	rdma_controls.update(&thread, &control);
	return 0;
}

/* What was outstanding at a reset is forgotten by the device. */
static __always_inline void reset(struct swerve_qp *row, struct queue *queue)
{
	queue->head = queue->tail;
	queue->open_bytes = 0;
	queue->open_requests = 0;
	queue->gap = 0;
	queue->gap_bytes = 0;
	queue->published = 1;
	queue->oldest = queue->number;
	row->completed_bytes = row->posted_bytes;
	row->completed = row->posted;
}

int rdma_modify_qp_return(struct pt_regs *ctx)
{
	struct control *control = end_control(CONTROL_MODIFY);
	struct swerve_qp *row;
	struct qp_port *port;
	struct queue *queue;
	struct qp_key key;
	u32 slot, *there;

	if (!control || (u32)PT_REGS_RC(ctx))
		return 0;
	key = control->key;
	there = rdma_slots.lookup(&key);
	slot = there ? *there : NO_ROW;
	row = rdma_table.lookup(&slot);
	queue = rdma_queues.lookup(&slot);
	port = rdma_ports.lookup(&slot);
	if (!row || !queue || !port)
		return 0;
	if (control->mask & QP_DEST_QPN)
		row->remote_qp_number = control->remote_qp_number;
	if (control->mask & QP_AV) {
		row->remote = control->remote;
		port->port = control->port;
		port->gid_index = control->sgid_index;
		port->known = 1;
	}
	if (control->mask & QP_STATE && control->state == QPS_RESET)
		reset(row, queue);
	return 0;
}

#endif /* SWERVE_RDMA_CONTROL_H */
