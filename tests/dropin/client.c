/* A program linked with libibverbs as any other: symbols by the linker, inline functions by the header. A queue
 * pair is connected to itself while a child is forked, and features that the device lacks fail as the man pages
 * say. Prints nothing; exits with an error that names the line of a failed check. */

#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(holds) do { if (!(holds)) { fprintf(stderr, "client.c:%d: %s (%s)\n", __LINE__, #holds, strerror(errno)); exit(1); } } while (0)

enum { LEN = 1 << 16 };

static void to_state(struct ibv_qp *qp, const union ibv_gid *gid)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };

	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = IBV_MTU_1024;
	attr.dest_qp_num = qp->qp_num;
	attr.max_dest_rd_atomic = 1;
	attr.ah_attr.is_global = 1;
	attr.ah_attr.port_num = 1;
	attr.ah_attr.grh.dgid = *gid;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr.qp_state = IBV_QPS_RTS;
	attr.timeout = 17;
	attr.retry_cnt = 7;
	attr.rnr_retry = 7;
	attr.max_rd_atomic = 1;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

/* Sends the first half of the region to the second, and sleeps for both completions. */
static void send_once(struct ibv_qp *qp, struct ibv_cq *cq, struct ibv_comp_channel *channel, struct ibv_mr *mr, unsigned char byte)
{
	unsigned char *memory = mr->addr;
	struct ibv_sge from = { (uintptr_t)memory, LEN / 2, mr->lkey }, to = { (uintptr_t)memory + LEN / 2, LEN / 2, mr->lkey };
	struct ibv_recv_wr receive = { .wr_id = 1, .sg_list = &to, .num_sge = 1 }, *bad_receive;
	struct ibv_send_wr send = { .wr_id = 2, .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad_send;
	struct ibv_wc wc;
	int done = 0;

	memset(memory, byte, LEN / 2);
	CHECK(!ibv_req_notify_cq(cq, 0));
	CHECK(!ibv_post_recv(qp, &receive, &bad_receive));
	CHECK(!ibv_post_send(qp, &send, &bad_send));
	while (done != 3) {
		int got = ibv_poll_cq(cq, 1, &wc);

		CHECK(got >= 0);
		if (got) {
			CHECK(wc.status == IBV_WC_SUCCESS);
			done |= wc.wr_id;
			continue;
		}
		struct ibv_cq *of;
		void *context;

		CHECK(!ibv_get_cq_event(channel, &of, &context) && of == cq && context == memory);
		ibv_ack_cq_events(cq, 1);
		CHECK(!ibv_req_notify_cq(cq, 0));
	}
	CHECK(!memcmp(memory, memory + LEN / 2, LEN / 2));
}

static void fork_and_exec(void)
{
	int status;
	pid_t child = fork();

	if (!child) {
		execl("/bin/true", "true", (char *)NULL);
		_exit(1);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void domains(struct ibv_context *context, struct ibv_pd *pd)
{
	struct ibv_xrcd_init_attr attr = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1, .oflags = O_CREAT };
	struct ibv_td_init_attr td_attr = {};
	struct ibv_xrcd *xrcd = ibv_open_xrcd(context, &attr);
	struct ibv_td *td = ibv_alloc_td(context, &td_attr);
	struct ibv_parent_domain_init_attr parent_attr = { .pd = pd, .td = td };
	struct ibv_pd *parent = ibv_alloc_parent_domain(context, &parent_attr);

	CHECK(xrcd && td && parent);
	CHECK(!ibv_dealloc_pd(parent) && !ibv_dealloc_td(td) && !ibv_close_xrcd(xrcd));
}

/* What no software device has fails as it does on rxe, and changes nothing. */
static void not_supported(struct ibv_context *context, struct ibv_pd *pd, struct ibv_cq *cq, struct ibv_qp *qp)
{
	struct ibv_counters_init_attr counters = {};
	struct ibv_counter_attach_attr attach = {};
	struct ibv_counters none = { .context = context };
	struct ibv_wq_init_attr wq = { .pd = pd, .cq = cq, .max_wr = 1, .max_sge = 1 };
	struct ibv_rwq_ind_table_init_attr table = {};
	struct ibv_flow_attr flow = { .size = sizeof(flow), .port = 1 };
	struct ibv_flow_action_esp_attr esp = {};
	struct ibv_srq_init_attr_ex tags = {
		.attr = { 1, 1, 0 }, .srq_type = IBV_SRQT_TM, .pd = pd, .cq = cq, .tm_cap = { 1, 1 },
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_TM,
	};
	struct ibv_qp_open_attr open = { .comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_TYPE, .qp_num = qp->qp_num, .qp_type = IBV_QPT_RC };
	struct ibv_srq srq = { .context = context };
	struct ibv_ops_wr op = {}, *bad_op = NULL;
	struct ibv_ece ece = { .vendor_id = 1 }, no_vendor = {};
	uint64_t value;

#define REFUSED(call, with) do { errno = 0; CHECK(!(call) && errno == (with)); } while (0)
	REFUSED(ibv_create_counters(context, &counters), EOPNOTSUPP);
	CHECK(ibv_attach_counters_point_flow(&none, &attach, NULL) == EOPNOTSUPP);
	CHECK(ibv_read_counters(&none, &value, 1, 0) == EOPNOTSUPP);
	CHECK(ibv_destroy_counters(&none) == EOPNOTSUPP);
	REFUSED(ibv_create_wq(context, &wq), EOPNOTSUPP);
	REFUSED(ibv_create_rwq_ind_table(context, &table), EOPNOTSUPP);
	REFUSED(ibv_create_flow(qp, &flow), EOPNOTSUPP);
	REFUSED(ibv_create_flow_action_esp(context, &esp), EOPNOTSUPP);
	REFUSED(ibv_create_srq_ex(context, &tags), EOPNOTSUPP);
	CHECK(ibv_post_srq_ops(&srq, &op, &bad_op) == EOPNOTSUPP && bad_op == &op);
	REFUSED(ibv_open_qp(context, &open), EOPNOTSUPP);
	CHECK(ibv_query_ece(qp, &ece) == EOPNOTSUPP);
	CHECK(ibv_set_ece(qp, &ece) == EOPNOTSUPP && ibv_set_ece(qp, &no_vendor) == EOPNOTSUPP);
}

/* Other refusals. */
static void refusals(struct ibv_context *context, struct ibv_pd *pd, struct ibv_qp *qp, const union ibv_gid *gid)
{
	struct ibv_ah_attr ah;
	struct ibv_wc wc = {};
	union ibv_gid group = { .raw = { 0xff, 0x12 } };

	(void)gid;
	errno = 0;
	CHECK(!ibv_reg_dmabuf_mr(pd, 0, 4096, 0, -1, 0) && errno == EOPNOTSUPP);
	errno = 0;
	CHECK(!ibv_import_device(-1) && errno == EINVAL);
	/* Only UD queue pairs. */
	CHECK(ibv_attach_mcast(qp, &group, 0) == EINVAL);
	CHECK(ibv_init_ah_from_wc(context, 1, &wc, NULL, &ah) == -1 && errno == EINVAL);
	CHECK(ibv_get_device_index(context->device) == -1);
	CHECK(ibv_query_qp_data_in_order(qp, IBV_WR_RDMA_WRITE, 0) == 0);
	CHECK(!ibv_fork_init() && ibv_is_fork_initialized() == IBV_FORK_UNNEEDED);
}

int main(void)
{
	int count = -1;
	struct ibv_device **list = ibv_get_device_list(&count);
	struct ibv_device_attr_ex device;
	struct ibv_port_attr port;
	struct ibv_gid_entry entry, table[4];
	union ibv_gid gid;
	__be16 pkey;

	CHECK(list && count == 1 && list[0] && !list[1]);
	CHECK(!strcmp(ibv_get_device_name(list[0]), "soft0") && list[0]->node_type == IBV_NODE_CA);
	struct ibv_context *context = ibv_open_device(list[0]);

	if (!context) {
		printf("%s\n", strerrorname_np(errno));
		return 2;
	}
	CHECK(ibv_get_device_guid(list[0]));
	ibv_free_device_list(list);
	CHECK(!ibv_query_device_ex(context, NULL, &device) && device.orig_attr.phys_port_cnt == 1);
	CHECK(!ibv_query_port(context, 1, &port) && port.state == IBV_PORT_ACTIVE && port.link_layer == IBV_LINK_LAYER_ETHERNET);
	CHECK(!ibv_query_gid(context, 1, 0, &gid));
	CHECK(!ibv_query_gid_ex(context, 1, 0, &entry, 0) && entry.gid_type == IBV_GID_TYPE_ROCE_V1);
	CHECK(ibv_query_gid_table(context, table, 4, 0) == 4 && !memcmp(&table[0].gid, &gid, sizeof(gid)));
	CHECK(!ibv_query_pkey(context, 1, 0, &pkey) && ibv_get_pkey_index(context, 1, pkey) == 0);

	struct ibv_pd *pd = ibv_alloc_pd(context);
	unsigned char *memory = calloc(1, LEN);
	/* An optional flag, so that the macro of the header uses another symbol. */
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, LEN, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_RELAXED_ORDERING);
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	struct ibv_cq *cq = ibv_create_cq(context, 16, memory, channel, 0);
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .cap = { 4, 4, 1, 1, 0 }, .qp_type = IBV_QPT_RC };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	CHECK(pd && mr && channel && cq && qp);
	to_state(qp, &gid);
	send_once(qp, cq, channel, mr, 1);
	fork_and_exec();
	send_once(qp, cq, channel, mr, 2);
	domains(context, pd);
	not_supported(context, pd, cq, qp);
	refusals(context, pd, qp, &gid);
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq) && !ibv_destroy_comp_channel(channel) && !ibv_dereg_mr(mr));
	CHECK(!ibv_dealloc_pd(pd) && !ibv_close_device(context));
	/* Opened again, and not closed, with the device's thread running at exit. */
	list = ibv_get_device_list(NULL);
	CHECK(ibv_open_device(list[0]));
	return 0;
}
