/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Where the tap gets its tables: from the agent, over a Unix socket, as the descriptor of a mappable BPF array map that
 * belongs to this process alone. No descriptor is kept: a mapping is enough, and outlives the agent.
 *
 * All under the tap's slow lock, in calls that make, change or destroy objects. The agent answers within a millisecond
 * as a rule. Only WAITS calls of a conversation wait for it at all, WAIT_MS each; after that the later calls look whether
 * the answer has come. Nothing is lost meanwhile: queue pairs without a row count in memory of their own.
 */
#ifndef SWERVE_TAP_SHARE_H
#define SWERVE_TAP_SHARE_H

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "clock.h"

#define TABLES 16 /* of one process */
#define WAIT_MS 5
#define WAITS 3
#define RETRY_NS 1000000000ULL /* after an agent that refused, or hung up */
#define DESCRIPTOR_FROM 500    /* out of the way of those that the application opens meanwhile */

/* The conversation, one packet each: hello, reply with the descriptor, and a byte that the map is in place. */
#define TAP_MAGIC 0x50415453 /* "STAP" */
#define TAP_VERSION 1

struct tap_hello {
	u32 magic;
	u32 version;
	u32 row_bytes; /* of struct swerve_qp, as compiled here */
	u32 rows;
	u32 tables; /* that this process has */
};

struct tap_reply {
	u32 magic;
	u32 version;
	u32 refused; /* 0, or why there is no descriptor */
};

static struct {
	struct swerve_qp *tables[TABLES];
	u32 count;
	u32 next; /* row to look at first, so that closed ones rest a while */
	u64 retry_ns;
	long sock; /* of the conversation under way, or negative */
	u64 inode; /* and which socket that descriptor has to be: the application may close what is not its own */
	u32 waits;
	char socket[108];
} tap_share = { .sock = -1, .socket = "/run/swerve/host.tap" };

static size_t table_bytes(void)
{
	return (SWERVE_QPS * sizeof(struct swerve_qp) + 4095) & ~4095UL;
}

/* What is called SWERVE_TAP_SOCKET in the environment, if anything. */
static void choose_socket(char **environment)
{
	static const char name[] = "SWERVE_TAP_SOCKET=";

	for (; environment && *environment; environment++) {
		if (begins_with(*environment, name)) {
			tap_share.socket[0] = 0;
			append(tap_share.socket, sizeof(tap_share.socket), *environment + sizeof(name) - 1);
		}
	}
}

static bool still_ours(void)
{
	struct stat status;

	return tap_share.sock >= 0 && system_call2(SYS_fstat, tap_share.sock, &status) == 0 &&
	       S_ISSOCK(status.st_mode) && status.st_ino == tap_share.inode;
}

static void hang_up(void)
{
	if (still_ours())
		system_call1(SYS_close, tap_share.sock);
	tap_share.sock = -1;
}

static bool answered(long wait_ms)
{
	struct pollfd wait = { .fd = tap_share.sock, .events = POLLIN };
	struct timespec most = { 0, wait_ms * 1000000 };

	return system_call(SYS_ppoll, (long)&wait, 1, (long)&most, 0, 8, 0) == 1;
}

/* The descriptor that comes with the answer, or a negative number. */
static long receive_table(void)
{
	char room[CMSG_SPACE(sizeof(int))] __attribute__((aligned(8)));
	struct cmsghdr *control = (struct cmsghdr *)room;
	struct msghdr message = { 0 };
	struct iovec vector;
	struct tap_reply reply;

	vector.iov_base = &reply;
	vector.iov_len = sizeof(reply);
	message.msg_iov = &vector;
	message.msg_iovlen = 1;
	message.msg_control = room;
	message.msg_controllen = sizeof(room);
	if (system_call3(SYS_recvmsg, tap_share.sock, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) != sizeof(reply) ||
	    reply.magic != TAP_MAGIC || reply.version != TAP_VERSION || reply.refused)
		return -1;
	if (message.msg_controllen < CMSG_LEN(sizeof(int)) || control->cmsg_level != SOL_SOCKET ||
	    control->cmsg_type != SCM_RIGHTS || control->cmsg_len != CMSG_LEN(sizeof(int)))
		return -1;
	return *(int *)CMSG_DATA(control);
}

static struct swerve_qp *map_table(long fd)
{
	long at = system_call(SYS_mmap, 0, table_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (at < 0 && at > -4096)
		return NULL;
	system_call3(SYS_madvise, at, table_bytes(), MADV_DONTFORK); /* a child's posts are not ours */
	return (struct swerve_qp *)at;
}

/* Begin a conversation; false when there is no agent, or none that takes one. */
static bool ask(void)
{
	struct tap_hello hello = { TAP_MAGIC, TAP_VERSION, sizeof(struct swerve_qp), SWERVE_QPS, tap_share.count };
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	struct stat status;
	long low, sock;

	low = system_call3(SYS_socket, AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (low < 0)
		return false;
	append(address.sun_path, sizeof(address.sun_path), tap_share.socket);
	if (system_call3(SYS_connect, low, &address, sizeof(address)) < 0 ||
	    system_call(SYS_sendto, low, (long)&hello, sizeof(hello), MSG_NOSIGNAL | MSG_DONTWAIT, 0, 0) < 0) {
		system_call1(SYS_close, low);
		return false;
	}
	sock = system_call3(SYS_fcntl, low, F_DUPFD_CLOEXEC, DESCRIPTOR_FROM);
	if (sock >= 0)
		system_call1(SYS_close, low);
	else
		sock = low;
	system_call2(SYS_fstat, sock, &status);
	tap_share.sock = sock;
	tap_share.inode = status.st_ino;
	tap_share.waits = 0;
	return true;
}

/* The answer to what was asked, if it has come; true when there is a new table. */
slow_path static bool take_answer(void)
{
	struct swerve_qp *table;
	long fd;

	if (!still_ours()) {
		tap_share.sock = -1;
		return false;
	}
	if (!answered(tap_share.waits++ < WAITS ? WAIT_MS : 0))
		return false;
	fd = receive_table();
	table = fd < 0 ? NULL : map_table(fd);
	if (fd >= 0)
		system_call1(SYS_close, fd);
	if (table) {
		tap_share.tables[tap_share.count++] = table;
		system_call(SYS_sendto, tap_share.sock, (long)"k", 1, MSG_NOSIGNAL | MSG_DONTWAIT, 0, 0);
	} else {
		tap_share.retry_ns = clock_ns() + RETRY_NS;
	}
	hang_up();
	return table;
}

/* One more table, if there is an agent that gives one. */
slow_path static bool get_table(void)
{
	if (tap_share.count >= TABLES)
		return false;
	if (tap_share.sock < 0 && (clock_ns() < tap_share.retry_ns || !ask()))
		return false;
	return take_answer();
}

/* A row that nobody uses, or NULL. */
static struct swerve_qp *find_row(void)
{
	u32 rows = tap_share.count * SWERVE_QPS, at;
	struct swerve_qp *row;

	for (u32 i = 0; i < rows; i++) {
		at = (tap_share.next + i) % rows;
		row = &tap_share.tables[at / SWERVE_QPS][at % SWERVE_QPS];
		if (load_acquire(&row->state) == SWERVE_QP_FREE) {
			tap_share.next = at + 1;
			return row;
		}
	}
	return NULL;
}

static struct swerve_qp *new_row(void)
{
	struct swerve_qp *row = find_row();

	return row || !get_table() ? row : find_row();
}

#endif /* SWERVE_TAP_SHARE_H */
