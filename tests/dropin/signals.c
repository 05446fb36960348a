/* Signals beside the libraries' blocking calls and threads. The argument is a check:
 *
 *   waits     signals end or restart the waits for events, as they do read(2)'s
 *   threads   signals that the only thread blocked are left to it
 *
 * Prints nothing; exits with an error that names the line of a failed check. */

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#define CHECK(holds) do { if (!(holds)) { fprintf(stderr, "signals.c:%d: %s (%s)\n", __LINE__, #holds, strerror(errno)); exit(1); } } while (0)

static struct ibv_context *context;
static struct ibv_comp_channel *channel;
static struct rdma_event_channel *manager;
static struct rdma_cm_id *id;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_srq *srq;
/* Where the device is, for the connection manager. */
static union { struct sockaddr any; struct sockaddr_in v4; } here = { .v4.sin_family = AF_INET };

static void open_all(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_srq_init_attr shared = { .attr = { .max_wr = 2, .max_sge = 1 } };
	struct ibv_qp_init_attr init = {
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_pd *pd;
	union ibv_gid gid;

	CHECK(devices && (context = ibv_open_device(devices[0])) && (pd = ibv_alloc_pd(context)));
	CHECK((channel = ibv_create_comp_channel(context)) && (cq = ibv_create_cq(context, 4, NULL, channel, 0)));
	CHECK((srq = ibv_create_srq(pd, &shared)));
	init.send_cq = init.recv_cq = cq;
	CHECK((qp = ibv_create_qp(pd, &init)));
	CHECK(!ibv_query_gid(context, 1, 3, &gid));
	memcpy(&here.v4.sin_addr, gid.raw + 12, 4);
	CHECK((manager = rdma_create_event_channel()) && !rdma_create_id(manager, &id, NULL, RDMA_PS_TCP));
	CHECK(!rdma_bind_addr(id, &here.any) && !rdma_listen(id, 1));
}

static int wait_cq(void)
{
	struct ibv_cq *found;
	void *own;
	int result = ibv_get_cq_event(channel, &found, &own);

	if (!result)
		ibv_ack_cq_events(found, 1);
	return result;
}

static int wait_async(void)
{
	struct ibv_async_event event;
	int result = ibv_get_async_event(context, &event);

	if (!result)
		ibv_ack_async_event(&event);
	return result;
}

static int wait_cm(void)
{
	struct rdma_cm_event *event;
	int result = rdma_get_cm_event(manager, &event);

	if (!result)
		rdma_ack_cm_event(event);
	return result;
}

static void cause_cq(void)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct ibv_recv_wr wr = { .num_sge = 0 }, *bad;

	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	CHECK(!ibv_req_notify_cq(cq, 0) && !ibv_post_recv(qp, &wr, &bad));
	attr.qp_state = IBV_QPS_ERR;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
}

static void cause_async(void)
{
	struct ibv_srq_attr limit = { .srq_limit = 1 };

	CHECK(!ibv_modify_srq(srq, &limit, IBV_SRQ_LIMIT));
}

static void cause_cm(void)
{
	struct rdma_cm_id *client;

	CHECK(!rdma_create_id(manager, &client, NULL, RDMA_PS_TCP));
	CHECK(!rdma_resolve_addr(client, NULL, &here.any, 1000));
}

struct waited { int (*wait)(void); void (*cause)(void); int fd; };

/* In five seconds or more. */
enum { MOST = 1000 };

static volatile sig_atomic_t handled;

static void count(int signal)
{
	static const char message[] = "signals.c: the wait does not end\n";

	(void)signal;
	if (++handled < MOST)
		return;
	CHECK(write(2, message, sizeof message - 1) > 0);
	_exit(1);
}

static void handle(int flags)
{
	struct sigaction action = { .sa_handler = count, .sa_flags = flags };

	handled = 0;
	CHECK(!sigaction(SIGALRM, &action, NULL));
}

/* The event comes when signals were handled in vain, which the waiting thread does. */
static void *cause_later(void *waited)
{
	while (handled < 5)
		usleep(1000);
	((struct waited *)waited)->cause();
	return NULL;
}

static void check_wait(struct waited *waited)
{
	int flags = fcntl(waited->fd, F_GETFL);
	sigset_t alarm, before;
	pthread_t causing;

	/* An interval, as one signal could come before the wait. */
	handle(0);
	CHECK(waited->wait() == -1 && errno == EINTR && handled > 0);
	CHECK(!fcntl(waited->fd, F_SETFL, flags | O_NONBLOCK));
	CHECK(waited->wait() == -1 && errno == EAGAIN);
	CHECK(!fcntl(waited->fd, F_SETFL, flags));
	handle(SA_RESTART);
	sigemptyset(&alarm);
	sigaddset(&alarm, SIGALRM);
	pthread_sigmask(SIG_BLOCK, &alarm, &before);
	CHECK(!pthread_create(&causing, NULL, cause_later, waited));
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	CHECK(!waited->wait() && handled >= 5);
	pthread_join(causing, NULL);
}

static void check_waits(void)
{
	struct itimerval often = { { 0, 5000 }, { 0, 5000 } };
	struct waited all[] = {
		{ wait_cq, cause_cq, channel->fd },
		{ wait_async, cause_async, context->async_fd },
		{ wait_cm, cause_cm, manager->fd },
	};

	handle(0);
	CHECK(!setitimer(ITIMER_REAL, &often, NULL));
	for (int i = 0; i < 3; i++)
		check_wait(&all[i]);
}

/* The signals that a thread blocks, as bits. */
static unsigned long long blocked(const char *thread)
{
	char path[64], line[128];
	unsigned long long mask = 0;
	FILE *file;

	snprintf(path, sizeof path, "/proc/self/task/%s/status", thread);
	CHECK((file = fopen(path, "r")));
	while (fgets(line, sizeof line, file))
		sscanf(line, "SigBlk: %llx", &mask);
	fclose(file);
	return mask;
}

static const char *self(void)
{
	static char number[16];

	snprintf(number, sizeof number, "%d", getpid());
	return number;
}

static void check_threads(void)
{
	/* What a thread raises itself by a fault or a system call; glibc's own two; what cannot be blocked. */
	static const int never[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, 32, 33, SIGKILL, SIGSTOP };
	unsigned long long all = ~0ULL;
	struct timespec limit = { 10, 0 };
	DIR *threads = opendir("/proc/self/task");
	sigset_t own;
	int others = 0;

	/* Opening the device has left the mask alone. */
	CHECK(threads && !blocked(self()));
	sigemptyset(&own);
	sigaddset(&own, SIGUSR1);
	sigaddset(&own, SIGTERM);
	sigprocmask(SIG_BLOCK, &own, NULL);
	CHECK(!kill(getpid(), SIGUSR1) && sigtimedwait(&own, NULL, &limit) == SIGUSR1);
	CHECK(!kill(getpid(), SIGTERM) && sigtimedwait(&own, NULL, &limit) == SIGTERM);

	for (unsigned i = 0; i < sizeof never / sizeof *never; i++)
		all &= ~(1ULL << (never[i] - 1));
	for (struct dirent *thread; (thread = readdir(threads)); ) {
		if (*thread->d_name == '.' || !strcmp(thread->d_name, self()))
			continue;
		CHECK((blocked(thread->d_name) & all) == all);
		/* Until it has run for the first time, glibc blocks all in it. */
		for (int i = 0; i < 1000 && blocked(thread->d_name) != all; i++)
			usleep(10000);
		CHECK(blocked(thread->d_name) == all);
		others++;
	}
	/* The device's and its connection manager's. */
	CHECK(others == 2);
}

int main(int argc, char **argv)
{
	if (argc != 2)
		return 2;
	open_all();
	if (!strcmp(argv[1], "waits"))
		check_waits();
	else
		check_threads();
	return 0;
}
