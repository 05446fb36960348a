/* Walks from a device to its place among the PCI devices, as NCCL (realpath(3), by path and by bus), hwloc (the
 * link of the device) and UCX (the realpath of the device itself) do, and prints what each finds. */

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void show(const char *what, const char *folder, const char *name)
{
	char path[PATH_MAX], line[256] = "none";
	FILE *file;

	snprintf(path, sizeof(path), "%s/%s", folder, name);
	file = fopen(path, "r");
	if (file) {
		if (fgets(line, sizeof(line), file))
			line[strcspn(line, "\n")] = 0;
		fclose(file);
	}
	printf("%s: %s\n", what, line);
}

static char *resolved(const char *what, const char *path)
{
	char *found = realpath(path, NULL);

	printf("%s: %s\n", what, found ? found : "none");
	return found;
}

int main(int count, char **arguments)
{
	const char *name = count > 1 ? arguments[1] : "soft0";
	char path[PATH_MAX], link[PATH_MAX];
	char *device, *bus;
	ssize_t len;

	snprintf(path, sizeof(path), "/sys/class/infiniband/%s", name);
	len = readlink(path, link, sizeof(link) - 1);
	link[len < 0 ? 0 : len] = 0;
	printf("link: %s\n", link);
	free(resolved("itself", path));
	strcat(path, "/device");
	device = resolved("path", path);
	if (!device)
		return 1;
	snprintf(path, sizeof(path), "%s/subsystem", device);
	free(resolved("subsystem", path));
	bus = strrchr(device, '/') + 1;
	snprintf(path, sizeof(path), "/sys/class/pci_bus/%.7s/../../%s", bus, bus);
	free(resolved("by bus", path));
	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s", bus);
	free(resolved("by address", path));
	show("class", device, "class");
	show("vendor", device, "vendor");
	show("device", device, "device");
	show("numa node", device, "numa_node");
	show("cpus", device, "local_cpulist");
	show("speed", device, "max_link_speed");
	show("width", device, "max_link_width");
	show("current", device, "current_link_width");
	free(device);
	return 0;
}
