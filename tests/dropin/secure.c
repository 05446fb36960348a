/* Opens and closes every device, and prints whether it runs in secure-execution mode (ld.so(8)). */

#include <infiniband/verbs.h>
#include <stdio.h>
#include <sys/auxv.h>

int main(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);

	for (struct ibv_device **device = devices; device && *device; device++) {
		struct ibv_context *context = ibv_open_device(*device);

		if (!context)
			return 2;
		ibv_close_device(context);
	}
	printf("%lu\n", getauxval(AT_SECURE));
	return devices ? 0 : 1;
}
