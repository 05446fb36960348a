/* A program that loads libibverbs at run time, and resolves its symbols by version, as NCCL does. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(holds) do { if (!(holds)) { fprintf(stderr, "loader.c:%d: %s (%s)\n", __LINE__, #holds, dlerror()); exit(1); } } while (0)

static const char *const required[] = {
	"get_device_list", "free_device_list", "get_device_name", "open_device", "close_device", "get_async_event", "ack_async_event",
	"query_device", "query_port", "query_gid", "query_qp", "alloc_pd", "dealloc_pd", "reg_mr", "dereg_mr", "create_cq", "destroy_cq",
	"create_qp", "modify_qp", "destroy_qp", "fork_init", "event_type_str", "query_pkey",
};

static void *symbol(void *library, const char *name, const char *version)
{
	char full[64];

	snprintf(full, sizeof(full), "ibv_%s", name);
	void *found = dlvsym(library, full, version);

	CHECK(found);
	return found;
}

/* Waits for an event that never arrives, as NCCL's thread does, until the process exits. */
static void *wait_for_event(void *context)
{
	void *library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD);
	int (*get)(struct ibv_context *, struct ibv_async_event *) = symbol(library, "get_async_event", "IBVERBS_1.1");
	struct ibv_async_event event;

	get(context, &event);
	return NULL;
}

int main(void)
{
	void *library = dlopen("libibverbs.so", RTLD_NOW);

	CHECK(library);
	CHECK(dlopen("libibverbs.so.1", RTLD_NOW) == library);
	for (size_t i = 0; i < sizeof(required) / sizeof(*required); i++)
		symbol(library, required[i], "IBVERBS_1.1");
	symbol(library, "reg_mr_iova2", "IBVERBS_1.8");
	symbol(library, "reg_dmabuf_mr", "IBVERBS_1.12");
	symbol(library, "query_ece", "IBVERBS_1.10");
	CHECK(!dlvsym(library, "ibv_reg_mr", "IBVERBS_1.12"));
	CHECK(dlsym(library, "ibv_reg_mr") == symbol(library, "reg_mr", "IBVERBS_1.1"));

	struct ibv_device **(*list)(int *) = symbol(library, "get_device_list", "IBVERBS_1.1");
	struct ibv_context *(*open)(struct ibv_device *) = symbol(library, "open_device", "IBVERBS_1.1");
	struct ibv_pd *(*alloc_pd)(struct ibv_context *) = symbol(library, "alloc_pd", "IBVERBS_1.1");
	struct ibv_mr *(*reg_mr)(struct ibv_pd *, void *, size_t, int) = symbol(library, "reg_mr", "IBVERBS_1.1");
	struct ibv_device **devices = list(NULL);

	/* libmlx5's functions say that the device is not theirs. */
	void *mlx5 = dlopen("libmlx5.so.1", RTLD_NOW);

	CHECK(mlx5);
	bool (*is_supported)(struct ibv_device *) = dlvsym(mlx5, "mlx5dv_is_supported", "MLX5_1.8");
	int (*query_device)(void *, void *) = dlvsym(mlx5, "mlx5dv_query_device", "MLX5_1.0");
	void *(*open_device)(struct ibv_device *, void *) = dlvsym(mlx5, "mlx5dv_open_device", "MLX5_1.7");
	Dl_info ours, theirs;

	CHECK(dladdr(is_supported, &theirs) && dladdr(list, &ours) && !strcmp(theirs.dli_fname, ours.dli_fname));
	CHECK(!is_supported(devices[0]) && query_device(NULL, NULL) == EOPNOTSUPP);
	errno = 0;
	CHECK(!open_device(devices[0], NULL) && errno == EOPNOTSUPP);

	struct ibv_context *context = open(devices[0]);
	struct ibv_pd *pd = alloc_pd(context);
	pthread_t thread;

	CHECK(reg_mr(pd, malloc(4096), 4096, IBV_ACCESS_LOCAL_WRITE));
	CHECK(!pthread_create(&thread, NULL, wait_for_event, context));
	/* The library's threads keep running after its handle is closed. */
	CHECK(!dlclose(library) && !dlclose(library));
	usleep(50000);
	CHECK(alloc_pd(context));
	return 0;
}
