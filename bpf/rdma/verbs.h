/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The verbs' ABI as far as rdma.c reads it: numbers, structures, and places in structures. For 64-bit processes.
 *
 * SWERVE_LOCK_BYTES: of a pthread mutex and a condition, which lie in the verbs' structures (other than on x86_64).
 */
#ifndef SWERVE_RDMA_VERBS_H
#define SWERVE_RDMA_VERBS_H

#ifndef SWERVE_LOCK_BYTES
#define SWERVE_LOCK_BYTES (40 + 48)
#endif

#define SEND_SIGNALED 2
#define WC_RECEIVE 128
#define WR_RDMA_WRITE 0
#define WR_RDMA_WRITE_WITH_IMM 1
#define WR_SEND 2
#define WR_SEND_WITH_IMM 3
#define WR_RDMA_READ 4
#define WR_ATOMIC_CMP_AND_SWP 5
#define WR_ATOMIC_FETCH_AND_ADD 6
#define WR_LOCAL_INV 7
#define WR_BIND_MW 8
#define WR_SEND_WITH_INV 9
#define WR_TSO 10
#define WR_ATOMIC_WRITE 15
#define QP_STATE 1
#define QP_AV (1 << 7)
#define QP_DEST_QPN (1 << 20)
#define QPS_RESET 0
#define DEVICE_NAME 24	   /* struct ibv_device */
#define INIT_SIGNAL_ALL 56 /* struct ibv_qp_init_attr */
#define ATTR_DEST_QPN 28   /* struct ibv_qp_attr */
#define ATTR_DGID 56
#define ATTR_SGID_INDEX 76
#define ATTR_PORT 86
#define QP_EX_WR_ID ((64 + SWERVE_LOCK_BYTES + 4 + 7) / 8 * 8 + 8) /* struct ibv_qp_ex */
#define CQ_EX_STATUS ((32 + SWERVE_LOCK_BYTES + 8) + 4)		   /* struct ibv_cq_ex */

struct verbs_qp {
	u64 context;
	u64 qp_context;
	u64 pd;
	u64 send_cq;
	u64 receive_cq;
	u64 srq;
	u32 handle;
	u32 number;
	u32 state;
	u32 type;
};

struct verbs_send {
	u64 wr_id;
	u64 next;
	u64 sges;
	u32 sge_count;
	u32 opcode;
	u32 flags;
	u32 pad;
};

struct verbs_receive {
	u64 wr_id;
	u64 next;
};

struct verbs_completion {
	u64 wr_id;
	u32 status;
	u32 opcode;
	u32 vendor_error;
	u32 bytes;
	u32 immediate;
	u32 qp_number;
};

#endif /* SWERVE_RDMA_VERBS_H */
