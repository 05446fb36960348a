/* Bare C: fills in a request and posts it, polls and checks the status. Every request is signaled; neither free
 * slots nor the buffers of completions are tracked, so each measurement uses the same buffers again. */
#include "peer.h"
#include <errno.h>

const int recycles = 0;

int measure_write(struct buffer *buffer, const struct remote *remote)
{
	struct ibv_send_wr *bad;
	struct ibv_sge sge = { buffer->addr, buffer->length, buffer->lkey };
	struct ibv_send_wr wr;
	fill_write(&wr, NULL, 0, &sge, IBV_SEND_SIGNALED, remote);
	return ibv_post_send(qp, &wr, &bad);
}

int measure_inline(const void *bytes, uint32_t length, const struct remote *remote)
{
	struct ibv_send_wr *bad;
	struct ibv_sge sge = { (uintptr_t)bytes, length, 0 };
	struct ibv_send_wr wr;
	fill_write(&wr, NULL, 0, &sge, IBV_SEND_INLINE | IBV_SEND_SIGNALED, remote);
	return ibv_post_send(qp, &wr, &bad);
}

int measure_batch(const struct remote *remote)
{
	struct ibv_send_wr wrs[BATCH], *bad;
	struct ibv_sge sges[BATCH];
	for (int i = 0; i < BATCH; i++) {
		struct buffer *buffer = pool.free[i];
		sges[i] = (struct ibv_sge){ buffer->addr, buffer->length, buffer->lkey };
		fill_write(&wrs[i], i + 1 < BATCH ? &wrs[i + 1] : NULL, 0, &sges[i], IBV_SEND_SIGNALED, remote);
	}
	return ibv_post_send(qp, wrs, &bad);
}

int measure_write_wr(struct buffer *buffer, const struct remote *remote)
{
	ibv_wr_start(qp_ex);
	qp_ex->wr_id = 0;
	qp_ex->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_write(qp_ex, remote->rkey, remote->addr);
	ibv_wr_set_sge(qp_ex, buffer->lkey, buffer->addr, buffer->length);
	return ibv_wr_complete(qp_ex);
}

int measure_inline_wr(const void *bytes, uint32_t length, const struct remote *remote)
{
	ibv_wr_start(qp_ex);
	qp_ex->wr_id = 0;
	qp_ex->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_write(qp_ex, remote->rkey, remote->addr);
	ibv_wr_set_inline_data(qp_ex, (void *)bytes, length);
	return ibv_wr_complete(qp_ex);
}

int measure_batch_wr(const struct remote *remote)
{
	ibv_wr_start(qp_ex);
	for (int i = 0; i < BATCH; i++) {
		struct buffer *buffer = pool.free[i];
		qp_ex->wr_id = 0;
		qp_ex->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_rdma_write(qp_ex, remote->rkey, remote->addr);
		ibv_wr_set_sge(qp_ex, buffer->lkey, buffer->addr, buffer->length);
	}
	return ibv_wr_complete(qp_ex);
}

int measure_receive(struct buffer *buffer)
{
	struct ibv_recv_wr *bad;
	struct ibv_sge sge = { buffer->addr, buffer->length, buffer->lkey };
	struct ibv_recv_wr wr;
	fill_receive(&wr, NULL, 0, &sge);
	return ibv_post_recv(qp, &wr, &bad);
}

int measure_list(void)
{
	struct ibv_recv_wr wrs[BATCH], *bad;
	struct ibv_sge sges[BATCH];
	for (int i = 0; i < BATCH; i++) {
		struct buffer *buffer = pool.free[i];
		sges[i] = (struct ibv_sge){ buffer->addr, buffer->length, buffer->lkey };
		fill_receive(&wrs[i], i + 1 < BATCH ? &wrs[i + 1] : NULL, 0, &sges[i]);
	}
	return ibv_post_recv(qp, wrs, &bad);
}

int measure_drain(void)
{
	struct ibv_wc wcs[POLL];
	int n = ibv_poll_cq(cq, POLL, wcs);
	if (n < 0)
		return EIO;
	for (int i = 0; i < n; i++)
		if (wcs[i].status != IBV_WC_SUCCESS)
			return EIO;
	return 0;
}

int measure_drain_ex(void)
{
	struct ibv_poll_cq_attr attr = {};
	int result = ibv_start_poll(cq_ex, &attr);
	if (result)
		return result == ENOENT ? 0 : EIO;
	do {
		if (cq_ex->status != IBV_WC_SUCCESS) {
			result = EIO;
			break;
		}
		result = ibv_next_poll(cq_ex);
	} while (!result);
	ibv_end_poll(cq_ex);
	return result == ENOENT ? 0 : EIO;
}
