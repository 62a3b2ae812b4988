// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
// The limit of NCCL's profiler plugin for ctypes, as the plugin includes it.
#include "limit.h"

const uint64_t limit = LIMIT, period_ns = PERIOD_NS;

uint64_t begins(uint64_t period)
{
	return period_begins(period);
}

uint64_t at(uint64_t now_ns)
{
	return period_at(now_ns);
}

uint8_t next(uint8_t sample, int reached)
{
	return next_sample(sample, reached);
}
