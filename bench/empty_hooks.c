// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Programs that do nothing, beside which those of tcp.c are timed on the same calls. */

int empty_callbacks(struct bpf_sock_ops *ops)
{
	return 1;
}

int empty_created(struct bpf_sock *sk)
{
	return 1;
}

RAW_TRACEPOINT_PROBE(tcp_cong_state_set)
{
	return 0;
}
