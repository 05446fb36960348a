/*
 * librdmacm's synchronous calls, with one process per role:
 *
 *   listen ADDRESS PORT   prints "ready", serves two clients in sequence, and exits after both
 *   busy   ADDRESS PORT   checks that the port is in use
 *   connect ADDRESS PORT  connects, is answered, disconnects
 *   die    ADDRESS PORT   connects, is answered, and kills itself; term, abort: by these signals
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

#define CHECK(what)                                                                                 \
	do {                                                                                        \
		if (!(what)) {                                                                      \
			fprintf(stderr, "line %d: %s: %s\n", __LINE__, #what, strerror(errno));     \
			return 1;                                                                   \
		}                                                                                   \
	} while (0)

static char message[64];

static struct rdma_addrinfo *resolve(const char *address, const char *port, int flags)
{
	struct rdma_addrinfo hints = { .ai_flags = flags | RAI_NUMERICHOST, .ai_port_space = RDMA_PS_TCP };
	struct rdma_addrinfo *info = NULL;

	return rdma_getaddrinfo(address, port, &hints, &info) ? NULL : info;
}

static struct ibv_qp_init_attr queues(void)
{
	struct ibv_qp_init_attr init = {
		.cap = { .max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1 },
		.sq_sig_all = 1,
	};

	return init;
}

static int serve(struct rdma_cm_id *listener)
{
	struct rdma_cm_id *id;
	struct rdma_cm_event *event;
	struct ibv_mr *mr;
	struct ibv_wc wc;

	CHECK(!rdma_get_request(listener, &id));
	CHECK(id->qp && id->event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK((mr = rdma_reg_msgs(id, message, sizeof message)));
	CHECK(!rdma_post_recv(id, NULL, message, sizeof message, mr));
	CHECK(!rdma_accept(id, NULL));
	CHECK(rdma_get_recv_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
	message[0] ^= 1;
	CHECK(!rdma_post_send(id, NULL, message, sizeof message, mr, 0));
	CHECK(rdma_get_send_comp(id, &wc) == 1);
	CHECK(!rdma_get_cm_event(id->channel, &event));
	CHECK(event->event == RDMA_CM_EVENT_DISCONNECTED);
	CHECK(!rdma_ack_cm_event(event));
	CHECK(!rdma_dereg_mr(mr));
	rdma_destroy_ep(id);
	return 0;
}

/* The signal by which a role ends; 0 for none. */
static int signal_of(const char *role)
{
	static const struct { const char *role; int signal; } all[] = {
		{ "die", SIGKILL }, { "term", SIGTERM }, { "abort", SIGABRT },
	};

	for (unsigned i = 0; i < sizeof all / sizeof *all; i++)
		if (!strcmp(role, all[i].role))
			return all[i].signal;
	return 0;
}

static int connect_once(struct rdma_cm_id *id, int deadly)
{
	struct ibv_mr *mr;
	struct ibv_wc wc;

	strcpy(message, "what");
	CHECK((mr = rdma_reg_msgs(id, message, sizeof message)));
	CHECK(!rdma_connect(id, NULL));
	CHECK(!rdma_post_send(id, NULL, message, sizeof message, mr, 0));
	CHECK(rdma_get_send_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
	CHECK(!rdma_post_recv(id, NULL, message, sizeof message, mr));
	CHECK(rdma_get_recv_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
	CHECK(message[0] == ('w' ^ 1));
	if (deadly)
		kill(getpid(), deadly);
	CHECK(!rdma_disconnect(id));
	CHECK(!rdma_dereg_mr(mr));
	rdma_destroy_ep(id);
	return 0;
}

int main(int argc, char **argv)
{
	struct ibv_qp_init_attr init = queues();
	struct rdma_addrinfo *info;
	struct rdma_cm_id *id;
	int passive;

	if (argc != 4)
		return 2;
	passive = !strcmp(argv[1], "listen") || !strcmp(argv[1], "busy");
	CHECK((info = resolve(argv[2], argv[3], passive ? RAI_PASSIVE : 0)));
	CHECK(!rdma_create_ep(&id, info, NULL, &init));
	rdma_freeaddrinfo(info);
	if (!strcmp(argv[1], "busy")) {
		CHECK(rdma_listen(id, 1) == -1 && errno == EADDRINUSE);
		rdma_destroy_ep(id);
		return 0;
	}
	if (!passive)
		return connect_once(id, signal_of(argv[1]));
	CHECK(!rdma_listen(id, 1));
	puts("ready");
	fflush(stdout);
	if (serve(id) || serve(id))
		return 1;
	rdma_destroy_ep(id);
	return 0;
}
