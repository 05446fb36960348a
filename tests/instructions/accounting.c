/* C with accounting: what a correct program must do to stream requests and reuse its buffers. A
 * request takes a free slot; its wr_id holds queue and slot, since both queues complete to one completion queue;
 * the slot stores the buffer; a completion retires its own slot and the unsignaled ones before it. At least one
 * request per half queue is signaled. Only the fields that a request uses are written. */
#include "peer.h"
#include <errno.h>

const int recycles = 1;

enum { SEND, RECEIVE };

struct queue {
	uint32_t head, tail;
	uint32_t signal_at;
	struct buffer *slots[DEPTH];
};

static struct queue sends = { .signal_at = DEPTH / 2 - 1 }, receives;
static struct queue *const queues[] = { [SEND] = &sends, [RECEIVE] = &receives };

/* The queue's number and the slot. */
static inline uint64_t wr_id_of(int queue, uint32_t position)
{
	return (uint64_t)queue << 32 | position % DEPTH;
}

static inline unsigned flags_at(struct queue *queue, uint32_t position)
{
	if (position != queue->signal_at)
		return 0;
	queue->signal_at = position + DEPTH / 2;
	return IBV_SEND_SIGNALED;
}

int measure_write(struct buffer *buffer, const struct remote *remote)
{
	struct queue *queue = &sends;
	struct ibv_send_wr *bad;
	uint32_t head = queue->head;
	if (head - queue->tail == DEPTH)
		return ENOMEM;
	struct ibv_sge sge = { buffer->addr, buffer->length, buffer->lkey };
	struct ibv_send_wr wr;
	fill_write(&wr, NULL, wr_id_of(SEND, head), &sge, flags_at(queue, head), remote);
	queue->slots[head % DEPTH] = buffer;
	queue->head = head + 1;
	return ibv_post_send(qp, &wr, &bad);
}

int measure_inline(const void *bytes, uint32_t length, const struct remote *remote)
{
	struct queue *queue = &sends;
	struct ibv_send_wr *bad;
	uint32_t head = queue->head;
	if (head - queue->tail == DEPTH)
		return ENOMEM;
	struct ibv_sge sge = { (uintptr_t)bytes, length, 0 };
	struct ibv_send_wr wr;
	fill_write(&wr, NULL, wr_id_of(SEND, head), &sge, IBV_SEND_INLINE | flags_at(queue, head), remote);
	queue->slots[head % DEPTH] = NULL;
	queue->head = head + 1;
	return ibv_post_send(qp, &wr, &bad);
}

int measure_batch(const struct remote *remote)
{
	struct queue *queue = &sends;
	struct ibv_send_wr wrs[BATCH], *bad;
	struct ibv_sge sges[BATCH];
	uint32_t head = queue->head;
	struct buffer **top = &pool.free[pool.count];
	if (head - queue->tail > DEPTH - BATCH)
		return ENOMEM;
	for (int i = 0; i < BATCH; i++, head++) {
		struct buffer *buffer = *--top;
		sges[i] = (struct ibv_sge){ buffer->addr, buffer->length, buffer->lkey };
		fill_write(&wrs[i], i + 1 < BATCH ? &wrs[i + 1] : NULL, wr_id_of(SEND, head), &sges[i], flags_at(queue, head), remote);
		queue->slots[head % DEPTH] = buffer;
	}
	queue->head = head;
	pool.count = top - pool.free;
	return ibv_post_send(qp, wrs, &bad);
}

int measure_write_wr(struct buffer *buffer, const struct remote *remote)
{
	struct queue *queue = &sends;
	uint32_t head = queue->head;
	if (head - queue->tail == DEPTH)
		return ENOMEM;
	ibv_wr_start(qp_ex);
	qp_ex->wr_id = wr_id_of(SEND, head);
	qp_ex->wr_flags = flags_at(queue, head);
	ibv_wr_rdma_write(qp_ex, remote->rkey, remote->addr);
	ibv_wr_set_sge(qp_ex, buffer->lkey, buffer->addr, buffer->length);
	queue->slots[head % DEPTH] = buffer;
	queue->head = head + 1;
	return ibv_wr_complete(qp_ex);
}

int measure_inline_wr(const void *bytes, uint32_t length, const struct remote *remote)
{
	struct queue *queue = &sends;
	uint32_t head = queue->head;
	if (head - queue->tail == DEPTH)
		return ENOMEM;
	ibv_wr_start(qp_ex);
	qp_ex->wr_id = wr_id_of(SEND, head);
	qp_ex->wr_flags = flags_at(queue, head);
	ibv_wr_rdma_write(qp_ex, remote->rkey, remote->addr);
	ibv_wr_set_inline_data(qp_ex, (void *)bytes, length);
	queue->slots[head % DEPTH] = NULL;
	queue->head = head + 1;
	return ibv_wr_complete(qp_ex);
}

int measure_batch_wr(const struct remote *remote)
{
	struct queue *queue = &sends;
	uint32_t head = queue->head;
	struct buffer **top = &pool.free[pool.count];
	if (head - queue->tail > DEPTH - BATCH)
		return ENOMEM;
	ibv_wr_start(qp_ex);
	for (int i = 0; i < BATCH; i++, head++) {
		struct buffer *buffer = *--top;
		qp_ex->wr_id = wr_id_of(SEND, head);
		qp_ex->wr_flags = flags_at(queue, head);
		ibv_wr_rdma_write(qp_ex, remote->rkey, remote->addr);
		ibv_wr_set_sge(qp_ex, buffer->lkey, buffer->addr, buffer->length);
		queue->slots[head % DEPTH] = buffer;
	}
	queue->head = head;
	pool.count = top - pool.free;
	return ibv_wr_complete(qp_ex);
}

int measure_receive(struct buffer *buffer)
{
	struct queue *queue = &receives;
	struct ibv_recv_wr *bad;
	uint32_t head = queue->head;
	if (head - queue->tail == DEPTH)
		return ENOMEM;
	struct ibv_sge sge = { buffer->addr, buffer->length, buffer->lkey };
	struct ibv_recv_wr wr;
	fill_receive(&wr, NULL, wr_id_of(RECEIVE, head), &sge);
	queue->slots[head % DEPTH] = buffer;
	queue->head = head + 1;
	return ibv_post_recv(qp, &wr, &bad);
}

int measure_list(void)
{
	struct queue *queue = &receives;
	struct ibv_recv_wr wrs[BATCH], *bad;
	struct ibv_sge sges[BATCH];
	uint32_t head = queue->head;
	struct buffer **top = &pool.free[pool.count];
	if (head - queue->tail > DEPTH - BATCH)
		return ENOMEM;
	for (int i = 0; i < BATCH; i++, head++) {
		struct buffer *buffer = *--top;
		sges[i] = (struct ibv_sge){ buffer->addr, buffer->length, buffer->lkey };
		fill_receive(&wrs[i], i + 1 < BATCH ? &wrs[i + 1] : NULL, wr_id_of(RECEIVE, head), &sges[i]);
		queue->slots[head % DEPTH] = buffer;
	}
	queue->head = head;
	pool.count = top - pool.free;
	return ibv_post_recv(qp, wrs, &bad);
}

/* Retires slots up to a completion's, and pushes their buffers on the pool with top `top`. Returns the new top. */
static inline struct buffer **retire(uint64_t wr_id, struct buffer **top)
{
	struct queue *queue = queues[wr_id >> 32];
	uint32_t tail = queue->tail, end = (uint32_t)wr_id + 1;
	do {
		struct buffer *buffer = queue->slots[tail++ % DEPTH];
		if (buffer)
			*top++ = buffer;
	} while ((tail ^ end) % DEPTH);
	queue->tail = tail;
	return top;
}

int measure_drain(void)
{
	struct ibv_wc wcs[POLL];
	struct buffer **top = &pool.free[pool.count];
	int result = 0, n = ibv_poll_cq(cq, POLL, wcs);
	if (n < 0)
		return EIO;
	for (int i = 0; i < n; i++) {
		if (wcs[i].status != IBV_WC_SUCCESS) {
			result = EIO;
			break;
		}
		top = retire(wcs[i].wr_id, top);
	}
	pool.count = top - pool.free;
	return result;
}

int measure_drain_ex(void)
{
	struct ibv_poll_cq_attr attr = {};
	struct buffer **top = &pool.free[pool.count];
	int result = ibv_start_poll(cq_ex, &attr);
	if (result)
		return result == ENOENT ? 0 : EIO;
	do {
		if (cq_ex->status != IBV_WC_SUCCESS) {
			result = EIO;
			break;
		}
		top = retire(cq_ex->wr_id, top);
		result = ibv_next_poll(cq_ex);
	} while (!result);
	ibv_end_poll(cq_ex);
	pool.count = top - pool.free;
	return result == ENOENT ? 0 : EIO;
}
