/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The tap: what an application posts to its RDMA queue pairs, and what it is told to be complete, counted inside the
 * application itself. Runs in user space, loaded by the dynamic linker (LD_AUDIT), so that libraries which are opened
 * by hand are seen too. It stands between the application and libibverbs where objects are made, and takes the
 * provider's place in the function pointers of struct ibv_context, ibv_qp_ex and ibv_cq_ex, where requests pass.
 *
 * Changes nothing that the application can see: every call goes on to the provider with the arguments it came with,
 * and returns what the provider returned; errno is never touched (there is no C library here). Takes no lock and makes
 * no system call where requests pass. What cannot be followed passes through.
 *
 * A child of fork() passes through as well, for its parent's queue pairs are not its to use; if it opens a device of
 * its own, it is followed from then on as a process of its own.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <infiniband/verbs.h>
#include <link.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t s64;

#include "swerve.h"
#include "requests.h"
#include "extended.h"

#define visible __attribute__((visibility("default")))
#define INSTANCES 4 /* copies of libibverbs in one process */

/* The functions of libibverbs that make or change objects, as one of its copies has them. */
struct library {
	const struct link_map *map;
	struct ibv_context *(*open_device)(struct ibv_device *device);
	struct ibv_context *(*import_device)(int fd);
	int (*close_device)(struct ibv_context *context);
	struct ibv_qp *(*create_qp)(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
	int (*modify_qp)(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
	int (*destroy_qp)(struct ibv_qp *qp);
	struct ibv_qp_ex *(*qp_to_qp_ex)(struct ibv_qp *qp);
	int (*destroy_cq)(struct ibv_cq *cq);
	int (*destroy_srq)(struct ibv_srq *srq);
};

static struct library libraries[INSTANCES];

/* ---- libibverbs: objects come and go --------------------------------------------------------------------------- */

static const char *name_in_path(const char *path)
{
	const char *name = path;

	for (; *path; path++)
		if (*path == '/')
			name = path + 1;
	return name;
}

static struct device *device_place(const struct ibv_context *context)
{
	u32 at = 0;

	while (at < devices_used && devices[at].context && devices[at].context != context)
		at++;
	return at < DEVICES ? &devices[at] : NULL;
}

static struct verbs_context *with_member(struct ibv_context *context, size_t offset)
{
	struct verbs_context *verbs = verbs_get_ctx(context);

	return verbs && verbs->sz >= sizeof(*verbs) - offset ? verbs : NULL;
}

/* Take the provider's place in a device that was just opened. */
slow_path static void opened(struct ibv_context *context)
{
	struct verbs_context *with_qp_ex, *with_cq_ex;
	struct device *device;

	if (!prepare())
		return;
	lock();
	device = device_place(context);
	if (!device || context->ops.post_send == tap_post_send)
		goto out;
	store(&device->context, NULL);
	device->ops = context->ops;
	device->generation = tap_generation;
	device->name[0] = device->path[0] = 0;
	append(device->name, sizeof(device->name), name_in_path(context->device->name));
	append(device->path, sizeof(device->path), context->device->ibdev_path);
	with_qp_ex = with_member(context, offsetof(struct verbs_context, create_qp_ex));
	with_cq_ex = with_member(context, offsetof(struct verbs_context, create_cq_ex));
	device->create_qp_ex = with_qp_ex ? with_qp_ex->create_qp_ex : NULL;
	device->create_cq_ex = with_cq_ex ? with_cq_ex->create_cq_ex : NULL;
	store_release(&device->context, context);
	if (device == &devices[devices_used])
		store_release(&devices_used, devices_used + 1);
	if (!tap_share.count && get_table())
		share_all();
	if (device->create_qp_ex)
		with_qp_ex->create_qp_ex = tap_create_qp_ex;
	if (device->create_cq_ex)
		with_cq_ex->create_cq_ex = tap_create_cq_ex;
	if (context->ops.bind_mw)
		context->ops.bind_mw = tap_bind_mw;
	context->ops.post_srq_recv = tap_post_srq_recv;
	context->ops.post_recv = tap_post_recv;
	context->ops.post_send = tap_post_send;
	context->ops.poll_cq = tap_poll_cq;
out:
	unlock();
}

/* A device is closed: its queue pairs are gone, whether they were destroyed or not. */
slow_path static void closed(const struct ibv_context *context)
{
	struct queue *queue;

	lock();
	for (u64 i = 0; i < 1 << QUEUES_SHIFT; i++) {
		queue = queues_by_address[i].key > SLOT_GONE ? queues_by_address[i].value : NULL;
		if (queue && queue->context == context)
			forget(queue);
	}
	for (u32 i = 0; i < devices_used; i++) /* not the first place that would do: those before may be empty by now */
		if (devices[i].context == context)
			store_release(&devices[i].context, NULL);
	unlock();
}

static void read_gid(const struct device *device, u32 port, u32 index, struct swerve_addr *into)
{
	char path[IBV_SYSFS_PATH_MAX + 48] = "", text[64];
	u32 digits = 0, digit;

	append(path, sizeof(path), device->path);
	append(path, sizeof(path), "/ports/");
	append_number(path, sizeof(path), port);
	append(path, sizeof(path), "/gids/");
	append_number(path, sizeof(path), index);
	read_file(path, text, sizeof(text));
	for (const char *at = text; *at && digits < 32; at++) {
		digit = *at >= '0' && *at <= '9' ? *at - '0' : *at >= 'a' && *at <= 'f' ? *at - 'a' + 10 : 16;
		if (digit < 16) {
			into->bytes[digits / 2] = into->bytes[digits / 2] << 4 | digit;
			digits++;
		}
	}
}

slow_path static void modified(struct queue *queue, const struct ibv_qp_attr *attr, int mask)
{
	if (mask & IBV_QP_STATE && attr->qp_state == IBV_QPS_RESET)
		drop_outstanding(queue);
	if (mask & IBV_QP_DEST_QPN)
		store(&queue->record->remote_qp_number, attr->dest_qp_num);
	if (mask & IBV_QP_AV && attr->ah_attr.is_global) {
		memcpy(&queue->record->remote, &attr->ah_attr.grh.dgid, sizeof(queue->record->remote));
		read_gid(queue->device, attr->ah_attr.port_num, attr->ah_attr.grh.sgid_index, &queue->record->local);
	}
}

slow_path static void remove_cq(const struct ibv_cq *cq, struct extended_cq *own)
{
	lock();
	take_out(cqs_by_address, CQS_SHIFT, (u64)cq, own);
	unlock();
	system_call2(SYS_munmap, own, sizeof(*own));
}

slow_path static void remove_srq(const struct ibv_srq *srq)
{
	struct shared *shared;

	lock();
	shared = look_up(srqs_by_address, SRQS_SHIFT, (u64)srq);
	if (shared) /* its page stays: another queue at this address may have been given it by now */
		take_out(srqs_by_address, SRQS_SHIFT, (u64)srq, shared);
	unlock();
}

static struct ibv_context *verbs_open_device(const struct library *library, struct ibv_device *device)
{
	struct ibv_context *context = library->open_device(device);

	if (context)
		opened(context);
	return context;
}

static struct ibv_context *verbs_import_device(const struct library *library, int fd)
{
	struct ibv_context *context = library->import_device(fd);

	if (context)
		opened(context);
	return context;
}

static int verbs_close_device(const struct library *library, struct ibv_context *context)
{
	int result = library->close_device(context);

	if (!result) {
		settle();
		closed(context);
	}
	return result;
}

static struct ibv_qp *verbs_create_qp(const struct library *library, struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct ibv_qp *qp = library->create_qp(pd, attr);

	if (qp && qp->context->ops.post_send == tap_post_send && alive(device_of(qp->context)->generation))
		follow(qp, attr->cap.max_send_wr, attr->sq_sig_all);
	return qp;
}

static int verbs_modify_qp(const struct library *library, struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	int result = library->modify_qp(qp, attr, mask);
	struct queue *queue = queue_of(qp);

	if (!result && queue && alive(queue->generation)) {
		settle();
		modified(queue, attr, mask);
	}
	return result;
}

static int verbs_destroy_qp(const struct library *library, struct ibv_qp *qp)
{
	struct queue *queue = queue_of(qp);
	int result = library->destroy_qp(qp);

	if (!result && queue) {
		settle();
		lock();
		if (queue_of(qp) == queue) /* else another was made at the same address meanwhile */
			forget(queue);
		unlock();
	}
	return result;
}

static struct ibv_qp_ex *verbs_qp_to_qp_ex(const struct library *library, struct ibv_qp *qp)
{
	struct ibv_qp_ex *ex = library->qp_to_qp_ex(qp);
	struct queue *queue = ex ? queue_of(qp) : NULL;

	if (queue && !queue->extended && alive(queue->generation)) {
		lock();
		if (!queue->extended && ex->wr_start && ex->wr_complete)
			take_place_in_qp_ex(queue, ex, queue->atomic_write);
		unlock();
	}
	return ex;
}

static int verbs_destroy_cq(const struct library *library, struct ibv_cq *cq)
{
	/* Before: afterwards the address may be another queue's. */
	struct extended_cq *own = look_up(cqs_by_address, CQS_SHIFT, (u64)cq);
	int result = library->destroy_cq(cq);

	if (!result && own)
		remove_cq(cq, own);
	return result;
}

static int verbs_destroy_srq(const struct library *library, struct ibv_srq *srq)
{
	int result = library->destroy_srq(srq);

	if (!result)
		remove_srq(srq);
	return result;
}

/* ---- the dynamic linker ---------------------------------------------------------------------------------------- */

/* Each copy of the library gets functions of its own, for they have to know which they stand before. */
#define FORWARD(at, type, name, parameters, arguments)          \
	static type name##_##at parameters                      \
	{                                                       \
		const struct library *library = &libraries[at]; \
                                                                \
		return verbs_##name arguments;                  \
	}
#define COPY(at)                                                                                        \
	FORWARD(at, struct ibv_context *, open_device, (struct ibv_device * device), (library, device)) \
	FORWARD(at, struct ibv_context *, import_device, (int fd), (library, fd))                       \
	FORWARD(at, int, close_device, (struct ibv_context * context), (library, context))              \
	FORWARD(at, struct ibv_qp *, create_qp, (struct ibv_pd * pd, struct ibv_qp_init_attr * attr),   \
		(library, pd, attr))                                                                    \
	FORWARD(at, int, modify_qp, (struct ibv_qp * qp, struct ibv_qp_attr * attr, int mask),          \
		(library, qp, attr, mask))                                                              \
	FORWARD(at, int, destroy_qp, (struct ibv_qp * qp), (library, qp))                               \
	FORWARD(at, struct ibv_qp_ex *, qp_to_qp_ex, (struct ibv_qp * qp), (library, qp))               \
	FORWARD(at, int, destroy_cq, (struct ibv_cq * cq), (library, cq))                               \
	FORWARD(at, int, destroy_srq, (struct ibv_srq * srq), (library, srq))

COPY(0)
COPY(1)
COPY(2)
COPY(3)

#define STANDS_BEFORE(name, version)                                   \
	{                                                              \
		"ibv_" #name, version, offsetof(struct library, name), \
		{                                                      \
			name##_0, name##_1, name##_2, name##_3         \
		}                                                      \
	}

static const struct {
	const char *name;
	const char *version; /* the older ones have another ABI */
	size_t member;
	void *functions[INSTANCES];
} stand_ins[] = {
	STANDS_BEFORE(open_device, "IBVERBS_1.1"),  STANDS_BEFORE(import_device, "IBVERBS_1.10"),
	STANDS_BEFORE(close_device, "IBVERBS_1.1"), STANDS_BEFORE(create_qp, "IBVERBS_1.1"),
	STANDS_BEFORE(modify_qp, "IBVERBS_1.1"),    STANDS_BEFORE(destroy_qp, "IBVERBS_1.1"),
	STANDS_BEFORE(qp_to_qp_ex, "IBVERBS_1.6"),  STANDS_BEFORE(destroy_cq, "IBVERBS_1.1"),
	STANDS_BEFORE(destroy_srq, "IBVERBS_1.1"),
};

/* Where an entry of an object's dynamic section points, or NULL. */
static const void *dynamic(const struct link_map *map, s64 tag)
{
	const ElfW(Dyn) *entry = map->l_ld;
	u64 at;

	for (; entry->d_tag != DT_NULL; entry++) {
		if (entry->d_tag != tag)
			continue;
		at = entry->d_un.d_ptr;
		return (const void *)(at < map->l_addr ? at + map->l_addr
						       : at); /* most linkers relocate them in place */
	}
	return NULL;
}

/* The version of the index-th symbol of an object; empty where symbols have none. */
static const char *version_of(const struct link_map *map, u32 index)
{
	const ElfW(Half) *versions = dynamic(map, DT_VERSYM);
	const ElfW(Verdef) *definition = dynamic(map, DT_VERDEF);
	const char *strings = dynamic(map, DT_STRTAB);

	if (!versions || !definition || !strings)
		return "";
	for (;;) {
		if (definition->vd_ndx == (versions[index] & 0x7fff))
			return strings +
			       ((const ElfW(Verdaux) *)((const char *)definition + definition->vd_aux))->vda_name;
		if (!definition->vd_next)
			return "";
		definition = (const ElfW(Verdef) *)((const char *)definition + definition->vd_next);
	}
}

visible u32 la_version(u32 version)
{
	return version < LAV_CURRENT ? version : LAV_CURRENT;
}

/* An object is loaded. Its cookie tells which copy of libibverbs it is: 1 and up, 0 for everything else. */
visible u32 la_objopen(struct link_map *map, Lmid_t space, uintptr_t *cookie)
{
	*cookie = 0;
	if (!begins_with(name_in_path(map->l_name), "libibverbs.so"))
		return LA_FLG_BINDFROM;
	for (u32 i = 0; i < INSTANCES; i++) {
		if (libraries[i].map)
			continue;
		libraries[i].map = map;
		*cookie = i + 1;
		return LA_FLG_BINDTO | LA_FLG_BINDFROM;
	}
	return LA_FLG_BINDFROM;
}

visible u32 la_objclose(uintptr_t *cookie)
{
	if (*cookie)
		libraries[*cookie - 1].map = NULL;
	return 0;
}

visible uintptr_t la_symbind64(Elf64_Sym *symbol, u32 index, uintptr_t *from, uintptr_t *to, u32 *flags,
			       const char *name)
{
	struct library *library = *to ? &libraries[*to - 1] : NULL;
	const char *version;

	for (u32 i = 0; library && i < sizeof(stand_ins) / sizeof(*stand_ins); i++) {
		if (!same_text(name, stand_ins[i].name))
			continue;
		version = version_of(library->map, index);
		if (*version && !same_text(version, stand_ins[i].version))
			break;
		*(uintptr_t *)((char *)library + stand_ins[i].member) = symbol->st_value;
		return (uintptr_t)stand_ins[i].functions[*to - 1];
	}
	return symbol->st_value;
}

__attribute__((constructor)) static void begin(int count, char **arguments, char **environment)
{
	choose_socket(environment);
}
