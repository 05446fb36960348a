/* Prints what sysfs shows, too, as the library has it: the interface, the type and the hardware's version of the
 * first device's first GID; then its vendor. */

#include <infiniband/verbs.h>
#include <net/if.h>
#include <stdio.h>

int main(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_context *context = devices && *devices ? ibv_open_device(*devices) : NULL;
	struct ibv_device_attr attr;
	struct ibv_gid_entry entry, table[4];
	char name[IF_NAMESIZE];

	if (!context || ibv_query_device(context, &attr) || ibv_query_gid_ex(context, 1, 3, &entry, 0))
		return 1;
	if (ibv_query_gid_table(context, table, 4, 0) != 4 || table[3].ndev_ifindex != entry.ndev_ifindex)
		return 2;
	puts(if_indextoname(entry.ndev_ifindex, name) ? name : "none");
	puts(entry.gid_type == IBV_GID_TYPE_ROCE_V2 ? "RoCE v2" : "IB/RoCE v1");
	printf("%x\n%06x %s\n", attr.hw_ver, attr.vendor_id, attr.vendor_part_id ? "part" : "no part");
	return 0;
}
