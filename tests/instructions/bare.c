/* Bare C: fills in a request and posts it, polls and looks at the status. Every request is signalled; it knows neither whether there is room nor whose buffer a
 * completion gives back, so each measure takes the same buffers again. */
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
		fill_write(&wrs[i], &wrs[i + 1], 0, &sges[i], IBV_SEND_SIGNALED, remote);
	}
	wrs[BATCH - 1].next = NULL;
	return ibv_post_send(qp, wrs, &bad);
}

int measure_receive(struct buffer *buffer)
{
	struct ibv_recv_wr *bad;
	struct ibv_sge sge = { buffer->addr, buffer->length, buffer->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 };
	return ibv_post_recv(qp, &wr, &bad);
}

int measure_list(void)
{
	struct ibv_recv_wr wrs[BATCH], *bad;
	struct ibv_sge sges[BATCH];
	for (int i = 0; i < BATCH; i++) {
		struct buffer *buffer = pool.free[i];
		sges[i] = (struct ibv_sge){ buffer->addr, buffer->length, buffer->lkey };
		wrs[i] = (struct ibv_recv_wr){ .next = i + 1 < BATCH ? &wrs[i + 1] : NULL, .sg_list = &sges[i], .num_sge = 1 };
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
