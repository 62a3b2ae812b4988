/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The pacer: sends the agent's probes when they are due, and looks whether they are answered. Runs in user space, as a
 * process of its own: swerve-pacer CONTROL PACKETS MEMORY PATHS PRIORITY, the first four being descriptors: a socket to
 * the agent, the packet socket, the memory that schedule.py fills, and the map probe_paths of probe.c. What is due was
 * put there some hundred milliseconds ahead, so probes leave on time while the agent is kept waiting; when the plan is
 * used up, nothing is sent. It runs at the real-time priority PRIORITY where it may: it sleeps between ticks, and a
 * tick is a bounded number of frames.
 *
 * At every tick, and once between two that are far apart, it looks for answers that are overdue, and tells the agent if
 * one is, which then probes more often: no verdict rests on it. probe.c does the same when the next probe leaves, so the
 * map may be missing.
 *
 * A schedule of probes that only look at a queue says how many bytes are sent along a path from one to the next: one
 * that comes sooner is left out, unless long enough after the one before. So hosts that send much look often, and the
 * probes of all hosts together are a fixed share of what passes.
 *
 * In C because it wakes up for every tick: what an interpreter touches is cold each time. Times are CLOCK_MONOTONIC
 * nanoseconds. One thread.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t s64;

#include "swerve.h"

/* ---- shared with schedule.py, which checks that it has the same LAYOUT ---- */

/*
 * The memory begins with words: how many ticks were planned, begun and done since the start, the processor time that
 * we have used, whether we wait for a plan, how many entries follow, how many rows of probe_paths are in use, how many
 * bytes pass along a path between two probes (0: all probes are sent), after what time one is sent all the same, and how
 * many bytes we have sent.
 */
enum {
	PLANNED,
	BEGUN,
	DONE,
	CPU,
	WAITING,
	ENTRIES,
	ROWS,
	APART_BYTES,
	APART_NS,
	SENT_BYTES,
	FIRST_ENTRY = 16
};

/*
 * The entry of tick n is entry n modulo ENTRIES: when it is due, when it is too late for it, when it began (0: it was
 * left out), and groups of messages. Of each: where its headers are in the memory, how many, and how long after the
 * group before it is to leave.
 */
enum {
	DUE,
	TOO_LATE,
	BEGAN,
	GROUPS,
	FIRST_GROUP
};
enum {
	HEADERS,
	COUNT,
	SPACING,
	GROUP_WORDS
};
#define MOST_GROUPS 6
#define ENTRY_WORDS (FIRST_GROUP + GROUP_WORDS * MOST_GROUPS)
#define LAYOUT (FIRST_ENTRY << 16 | ENTRY_WORDS << 8 | (unsigned char)sizeof(struct mmsghdr))

/*
 * Over the control socket, a byte each: READY is ours, with the address of the memory here and LAYOUT. HOLD is answered
 * with HELD, and then nothing is sent until GO. A plan for a pacer that waits comes with GO, too. OVERDUE is ours: an
 * answer is, and the agent is to look.
 */
enum {
	READY = 'R',
	HOLD = 'H',
	HELD = 'D',
	GO = 'G',
	OVERDUE = 'O'
};

/* ---- */

#define MOST_RT_US 200000
#define NS_PER_S 1000000000LL
#define AWAKE_NS NS_PER_S
#define LOOK_LATE_NS 2000000 /* then we had no processor, and answers may wait for one as well */

static int control, packets;
static char *base;
static int64_t *words;
static const struct swerve_probe_path *paths; /* NULL: not known, and nobody looks */

static int64_t clock_ns(clockid_t clock)
{
	struct timespec now;

	clock_gettime(clock, &now);
	return now.tv_sec * NS_PER_S + now.tv_nsec;
}

/* Words that the agent reads or writes meanwhile. */
static int64_t load(int word)
{
	return __atomic_load_n(&words[word], __ATOMIC_SEQ_CST);
}

static void store(int word, int64_t value)
{
	__atomic_store_n(&words[word], value, __ATOMIC_SEQ_CST);
}

/* One byte from the agent; 0 when it is gone. */
static unsigned char hear(void)
{
	unsigned char byte;
	ssize_t size;

	do
		size = recv(control, &byte, 1, 0);
	while (size < 0 && errno == EINTR);
	return size == 1 ? byte : 0;
}

/* Wait for a word of the agent, and do what it says; 0 when the agent is gone. */
static int obey(void)
{
	const unsigned char held = HELD;
	unsigned char word = hear();

	while (word == HOLD) {
		if (send(control, &held, 1, MSG_NOSIGNAL) != 1)
			return 0;
		word = hear();
	}
	return word == GO;
}

/*
 * Send so many messages in as few system calls as possible. The agent has set the length of each to 0; the kernel
 * writes how many bytes were sent, and we the errno of a refusal, negated.
 */
static void send_messages(struct mmsghdr *message, int64_t count)
{
	while (count > 0) {
		int sent = sendmmsg(packets, message, count, MSG_DONTWAIT);

		if (sent <= 0) { /* it stops at the first that fails, and says why only when it is the first */
			message->msg_len = -errno;
			if (errno == EAGAIN)
				return; /* the socket's buffer is full; those behind keep their 0 */
			sent = 1;
		}
		message += sent;
		count -= sent;
	}
}

/* Of a path: when the last message that was not left out was due, what had passed by then, and by the last tick. */
static struct {
	int64_t at_ns;
	u64 bytes;
	u64 seen;
} known[SWERVE_PROBE_PATHS];

/*
 * Once nothing has passed along any path for AWAKE_NS, ticks are left out until `rest_until_ns`: we need not wake up for
 * them.
 */
static int64_t moved_ns, rest_until_ns;

/*
 * Send those along whose path enough has passed since the last, or whose last is long ago. The low half of the
 * destination address names the path (swerve.h). Returns whether anything has passed since the tick before.
 */
static int send_wanted(struct mmsghdr *message, int64_t count, int64_t due_ns)
{
	u64 apart_bytes = load(APART_BYTES);
	int64_t apart_ns = load(APART_NS);
	int moved = 0;

	for (; count > 0; count--, message++) {
		const u8 *frame = message->msg_hdr.msg_iov->iov_base;
		u32 row = (frame[4] << 8 | frame[5]) % SWERVE_PROBE_PATHS;
		u64 bytes = paths ? __atomic_load_n(&paths[row].passed_bytes, __ATOMIC_RELAXED) : 0;

		moved |= bytes != known[row].seen;
		known[row].seen = bytes;
		if (bytes - known[row].bytes < apart_bytes && due_ns < known[row].at_ns + apart_ns)
			continue;
		known[row].bytes = bytes;
		known[row].at_ns = due_ns;
		message->msg_len = 0;
		send_messages(message, 1);
		if ((int)message->msg_len > 0)
			store(SENT_BYTES, load(SENT_BYTES) + message->msg_len);
	}
	return moved;
}

static void send_groups(const int64_t *group, int64_t groups, int64_t began_ns, int64_t due_ns)
{
	int moved = 0;

	for (; groups > 0; groups--, group += GROUP_WORDS) {
		struct mmsghdr *messages = (struct mmsghdr *)(base + group[HEADERS]);

		while (group[SPACING] && clock_ns(CLOCK_MONOTONIC) < began_ns + group[SPACING])
			; /* microseconds: no timer is as punctual */
		began_ns = clock_ns(CLOCK_MONOTONIC);
		if (load(APART_BYTES))
			moved |= send_wanted(messages, group[COUNT], due_ns);
		else
			send_messages(messages, group[COUNT]);
	}
	if (moved || !load(APART_BYTES))
		moved_ns = due_ns;
	rest_until_ns = due_ns > moved_ns + AWAKE_NS ? due_ns + load(APART_NS) : 0;
}

static void send_tick(int64_t tick, int64_t *entry)
{
	int64_t began_ns = clock_ns(CLOCK_MONOTONIC);
	int left_out = began_ns > entry[TOO_LATE] || entry[DUE] < rest_until_ns;

	entry[BEGAN] = left_out ? 0 : began_ns;
	store(BEGUN, tick + 1); /* before the first frame: whoever sees an answer sees that its probe was sent */
	if (!left_out)
		send_groups(entry + FIRST_GROUP, entry[GROUPS], began_ns, entry[DUE]);
	store(CPU, clock_ns(CLOCK_PROCESS_CPUTIME_ID));
	store(DONE, tick + 1);
}

/*
 * As in note_sent of probe.c; but where round trips are nearly that long, an answer that is not here yet is no news.
 * INT64_MAX: none is waited for.
 */
static int64_t overdue_from(const struct swerve_probe_path *path)
{
	u64 first_ns = __atomic_load_n(&path->first_ns, __ATOMIC_RELAXED), grace_ns = path->grace_ns;
	u64 late_ns = grace_ns < SWERVE_PROBE_LATE_NS ? grace_ns : SWERVE_PROBE_LATE_NS;

	if (!path->limit || path->overdue || grace_ns > SWERVE_PROBE_MOST_GRACE_NS || !first_ns)
		return INT64_MAX;
	return first_ns + late_ns;
}

/*
 * Whether an answer is overdue, and if not, when the first of those that are waited for will be; INT64_MAX: none is.
 * The agent may be hanging: we do not wait for it.
 */
static int64_t look(int64_t due_ns)
{
	const unsigned char overdue = OVERDUE;
	int64_t now_ns = clock_ns(CLOCK_MONOTONIC), rows = load(ROWS), next_ns = INT64_MAX;

	if (!paths || now_ns > due_ns + LOOK_LATE_NS)
		return INT64_MAX;
	for (int64_t row = 0; row < rows && row < SWERVE_PROBE_PATHS; row++) {
		int64_t from_ns = overdue_from(&paths[row]);

		if (from_ns < now_ns) {
			send(control, &overdue, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
			return INT64_MAX;
		}
		if (from_ns < next_ns)
			next_ns = from_ns;
	}
	return next_ns == INT64_MAX ? next_ns : next_ns + 1;
}

/* For a plan; 0 when the agent is gone. */
static int wait_for_plan(void)
{
	int alive;

	store(WAITING, 1);
	alive = load(BEGUN) != load(PLANNED) || obey(); /* it may have come a moment ago */
	store(WAITING, 0);
	return alive;
}

/* Sleep, unless the agent says something; 0 when it is gone. */
static int sleep_for(int64_t left_ns)
{
	struct timespec left = { .tv_sec = left_ns / NS_PER_S, .tv_nsec = left_ns % NS_PER_S };
	struct pollfd watched = { .fd = control, .events = POLLIN };

	return ppoll(&watched, 1, &left, NULL) <= 0 || obey();
}

static void run(void)
{
	int alive = obey(); /* there is no plan yet */
	int64_t look_ns = INT64_MAX;

	while (alive) {
		int64_t tick = load(BEGUN);

		if (tick == load(PLANNED)) {
			alive = wait_for_plan();
			continue;
		}
		int64_t *entry = words + FIRST_ENTRY + tick % load(ENTRIES) * ENTRY_WORDS;
		int looks = look_ns < entry[DUE];
		int64_t left_ns = (looks ? look_ns : entry[DUE]) - clock_ns(CLOCK_MONOTONIC);

		if (entry[DUE] < rest_until_ns) {
			send_tick(tick, entry);
		} else if (left_ns > 0) {
			alive = sleep_for(left_ns);
		} else if (looks) {
			look_ns = look(look_ns);
		} else {
			int64_t due_ns = entry[DUE]; /* the entry may be another tick's as soon as it is sent */

			send_tick(tick, entry);
			look_ns = look(due_ns);
		}
	}
}

/* Without it, or where it may not: probes are late where others take all processors. */
static void be_prompt(int priority)
{
	const struct rlimit none = { 0, 0 }, most = { MOST_RT_US, MOST_RT_US };
	const struct sched_param param = { .sched_priority = priority };

	if (setrlimit(RLIMIT_CORE, &none) || setrlimit(RLIMIT_RTTIME, &most)) /* without a sleep; then we are ended */
		return;
	sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &param);
}

static int say_ready(void)
{
	unsigned char ready[1 + sizeof(uint64_t) + sizeof(uint32_t)] = { READY };
	uint64_t address = (uintptr_t)base;
	uint32_t layout = LAYOUT;

	memcpy(ready + 1, &address, sizeof(address));
	memcpy(ready + 1 + sizeof(address), &layout, sizeof(layout));
	return send(control, ready, sizeof(ready), MSG_NOSIGNAL) == sizeof(ready);
}

int main(int count, char **arguments)
{
	struct stat memory;

	if (count != 6)
		return 2;
	control = atoi(arguments[1]);
	packets = atoi(arguments[2]);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	signal(SIGINT, SIG_IGN); /* meant for the agent, with which we end */
	signal(SIGTERM, SIG_IGN);
	be_prompt(atoi(arguments[5]));
	if (fstat(atoi(arguments[3]), &memory))
		return 1;
	base = mmap(NULL, memory.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(arguments[3]), 0);
	if (base == MAP_FAILED)
		return 1;
	words = (int64_t *)base;
	paths = mmap(NULL, SWERVE_PROBE_PATHS * sizeof(*paths), PROT_READ, MAP_SHARED, atoi(arguments[4]), 0);
	if (paths == MAP_FAILED)
		paths = NULL;
	if (say_ready())
		run();
	return 0;
}
