/* The static inline functions of rdma-core's own <infiniband/verbs.h> on a context of the soft device: these functions find
 * its calls in the structs, not in our table. A queue pair is connected to itself, with ibv_wr_* and an
 * extended completion queue. */

#include <errno.h>
#include <infiniband/verbs.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

/* The functions that are symbols of the library. */
struct library {
	int (*modify_qp)(struct ibv_qp *, struct ibv_qp_attr *, int);
	int (*destroy_qp)(struct ibv_qp *);
	int (*destroy_cq)(struct ibv_cq *);
	int (*dereg_mr)(struct ibv_mr *);
	struct ibv_qp_ex *(*qp_to_qp_ex)(struct ibv_qp *);
};

/* Returns the line of a failed check. */
#define CHECK(holds) do { if (!(holds)) return __LINE__; } while (0)

enum { TIMEOUT_S = 20, FROM_DEVICE = 16, AT = 64 };

static int connect_to_itself(const struct library *lib, struct ibv_qp *qp, const union ibv_gid *gid)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE,
	};

	CHECK(!lib->modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = IBV_MTU_1024;
	attr.dest_qp_num = qp->qp_num;
	attr.max_dest_rd_atomic = 1;
	attr.ah_attr.is_global = 1;
	attr.ah_attr.port_num = 1;
	attr.ah_attr.grh.dgid = *gid;
	CHECK(!lib->modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr.qp_state = IBV_QPS_RTS;
	attr.timeout = 14;
	attr.retry_cnt = 7;
	attr.max_rd_atomic = 1;
	CHECK(!lib->modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					     IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
	return 0;
}

/* Waits for the next completion within a poll, or starts one. */
static int await(struct ibv_cq_ex *cq, int started)
{
	struct ibv_poll_cq_attr attr = {};
	time_t since = time(NULL);
	int result;

	do {
		result = started ? ibv_next_poll(cq) : ibv_start_poll(cq, &attr);
		sched_yield();
	} while (result == ENOENT && time(NULL) - since < TIMEOUT_S);
	return result;
}

int use_inlines(struct ibv_context *context, struct ibv_pd *pd, struct ibv_mr *mr, const union ibv_gid *gid,
		const struct library *lib)
{
	struct ibv_device_attr_ex device;
	struct ibv_alloc_dm_attr dm_attr = { .length = 4096 };
	struct ibv_cq_init_attr_ex cq_attr = {
		.cqe = 16,
		.wc_flags = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_QP_NUM | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP,
	};
	struct ibv_modify_cq_attr moderation = {
		.attr_mask = IBV_CQ_ATTR_MODERATE,
		.moderate = { .cq_count = 4, .cq_period = 10 },
	};
	struct ibv_values_ex values = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK };
	struct ibv_sge whole = { .addr = (uintptr_t)mr->addr, .length = mr->length, .lkey = mr->lkey };
	const unsigned int access = IBV_ACCESS_ZERO_BASED | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
	uint64_t first;

	CHECK(!ibv_query_device_ex(context, NULL, &device));
	CHECK(device.hca_core_clock == 1000000 && device.max_dm_size >= dm_attr.length && device.phys_port_cnt_ex == 1);

	struct ibv_dm *dm = ibv_alloc_dm(context, &dm_attr);
	CHECK(dm && !ibv_memcpy_to_dm(dm, 8, "of the device..", FROM_DEVICE));
	struct ibv_mr *on_device = ibv_reg_dm_mr(pd, dm, 8, 64, access);
	CHECK(on_device && ibv_free_dm(dm) == EBUSY);
	struct ibv_mr *null = ibv_alloc_null_mr(pd);
	CHECK(null);
	CHECK(!ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, IBV_ADVISE_MR_FLAG_FLUSH, &whole, 1));

	struct ibv_cq_ex *cq = ibv_create_cq_ex(context, &cq_attr);
	CHECK(cq && !ibv_modify_cq(ibv_cq_ex_to_cq(cq), &moderation));
	struct ibv_poll_cq_attr poll_attr = {};
	CHECK(ibv_start_poll(cq, &poll_attr) == ENOENT);

	struct ibv_qp_init_attr_ex qp_attr = {
		.send_cq = ibv_cq_ex_to_cq(cq),
		.recv_cq = ibv_cq_ex_to_cq(cq),
		.cap = { .max_send_wr = 4, .max_send_sge = 2, .max_inline_data = 32 },
		.qp_type = IBV_QPT_RC,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = pd,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_RDMA_WRITE,
	};
	struct ibv_qp *qp = ibv_create_qp_ex(context, &qp_attr);
	CHECK(qp);
	struct ibv_qp_ex *extended = lib->qp_to_qp_ex(qp);
	CHECK(extended && !connect_to_itself(lib, qp, gid));

	ibv_wr_start(extended);
	extended->wr_id = 1;
	extended->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_read(extended, on_device->rkey, 0);
	ibv_wr_set_sge(extended, mr->lkey, whole.addr, FROM_DEVICE);
	extended->wr_id = 2;
	ibv_wr_rdma_write(extended, mr->rkey, whole.addr + AT);
	ibv_wr_set_inline_data(extended, (void *)"inline", 7);
	CHECK(!ibv_wr_complete(extended));
	ibv_wr_start(extended);
	ibv_wr_abort(extended);

	CHECK(!await(cq, 0) && cq->wr_id == 1 && cq->status == IBV_WC_SUCCESS);
	CHECK(ibv_wc_read_opcode(cq) == IBV_WC_RDMA_READ && ibv_wc_read_byte_len(cq) == FROM_DEVICE);
	CHECK(ibv_wc_read_qp_num(cq) == qp->qp_num && ibv_wc_read_wc_flags(cq) == 0);
	first = ibv_wc_read_completion_ts(cq);
	CHECK(!await(cq, 1) && cq->wr_id == 2 && cq->status == IBV_WC_SUCCESS);
	CHECK(ibv_wc_read_opcode(cq) == IBV_WC_RDMA_WRITE && ibv_wc_read_completion_ts(cq) >= first);
	ibv_end_poll(cq);
	CHECK(!ibv_query_rt_values_ex(context, &values) && first && (uint64_t)values.raw_clock.tv_nsec >= first);
	CHECK(!memcmp(mr->addr, "of the device..", FROM_DEVICE) && !memcmp((char *)mr->addr + AT, "inline", 7));

	CHECK(!lib->destroy_qp(qp) && !lib->destroy_cq(ibv_cq_ex_to_cq(cq)));
	CHECK(!lib->dereg_mr(on_device) && !lib->dereg_mr(null) && !ibv_free_dm(dm));
	return 0;
}
