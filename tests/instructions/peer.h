/* Shared by the C columns: `peer.c` sets up and repeats, `accounting.c` or `bare.c` is counted. */
#pragma once
#include <infiniband/verbs.h>

/* As in the Rust column. */
#define DEPTH 128
#define BATCH 16
#define BYTES 64
#define POLL 32

struct buffer {
	uint64_t addr;
	uint32_t length;
	uint32_t lkey;
};

struct remote {
	uint64_t addr;
	uint32_t rkey;
};

/* Buffers not in flight. */
struct pool {
	unsigned count;
	struct buffer *free[2 * DEPTH];
};

extern struct pool pool;
extern struct ibv_qp *qp;
extern struct ibv_cq *cq;

/* The same objects as extended ones, where the row uses them. */
extern struct ibv_qp_ex *qp_ex;
extern struct ibv_cq_ex *cq_ex;

/* Whether completions return buffers. */
extern const int recycles;

/* Each 0, or an errno value. `_wr` posts through ibv_wr_*, `_ex` polls an extended completion queue. */
int measure_write(struct buffer *buffer, const struct remote *remote);
int measure_write_wr(struct buffer *buffer, const struct remote *remote);
int measure_inline(const void *bytes, uint32_t length, const struct remote *remote);
int measure_inline_wr(const void *bytes, uint32_t length, const struct remote *remote);
int measure_batch(const struct remote *remote);
int measure_batch_wr(const struct remote *remote);
int measure_receive(struct buffer *buffer);
int measure_list(void);
int measure_drain(void);
int measure_drain_ex(void);

/* Writes the fields of an RDMA WRITE, and leaves the rest: clearing all 128 bytes would cost more than the request. */
static inline void fill_write(struct ibv_send_wr *wr, struct ibv_send_wr *next, uint64_t wr_id, struct ibv_sge *sge, unsigned flags,
			      const struct remote *remote)
{
	wr->wr_id = wr_id;
	wr->next = next;
	wr->sg_list = sge;
	wr->num_sge = 1;
	wr->opcode = IBV_WR_RDMA_WRITE;
	wr->send_flags = flags;
	wr->wr.rdma.remote_addr = remote->addr;
	wr->wr.rdma.rkey = remote->rkey;
}

static inline void fill_receive(struct ibv_recv_wr *wr, struct ibv_recv_wr *next, uint64_t wr_id, struct ibv_sge *sge)
{
	wr->wr_id = wr_id;
	wr->next = next;
	wr->sg_list = sge;
	wr->num_sge = 1;
}
