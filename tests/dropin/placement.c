/* The memory placement extensions between two queue pairs of one device: an atomic WRITE, a FLUSH, and what refuses
 * them. ibv_wr_flush of rdma-core 46 is called by its place in the struct, as the headers may be older.
 * Then it stays until its input ends, which it prints. */

#include <errno.h>
#include <infiniband/verbs.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { FLUSH_GLOBAL = 1, FLUSH_PERSISTENT = 2, ACCESS_GLOBAL = 1 << 8, ACCESS_PERSISTENT = 1 << 9 };
enum { WITH_FLUSH = 1 << 11, FLUSHED = 8, LENGTH = 4096 };

typedef void (*flush_call)(struct ibv_qp_ex *, uint32_t, uint64_t, size_t, uint8_t, uint8_t);

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr, *volatile_mr;
static _Alignas(8) char bytes[LENGTH];

static struct ibv_qp *made(void)
{
	struct ibv_qp_init_attr_ex init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .pd = pd,
		.cap = { .max_send_wr = 4, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_ATOMIC_WRITE | WITH_FLUSH | IBV_QP_EX_WITH_RDMA_WRITE,
	};
	return ibv_create_qp_ex(context, &init);
}

static int connected(struct ibv_qp *qp, uint32_t peer)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT, .port_num = 1, .dest_qp_num = peer, .path_mtu = IBV_MTU_1024,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | ACCESS_GLOBAL | ACCESS_PERSISTENT,
		.max_rd_atomic = 4, .max_dest_rd_atomic = 4, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = 3, .hop_limit = 64 } },
	};
	struct ibv_qp_attr set;
	struct ibv_qp_init_attr init;

	return ibv_query_gid(context, 1, 3, &attr.ah_attr.grh.dgid) ||
	       ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) ||
	       (attr.qp_state = IBV_QPS_RTR,
		ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
						 IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)) ||
	       (attr.qp_state = IBV_QPS_RTS,
		ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
						 IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)) ||
	       ibv_query_qp(qp, &set, IBV_QP_ACCESS_FLAGS, &init) || set.qp_access_flags != attr.qp_access_flags;
}

/* The status of one request, and that its completion has this opcode. */
static int status_of(struct ibv_qp *pair[2], int opcode, void (*post)(struct ibv_qp_ex *))
{
	struct ibv_qp_ex *qp;
	struct ibv_wc wc = { .status = -1 };
	int found;

	for (int i = 0; i < 2; i++)
		pair[i] = made();
	if (!pair[0] || !pair[1] || connected(pair[0], pair[1]->qp_num) || connected(pair[1], pair[0]->qp_num))
		return -1;
	qp = ibv_qp_to_qp_ex(pair[0]);
	ibv_wr_start(qp);
	qp->wr_id = 7;
	qp->wr_flags = IBV_SEND_SIGNALED;
	post(qp);
	if (ibv_wr_complete(qp))
		return -2;
	while (!(found = ibv_poll_cq(cq, 1, &wc)))
		;
	if (ibv_destroy_qp(pair[0]) || ibv_destroy_qp(pair[1]) || found < 0 || wc.wr_id != 7)
		return -3;
	return wc.status == IBV_WC_SUCCESS && (int)wc.opcode != opcode ? -4 : (int)wc.status;
}

static const uint64_t WORD = 0x0123456789abcdef;

static void atomic_write(struct ibv_qp_ex *qp)
{
	ibv_wr_atomic_write(qp, mr->rkey, (uintptr_t)bytes + 64, &WORD);
}

static void unaligned(struct ibv_qp_ex *qp)
{
	ibv_wr_atomic_write(qp, mr->rkey, (uintptr_t)bytes + 68, &WORD);
}

static void flush(struct ibv_qp_ex *qp, struct ibv_mr *of, size_t length, int type, int level)
{
	size_t at = offsetof(struct ibv_qp_ex, wr_atomic_write) + sizeof(void *);
	flush_call call;

	memcpy(&call, (char *)qp + at, sizeof(call));
	call(qp, of->rkey, (uintptr_t)bytes, length, type, level);
}

static void of_range(struct ibv_qp_ex *qp) { flush(qp, mr, LENGTH, FLUSH_GLOBAL, 0); }
static void of_region(struct ibv_qp_ex *qp) { flush(qp, mr, 0, FLUSH_GLOBAL, 1); }
static void too_far(struct ibv_qp_ex *qp) { flush(qp, mr, LENGTH + 1, FLUSH_GLOBAL, 0); }
static void persistent(struct ibv_qp_ex *qp) { flush(qp, mr, LENGTH, FLUSH_PERSISTENT, 0); }
static void not_granted(struct ibv_qp_ex *qp) { flush(qp, volatile_mr, LENGTH, FLUSH_GLOBAL, 0); }
static void unknown(struct ibv_qp_ex *qp) { flush(qp, mr, LENGTH, 4, 0); }

int main(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_device_attr_ex attr;
	struct ibv_qp *pair[2];
	int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;

	context = devices && *devices ? ibv_open_device(*devices) : NULL;
	if (!context || ibv_query_device_ex(context, NULL, &attr))
		return 1;
	if ((attr.device_cap_flags_ex >> 38 & 7) != 5) {
		fprintf(stderr, "capabilities %llx\n", (unsigned long long)attr.device_cap_flags_ex);
		return 2;
	}
	pd = ibv_alloc_pd(context);
	cq = ibv_create_cq(context, 8, NULL, NULL, 0);
	mr = ibv_reg_mr(pd, bytes, LENGTH, access | ACCESS_GLOBAL);
	volatile_mr = ibv_reg_mr(pd, bytes, LENGTH, access);
	if (!pd || !cq || !mr || !volatile_mr)
		return 3;
	if (ibv_reg_mr(pd, bytes, LENGTH, access | ACCESS_PERSISTENT) || errno != EINVAL)
		return 4;
	printf("atomic write %d ", status_of(pair, IBV_WC_ATOMIC_WRITE, atomic_write));
	puts(*(volatile uint64_t *)(bytes + 64) == WORD ? "stored" : "lost");
	printf("unaligned %d\n", status_of(pair, IBV_WC_ATOMIC_WRITE, unaligned));
	printf("flush of range %d, region %d\n", status_of(pair, FLUSHED, of_range), status_of(pair, FLUSHED, of_region));
	printf("refused %d %d %d %d\n", status_of(pair, FLUSHED, too_far), status_of(pair, FLUSHED, persistent),
	       status_of(pair, FLUSHED, not_granted), status_of(pair, FLUSHED, unknown));
	for (int next = getchar(); next != EOF; next = getchar())
		putchar(next);
	return 0;
}
