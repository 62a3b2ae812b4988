/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the tap needs of the machine, without a C library: system calls, the thread, the clock, small text. So the tap
 * brings no second library into the application, has no errno to disturb, and allocates nothing but whole pages.
 */
#ifndef SWERVE_TAP_SYSTEM_H
#define SWERVE_TAP_SYSTEM_H

#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
#define slow_path __attribute__((noinline, cold))
#define barrier() __asm__ __volatile__("" ::: "memory")
#define load(from) __atomic_load_n(from, __ATOMIC_RELAXED)
#define load_acquire(from) __atomic_load_n(from, __ATOMIC_ACQUIRE)
#define store(to, value) __atomic_store_n(to, value, __ATOMIC_RELAXED)
#define store_release(to, value) __atomic_store_n(to, value, __ATOMIC_RELEASE)

/* Calls that give an error give it as a negative number. */
#if defined(__x86_64__)
static inline long system_call(long number, long a, long b, long c, long d, long e, long f)
{
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;
	long result;

	__asm__ __volatile__("syscall"
			     : "=a"(result)
			     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
			     : "rcx", "r11", "memory");
	return result;
}

#define THREAD_POINTER "mov %%fs:0, %0"

static inline u64 ticks(void)
{
	u32 low, high;

	__asm__ __volatile__("rdtsc" : "=a"(low), "=d"(high));
	return (u64)high << 32 | low;
}
#elif defined(__aarch64__)
static inline long system_call(long number, long a, long b, long c, long d, long e, long f)
{
	register long x8 __asm__("x8") = number;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;
	register long x5 __asm__("x5") = f;

	__asm__ __volatile__("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
	return x0;
}

#define THREAD_POINTER "mrs %0, tpidr_el0"

static inline u64 ticks(void)
{
	u64 count;

	__asm__ __volatile__("isb; mrs %0, cntvct_el0" : "=r"(count));
	return count;
}
#else
#error "the tap is written for x86_64 and aarch64"
#endif

/* A number that no two living threads share. */
static inline u64 this_thread(void)
{
	u64 pointer;

	__asm__ __volatile__(THREAD_POINTER : "=r"(pointer));
	return pointer;
}

#define system_call0(number) system_call(number, 0, 0, 0, 0, 0, 0)
#define system_call1(number, a) system_call(number, (long)(a), 0, 0, 0, 0, 0)
#define system_call2(number, a, b) system_call(number, (long)(a), (long)(b), 0, 0, 0, 0)
#define system_call3(number, a, b, c) system_call(number, (long)(a), (long)(b), (long)(c), 0, 0, 0)

/* The compiler calls these two even where there is no library. */
__attribute__((visibility("hidden"))) void *memset(void *to, int value, size_t size)
{
	for (size_t i = 0; i < size; i++)
		((volatile u8 *)to)[i] = value;
	return to;
}

__attribute__((visibility("hidden"))) void *memcpy(void *to, const void *from, size_t size)
{
	for (size_t i = 0; i < size; i++)
		((volatile u8 *)to)[i] = ((const u8 *)from)[i];
	return to;
}

static bool same_text(const char *a, const char *b)
{
	while (*a && *a == *b) {
		a++;
		b++;
	}
	return *a == *b;
}

static bool begins_with(const char *text, const char *with)
{
	while (*with && *text == *with) {
		text++;
		with++;
	}
	return !*with;
}

/* Append to a text that has room for size bytes in all; cut to fit. */
static void append(char *to, size_t size, const char *more)
{
	size_t at = 0;

	while (at + 1 < size && to[at])
		at++;
	while (at + 1 < size && *more)
		to[at++] = *more++;
	to[at] = 0;
}

static void append_number(char *to, size_t size, u32 number)
{
	char digits[11] = "";
	int at = 10;

	do {
		digits[--at] = '0' + number % 10;
		number /= 10;
	} while (number);
	append(to, size, digits + at);
}

/* A small file's text; empty when it cannot be read. */
static void read_file(const char *path, char *into, size_t size)
{
	long fd = system_call(SYS_openat, AT_FDCWD, (long)path, O_RDONLY | O_CLOEXEC, 0, 0, 0), got = 0;

	if (fd >= 0) {
		got = system_call3(SYS_read, fd, into, size - 1);
		system_call1(SYS_close, fd);
	}
	into[got > 0 ? got : 0] = 0;
}

/* Zeroed pages, or NULL. */
static void *pages(size_t size)
{
	long at = system_call(SYS_mmap, 0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	return at < 0 && at > -4096 ? NULL : (void *)at;
}

static void pause_ns(long ns)
{
	struct timespec span = { 0, ns };

	system_call2(SYS_nanosleep, &span, 0);
}

#endif /* SWERVE_TAP_SYSTEM_H */
