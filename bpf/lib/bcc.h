/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What bcc 0.26 leaves out. */
#ifndef SWERVE_LIB_BCC_H
#define SWERVE_LIB_BCC_H

#ifndef NULL
#define NULL ((void *)0)
#endif

#define MAPPABLE 1024 /* BPF_F_MMAPABLE */

/* It declares this helper with a parameter less than it has, */
static long (*redirect_neigh)(u32 ifindex, struct bpf_redir_neigh *hop, int bytes,
			      u64 flags) = (void *)BPF_FUNC_redirect_neigh;
/* and this one with 32 bits of its 64. */
static u64 (*socket_cookie)(void *context) = (void *)BPF_FUNC_get_socket_cookie;

#endif /* SWERVE_LIB_BCC_H */
