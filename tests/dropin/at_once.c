/* Clients that connect at once to a server with a thread for each: every one has a queue pair, and its message arrives.
 * Its argument is the device's address. */

#include <arpa/inet.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CLIENTS = 16 };

#define CHECK(condition)                                            \
	do {                                                        \
		if (!(condition)) {                                 \
			perror(#condition);                         \
			exit(1);                                    \
		}                                                   \
	} while (0)

static struct rdma_conn_param connection = {.responder_resources = 1, .initiator_depth = 1, .retry_count = 7, .rnr_retry_count = 7};

/* A queue pair with a completion queue of its own, and a region of `buffer`. */
static struct ibv_mr *create(struct rdma_cm_id *id, char *buffer)
{
	struct ibv_pd *pd = ibv_alloc_pd(id->verbs);
	struct ibv_cq *cq = ibv_create_cq(id->verbs, 2, NULL, NULL, 0);
	struct ibv_qp_init_attr attr = {.send_cq = cq, .recv_cq = cq, .cap = {1, 1, 1, 1}, .qp_type = IBV_QPT_RC, .sq_sig_all = 1};

	CHECK(pd && cq && !id->qp && !rdma_create_qp(id, pd, &attr));
	return ibv_reg_mr(pd, buffer, 4, IBV_ACCESS_LOCAL_WRITE);
}

static void completed(struct ibv_qp *qp)
{
	struct ibv_wc wc;

	while (!ibv_poll_cq(qp->send_cq, 1, &wc))
		;
	CHECK(wc.status == IBV_WC_SUCCESS);
}

/* Of the server's other connections there are events, too. */
static struct rdma_cm_id *wait_for(struct rdma_event_channel *channel, enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	do {
		CHECK(!rdma_get_cm_event(channel, &event));
		if (event->event != type && event->status) {
			fprintf(stderr, "%s (%d)\n", rdma_event_str(event->event), event->status);
			exit(1);
		}
		id = event->event == type ? event->id : NULL;
		rdma_ack_cm_event(event);
	} while (!id);
	return id;
}

static void *serve(void *argument)
{
	struct rdma_cm_id *id = argument;
	char buffer[4];
	struct ibv_mr *mr = create(id, buffer);
	struct ibv_sge sge = {(uintptr_t)buffer, sizeof(buffer), mr->lkey};
	struct ibv_recv_wr receive = {.sg_list = &sge, .num_sge = 1}, *refused;

	CHECK(!ibv_post_recv(id->qp, &receive, &refused) && !rdma_accept(id, &connection));
	completed(id->qp);
	return NULL;
}

static int send_one(struct sockaddr_in *address)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *id;
	char buffer[4] = "one";

	CHECK(channel && !rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)address, 2000));
	wait_for(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(!rdma_resolve_route(id, 2000));
	wait_for(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
	struct ibv_mr *mr = create(id, buffer);
	struct ibv_sge sge = {(uintptr_t)buffer, sizeof(buffer), mr->lkey};
	struct ibv_send_wr send = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *refused;

	CHECK(!rdma_connect(id, &connection));
	wait_for(channel, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(!ibv_post_send(id->qp, &send, &refused));
	completed(id->qp);
	return 0;
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(7472)};
	struct rdma_event_channel *channel;
	pthread_t threads[CLIENTS];
	struct rdma_cm_id *listener;
	int ready[2], status;
	char start;

	CHECK(argc == 2 && inet_pton(AF_INET, argv[1], &address.sin_addr) == 1 && !pipe(ready));
	for (int client = 0; client < CLIENTS; client++)
		if (!fork()) {
			close(ready[1]);
			CHECK(read(ready[0], &start, 1) == 0);
			return send_one(&address);
		}
	CHECK((channel = rdma_create_event_channel()) && !rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP));
	CHECK(!rdma_bind_addr(listener, (struct sockaddr *)&address) && !rdma_listen(listener, CLIENTS));
	/* The end of the pipe starts all of them. */
	close(ready[1]);
	for (int client = 0; client < CLIENTS; client++)
		CHECK(!pthread_create(&threads[client], NULL, serve, wait_for(channel, RDMA_CM_EVENT_CONNECT_REQUEST)));
	for (int client = 0; client < CLIENTS; client++)
		CHECK(!pthread_join(threads[client], NULL));
	for (int client = 0; client < CLIENTS; client++)
		CHECK(wait(&status) > 0 && status == 0);
	return 0;
}
