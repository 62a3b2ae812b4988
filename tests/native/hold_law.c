// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
// The law of holds for ctypes, as the kernel's program includes it.
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t s32;
typedef int64_t s64;

#include "swerve.h"
#include "steer/hold_law.h"

int sample(struct swerve_hold_state *state, const struct swerve_hold_limits *limits, u64 now_ns, u64 sent_ns,
	   u64 queue_ns)
{
	return hold_sample(state, limits, now_ns, sent_ns, queue_ns);
}

u64 release(struct swerve_hold_state *state, const struct swerve_hold_limits *limits, u64 now_ns, u32 wire_bytes)
{
	return hold_release(state, limits, now_ns, wire_bytes);
}

u64 root(u64 value)
{
	return hold_root(value);
}
