/* The library's names of numbers, which must equal those of the system's library. */

#include <infiniband/verbs.h>
#include <stdio.h>

const char *ibv_get_sysfs_path(void);
int ibv_read_sysfs_file(const char *dir, const char *file, char *buf, size_t size);

int main(void)
{
	char buffer[64] = "";

	for (int i = -2; i < 40; i++) {
		printf("%d: %s, %s, %s, %s\n", i, ibv_node_type_str(i), ibv_port_state_str(i), ibv_event_type_str(i), ibv_wc_status_str(i));
		printf("%d: mult %d, mbps %d\n", i, ibv_rate_to_mult(i), ibv_rate_to_mbps(i));
	}
	for (int i = -2; i < 1300000; i++)
		if (mult_to_ibv_rate(i) || mbps_to_ibv_rate(i))
			printf("%d: %d, %d\n", i, mult_to_ibv_rate(i), mbps_to_ibv_rate(i));
	printf("%s\n", ibv_get_sysfs_path());
	printf("%d\n", ibv_read_sysfs_file("/proc/self", "comm", buffer, sizeof(buffer)));
	printf("%s\n", buffer);
	printf("%d\n", ibv_read_sysfs_file("/proc/self", "nothing of that name", buffer, sizeof(buffer)));
	printf("%d %.3s\n", ibv_read_sysfs_file("/proc/self", "comm", buffer, 3), buffer);
	return 0;
}
