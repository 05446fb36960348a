/* Sends itself a datagram and prints the service level of its completion: on RoCE, the type of the frame. */

#include <infiniband/verbs.h>
#include <stdio.h>
#include <string.h>

static int connect(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 1};

	if (ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY))
		return 1;
	attr.qp_state = IBV_QPS_RTR;
	if (ibv_modify_qp(qp, &attr, IBV_QP_STATE))
		return 1;
	attr.qp_state = IBV_QPS_RTS;
	return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
}

int main(void)
{
	static char buffer[64];
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_context *context = ibv_open_device(*devices);
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_mr *mr = ibv_reg_mr(pd, buffer, sizeof(buffer), IBV_ACCESS_LOCAL_WRITE);
	struct ibv_cq *cq = ibv_create_cq(context, 4, NULL, NULL, 0);
	struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .cap = {1, 1, 1, 1}, .qp_type = IBV_QPT_UD};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	struct ibv_ah_attr path = {.is_global = 1, .port_num = 1, .grh = {.sgid_index = 3, .hop_limit = 1}};
	struct ibv_sge sge = {(uintptr_t)buffer, sizeof(buffer), mr->lkey};
	struct ibv_recv_wr receive = {.sg_list = &sge, .num_sge = 1}, *refused_receive;
	struct ibv_send_wr send = {.opcode = IBV_WR_SEND}, *refused_send;
	struct ibv_wc wc = {0};

	if (ibv_query_gid(context, 1, 3, &path.grh.dgid) || connect(qp) || ibv_post_recv(qp, &receive, &refused_receive))
		return 1;
	send.wr.ud.ah = ibv_create_ah(pd, &path);
	send.wr.ud.remote_qpn = qp->qp_num;
	send.wr.ud.remote_qkey = 1;
	if (!send.wr.ud.ah || ibv_post_send(qp, &send, &refused_send))
		return 2;
	while (!ibv_poll_cq(cq, 1, &wc))
		;
	if (wc.status || !(wc.wc_flags & IBV_WC_GRH))
		return 3;
	printf("%d\n", wc.sl);
	return 0;
}
