/* Posting and polling of the no-op provider. A request completes when it is posted; no data moves. */
#include "provider.h"
#include <errno.h>

static void stub_put(struct stub_cq *cq, unsigned at, uint64_t wr_id, uint32_t qp_num, enum ibv_wc_opcode opcode)
{
	cq->ring[at % ENTRIES] =
		(struct ibv_wc){ .wr_id = wr_id, .status = IBV_WC_SUCCESS, .opcode = opcode, .byte_len = 64, .qp_num = qp_num };
}

/* The post list. */

static int stub_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct stub_cq *cq = (struct stub_cq *)qp->send_cq;
	(void)bad;
	for (; wr; wr = wr->next)
		if (wr->send_flags & IBV_SEND_SIGNALED)
			stub_put(cq, cq->head++, wr->wr_id, qp->qp_num, IBV_WC_RDMA_WRITE);
	return 0;
}

static int stub_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct stub_cq *cq = (struct stub_cq *)qp->recv_cq;
	(void)bad;
	for (; wr; wr = wr->next)
		stub_put(cq, cq->head++, wr->wr_id, qp->qp_num, IBV_WC_RECV);
	return 0;
}

/* ibv_wr_*: a request is staged by its opcode and published by ibv_wr_complete. */

static void stub_stage(struct ibv_qp_ex *qp, enum ibv_wc_opcode opcode)
{
	struct stub_cq *cq = (struct stub_cq *)qp->qp_base.send_cq;
	if (qp->wr_flags & IBV_SEND_SIGNALED)
		stub_put(cq, cq->staged++, qp->wr_id, qp->qp_base.qp_num, opcode);
}

static void stub_wr_start(struct ibv_qp_ex *qp)
{
	struct stub_cq *cq = (struct stub_cq *)qp->qp_base.send_cq;
	cq->staged = cq->head;
}

static int stub_wr_complete(struct ibv_qp_ex *qp)
{
	struct stub_cq *cq = (struct stub_cq *)qp->qp_base.send_cq;
	cq->head = cq->staged;
	return 0;
}

static void stub_wr_abort(struct ibv_qp_ex *qp) { (void)qp; }

static void stub_wr_send(struct ibv_qp_ex *qp) { stub_stage(qp, IBV_WC_SEND); }

static void stub_wr_send_imm(struct ibv_qp_ex *qp, __be32 imm)
{
	(void)imm;
	stub_stage(qp, IBV_WC_SEND);
}

static void stub_wr_send_inv(struct ibv_qp_ex *qp, uint32_t rkey)
{
	(void)rkey;
	stub_stage(qp, IBV_WC_SEND);
}

static void stub_wr_rdma_read(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t addr)
{
	(void)rkey;
	(void)addr;
	stub_stage(qp, IBV_WC_RDMA_READ);
}

static void stub_wr_rdma_write(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t addr)
{
	(void)rkey;
	(void)addr;
	stub_stage(qp, IBV_WC_RDMA_WRITE);
}

static void stub_wr_rdma_write_imm(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t addr, __be32 imm)
{
	(void)imm;
	stub_wr_rdma_write(qp, rkey, addr);
}

static void stub_wr_atomic_cmp_swp(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t addr, uint64_t compare, uint64_t swap)
{
	(void)rkey;
	(void)addr;
	(void)compare;
	(void)swap;
	stub_stage(qp, IBV_WC_COMP_SWAP);
}

static void stub_wr_atomic_fetch_add(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t addr, uint64_t add)
{
	(void)rkey;
	(void)addr;
	(void)add;
	stub_stage(qp, IBV_WC_FETCH_ADD);
}

static void stub_wr_bind_mw(struct ibv_qp_ex *qp, struct ibv_mw *mw, uint32_t rkey, const struct ibv_mw_bind_info *info)
{
	(void)mw;
	(void)rkey;
	(void)info;
	stub_stage(qp, IBV_WC_BIND_MW);
}

static void stub_wr_local_inv(struct ibv_qp_ex *qp, uint32_t rkey)
{
	(void)rkey;
	stub_stage(qp, IBV_WC_LOCAL_INV);
}

static void stub_wr_set_ud_addr(struct ibv_qp_ex *qp, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey)
{
	(void)qp;
	(void)ah;
	(void)qpn;
	(void)qkey;
}

static void stub_wr_set_sge(struct ibv_qp_ex *qp, uint32_t lkey, uint64_t addr, uint32_t length)
{
	(void)qp;
	(void)lkey;
	(void)addr;
	(void)length;
}

static void stub_wr_set_sge_list(struct ibv_qp_ex *qp, size_t count, const struct ibv_sge *list)
{
	(void)qp;
	(void)count;
	(void)list;
}

static void stub_wr_set_inline_data(struct ibv_qp_ex *qp, void *addr, size_t length)
{
	(void)qp;
	(void)addr;
	(void)length;
}

static void stub_wr_set_inline_data_list(struct ibv_qp_ex *qp, size_t count, const struct ibv_data_buf *list)
{
	(void)qp;
	(void)count;
	(void)list;
}

/* The classic completion queue. */

static int stub_poll_cq(struct ibv_cq *cq, int num, struct ibv_wc *wc)
{
	struct stub_cq *from = (struct stub_cq *)cq;
	int n = 0;
	for (; n < num && from->tail != from->head; n++)
		wc[n] = from->ring[from->tail++ % ENTRIES];
	return n;
}

/* The extended one: the entry at `tail` is the current one until the next or the end. */

static int stub_show(struct stub_cq *cq)
{
	if (cq->tail == cq->head)
		return ENOENT;
	cq->ex.wr_id = cq->ring[cq->tail % ENTRIES].wr_id;
	cq->ex.status = cq->ring[cq->tail % ENTRIES].status;
	return 0;
}

static int stub_start_poll(struct ibv_cq_ex *cq, struct ibv_poll_cq_attr *attr)
{
	return attr->comp_mask ? EINVAL : stub_show((struct stub_cq *)cq);
}

static int stub_next_poll(struct ibv_cq_ex *cq)
{
	struct stub_cq *from = (struct stub_cq *)cq;
	/* Without a next entry the current one stays current: ibv_end_poll releases it. */
	if (from->tail + 1 == from->head)
		return ENOENT;
	from->tail++;
	return stub_show(from);
}

static void stub_end_poll(struct ibv_cq_ex *cq) { ((struct stub_cq *)cq)->tail++; }

static struct ibv_wc *stub_current(struct ibv_cq_ex *cq)
{
	struct stub_cq *from = (struct stub_cq *)cq;
	return &from->ring[from->tail % ENTRIES];
}

static enum ibv_wc_opcode stub_read_opcode(struct ibv_cq_ex *cq) { return stub_current(cq)->opcode; }
static uint32_t stub_read_vendor_err(struct ibv_cq_ex *cq) { return stub_current(cq)->vendor_err; }
static uint32_t stub_read_byte_len(struct ibv_cq_ex *cq) { return stub_current(cq)->byte_len; }
static __be32 stub_read_imm_data(struct ibv_cq_ex *cq) { return stub_current(cq)->imm_data; }
static uint32_t stub_read_qp_num(struct ibv_cq_ex *cq) { return stub_current(cq)->qp_num; }
static uint32_t stub_read_src_qp(struct ibv_cq_ex *cq) { return stub_current(cq)->src_qp; }
static unsigned stub_read_wc_flags(struct ibv_cq_ex *cq) { return stub_current(cq)->wc_flags; }
static uint32_t stub_read_slid(struct ibv_cq_ex *cq) { return stub_current(cq)->slid; }
static uint8_t stub_read_sl(struct ibv_cq_ex *cq) { return stub_current(cq)->sl; }
static uint8_t stub_read_dlid_path_bits(struct ibv_cq_ex *cq) { return stub_current(cq)->dlid_path_bits; }
static uint64_t stub_read_completion_ts(struct ibv_cq_ex *cq) { return ((struct stub_cq *)cq)->tail; }

void stub_serve_context(struct ibv_context *context)
{
	context->ops.post_send = stub_post_send;
	context->ops.post_recv = stub_post_recv;
	context->ops.poll_cq = stub_poll_cq;
}

void stub_serve_cq(struct ibv_cq_ex *cq)
{
	cq->start_poll = stub_start_poll;
	cq->next_poll = stub_next_poll;
	cq->end_poll = stub_end_poll;
	cq->read_opcode = stub_read_opcode;
	cq->read_vendor_err = stub_read_vendor_err;
	cq->read_byte_len = stub_read_byte_len;
	cq->read_imm_data = stub_read_imm_data;
	cq->read_qp_num = stub_read_qp_num;
	cq->read_src_qp = stub_read_src_qp;
	cq->read_wc_flags = stub_read_wc_flags;
	cq->read_slid = stub_read_slid;
	cq->read_sl = stub_read_sl;
	cq->read_dlid_path_bits = stub_read_dlid_path_bits;
	cq->read_completion_ts = stub_read_completion_ts;
	cq->read_completion_wallclock_ns = stub_read_completion_ts;
}

void stub_serve_qp(struct ibv_qp_ex *qp)
{
	qp->wr_start = stub_wr_start;
	qp->wr_complete = stub_wr_complete;
	qp->wr_abort = stub_wr_abort;
	qp->wr_send = stub_wr_send;
	qp->wr_send_imm = stub_wr_send_imm;
	qp->wr_send_inv = stub_wr_send_inv;
	qp->wr_rdma_read = stub_wr_rdma_read;
	qp->wr_rdma_write = stub_wr_rdma_write;
	qp->wr_rdma_write_imm = stub_wr_rdma_write_imm;
	qp->wr_atomic_cmp_swp = stub_wr_atomic_cmp_swp;
	qp->wr_atomic_fetch_add = stub_wr_atomic_fetch_add;
	qp->wr_bind_mw = stub_wr_bind_mw;
	qp->wr_local_inv = stub_wr_local_inv;
	qp->wr_set_ud_addr = stub_wr_set_ud_addr;
	qp->wr_set_sge = stub_wr_set_sge;
	qp->wr_set_sge_list = stub_wr_set_sge_list;
	qp->wr_set_inline_data = stub_wr_set_inline_data;
	qp->wr_set_inline_data_list = stub_wr_set_inline_data_list;
}
