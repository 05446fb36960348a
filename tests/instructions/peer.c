/* peer ROW ITERATIONS: runs a row of the table that many times. Only the functions named `measure_` are counted. */
#include "peer.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct pool pool;
struct ibv_qp *qp;
struct ibv_cq *cq;

static struct buffer buffers[2 * DEPTH];

static struct buffer *take(void) { return recycles ? pool.free[--pool.count] : &buffers[0]; }

static void set_up(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_context *context = ibv_open_device(devices[0]);
	struct ibv_pd *pd = ibv_alloc_pd(context);
	char *memory = malloc(2 * DEPTH * BYTES);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, 2 * DEPTH * BYTES, IBV_ACCESS_LOCAL_WRITE);
	cq = ibv_create_cq(context, 2 * DEPTH, NULL, NULL, 0);
	qp = ibv_create_qp(pd, &(struct ibv_qp_init_attr){
				       .send_cq = cq,
				       .recv_cq = cq,
				       .cap = { DEPTH, DEPTH, 1, 1, BYTES },
				       .qp_type = IBV_QPT_RC,
			       });
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
	if (!strcmp(row, "inline"))
		return measure_inline(bytes, sizeof bytes, &remote);
	if (!strcmp(row, "batch"))
		return measure_batch(&remote);
	if (!strcmp(row, "receive"))
		return measure_receive(take());
	if (!strcmp(row, "list") || !strcmp(row, "drain"))
		return measure_list();
	return -1;
}

int main(int argc, char **argv)
{
	if (argc != 3)
		return 2;
	set_up();
	for (long left = atol(argv[2]); left > 0; left--)
		if (once(argv[1]) || measure_drain()) {
			fprintf(stderr, "%s failed\n", argv[1]);
			return 1;
		}
	/* All buffers are back but those that no completion has confirmed yet: the accounting did its work. */
	return pool.count < DEPTH;
}
