/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An application of verbs that does what it is told: one command a line on standard input, one answer a line on
 * standard output, beginning with ok or error. Objects are named by small numbers, in the order in which they were
 * made. errno is set to a mark before each verb, so that an answer can say what became of it.
 *
 * Built with -DDLOPEN it opens the library and looks its functions up by hand, as NCCL does.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "fake.h"

#ifdef DLOPEN
static __typeof__(ibv_get_device_list) *get_device_list;
static __typeof__(ibv_open_device) *open_device;
static __typeof__(ibv_close_device) *close_device;
static __typeof__(ibv_alloc_pd) *alloc_pd;
static __typeof__(ibv_create_cq) *create_cq;
static __typeof__(ibv_destroy_cq) *destroy_cq;
static __typeof__(ibv_create_qp) *create_qp;
static __typeof__(ibv_modify_qp) *modify_qp;
static __typeof__(ibv_destroy_qp) *destroy_qp;
static __typeof__(ibv_create_srq) *create_srq;
static __typeof__(ibv_qp_to_qp_ex) *to_qp_ex;
static void *library;

static void load(void)
{
	library = dlopen("libibverbs.so.1", RTLD_NOW);
	if (!library) {
		printf("error %s\n", dlerror());
		exit(1);
	}
	get_device_list = dlsym(library, "ibv_get_device_list");
	open_device = dlvsym(library, "ibv_open_device", "IBVERBS_1.1");
	close_device = dlvsym(library, "ibv_close_device", "IBVERBS_1.1");
	alloc_pd = dlsym(library, "ibv_alloc_pd");
	create_cq = dlsym(library, "ibv_create_cq");
	destroy_cq = dlsym(library, "ibv_destroy_cq");
	create_qp = dlvsym(library, "ibv_create_qp", "IBVERBS_1.1");
	modify_qp = dlsym(library, "ibv_modify_qp");
	destroy_qp = dlsym(library, "ibv_destroy_qp");
	create_srq = dlsym(library, "ibv_create_srq");
	to_qp_ex = dlsym(library, "ibv_qp_to_qp_ex");
}
#else
#define get_device_list ibv_get_device_list
#define open_device ibv_open_device
#define close_device ibv_close_device
#define alloc_pd ibv_alloc_pd
#define create_cq ibv_create_cq
#define destroy_cq ibv_destroy_cq
#define create_qp ibv_create_qp
#define modify_qp ibv_modify_qp
#define destroy_qp ibv_destroy_qp
#define create_srq ibv_create_srq
#define to_qp_ex ibv_qp_to_qp_ex

static void load(void)
{
}
#endif

/* One of the stand-in's own functions. */
static void *find(const char *name)
{
#ifdef DLOPEN
	return dlsym(library, name);
#else
	return dlsym(RTLD_DEFAULT, name);
#endif
}

#define MOST 8192
#define CHAIN 4096
#define MARK 77

static struct ibv_context *contexts[MOST];
static struct ibv_pd *domains[MOST];
static struct ibv_cq *cqs[MOST];
static struct ibv_srq *srqs[MOST];
static struct ibv_qp *qps[MOST];
static int contexts_made, cqs_made, srqs_made, qps_made;

static uint64_t now(void)
{
	struct timespec at;

	clock_gettime(CLOCK_MONOTONIC, &at);
	return at.tv_sec * 1000000000ull + at.tv_nsec;
}

/* Processor time of this thread. */
static uint64_t used(void)
{
	struct timespec at;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &at);
	return at.tv_sec * 1000000000ull + at.tv_nsec;
}

static void open_command(const char *name)
{
	struct ibv_device **list = get_device_list(NULL), **each = list;

	while (*each && strcmp((*each)->name, name))
		each++;
	if (!*each) {
		printf("error no device %s\n", name);
		return;
	}
	contexts[contexts_made] = open_device(*each);
	domains[contexts_made] = alloc_pd(contexts[contexts_made]);
	printf("ok %d %p\n", contexts_made, (void *)contexts[contexts_made]);
	contexts_made++;
}

static void cq_command(long *a, bool extended)
{
	struct ibv_context *context = contexts[a[0]];
	struct ibv_cq_init_attr_ex attr = { .cqe = a[1], .wc_flags = a[2] };

	if (extended)
		cqs[cqs_made] = (struct ibv_cq *)verbs_get_ctx_op(context, create_cq_ex)->create_cq_ex(context, &attr);
	else
		cqs[cqs_made] = create_cq(context, a[1], NULL, NULL, 0);
	printf("ok %d\n", cqs_made++);
}

static void srq_command(long *a)
{
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = a[1], .max_sge = 1 } };

	srqs[srqs_made] = create_srq(domains[a[0]], &attr);
	printf("ok %d\n", srqs_made++);
}

/* context, send queue's CQ, receive queue's CQ, room for sends, for receives, signal all, SRQ or -1, type */
static void qp_command(long *a, bool extended)
{
	struct ibv_qp_init_attr_ex attr = {
		.send_cq = cqs[a[1]],
		.recv_cq = cqs[a[2]],
		.srq = a[6] < 0 ? NULL : srqs[a[6]],
		.cap = { .max_send_wr = a[3], .max_recv_wr = a[4], .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = a[7] ? a[7] : IBV_QPT_RC,
		.sq_sig_all = a[5],
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = domains[a[0]],
		.send_ops_flags = 0x7f,
	};
	struct verbs_context *verbs = verbs_get_ctx(contexts[a[0]]);
	struct ibv_qp *qp;

	errno = MARK;
	qp = extended ? verbs->create_qp_ex(contexts[a[0]], &attr) :
			create_qp(domains[a[0]], (struct ibv_qp_init_attr *)&attr);
	if (!qp) {
		printf("error %d\n", errno);
		return;
	}
	qps[qps_made] = qp;
	printf("ok %d %u errno %d\n", qps_made++, qp->qp_num, errno);
}

static void connect_command(struct ibv_qp *qp, long number, const char *gid)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .dest_qp_num = number };
	int mask = IBV_QP_STATE | IBV_QP_DEST_QPN | IBV_QP_AV;

	attr.ah_attr.port_num = 1;
	if (*gid) {
		attr.ah_attr.is_global = 1;
		attr.ah_attr.grh.sgid_index = 1;
		for (int i = 0; i < 16; i++)
			sscanf(gid + 2 * i, "%2hhx", &attr.ah_attr.grh.dgid.raw[i]);
	}
	printf("ok %d\n", modify_qp(qp, &attr, mask));
}

static void state_command(struct ibv_qp *qp, long state)
{
	struct ibv_qp_attr attr = { .qp_state = state };

	printf("ok %d\n", modify_qp(qp, &attr, IBV_QP_STATE));
}

static bool is_signalled(long every, long i)
{
	return every && (i + 1) % every == 0;
}

/* count, bytes of each, opcode, signal every, first wr_id, step of wr_id; answers error, refused one, errno */
static void post_command(struct ibv_qp *qp, long *a)
{
	static struct ibv_send_wr chain[CHAIN];
	static struct ibv_sge sge;
	struct ibv_send_wr *bad = NULL;
	int error;

	sge.length = a[1];
	for (long i = 0; i < a[0]; i++)
		chain[i] = (struct ibv_send_wr){
			.wr_id = a[4] + i * a[5],
			.next = i + 1 < a[0] ? &chain[i + 1] : NULL,
			.sg_list = &sge,
			.num_sge = a[1] ? 1 : 0,
			.opcode = a[2],
			.send_flags = is_signalled(a[3], i) ? IBV_SEND_SIGNALED : 0,
		};
	errno = MARK;
	error = ibv_post_send(qp, chain, &bad);
	printf("ok %d %ld errno %d\n", error, bad ? (long)(bad - chain) : -1, errno);
}

static void build(struct ibv_qp_ex *qp, long opcode)
{
	switch (opcode) {
	case IBV_WR_RDMA_WRITE:
		ibv_wr_rdma_write(qp, 1, 1);
		break;
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		ibv_wr_rdma_write_imm(qp, 1, 1, 1);
		break;
	case IBV_WR_RDMA_READ:
		ibv_wr_rdma_read(qp, 1, 1);
		break;
	case IBV_WR_SEND_WITH_IMM:
		ibv_wr_send_imm(qp, 1);
		break;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
		ibv_wr_atomic_cmp_swp(qp, 1, 1, 1, 1);
		break;
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		ibv_wr_atomic_fetch_add(qp, 1, 1, 1);
		break;
	default:
		ibv_wr_send(qp);
	}
}

/* the same, then how the data is given (0: one piece, 1: two, 2: inline, 3: inline in two) and whether to abort */
static void post_extended_command(struct ibv_qp *base, long *a)
{
	struct ibv_qp_ex *qp = to_qp_ex(base);
	struct ibv_sge sges[2] = { { .length = a[1] / 2 }, { .length = a[1] - a[1] / 2 } };
	struct ibv_data_buf buffers[2] = { { .length = a[1] / 2 }, { .length = a[1] - a[1] / 2 } };
	int error = 0;

	errno = MARK;
	ibv_wr_start(qp);
	for (long i = 0; i < a[0]; i++) {
		qp->wr_id = a[4] + i * a[5];
		qp->wr_flags = is_signalled(a[3], i) ? IBV_SEND_SIGNALED : 0;
		build(qp, a[2]);
		if (a[6] == 0)
			ibv_wr_set_sge(qp, 1, 1, a[1]);
		else if (a[6] == 1)
			ibv_wr_set_sge_list(qp, 2, sges);
		else if (a[6] == 2)
			ibv_wr_set_inline_data(qp, NULL, a[1]);
		else
			ibv_wr_set_inline_data_list(qp, 2, buffers);
	}
	if (a[7])
		ibv_wr_abort(qp);
	else
		error = ibv_wr_complete(qp);
	printf("ok %d errno %d\n", error, errno);
}

static void receive_command(struct ibv_qp *qp, struct ibv_srq *srq, long count, long wr_id)
{
	static struct ibv_recv_wr chain[CHAIN];
	struct ibv_recv_wr *bad = NULL;
	int error;

	for (long i = 0; i < count; i++)
		chain[i] = (struct ibv_recv_wr){ .wr_id = wr_id + i, .next = i + 1 < count ? &chain[i + 1] : NULL };
	error = srq ? ibv_post_srq_recv(srq, chain, &bad) : ibv_post_recv(qp, chain, &bad);
	printf("ok %d %ld\n", error, bad ? (long)(bad - chain) : -1);
}

static void poll_command(struct ibv_cq *cq, long most)
{
	static struct ibv_wc completions[CHAIN];
	int count;

	errno = MARK;
	count = ibv_poll_cq(cq, most, completions);
	printf("ok %d errno %d", count, errno);
	for (int i = 0; i < count; i++)
		printf(" %lu:%d:%u", completions[i].wr_id, completions[i].status, completions[i].qp_num);
	printf("\n");
}

static void poll_extended_command(struct ibv_cq *base, long most)
{
	struct ibv_cq_ex *cq = (struct ibv_cq_ex *)base;
	struct ibv_poll_cq_attr attr = { 0 };
	int error = ibv_start_poll(cq, &attr), count = 0;

	printf("ok");
	if (!error) {
		do {
			printf(" %lu:%d", cq->wr_id, cq->status);
			error = ++count < most ? ibv_next_poll(cq) : ENOENT;
		} while (!error);
		ibv_end_poll(cq);
	}
	printf(" n %d\n", count);
}

/* Post one request and wait for it, count times: what processor time a pair takes. */
static void loop_command(struct ibv_qp *qp, struct ibv_cq *cq, long count)
{
	struct ibv_sge sge = { .length = 4096 };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_wc wc;
	uint64_t from = used();

	for (long i = 0; i < count; i++) {
		wr.wr_id = i;
		if (ibv_post_send(qp, &wr, &bad) || ibv_poll_cq(cq, 1, &wc) != 1) {
			printf("error at %ld\n", i);
			return;
		}
	}
	printf("ok %.3f\n", (double)(used() - from) / count);
}

/* The same with the extended calls. */
static void loop_extended_command(struct ibv_qp *base, struct ibv_cq *base_cq, long count)
{
	struct ibv_qp_ex *qp = to_qp_ex(base);
	struct ibv_cq_ex *cq = (struct ibv_cq_ex *)base_cq;
	struct ibv_poll_cq_attr attr = { 0 };
	uint64_t from = used();

	for (long i = 0; i < count; i++) {
		ibv_wr_start(qp);
		qp->wr_id = i;
		qp->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_rdma_write(qp, 1, 1);
		ibv_wr_set_sge(qp, 1, 1, 4096);
		if (ibv_wr_complete(qp) || ibv_start_poll(cq, &attr)) {
			printf("error at %ld\n", i);
			return;
		}
		ibv_end_poll(cq);
	}
	printf("ok %.3f\n", (double)(used() - from) / count);
}

/*
 * So many requests at once, then sleep until the next burst is due: answers the thread's processor time in nanoseconds,
 * and the time in all.
 */
static void pace_command(struct ibv_qp *qp, struct ibv_cq *cq, long burst, long interval_ns, long bursts)
{
	struct ibv_sge sge = { .length = 4096 };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED }, *bad;
	uint64_t from = now(), from_used = used(), due = from;
	struct timespec at;
	struct ibv_wc wc;

	for (long i = 0; i < bursts; i++) {
		for (long j = 0; j < burst; j++) {
			wr.wr_id = j;
			if (ibv_post_send(qp, &wr, &bad) || ibv_poll_cq(cq, 1, &wc) != 1) {
				printf("error at %ld\n", i);
				return;
			}
		}
		due += interval_ns;
		at = (struct timespec){ due / 1000000000, due % 1000000000 };
		clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
	}
	printf("ok %ld %ld\n", (long)(used() - from_used), (long)(now() - from));
}

#define AT_ONCE 3

struct work {
	struct ibv_qp *qp;
	struct ibv_cq *cq;
	long count, threads;
	long *posted, *refused, *completed, *done;
};

static long get(long *from)
{
	return __atomic_load_n(from, __ATOMIC_SEQ_CST);
}

static void more(long *to, long by)
{
	__atomic_fetch_add(to, by, __ATOMIC_SEQ_CST);
}

static void *work(void *argument)
{
	struct ibv_sge sge = { .length = 100 };
	struct ibv_send_wr wr[AT_ONCE], *bad;
	struct work *work = argument;
	struct ibv_wc wc[4];
	long taken;

	for (long i = 0; i < AT_ONCE; i++)
		wr[i] = (struct ibv_send_wr){ .next = i + 1 < AT_ONCE ? &wr[i + 1] : NULL,
					      .sg_list = &sge,
					      .num_sge = 1,
					      .send_flags = IBV_SEND_SIGNALED };
	for (long i = 0; i < work->count; i++) {
		for (long j = 0; j < AT_ONCE; j++)
			wr[j].wr_id = i * AT_ONCE + j;
		taken = ibv_post_send(work->qp, wr, &bad) ? bad - wr : AT_ONCE;
		more(work->posted, taken);
		more(work->refused, AT_ONCE - taken);
		more(work->completed, ibv_poll_cq(work->cq, 4, wc));
	}
	more(work->done, 1);
	while (get(work->done) < work->threads || get(work->completed) < get(work->posted))
		more(work->completed, ibv_poll_cq(work->cq, 4, wc));
	return NULL;
}

/*
 * Threads that all post to these queue pairs (the first a[0] made) and all poll one CQ, a[3] lists each, until all has
 * completed: answers how many were posted, and refused.
 */
static void threads_command(long *a)
{
	long threads = a[2], posted = 0, refused = 0, completed = 0, done = 0;
	pthread_t started[64];
	struct work works[64];

	for (long i = 0; i < threads; i++) {
		works[i] = (struct work){ qps[i % a[0]], cqs[a[1]], a[3],	threads,
					  &posted,	 &refused,   &completed, &done };
		pthread_create(&started[i], NULL, work, &works[i]);
	}
	for (long i = 0; i < threads; i++)
		pthread_join(started[i], NULL);
	printf("ok %ld %ld\n", posted, refused);
}

/* A child that uses the parent's queue pair; it must change nothing that is counted for the parent. */
static void fork_command(struct ibv_qp *qp, struct ibv_cq *cq, long count)
{
	pid_t child;
	int status;

	fflush(stdout);
	child = fork();
	if (!child) {
		struct ibv_send_wr wr = { .send_flags = IBV_SEND_SIGNALED }, *bad;
		struct ibv_wc wc;

		for (long i = 0; i < count; i++)
			if (ibv_post_send(qp, &wr, &bad) || ibv_poll_cq(cq, 1, &wc) != 1)
				_exit(1);
		_exit(0);
	}
	waitpid(child, &status, 0);
	printf("ok %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
}

/* A child that opens a device of its own and uses it. */
static void fork_open_command(long count)
{
	pid_t child;
	int status;

	fflush(stdout);
	child = fork();
	if (!child) {
		FILE *nothing = freopen("/dev/null", "w", stdout);
		long of_cq[] = { contexts_made, 64, 0 }, of_qp[] = { contexts_made, cqs_made, cqs_made, 64, 64, 0, -1, 0 };

		open_command("beta0");
		cq_command(of_cq, false);
		qp_command(of_qp, false);
		loop_command(qps[qps_made - 1], cqs[cqs_made - 1], count);
		for (int i = 0; i < 20; i++) { /* for an agent that needs a while */
			state_command(qps[qps_made - 1], IBV_QPS_INIT);
			usleep(10000);
		}
		_exit(!nothing);
	}
	waitpid(child, &status, 0);
	printf("ok %d %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1, child);
}

static bool obey(const char *line)
{
	char verb[32] = "", text[64] = "";
	long a[10] = { 0 };

	if (sscanf(line, "%31s %ld %ld %ld %ld %ld %ld %ld %ld %ld", verb, a, a + 1, a + 2, a + 3, a + 4, a + 5, a + 6,
		   a + 7, a + 8) < 1)
		return true;
	if (!strcmp(verb, "open")) {
		sscanf(line, "%*s %63s", text);
		open_command(text);
	} else if (!strcmp(verb, "cq")) {
		cq_command(a, false);
	} else if (!strcmp(verb, "cqx")) {
		cq_command(a, true);
	} else if (!strcmp(verb, "srq")) {
		srq_command(a);
	} else if (!strcmp(verb, "qp")) {
		qp_command(a, false);
	} else if (!strcmp(verb, "qpx")) {
		qp_command(a, true);
	} else if (!strcmp(verb, "connect")) {
		sscanf(line, "%*s %*s %*s %63s", text);
		connect_command(qps[a[0]], a[1], text);
	} else if (!strcmp(verb, "state")) {
		state_command(qps[a[0]], a[1]);
	} else if (!strcmp(verb, "post")) {
		post_command(qps[a[0]], a + 1);
	} else if (!strcmp(verb, "postx")) {
		post_extended_command(qps[a[0]], a + 1);
	} else if (!strcmp(verb, "recv")) {
		receive_command(qps[a[0]], NULL, a[1], a[2]);
	} else if (!strcmp(verb, "srqrecv")) {
		receive_command(NULL, srqs[a[0]], a[1], a[2]);
	} else if (!strcmp(verb, "poll")) {
		poll_command(cqs[a[0]], a[1]);
	} else if (!strcmp(verb, "pollx")) {
		poll_extended_command(cqs[a[0]], a[1]);
	} else if (!strcmp(verb, "control")) {
		int (*control)(struct ibv_qp *, int, long) = find("fake_control");

		printf("ok %d\n", control(qps[a[0]], a[1], a[2]));
	} else if (!strcmp(verb, "loop")) {
		loop_command(qps[a[0]], cqs[a[1]], a[2]);
	} else if (!strcmp(verb, "loopx")) {
		loop_extended_command(qps[a[0]], cqs[a[1]], a[2]);
	} else if (!strcmp(verb, "pace")) {
		pace_command(qps[a[0]], cqs[a[1]], a[2], a[3], a[4]);
	} else if (!strcmp(verb, "threads")) {
		threads_command(a);
	} else if (!strcmp(verb, "fork")) {
		fork_command(qps[a[0]], cqs[a[1]], a[2]);
	} else if (!strcmp(verb, "forkopen")) {
		fork_open_command(a[0]);
	} else if (!strcmp(verb, "destroyqp")) {
		printf("ok %d\n", destroy_qp(qps[a[0]]));
	} else if (!strcmp(verb, "destroycq")) {
		printf("ok %d\n", destroy_cq(cqs[a[0]]));
	} else if (!strcmp(verb, "close")) {
		printf("ok %d\n", close_device(contexts[a[0]]));
#ifdef DLOPEN
	} else if (!strcmp(verb, "unload")) {
		printf("ok %d\n", dlclose(library));
	} else if (!strcmp(verb, "load")) {
		load();
		printf("ok\n");
#endif
	} else if (!strcmp(verb, "hidden")) { /* a queue pair that the library makes behind everybody's back */
		struct ibv_qp *(*make)(struct ibv_pd *, struct ibv_qp_init_attr *) = find("fake_hidden_qp");
		struct ibv_qp_init_attr attr = { .send_cq = cqs[a[1]], .recv_cq = cqs[a[1]], .qp_type = IBV_QPT_RC };

		attr.cap.max_send_wr = 64;
		qps[qps_made] = make(domains[a[0]], &attr);
		printf("ok %d %u\n", qps_made, qps[qps_made]->qp_num);
		qps_made++;
	} else if (!strcmp(verb, "bind")) {
		struct ibv_mw window = { .context = qps[a[0]]->context, .type = IBV_MW_TYPE_1 };
		struct ibv_mr region = { 0 };
		struct ibv_mw_bind bind = { .wr_id = a[1], .send_flags = a[2] ? IBV_SEND_SIGNALED : 0 };

		bind.bind_info.mr = &region;
		printf("ok %d\n", window.context->ops.bind_mw(qps[a[0]], &window, &bind));
	} else if (!strcmp(verb, "grab")) { /* close everything, and have another file at this number */
		for (int fd = 3; fd < 1024; fd++)
			close(fd);
		printf("ok %d\n", dup2(STDIN_FILENO, a[0]));
	} else if (!strcmp(verb, "held")) {
		printf("ok %d\n", fcntl(a[0], F_GETFD) >= 0);
	} else if (!strcmp(verb, "pointers")) {
		printf("ok %p %p\n", (void *)contexts[a[0]]->ops.post_send, (void *)contexts[a[0]]->ops.poll_cq);
	} else if (!strcmp(verb, "quit")) {
		return false;
	} else {
		printf("error unknown command %s\n", verb);
	}
	fflush(stdout);
	return true;
}

int main(void)
{
	char line[512];

	load();
	while (fgets(line, sizeof(line), stdin) && obey(line))
		;
	return 0;
}
