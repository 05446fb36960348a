/* peer ROW ITERATIONS: runs a row of the table that many times. Only the functions named `measure_` are counted. */
#include "peer.h"
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct pool pool;
struct ibv_qp *qp;
struct ibv_cq *cq;
struct ibv_qp_ex *qp_ex;
struct ibv_cq_ex *cq_ex;

static struct buffer buffers[2 * DEPTH];

static struct buffer *take(void) { return recycles ? pool.free[--pool.count] : &buffers[0]; }

static bool ends_with(const char *row, const char *end)
{
	size_t length = strlen(row), tail = strlen(end);
	return length >= tail && !strcmp(row + length - tail, end);
}

static void make_cq(struct ibv_context *context, bool extended)
{
	if (extended) {
		struct ibv_cq_init_attr_ex attr = { .cqe = 2 * DEPTH };
		cq_ex = ibv_create_cq_ex(context, &attr);
		cq = ibv_cq_ex_to_cq(cq_ex);
	} else {
		cq = ibv_create_cq(context, 2 * DEPTH, NULL, NULL, 0);
	}
}

static void make_qp(struct ibv_context *context, struct ibv_pd *pd, bool extended)
{
	struct ibv_qp_cap cap = { DEPTH, DEPTH, 1, 1, BYTES };
	if (extended) {
		struct ibv_qp_init_attr_ex attr = {
			.send_cq = cq,
			.recv_cq = cq,
			.cap = cap,
			.qp_type = IBV_QPT_RC,
			.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
			.pd = pd,
			.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE,
		};
		qp = ibv_create_qp_ex(context, &attr);
		qp_ex = ibv_qp_to_qp_ex(qp);
	} else {
		struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .cap = cap, .qp_type = IBV_QPT_RC };
		qp = ibv_create_qp(pd, &attr);
	}
}

static void set_up(const char *row)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_context *context = ibv_open_device(devices[0]);
	struct ibv_pd *pd = ibv_alloc_pd(context);
	char *memory = malloc(2 * DEPTH * BYTES);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, 2 * DEPTH * BYTES, IBV_ACCESS_LOCAL_WRITE);
	make_cq(context, ends_with(row, "_ex"));
	make_qp(context, pd, ends_with(row, "_wr"));
	for (unsigned i = 0; i < 2 * DEPTH; i++) {
		buffers[i] = (struct buffer){ (uintptr_t)memory + i * BYTES, BYTES, mr->lkey };
		pool.free[pool.count++] = &buffers[i];
	}
	ibv_free_device_list(devices);
}

static int once(const char *row)
{
	static const char bytes[BATCH];
	static const struct remote remote = { 0x10000, 0x4321 };
	if (!strcmp(row, "write"))
		return measure_write(take(), &remote);
	if (!strcmp(row, "write_wr"))
		return measure_write_wr(take(), &remote);
	if (!strcmp(row, "inline"))
		return measure_inline(bytes, sizeof bytes, &remote);
	if (!strcmp(row, "inline_wr"))
		return measure_inline_wr(bytes, sizeof bytes, &remote);
	if (!strcmp(row, "batch"))
		return measure_batch(&remote);
	if (!strcmp(row, "batch_wr"))
		return measure_batch_wr(&remote);
	if (!strcmp(row, "receive"))
		return measure_receive(take());
	if (!strcmp(row, "list") || !strcmp(row, "drain") || !strcmp(row, "drain_ex"))
		return measure_list();
	return -1;
}

int main(int argc, char **argv)
{
	if (argc != 3)
		return 2;
	set_up(argv[1]);
	for (long left = atol(argv[2]); left > 0; left--)
		if (once(argv[1]) || (cq_ex ? measure_drain_ex() : measure_drain())) {
			fprintf(stderr, "%s failed\n", argv[1]);
			return 1;
		}
	/* All buffers were returned but those without a completion yet: the accounting works. */
	return pool.count < DEPTH;
}
