/* The provider in two parts: `provider.c` makes objects, `datapath.c` posts and polls. Only the second runs while
 * callgrind counts, and all of its functions begin with `stub_`. */
#pragma once
#include <infiniband/verbs.h>
#include <stddef.h>

/* Capacity of a completion queue; a power of two, more than any column requests. */
#define ENTRIES 1024

struct stub_cq {
	union {
		struct ibv_cq cq;
		struct ibv_cq_ex ex;
	};
	/* Completions lie from `tail` to `head`; `staged` runs ahead of `head` between ibv_wr_start and ibv_wr_complete. */
	unsigned head, tail, staged;
	struct ibv_wc ring[ENTRIES];
};

union stub_qp {
	struct ibv_qp qp;
	struct ibv_qp_ex ex;
};

void stub_serve_context(struct ibv_context *context);
void stub_serve_cq(struct ibv_cq_ex *cq);
void stub_serve_qp(struct ibv_qp_ex *qp);
