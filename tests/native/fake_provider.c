/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A provider whose device is memory: what is posted is carried out at once, in the caller, and completes in the
 * order of posting. A connected pair within the process hands messages to each other's receives. Built several times
 * with another PROVIDER, so that a process has several providers.
 *
 * One spin lock per context, as providers have one per queue. A signalled completion gives back the room of its
 * request and of all earlier ones when it is polled, not before.
 */
#include <stdbool.h>
#include <stdlib.h>

#include "fake.h"

#define PASTE(a, b) a##b
#define NAMED(a, b) PASTE(a, b)
#define TEXT(a) #a
#define STRING(a) TEXT(a)

struct request {
	uint64_t wr_id;
	uint32_t opcode;
	uint32_t bytes;
	bool signalled;
};

struct entry {
	struct ibv_wc wc;
	struct queue_pair *qp;
	uint64_t frees; /* requests of qp whose room is given back when this is polled */
};

struct queue {
	union {
		struct ibv_cq cq;
		struct ibv_cq_ex ex;
	};
	struct entry *ring;
	struct ibv_wc current;
	uint64_t head, tail, mask;
};

struct receive {
	uint64_t wr_id;
};

struct receives {
	struct receive *ring;
	uint64_t head, tail, mask, limit;
};

struct shared_receives {
	struct ibv_srq srq;
	struct receives receives;
};

struct queue_pair {
	union {
		struct ibv_qp qp;
		struct ibv_qp_ex ex;
	};
	struct queue_pair *next;
	bool extended, signal_all, stalled, errored;
	uint32_t remote;
	int fail;
	long refuse; /* requests until one is refused; 0: none is */
	struct request *ring;
	uint64_t freed, done, tail, mask, limit;
	uint64_t batch; /* extended posts that are not complete yet */
	int batch_error;
	struct receives receives;
};

struct instance {
	struct fake_context fake;
	pthread_spinlock_t lock;
	struct queue_pair *pairs;
	uint32_t next_number;
};

static struct instance *instance_of(struct ibv_context *context)
{
	return (struct instance *)((char *)context - offsetof(struct instance, fake.verbs.context));
}

static uint64_t power_of_two(uint64_t at_least)
{
	uint64_t size = 16;

	while (size < at_least)
		size *= 2;
	return size;
}

static void complete(struct queue_pair *qp, struct ibv_cq *where, struct ibv_wc wc, uint64_t frees)
{
	struct queue *queue = (struct queue *)where;

	if (queue->tail - queue->head > queue->mask)
		abort(); /* overrun: the test posts more than its queue holds */
	wc.qp_num = qp->qp.qp_num;
	queue->ring[queue->tail++ & queue->mask] = (struct entry){ wc, qp, frees };
}

static struct queue_pair *pair_of(struct instance *instance, uint32_t number)
{
	struct queue_pair *each = instance->pairs;

	while (each && each->qp.qp_num != number)
		each = each->next;
	return each;
}

static struct receives *receives_of(struct queue_pair *qp)
{
	return qp->qp.srq ? &((struct shared_receives *)qp->qp.srq)->receives : &qp->receives;
}

static bool needs_receive(uint32_t opcode)
{
	return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_SEND_WITH_INV ||
	       opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

static int deliver(struct instance *instance, struct queue_pair *qp, const struct request *request)
{
	struct queue_pair *peer = qp->remote ? pair_of(instance, qp->remote) : NULL;
	bool with_immediate = request->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
	struct receives *receives;
	struct ibv_wc wc = { 0 };

	if (!peer || !needs_receive(request->opcode))
		return IBV_WC_SUCCESS;
	receives = receives_of(peer);
	if (receives->head == receives->tail)
		return IBV_WC_RNR_RETRY_EXC_ERR;
	wc.wr_id = receives->ring[receives->head++ & receives->mask].wr_id;
	wc.opcode = with_immediate ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV;
	wc.byte_len = request->bytes;
	complete(peer, peer->qp.recv_cq, wc, 0);
	return IBV_WC_SUCCESS;
}

static enum ibv_wc_opcode completed_opcode(uint32_t opcode)
{
	switch (opcode) {
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		return IBV_WC_RDMA_WRITE;
	case IBV_WR_RDMA_READ:
		return IBV_WC_RDMA_READ;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
		return IBV_WC_COMP_SWAP;
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		return IBV_WC_FETCH_ADD;
	default:
		return IBV_WC_SEND;
	}
}

/* Carry out what is posted. Failed requests complete whether signalled or not, and without a valid opcode. */
static void run(struct instance *instance, struct queue_pair *qp)
{
	while (!qp->stalled && qp->done < qp->tail) {
		struct request *request = &qp->ring[qp->done & qp->mask];
		struct ibv_wc wc = { .wr_id = request->wr_id, .byte_len = request->bytes };

		if (qp->errored) {
			wc.status = IBV_WC_WR_FLUSH_ERR;
		} else if (qp->fail) {
			wc.status = qp->fail;
			qp->fail = 0;
		} else {
			wc.status = deliver(instance, qp, request);
		}
		qp->done++;
		wc.opcode = wc.status ? 0x5a : completed_opcode(request->opcode);
		qp->errored = qp->errored || wc.status;
		if (wc.status || request->signalled)
			complete(qp, qp->qp.send_cq, wc, qp->done);
	}
}

static int accept(struct queue_pair *qp, struct request request)
{
	if (qp->refuse && --qp->refuse == 0)
		return EINVAL;
	if (qp->tail + qp->batch - qp->freed >= qp->limit)
		return ENOMEM;
	request.signalled |= qp->signal_all;
	qp->ring[(qp->tail + qp->batch) & qp->mask] = request;
	return 0;
}

int NAMED(PROVIDER, _post_send)(struct ibv_qp *base, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct instance *instance = instance_of(base->context);
	struct queue_pair *qp = (struct queue_pair *)base;
	int error = 0;

	pthread_spin_lock(&instance->lock);
	for (; wr && !error; wr = wr->next) {
		struct request request = { wr->wr_id, wr->opcode, 0, wr->send_flags & IBV_SEND_SIGNALED };

		for (int i = 0; i < wr->num_sge; i++)
			request.bytes += wr->sg_list[i].length;
		error = accept(qp, request);
		if (error)
			*bad = wr;
		else
			qp->tail++;
	}
	run(instance, qp);
	pthread_spin_unlock(&instance->lock);
	return error;
}

/* alpha posts by itself, as most providers do; beta through the function pointer, as rxe does. */
static int bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
	struct ibv_send_wr wr = { .wr_id = bind->wr_id, .opcode = IBV_WR_BIND_MW, .send_flags = bind->send_flags }, *bad;

	return STRING(PROVIDER)[0] == 'a' ? NAMED(PROVIDER, _post_send)(qp, &wr, &bad) : ibv_post_send(qp, &wr, &bad);
}

static int take(struct ibv_context *context, struct receives *receives, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct instance *instance = instance_of(context);

	pthread_spin_lock(&instance->lock);
	for (; wr && receives->tail - receives->head < receives->limit; wr = wr->next)
		receives->ring[receives->tail++ & receives->mask].wr_id = wr->wr_id;
	pthread_spin_unlock(&instance->lock);
	if (wr)
		*bad = wr;
	return wr ? ENOMEM : 0;
}

int NAMED(PROVIDER, _post_recv)(struct ibv_qp *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	return take(base->context, &((struct queue_pair *)base)->receives, wr, bad);
}

int NAMED(PROVIDER, _post_srq_recv)(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	return take(srq->context, &((struct shared_receives *)srq)->receives, wr, bad);
}

static bool next_entry(struct queue *queue, struct ibv_wc *wc)
{
	while (queue->head < queue->tail) {
		struct entry *entry = &queue->ring[queue->head++ & queue->mask];

		if (!entry->qp)
			continue; /* its queue pair is destroyed */
		if (entry->frees > entry->qp->freed)
			entry->qp->freed = entry->frees;
		*wc = entry->wc;
		return true;
	}
	return false;
}

int NAMED(PROVIDER, _poll_cq)(struct ibv_cq *cq, int room, struct ibv_wc *wc)
{
	struct instance *instance = instance_of(cq->context);
	int count = 0;

	pthread_spin_lock(&instance->lock);
	while (count < room && next_entry((struct queue *)cq, &wc[count]))
		count++;
	pthread_spin_unlock(&instance->lock);
	return count;
}

/* ---- extended completion queues ---- */

static int advance(struct ibv_cq_ex *ex)
{
	struct instance *instance = instance_of(ex->context);
	struct queue *queue = (struct queue *)ex;
	bool found;

	pthread_spin_lock(&instance->lock);
	found = next_entry(queue, &queue->current);
	pthread_spin_unlock(&instance->lock);
	if (!found)
		return ENOENT;
	ex->wr_id = queue->current.wr_id;
	ex->status = queue->current.status;
	return 0;
}

int NAMED(PROVIDER, _start_poll)(struct ibv_cq_ex *ex, struct ibv_poll_cq_attr *attr)
{
	return attr->comp_mask ? EINVAL : advance(ex);
}

int NAMED(PROVIDER, _next_poll)(struct ibv_cq_ex *ex)
{
	return advance(ex);
}

void NAMED(PROVIDER, _end_poll)(struct ibv_cq_ex *ex)
{
	((struct queue *)ex)->current.qp_num = 0;
}

static enum ibv_wc_opcode read_opcode(struct ibv_cq_ex *ex)
{
	return ((struct queue *)ex)->current.opcode;
}

static uint32_t read_byte_len(struct ibv_cq_ex *ex)
{
	return ((struct queue *)ex)->current.byte_len;
}

static uint32_t read_qp_num(struct ibv_cq_ex *ex)
{
	return ((struct queue *)ex)->current.qp_num;
}

/* ---- extended posts ---- */

static void begin(struct ibv_qp_ex *ex, uint32_t opcode)
{
	struct queue_pair *qp = (struct queue_pair *)ex;
	struct request request = { ex->wr_id, opcode, 0, ex->wr_flags & IBV_SEND_SIGNALED };

	if (qp->batch_error)
		return;
	qp->batch_error = accept(qp, request);
	if (!qp->batch_error)
		qp->batch++;
}

static void add_bytes(struct ibv_qp_ex *ex, uint64_t bytes)
{
	struct queue_pair *qp = (struct queue_pair *)ex;

	if (!qp->batch_error && qp->batch)
		qp->ring[(qp->tail + qp->batch - 1) & qp->mask].bytes += bytes;
}

void NAMED(PROVIDER, _wr_start)(struct ibv_qp_ex *ex)
{
	pthread_spin_lock(&instance_of(ex->qp_base.context)->lock);
}

static int finish(struct ibv_qp_ex *ex, bool commit)
{
	struct instance *instance = instance_of(ex->qp_base.context);
	struct queue_pair *qp = (struct queue_pair *)ex;
	int error = qp->batch_error;

	if (commit && !error)
		qp->tail += qp->batch;
	qp->batch = 0;
	qp->batch_error = 0;
	run(instance, qp);
	pthread_spin_unlock(&instance->lock);
	return error;
}

int NAMED(PROVIDER, _wr_complete)(struct ibv_qp_ex *ex)
{
	return finish(ex, true);
}

void NAMED(PROVIDER, _wr_abort)(struct ibv_qp_ex *ex)
{
	finish(ex, false);
}

void NAMED(PROVIDER, _wr_rdma_write)(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address)
{
	begin(ex, IBV_WR_RDMA_WRITE);
}

static void wr_rdma_write_imm(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address, __be32 immediate)
{
	begin(ex, IBV_WR_RDMA_WRITE_WITH_IMM);
}

static void wr_rdma_read(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address)
{
	begin(ex, IBV_WR_RDMA_READ);
}

void NAMED(PROVIDER, _wr_send)(struct ibv_qp_ex *ex)
{
	begin(ex, IBV_WR_SEND);
}

static void wr_send_imm(struct ibv_qp_ex *ex, __be32 immediate)
{
	begin(ex, IBV_WR_SEND_WITH_IMM);
}

static void wr_atomic_cmp_swp(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address, uint64_t compare, uint64_t swap)
{
	begin(ex, IBV_WR_ATOMIC_CMP_AND_SWP);
}

static void wr_atomic_fetch_add(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address, uint64_t add)
{
	begin(ex, IBV_WR_ATOMIC_FETCH_AND_ADD);
}

static void wr_set_sge(struct ibv_qp_ex *ex, uint32_t lkey, uint64_t address, uint32_t length)
{
	add_bytes(ex, length);
}

static void wr_set_sge_list(struct ibv_qp_ex *ex, size_t count, const struct ibv_sge *list)
{
	for (size_t i = 0; i < count; i++)
		add_bytes(ex, list[i].length);
}

static void wr_set_inline_data(struct ibv_qp_ex *ex, void *address, size_t length)
{
	add_bytes(ex, length);
}

static void wr_set_inline_data_list(struct ibv_qp_ex *ex, size_t count, const struct ibv_data_buf *list)
{
	for (size_t i = 0; i < count; i++)
		add_bytes(ex, list[i].length);
}

static void wr_set_ud_addr(struct ibv_qp_ex *ex, struct ibv_ah *ah, uint32_t number, uint32_t key)
{
}

/* ---- making and unmaking ---- */

static void init_receives(struct receives *receives, uint32_t limit)
{
	uint64_t size = power_of_two(limit);

	receives->ring = calloc(size, sizeof(*receives->ring));
	receives->mask = size - 1;
	receives->limit = limit;
}

static struct ibv_cq *create_cq(struct ibv_context *context, int cqe, void *cq_context)
{
	struct queue *queue = calloc(1, sizeof(*queue));
	uint64_t size = power_of_two(cqe);

	queue->ring = calloc(size, sizeof(*queue->ring));
	queue->mask = size - 1;
	queue->cq.context = context;
	queue->cq.cq_context = cq_context;
	queue->cq.cqe = cqe;
	return &queue->cq;
}

static struct ibv_cq_ex *create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr)
{
	struct queue *queue = (struct queue *)create_cq(context, attr->cqe, attr->cq_context);

	queue->ex.start_poll = NAMED(PROVIDER, _start_poll);
	queue->ex.next_poll = NAMED(PROVIDER, _next_poll);
	queue->ex.end_poll = NAMED(PROVIDER, _end_poll);
	queue->ex.read_opcode = read_opcode;
	if (attr->wc_flags & IBV_WC_EX_WITH_BYTE_LEN) /* as real providers: only what was asked for */
		queue->ex.read_byte_len = read_byte_len;
	if (attr->wc_flags & IBV_WC_EX_WITH_QP_NUM)
		queue->ex.read_qp_num = read_qp_num;
	return &queue->ex;
}

static int destroy_cq(struct ibv_cq *cq)
{
	free(((struct queue *)cq)->ring);
	free(cq);
	return 0;
}

static struct queue_pair *new_pair(struct ibv_context *context, struct ibv_pd *pd, struct ibv_qp_init_attr_ex *attr)
{
	struct instance *instance = instance_of(context);
	struct queue_pair *qp;
	uint64_t size;

	if (!attr->send_cq || !attr->recv_cq || attr->cap.max_send_wr > 1 << 20) {
		errno = EINVAL;
		return NULL;
	}
	qp = calloc(1, sizeof(*qp));
	size = power_of_two(attr->cap.max_send_wr);
	qp->ring = calloc(size, sizeof(*qp->ring));
	qp->mask = size - 1;
	qp->limit = attr->cap.max_send_wr;
	qp->signal_all = attr->sq_sig_all;
	qp->qp = (struct ibv_qp){
		.context = context,
		.qp_context = attr->qp_context,
		.pd = pd,
		.send_cq = attr->send_cq,
		.recv_cq = attr->recv_cq,
		.srq = attr->srq,
		.qp_type = attr->qp_type,
	};
	init_receives(&qp->receives, attr->cap.max_recv_wr);
	pthread_spin_lock(&instance->lock);
	qp->qp.qp_num = ++instance->next_number;
	qp->next = instance->pairs;
	instance->pairs = qp;
	pthread_spin_unlock(&instance->lock);
	return qp;
}

static struct ibv_qp *create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct ibv_qp_init_attr_ex extended = { 0 };

	memcpy(&extended, attr, sizeof(*attr));
	return (struct ibv_qp *)new_pair(pd->context, pd, &extended);
}

static struct ibv_qp *create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
	struct queue_pair *qp = new_pair(context, attr->pd, attr);

	if (!qp || !(attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS))
		return (struct ibv_qp *)qp;
	qp->extended = true;
	qp->ex.wr_start = NAMED(PROVIDER, _wr_start);
	qp->ex.wr_complete = NAMED(PROVIDER, _wr_complete);
	qp->ex.wr_abort = NAMED(PROVIDER, _wr_abort);
	qp->ex.wr_rdma_write = NAMED(PROVIDER, _wr_rdma_write);
	qp->ex.wr_rdma_write_imm = wr_rdma_write_imm;
	qp->ex.wr_rdma_read = wr_rdma_read;
	qp->ex.wr_send = NAMED(PROVIDER, _wr_send);
	qp->ex.wr_send_imm = wr_send_imm;
	qp->ex.wr_atomic_cmp_swp = wr_atomic_cmp_swp;
	qp->ex.wr_atomic_fetch_add = wr_atomic_fetch_add;
	qp->ex.wr_set_sge = wr_set_sge;
	qp->ex.wr_set_sge_list = wr_set_sge_list;
	qp->ex.wr_set_inline_data = wr_set_inline_data;
	qp->ex.wr_set_inline_data_list = wr_set_inline_data_list;
	qp->ex.wr_set_ud_addr = wr_set_ud_addr;
	return &qp->qp;
}

static int modify_qp(struct ibv_qp *base, struct ibv_qp_attr *attr, int mask)
{
	struct instance *instance = instance_of(base->context);
	struct queue_pair *qp = (struct queue_pair *)base;

	pthread_spin_lock(&instance->lock);
	if (mask & IBV_QP_DEST_QPN)
		qp->remote = attr->dest_qp_num;
	if (mask & IBV_QP_STATE) {
		base->state = attr->qp_state;
		qp->errored = attr->qp_state == IBV_QPS_ERR;
		if (qp->errored)
			qp->stalled = false;
		if (attr->qp_state == IBV_QPS_RESET)
			qp->freed = qp->done = qp->tail;
		run(instance, qp);
	}
	pthread_spin_unlock(&instance->lock);
	return 0;
}

static void forget(struct queue *queue, const struct queue_pair *qp)
{
	for (uint64_t i = queue->head; i < queue->tail; i++)
		if (queue->ring[i & queue->mask].qp == qp)
			queue->ring[i & queue->mask].qp = NULL;
}

static int destroy_qp(struct ibv_qp *base)
{
	struct instance *instance = instance_of(base->context);
	struct queue_pair *qp = (struct queue_pair *)base, **link;

	pthread_spin_lock(&instance->lock);
	for (link = &instance->pairs; *link != qp; link = &(*link)->next)
		;
	*link = qp->next;
	forget((struct queue *)base->send_cq, qp);
	forget((struct queue *)base->recv_cq, qp);
	pthread_spin_unlock(&instance->lock);
	free(qp->receives.ring);
	free(qp->ring);
	free(qp);
	return 0;
}

static struct ibv_qp_ex *to_qp_ex(struct ibv_qp *qp)
{
	return ((struct queue_pair *)qp)->extended ? &((struct queue_pair *)qp)->ex : NULL;
}

static struct ibv_srq *create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
	struct shared_receives *shared = calloc(1, sizeof(*shared));

	init_receives(&shared->receives, attr->attr.max_wr);
	shared->srq.context = pd->context;
	shared->srq.pd = pd;
	return &shared->srq;
}

static int destroy_srq(struct ibv_srq *srq)
{
	free(((struct shared_receives *)srq)->receives.ring);
	free(srq);
	return 0;
}

static int control(struct ibv_qp *base, int what, long value)
{
	struct instance *instance = instance_of(base->context);
	struct queue_pair *qp = (struct queue_pair *)base;

	pthread_spin_lock(&instance->lock);
	if (what == FAKE_STALL)
		qp->stalled = value;
	else if (what == FAKE_FAIL)
		qp->fail = value;
	else if (what == FAKE_REFUSE)
		qp->refuse = value + 1;
	run(instance, qp);
	pthread_spin_unlock(&instance->lock);
	return 0;
}

static struct ibv_context *open_device(struct ibv_device *device);

static int close_device(struct ibv_context *context)
{
	free(instance_of(context));
	return 0;
}

__attribute__((visibility("default"))) const struct fake_provider NAMED(PROVIDER, _provider) = {
	.name = STRING(PROVIDER),
	.open = open_device,
	.close = close_device,
	.create_cq = create_cq,
	.destroy_cq = destroy_cq,
	.create_qp = create_qp,
	.modify_qp = modify_qp,
	.destroy_qp = destroy_qp,
	.to_qp_ex = to_qp_ex,
	.create_srq = create_srq,
	.destroy_srq = destroy_srq,
	.control = control,
};

static struct ibv_context *open_device(struct ibv_device *device)
{
	struct instance *instance = calloc(1, sizeof(*instance));
	struct verbs_context *verbs = &instance->fake.verbs;

	instance->fake.provider = &NAMED(PROVIDER, _provider);
	pthread_spin_init(&instance->lock, PTHREAD_PROCESS_PRIVATE);
	instance->next_number = 0x100;
	verbs->sz = sizeof(*verbs);
	verbs->create_qp_ex = create_qp_ex;
	verbs->create_cq_ex = create_cq_ex;
	verbs->context.device = device;
	verbs->context.cmd_fd = -1;
	verbs->context.async_fd = -1;
	verbs->context.num_comp_vectors = 1;
	verbs->context.abi_compat = __VERBS_ABI_IS_EXTENDED;
	verbs->context.ops.post_send = NAMED(PROVIDER, _post_send);
	verbs->context.ops.post_recv = NAMED(PROVIDER, _post_recv);
	verbs->context.ops.post_srq_recv = NAMED(PROVIDER, _post_srq_recv);
	verbs->context.ops.bind_mw = bind_mw;
	verbs->context.ops.poll_cq = NAMED(PROVIDER, _poll_cq);
	return &verbs->context;
}
