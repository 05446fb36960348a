/* A child of fork(2) opens the device again, of which its parent has a context: the two are separate users, and what
 * the parent has cannot be imported. The child's datagrams to a multicast group, of which both ends are queue pairs of its own, come back to it. */

#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { GRH = 40, QKEY = 0x1234, GROUP_QPN = 0xffffff };

#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
			exit(1); \
		} \
	} while (0)

static struct ibv_context *opened(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_context *context;

	CHECK(devices && devices[0]);
	context = ibv_open_device(devices[0]);
	CHECK(context);
	ibv_free_device_list(devices);
	return context;
}

static struct ibv_qp *ready(struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_UD,
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	CHECK(qp);
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
	attr.qp_state = IBV_QPS_RTR;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_RTS;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
	return qp;
}

/* Both completions, of the send and of the receive, in either order. */
static void complete(struct ibv_cq *cq)
{
	time_t end = time(NULL) + 20;
	struct ibv_wc wc;
	int done = 0;

	while (done < 2) {
		int found = ibv_poll_cq(cq, 1, &wc);

		CHECK(found >= 0 && time(NULL) < end);
		CHECK(!found || wc.status == IBV_WC_SUCCESS);
		done += found;
	}
}

/* By descriptor and handle, which the child has, too. */
static void not_imported(struct ibv_context *context, struct ibv_pd *pd, struct ibv_mr *mr)
{
	errno = 0;
	CHECK(!ibv_import_device(dup(context->cmd_fd)) && errno == EOPNOTSUPP);
	errno = 0;
	CHECK(!ibv_import_pd(context, pd->handle) && errno == ENOENT);
	errno = 0;
	CHECK(!ibv_import_mr(pd, mr->handle) && errno == ENOENT);
}

static void child(const char *group)
{
	static char memory[256];
	struct ibv_context *context = opened();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 4, NULL, NULL, 0);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE);
	struct ibv_qp *qp = ready(pd, cq);
	struct ibv_sge in = { (uintptr_t)memory, 128, mr->lkey }, out = { (uintptr_t)memory + 128, 6, mr->lkey };
	struct ibv_recv_wr receive = { .sg_list = &in, .num_sge = 1 }, *bad_receive;
	struct ibv_send_wr send = { .sg_list = &out, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED };
	struct ibv_ah_attr vector = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = 3, .hop_limit = 64 } };
	struct ibv_send_wr *bad;

	vector.grh.dgid.raw[10] = vector.grh.dgid.raw[11] = 0xff;
	CHECK(inet_pton(AF_INET, group, &vector.grh.dgid.raw[12]) == 1);
	CHECK(!ibv_attach_mcast(qp, &vector.grh.dgid, 0));
	CHECK(!ibv_post_recv(qp, &receive, &bad_receive));
	strcpy(memory + 128, "hello");
	send.wr.ud.ah = ibv_create_ah(pd, &vector);
	send.wr.ud.remote_qpn = GROUP_QPN;
	send.wr.ud.remote_qkey = QKEY;
	CHECK(send.wr.ud.ah && !ibv_post_send(qp, &send, &bad));
	complete(cq);
	CHECK(!strcmp(memory + GRH, "hello"));
	CHECK(!ibv_detach_mcast(qp, &vector.grh.dgid, 0));
}

int main(int count, char **arguments)
{
	static char memory[64];
	struct ibv_context *context = opened();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof(memory), 0);
	int status;
	pid_t pid = fork();

	CHECK(pid >= 0 && count == 2);
	if (!pid) {
		not_imported(context, pd, mr);
		child(arguments[1]);
		return 0;
	}
	CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	CHECK(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd) && !ibv_close_device(context));
	return 0;
}
