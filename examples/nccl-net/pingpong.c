/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Two processes send each other messages in turn through a network plugin's interface, and check every byte.
 *
 *     pingpong PLUGIN RAILS RAILS BYTES SECONDS
 *
 * RAILS are what SWERVE_NET_RAILS is to be in each process. It lasts for SECONDS and until standard input ends. A line
 * "at N" follows about every 100 ms, and a last line of key=value: messages, lost, duplicated, wrong bytes, quantiles
 * and the longest of the round trips. The plugin's log goes to standard error.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "net.h"

#define CHECK(condition)                                                                  \
	do {                                                                              \
		if (!(condition)) {                                                       \
			fprintf(stderr, "pingpong: line %d: %s\n", __LINE__, #condition); \
			exit(1);                                                          \
		}                                                                         \
	} while (0)

enum {
	LAST = 1,
	MOST_TRIPS = 4 << 20
};

struct message {
	uint64_t number; /* from 1 on */
	uint64_t flags;
	uint8_t bytes[];
};

static const struct nccl_net *net;
static const char *name;
static void *sender, *receiver, *listener, *send_memory, *receive_memory;
static struct message *out, *in[2]; /* one is received into while the other is looked at */
static void *receiving;		    /* into in[0] */
static int size;
static uint64_t lost, duplicated, wrong;

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + now.tv_nsec;
}

static void log_line(int level, unsigned long subsystems, const char *file, int line, const char *format, ...)
{
	char text[256];
	va_list arguments;

	(void)level, (void)subsystems, (void)file, (void)line;
	va_start(arguments, format);
	vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	fprintf(stderr, "%.3f %s %s\n", now_ns() / 1e9, name, text);
}

/* Another byte at each place of each message of each side. */
static uint8_t byte_at(uint64_t number, int place, bool from_first)
{
	return (number * 31 + place * 7 + (place >> 8) + from_first * 101) & 0xff;
}

static int wait_for(void *request)
{
	int done = 0, bytes = 0;

	while (!done)
		CHECK(!net->test(request, &done, &bytes));
	return bytes;
}

static void send_one(uint64_t number, uint64_t flags, bool first)
{
	void *request = NULL;

	out->number = number;
	out->flags = flags;
	for (int place = 0; place < size; place++)
		out->bytes[place] = byte_at(number, place, first);
	while (!request)
		CHECK(!net->isend(sender, out, sizeof(*out) + size, 0, send_memory, &request));
	CHECK(wait_for(request) == (int)sizeof(*out) + size);
}

static void receive(void)
{
	int bytes = sizeof(**in) + size, tag = 0;
	void *data = in[0];

	memset(data, 0xee, bytes);
	while (!receiving)
		CHECK(!net->irecv(receiver, 1, &data, &bytes, &tag, &receive_memory, &receiving));
}

/* Receives until this message is there; counts what should not come. */
static uint64_t receive_one(uint64_t number, bool from_first)
{
	for (;;) {
		struct message *got = in[0];

		CHECK(wait_for(receiving) == (int)sizeof(*got) + size);
		receiving = NULL;
		in[0] = in[1];
		in[1] = got;
		receive();
		for (int place = 0; place < size; place++)
			wrong += got->bytes[place] != byte_at(got->number, place, from_first);
		if (got->number >= number) {
			lost += got->number - number;
			return got->flags;
		}
		duplicated++;
	}
}

static void begin(const char *plugin, const char *rails, int other)
{
	struct nccl_net_properties properties;
	char mine[NCCL_HANDLE_BYTES] = { 0 }, theirs[NCCL_HANDLE_BYTES];
	void *library, *offload = NULL;
	size_t room = (sizeof(**in) + size + 7) & ~7;
	int count = 0;

	CHECK(!setenv("SWERVE_NET_RAILS", rails, 1));
	library = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
	if (!library)
		fprintf(stderr, "%s\n", dlerror());
	CHECK(library && (net = dlsym(library, "ncclNet_v8")));
	CHECK(!net->init(log_line) && !net->devices(&count) && count > 0 && !net->get_properties(0, &properties));
	CHECK(properties.memory & NCCL_PTR_HOST);
	CHECK(!net->listen(0, mine, &listener));
	CHECK(write(other, mine, sizeof(mine)) == sizeof(mine) &&
	      read(other, theirs, sizeof(theirs)) == sizeof(theirs));
	while (!sender || !receiver) {
		if (!sender)
			CHECK(!net->connect(0, theirs, &sender, &offload));
		if (!receiver)
			CHECK(!net->accept(listener, &receiver, &offload));
	}
	out = calloc(1, sizeof(*out) + size);
	in[0] = calloc(2, room);
	CHECK(out && in[0]);
	in[1] = (void *)((uint8_t *)in[0] + room);
	CHECK(!net->register_memory(sender, out, sizeof(*out) + size, NCCL_PTR_HOST, &send_memory));
	CHECK(!net->register_memory(receiver, in[0], 2 * room, NCCL_PTR_HOST, &receive_memory));
	receive();
}

static void end(void)
{
	CHECK(!net->deregister_memory(sender, send_memory) && !net->deregister_memory(receiver, receive_memory));
	CHECK(!net->close_send(sender) && !net->close_receive(receiver) && !net->close_listen(listener));
}

static int later(const void *one, const void *other)
{
	uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;

	return (a > b) - (a < b);
}

static bool input_ended(void)
{
	struct pollfd input = { STDIN_FILENO, POLLIN, 0 };
	char byte;

	return poll(&input, 1, 0) > 0 && read(STDIN_FILENO, &byte, 1) <= 0;
}

static void ping(double seconds)
{
	uint64_t *trips = calloc(MOST_TRIPS, sizeof(*trips)), began = now_ns(), said = began, number = 0;
	bool last = false;

	CHECK(trips);
	while (!last) {
		uint64_t start = now_ns();

		last = (start > began + seconds * 1e9 && input_ended()) || number == MOST_TRIPS - 1;
		send_one(++number, last ? LAST : 0, true);
		receive_one(number, false);
		trips[number - 1] = now_ns() - start;
		if (now_ns() > said + 100000000) {
			said = now_ns();
			printf("at %llu\n", (unsigned long long)number);
		}
	}
	qsort(trips, number, sizeof(*trips), later);
	printf("messages=%llu lost=%llu duplicated=%llu wrong=%llu p50_us=%.1f p99_us=%.1f longest_ms=%.3f\n",
	       (unsigned long long)number, (unsigned long long)lost, (unsigned long long)duplicated,
	       (unsigned long long)wrong, trips[number / 2] / 1e3, trips[number * 99 / 100] / 1e3,
	       trips[number - 1] / 1e6);
	free(trips);
}

static void pong(void)
{
	for (uint64_t number = 1, flags = 0; !(flags & LAST); number++) {
		flags = receive_one(number, true);
		send_one(number, 0, false);
	}
}

int main(int count, char **words)
{
	int ends[2], status;
	pid_t child;

	CHECK(count == 6);
	size = atoi(words[4]);
	CHECK(size >= 0 && !socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
	setvbuf(stdout, NULL, _IOLBF, 0);
	child = fork();
	CHECK(child >= 0);
	name = child ? "first" : "second";
	close(ends[!!child]);
	if (!child)
		prctl(PR_SET_PDEATHSIG, SIGKILL);
	begin(words[1], words[child ? 2 : 3], ends[!child]);
	if (child)
		ping(atof(words[5]));
	else
		pong();
	end();
	if (!child)
		return lost || duplicated || wrong;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	return lost || duplicated || wrong;
}
