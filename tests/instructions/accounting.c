/* C with accounting: what a correct program must do to stream requests and use its buffers again. A request has a slot, if one is free; its wr_id says which
 * queue and slot, since both queues complete to one completion queue; the slot remembers the buffer; a completion retires its own slot and those before it,
 * whose requests were not signalled. A request is signalled at least every half queue. Only the fields that a request has are written. */
#include "peer.h"
#include <errno.h>

const int recycles = 1;

enum { SEND, RECEIVE };

struct queue {
	uint32_t head, tail;
	uint32_t signal_at;
	struct buffer *slots[DEPTH];
};

static struct queue queues[2] = { [SEND] = { .signal_at = DEPTH / 2 - 1 } };

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
	struct queue *queue = &queues[SEND];
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
	struct queue *queue = &queues[SEND];
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
	struct queue *queue = &queues[SEND];
	struct ibv_send_wr wrs[BATCH], *bad;
	struct ibv_sge sges[BATCH];
	uint32_t head = queue->head;
	if (head - queue->tail > DEPTH - BATCH)
		return ENOMEM;
	for (int i = 0; i < BATCH; i++, head++) {
		struct buffer *buffer = pool.free[--pool.count];
		sges[i] = (struct ibv_sge){ buffer->addr, buffer->length, buffer->lkey };
		fill_write(&wrs[i], &wrs[i + 1], wr_id_of(SEND, head), &sges[i], flags_at(queue, head), remote);
		queue->slots[head % DEPTH] = buffer;
	}
	wrs[BATCH - 1].next = NULL;
	queue->head = head;
	return ibv_post_send(qp, wrs, &bad);
}

int measure_receive(struct buffer *buffer)
{
	struct queue *queue = &queues[RECEIVE];
	struct ibv_recv_wr *bad;
	uint32_t head = queue->head;
	if (head - queue->tail == DEPTH)
		return ENOMEM;
	struct ibv_sge sge = { buffer->addr, buffer->length, buffer->lkey };
	struct ibv_recv_wr wr = { .wr_id = wr_id_of(RECEIVE, head), .sg_list = &sge, .num_sge = 1 };
	queue->slots[head % DEPTH] = buffer;
	queue->head = head + 1;
	return ibv_post_recv(qp, &wr, &bad);
}

int measure_list(void)
{
	struct queue *queue = &queues[RECEIVE];
	struct ibv_recv_wr wrs[BATCH], *bad;
	struct ibv_sge sges[BATCH];
	uint32_t head = queue->head;
	if (head - queue->tail > DEPTH - BATCH)
		return ENOMEM;
	for (int i = 0; i < BATCH; i++, head++) {
		struct buffer *buffer = pool.free[--pool.count];
		sges[i] = (struct ibv_sge){ buffer->addr, buffer->length, buffer->lkey };
		wrs[i] = (struct ibv_recv_wr){
			.wr_id = wr_id_of(RECEIVE, head),
			.next = i + 1 < BATCH ? &wrs[i + 1] : NULL,
			.sg_list = &sges[i],
			.num_sge = 1,
		};
		queue->slots[head % DEPTH] = buffer;
	}
	queue->head = head;
	return ibv_post_recv(qp, wrs, &bad);
}

int measure_drain(void)
{
	struct ibv_wc wcs[POLL];
	int n = ibv_poll_cq(cq, POLL, wcs);
	if (n < 0)
		return EIO;
	for (int i = 0; i < n; i++) {
		struct queue *queue = &queues[wcs[i].wr_id >> 32];
		uint32_t end = (uint32_t)wcs[i].wr_id + 1;
		if (wcs[i].status != IBV_WC_SUCCESS)
			return EIO;
		do {
			struct buffer *buffer = queue->slots[queue->tail % DEPTH];
			if (buffer)
				pool.free[pool.count++] = buffer;
			queue->tail++;
		} while (queue->tail % DEPTH != end % DEPTH);
	}
	return 0;
}
