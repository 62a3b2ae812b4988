/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Two connected queue pairs of one process, on two devices: a sender that does as it is told, and a receiver.
 *
 *	rc_pair DEVICE GID-INDEX DEVICE GID-INDEX SIZE
 *
 * Reads one command a line and answers each with one line: what was posted and completed so far.
 *
 *	op write|send	what to post from now on
 *	pace MBIT	post at this pace, whatever becomes of it
 *	full DEPTH	keep so many requests outstanding
 *	stop		post nothing
 *	receives on|off	whether the receiver posts any; those that are posted stay
 *	say		nothing
 */
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SEND_DEPTH 8192
#define RECEIVES 32

struct end {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	union ibv_gid gid;
	int gid_index;
	char *memory;
};

static struct end sender, receiver;
static uint32_t size;
static uint64_t posted, completed, failed, receives_open, last_status;
static int receiving = 1;
static enum ibv_wr_opcode opcode = IBV_WR_RDMA_WRITE;

static void die(const char *what)
{
	fprintf(stderr, "rc_pair: %s\n", what);
	exit(1);
}

static struct ibv_context *opened(const char *name)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);

	for (int i = 0; devices && devices[i]; i++)
		if (!strcmp(ibv_get_device_name(devices[i]), name))
			return ibv_open_device(devices[i]);
	return NULL;
}

static void make(struct end *end, const char *device, const char *gid_index)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .sq_sig_all = 1 };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };

	end->context = opened(device);
	if (!end->context)
		die("no such device");
	end->gid_index = atoi(gid_index);
	end->pd = ibv_alloc_pd(end->context);
	end->cq = ibv_create_cq(end->context, 2 * SEND_DEPTH, NULL, NULL, 0);
	end->memory = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
	if (!end->pd || !end->cq || !end->memory || ibv_query_gid(end->context, 1, end->gid_index, &end->gid))
		die("no resources");
	end->mr = ibv_reg_mr(end->pd, end->memory, size, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	init.send_cq = init.recv_cq = end->cq;
	init.cap = (struct ibv_qp_cap){ .max_send_wr = SEND_DEPTH, .max_recv_wr = RECEIVES, .max_send_sge = 1, .max_recv_sge = 1 };
	end->qp = ibv_create_qp(end->pd, &init);
	attr.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
	if (!end->mr || !end->qp ||
	    ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
		die("no queue pair");
}

static void join(struct end *end, const struct end *other)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_4096,
		.dest_qp_num = other->qp->qp_num,
		.max_dest_rd_atomic = 1,
		.min_rnr_timer = 14, /* 1.28 ms */
		.ah_attr = { .is_global = 1, .port_num = 1 },
	};

	attr.ah_attr.grh = (struct ibv_global_route){ .dgid = other->gid, .sgid_index = end->gid_index, .hop_limit = 64 };
	if (ibv_modify_qp(end->qp, &attr,
			  IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				  IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
		die("not ready to receive");
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 18, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1 };
	if (ibv_modify_qp(end->qp, &attr,
			  IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
				  IBV_QP_MAX_QP_RD_ATOMIC))
		die("not ready to send");
}

static int post(void)
{
	struct ibv_sge sge = { (uintptr_t)sender.memory, size, sender.mr->lkey };
	struct ibv_send_wr wr = { .wr_id = posted, .sg_list = &sge, .num_sge = 1, .opcode = opcode }, *bad;

	wr.wr.rdma.remote_addr = (uintptr_t)receiver.memory;
	wr.wr.rdma.rkey = receiver.mr->rkey;
	if (posted - completed >= SEND_DEPTH || failed || ibv_post_send(sender.qp, &wr, &bad))
		return 0;
	posted++;
	return 1;
}

static void receive(void)
{
	struct ibv_sge sge = { (uintptr_t)receiver.memory, size, receiver.mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

	while (receiving && receives_open < RECEIVES && !ibv_post_recv(receiver.qp, &wr, &bad))
		receives_open++;
}

static int reap(struct end *end, uint64_t *count)
{
	struct ibv_wc wc[16];
	int some = 0, found;

	while ((found = ibv_poll_cq(end->cq, 16, wc)) > 0) {
		some += found;
		*count += found;
		for (int i = 0; i < found; i++)
			if (wc[i].status) {
				failed++;
				last_status = wc[i].status;
			}
	}
	return some;
}

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static double bytes_per_ns;
static uint64_t depth;

static int obey(void)
{
	char line[128], word[16] = "";
	double number = 0;

	if (!fgets(line, sizeof(line), stdin))
		return 0;
	if (sscanf(line, "pace %lf", &number) == 1) {
		bytes_per_ns = number * 1e6 / 8e9;
		depth = 0;
	} else if (sscanf(line, "full %lf", &number) == 1) {
		bytes_per_ns = 0;
		depth = number;
	} else if (sscanf(line, "op %15s", word) == 1) {
		opcode = strcmp(word, "send") ? IBV_WR_RDMA_WRITE : IBV_WR_SEND;
	} else if (sscanf(line, "receives %15s", word) == 1) {
		receiving = !strcmp(word, "on");
	} else if (!strncmp(line, "stop", 4)) {
		bytes_per_ns = depth = 0;
	}
	printf("%llu %llu %llu %llu %llu\n", (unsigned long long)posted, (unsigned long long)completed,
	       (unsigned long long)failed, (unsigned long long)last_status, (unsigned long long)now_ns());
	return 1;
}

int main(int count, char **words)
{
	struct pollfd commands = { .fd = 0, .events = POLLIN };
	uint64_t before = now_ns();
	double credit = 0;

	if (count != 6)
		die("rc_pair DEVICE GID-INDEX DEVICE GID-INDEX SIZE");
	setvbuf(stdin, NULL, _IONBF, 0);
	setvbuf(stdout, NULL, _IOLBF, 0);
	size = atoi(words[5]);
	make(&sender, words[1], words[2]);
	make(&receiver, words[3], words[4]);
	join(&receiver, &sender);
	join(&sender, &receiver);
	printf("%d %u %u\n", getpid(), sender.qp->qp_num, receiver.qp->qp_num);
	for (;;) {
		uint64_t now = now_ns(), taken = 0;
		int busy;

		if (poll(&commands, 1, 0) > 0 && !obey())
			return 0;
		receive();
		busy = reap(&sender, &completed);
		busy += reap(&receiver, &taken);
		receives_open -= taken;
		credit = bytes_per_ns ? credit + (now - before) * bytes_per_ns : 0;
		before = now;
		while (credit >= size && post()) {
			credit -= size;
			busy++;
		}
		if (credit > 64.0 * size)
			credit = 64.0 * size;
		while (posted - completed < depth && post())
			busy++;
		if (!busy)
			usleep(500);
	}
}
