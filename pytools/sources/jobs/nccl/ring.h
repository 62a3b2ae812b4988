/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The file that a process of a job shares with its reader: a header, a row for each communicator, and a ring of
 * records with many writers (threads of the process) and one reader. ring.py knows the same layout.
 *
 * The file is the user's alone, in a directory that nobody else can write. All its pages are there from the start, so
 * that a full file system is an error here and no signal later. The reader need not be trusted: what it writes is a
 * position, a mask and a time, and any value of them leads to lost records at worst.
 *
 * Times are CLOCK_MONOTONIC nanoseconds, but those of the GPU, which are its globaltimer's.
 */
#ifndef SWERVE_NCCL_RING_H
#define SWERVE_NCCL_RING_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t s32;

#define load(from) __atomic_load_n(from, __ATOMIC_RELAXED)
#define load_acquire(from) __atomic_load_n(from, __ATOMIC_ACQUIRE)
#define store(to, value) __atomic_store_n(to, value, __ATOMIC_RELAXED)
#define store_release(to, value) __atomic_store_n(to, value, __ATOMIC_RELEASE)
#define add(to, value) __atomic_fetch_add(to, value, __ATOMIC_RELAXED)
#define compare_exchange(at, expected, value) \
	__atomic_compare_exchange_n(at, expected, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)

#define RING_MAGIC 0x4c434e53 /* "SNCL" */
#define RING_VERSION 1
#define RING_RECORDS 8192 /* a power of two */
#define RING_COMMUNICATORS 256
#define RING_STALE_NS 60000000000ULL /* without a sign of life: the process is gone */
#define RING_TEXT 16

enum ring_kind {
	RING_COLLECTIVE = 1,
	RING_P2P = 2,
	RING_KERNEL = 3,
	RING_PROXY = 4,
};

enum ring_counter {
	RING_FULL,	      /* records for which the ring had no room */
	RING_NO_SLOT,	      /* events that began while too many others had not ended */
	RING_NO_COMMUNICATOR, /* communicators beyond the rows */
	RING_UNKNOWN,	      /* calls with a handle that is none, or is over */
	RING_FOREIGN,	      /* proxy operations that another process began (PXN) */
	RING_UNFINISHED,      /* events that their communicator did not live to see ended */
	RING_COUNTERS,
};

struct ring_record {
	u64 id;	    /* of the event in its process */
	u64 parent; /* the operation, of a kernel or a proxy; 0: not known */
	u64 start_ns;
	u64 stop_ns;	  /* of an operation: when it was enqueued; of others: when NCCL saw that they had ended */
	u64 communicator; /* serial number of the row */
	u64 number;	  /* of a collective among those of its function */
	u64 bytes;	  /* of an operation: count times size; of a proxy: what passed */
	s32 peer;	  /* or the root of a collective */
	u8 kind;
	u8 channel; /* of an operation: how many */
	u8 send;    /* of a proxy */
	u8 sample;  /* of an operation (limit.h) */
	union {
		struct {
			u64 called_ns; /* when the application called NCCL; 0: not known */
			char function[RING_TEXT];
			char datatype[RING_TEXT];
			char algorithm[RING_TEXT];
			char protocol[8];
		} operation;
		struct {
			u64 gpu_start_ns; /* 0: not known */
			u64 gpu_stop_ns;
		} kernel;
		struct {
			u64 wait_ns
				[3]; /* send: GPU, peer, network; receive: network, flush, GPU; sums over the steps */
			u64 steps;
		} proxy;
	};
};

struct ring_communicator {
	u64 serial; /* written last; 0: no communicator yet */
	u64 hash;   /* the same on all ranks */
	u64 created_ns;
	u64 closed_ns; /* 0: it lives */
	s32 rank;      /* -1: not known; below as well */
	s32 ranks;
	s32 nodes;
	u32 interface; /* version */
	char name[64];
	u64 padding[2];
};

struct ring {
	u32 magic; /* written last */
	u32 version;
	u32 records;
	u32 communicators;
	u32 record_bytes;
	u32 pid; /* as the process sees itself */
	u64 created_ns;
	u64 padding_1[4];
	/* the reader's */
	u64 read;     /* records taken */
	u64 until_ns; /* when the mask lapses */
	u32 events;   /* wanted mask */
	u32 padding_2[11];
	/* the plugin's */
	u64 written; /* records promised */
	u64 padding_3[7];
	u64 alive_ns;
	u32 applied; /* mask in force */
	u32 closed;  /* the process has ended */
	u64 padding_4[6];
	u64 counters[RING_COUNTERS];
	u8 padding_5[4096 - 256 - 8 * RING_COUNTERS];
	struct ring_communicator rows[RING_COMMUNICATORS];
	u64 turns[RING_RECORDS]; /* position of the record that is there, plus one: written after it */
	struct ring_record record[RING_RECORDS];
};

_Static_assert(sizeof(struct ring_record) == 128 && sizeof(struct ring_communicator) == 128, "rows of 128 bytes");
_Static_assert(offsetof(struct ring, rows) == 4096, "the header is a page");

static inline u64 clock_ns(clockid_t clock)
{
	struct timespec now;

	clock_gettime(clock, &now);
	return now.tv_sec * 1000000000ULL + now.tv_nsec;
}

/* Write a record, unless there is no room. The former one of its place must be whole, whatever the reader says it has. */
static inline void ring_push(struct ring *ring, const struct ring_record *record)
{
	u64 at = load(&ring->written), former, now;

	for (;;) {
		former = at < RING_RECORDS ? 0 : at + 1 - RING_RECORDS;
		if (at - load_acquire(&ring->read) < RING_RECORDS &&
		    load_acquire(&ring->turns[at % RING_RECORDS]) == former) {
			if (compare_exchange(&ring->written, &at, at + 1))
				break;
			continue;
		}
		now = load_acquire(&ring->written);
		if (now == at) {
			add(&ring->counters[RING_FULL], 1);
			return;
		}
		at = now; /* another writer has taken this place meanwhile */
	}
	ring->record[at % RING_RECORDS] = *record;
	store_release(&ring->turns[at % RING_RECORDS], at + 1);
}

/* ---- the file -------------------------------------------------------------------------------------------------- */

/* A directory that nobody but this user and root can change, or a negative number. */
static int ring_directory(void)
{
	const char *named = secure_getenv("SWERVE_NCCL_DIR");
	char made[64];
	struct stat status;
	int directory;

	if (!named || !*named) {
		snprintf(made, sizeof(made), "/dev/shm/swerve-nccl-%u", geteuid());
		named = made;
	}
	mkdir(named, 0700);
	directory = open(named, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (directory < 0)
		return -1;
	if (fstat(directory, &status) || (status.st_uid != geteuid() && status.st_uid != 0) ||
	    status.st_mode & (S_IWGRP | S_IWOTH)) {
		close(directory);
		errno = EPERM;
		return -1;
	}
	return directory;
}

/* Whether a file is the ring of a process that has given no sign of life for long. */
static bool ring_is_stale(int file)
{
	u64 alive_ns;
	u32 magic;

	return pread(file, &magic, sizeof(magic), 0) == sizeof(magic) && magic == RING_MAGIC &&
	       pread(file, &alive_ns, sizeof(alive_ns), offsetof(struct ring, alive_ns)) == sizeof(alive_ns) &&
	       clock_ns(CLOCK_MONOTONIC) - alive_ns >
		       RING_STALE_NS; /* one of before a reboot lies ahead, and far off */
}

/* Remove what killed processes left, where no reader does. Names tell nothing: namespaces have process ids of their own. */
static void ring_sweep(int directory)
{
	int again = openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), file;
	DIR *list = again < 0 ? NULL : fdopendir(again);
	struct dirent *each;
	const char *end;

	if (!list) {
		if (again >= 0)
			close(again);
		return;
	}
	while ((each = readdir(list))) {
		end = strrchr(each->d_name, '.');
		if (!end || strcmp(end, ".ring"))
			continue;
		file = openat(directory, each->d_name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
		if (file < 0)
			continue;
		if (ring_is_stale(file))
			unlinkat(directory, each->d_name, 0);
		close(file);
	}
	closedir(list);
}

/* A new ring, and the name of its file; NULL with errno where there can be none. */
static struct ring *ring_create(char *name, size_t room)
{
	struct ring *ring = MAP_FAILED;
	int directory = ring_directory(), file = -1, error;
	u64 now_ns = clock_ns(CLOCK_MONOTONIC);

	if (directory < 0)
		return NULL;
	ring_sweep(directory);
	snprintf(name, room, "%d-%llu.ring", getpid(), (unsigned long long)now_ns);
	file = openat(directory, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	error = file < 0 ? errno : fchmod(file, 0600) ? errno : posix_fallocate(file, 0, sizeof(*ring));
	if (!error) {
		ring = mmap(NULL, sizeof(*ring), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
		error = ring == MAP_FAILED ? errno : 0;
	}
	if (error && file >= 0)
		unlinkat(directory, name, 0);
	if (file >= 0)
		close(file);
	close(directory);
	if (error) {
		errno = error;
		return NULL;
	}
	ring->version = RING_VERSION;
	ring->records = RING_RECORDS;
	ring->communicators = RING_COMMUNICATORS;
	ring->record_bytes = sizeof(struct ring_record);
	ring->pid = getpid();
	ring->created_ns = ring->alive_ns = now_ns;
	store_release(&ring->magic, RING_MAGIC);
	return ring;
}

static void ring_unlink(const char *name)
{
	int directory = ring_directory();

	if (directory >= 0) {
		unlinkat(directory, name, 0);
		close(directory);
	}
}

#endif /* SWERVE_NCCL_RING_H */
