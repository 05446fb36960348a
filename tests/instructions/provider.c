/* A no-op libibverbs.so.1, for counting its callers' instructions; the same under every column.
 *
 * One device, one port; both ways to post and both kinds of completion queue. */
#include "provider.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#undef ibv_query_port
#undef ibv_reg_mr

static struct ibv_device device = { .node_type = IBV_NODE_CA, .transport_type = IBV_TRANSPORT_IB, .name = "stub0" };

struct ibv_device **ibv_get_device_list(int *num)
{
	struct ibv_device **list = calloc(2, sizeof *list);
	list[0] = &device;
	if (num)
		*num = 1;
	return list;
}

void ibv_free_device_list(struct ibv_device **list) { free(list); }
const char *ibv_get_device_name(struct ibv_device *d) { return d->name; }
__be64 ibv_get_device_guid(struct ibv_device *d) { (void)d; return 0; }

static int query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input, struct ibv_device_attr_ex *attr, size_t size)
{
	(void)input;
	if (size < sizeof attr->orig_attr)
		return EINVAL;
	memset(attr, 0, size);
	return ibv_query_device(context, &attr->orig_attr);
}

static int query_port_ex(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t size)
{
	memset(attr, 0, size);
	return ibv_query_port(context, port, (struct _compat_ibv_port_attr *)attr);
}

static struct ibv_cq_ex *create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr)
{
	struct stub_cq *cq = calloc(1, sizeof *cq);
	cq->cq.context = context;
	cq->cq.channel = attr->channel;
	cq->cq.cq_context = attr->cq_context;
	cq->cq.cqe = attr->cqe;
	stub_serve_cq(&cq->ex);
	return &cq->ex;
}

static struct ibv_qp *create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
	union stub_qp *made = calloc(1, sizeof *made);
	struct ibv_qp *qp = &made->qp;
	qp->context = context;
	qp->qp_context = attr->qp_context;
	qp->pd = attr->pd;
	qp->send_cq = attr->send_cq;
	qp->recv_cq = attr->recv_cq;
	qp->qp_num = 0x11;
	qp->qp_type = attr->qp_type;
	if (attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS)
		stub_serve_qp(&made->ex);
	return qp;
}

struct ibv_context *ibv_open_device(struct ibv_device *d)
{
	struct verbs_context *extended = calloc(1, sizeof *extended);
	struct ibv_context *context = &extended->context;
	extended->sz = sizeof *extended;
	extended->query_device_ex = query_device_ex;
	extended->query_port = query_port_ex;
	extended->create_cq_ex = create_cq_ex;
	extended->create_qp_ex = create_qp_ex;
	context->abi_compat = __VERBS_ABI_IS_EXTENDED;
	context->device = d;
	context->num_comp_vectors = 1;
	context->async_fd = context->cmd_fd = -1;
	stub_serve_context(context);
	return context;
}

int ibv_close_device(struct ibv_context *context)
{
	free(verbs_get_ctx(context));
	return 0;
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event) { (void)context; (void)event; return -1; }
void ibv_ack_async_event(struct ibv_async_event *event) { (void)event; }

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	(void)context;
	memset(attr, 0, sizeof *attr);
	attr->phys_port_cnt = 1;
	attr->max_mr_size = UINT64_MAX;
	attr->max_qp_wr = ENTRIES;
	attr->max_sge = 4;
	attr->max_cqe = ENTRIES;
	attr->max_qp_rd_atom = attr->max_qp_init_rd_atom = 16;
	return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *compat)
{
	struct ibv_port_attr *attr = (struct ibv_port_attr *)compat;
	(void)context;
	(void)port;
	attr->state = IBV_PORT_ACTIVE;
	attr->max_mtu = attr->active_mtu = IBV_MTU_4096;
	attr->gid_tbl_len = 1;
	attr->link_layer = IBV_LINK_LAYER_ETHERNET;
	return 0;
}

int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
	static const uint8_t address[16] = { [10] = 0xff, 0xff, 10, 0, 0, 1 };
	(void)context;
	(void)port;
	(void)index;
	memcpy(gid->raw, address, sizeof address);
	return 0;
}

ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t room, uint32_t flags, size_t size)
{
	(void)flags;
	if (!room || size < sizeof *entries)
		return -EINVAL;
	*entries = (struct ibv_gid_entry){ .port_num = 1, .gid_type = IBV_GID_TYPE_ROCE_V2 };
	ibv_query_gid(context, 1, 0, &entries->gid);
	return 1;
}

int ibv_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey)
{
	(void)context;
	(void)port;
	(void)index;
	*pkey = 0xffff;
	return 0;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	struct ibv_pd *pd = calloc(1, sizeof *pd);
	pd->context = context;
	return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd) { free(pd); return 0; }

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	struct ibv_mr *mr = calloc(1, sizeof *mr);
	(void)access;
	mr->context = pd->context;
	mr->pd = pd;
	mr->addr = addr;
	mr->length = length;
	mr->lkey = mr->rkey = 0x1234;
	return mr;
}

int ibv_dereg_mr(struct ibv_mr *mr) { free(mr); return 0; }
struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context) { (void)context; return NULL; }
int ibv_destroy_comp_channel(struct ibv_comp_channel *channel) { (void)channel; return 0; }

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *user, struct ibv_comp_channel *channel, int vector)
{
	(void)vector;
	return ibv_cq_ex_to_cq(create_cq_ex(context, &(struct ibv_cq_init_attr_ex){ .cqe = cqe, .cq_context = user, .channel = channel }));
}

int ibv_resize_cq(struct ibv_cq *cq, int cqe) { (void)cq; (void)cqe; return 0; }
int ibv_destroy_cq(struct ibv_cq *cq) { free(cq); return 0; }
int ibv_get_cq_event(struct ibv_comp_channel *c, struct ibv_cq **cq, void **user) { (void)c; (void)cq; (void)user; return -1; }
void ibv_ack_cq_events(struct ibv_cq *cq, unsigned n) { (void)cq; (void)n; }

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct ibv_qp_init_attr_ex extended = { .pd = pd };
	memcpy(&extended, attr, sizeof *attr);
	return create_qp_ex(pd->context, &extended);
}

struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp)
{
	struct ibv_qp_ex *extended = &((union stub_qp *)qp)->ex;
	return extended->wr_start ? extended : NULL;
}

int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
	(void)mask;
	(void)init;
	attr->qp_state = qp->state;
	return 0;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	if (mask & IBV_QP_STATE)
		qp->state = attr->qp_state;
	return 0;
}

int ibv_destroy_qp(struct ibv_qp *qp) { free(qp); return 0; }
int ibv_fork_init(void) { return 0; }
